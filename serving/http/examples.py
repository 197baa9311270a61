"""Requests to try, of a served version: its own features, with ids that have rows."""

from itertools import islice
from typing import Any

from fastapi import FastAPI

from tableside.quant.rows.fetched import AskedTable
from tableside.serving.http.openapi import Json
from tableside.serving.model.version import ServedVersion, end_ids
from tableside.serving.service.service import Service

_FEATURES = 3  # of a lookup, at most


def lookup(served: ServedVersion) -> Json | None:
    """Returns the body of a `/v1/lookup` that is answered; None: no id is known that has a row here."""
    known = ((name, [found]) for name in served.features if (found := _ids(served, name)))
    features = dict(islice(known, _FEATURES))
    return {"model": served.header.model, "features": features} if features else None


def score(served: ServedVersion) -> Json | None:
    """Returns the body of a `/v1/score`; None: there is no scorer, or an id is not known."""
    if served.scorer is None:
        return None
    ids = {i.feature: _ids(served, i.feature)[:1] for i in served.scorer.inputs if i.feature}
    dense = {name: [[0.5] * width] for name, width in served.scorer.dense.items()}
    found = {"model": served.header.model, "features": {name: [of] for name, of in ids.items()}}
    return {**found, **({"dense": dense} if dense else {})} if ids and all(ids.values()) else None


def infer(served: ServedVersion, asked: Json) -> Json:
    """Returns the body of an infer request. asked: of `lookup`."""
    return {
        "inputs": [
            {
                "name": name,
                "datatype": "BYTES" if served.features[name].strings else "INT64",
                "shape": [1, len(bag)],
                "data": bag,
            }
            for name, (bag,) in asked["features"].items()
        ]
    }


def _ids(served: ServedVersion, feature: str) -> list[Any]:
    """Returns ids that a feature's table answers, of its ends. Of strings only hashes are kept, and raw ids
    of a disk are not read for this: any will do where the table has a row for those that it does not know."""
    bound = served.features[feature]
    table, is_on_disk = bound.table, bound.feature.table in served.segment.base.readers
    if isinstance(table, AskedTable):
        is_refusing, by_number = table.default is None, not table.owners.buckets
        ids = [0, table.rows - 1] if by_number and table.rows else [] if is_refusing else [0]
    else:
        row_map = table.row_map
        is_refusing = row_map is None or row_map.default_row is None
        if is_on_disk and row_map is not None and row_map.index is not None:
            ids = [] if is_refusing else [0]
        else:
            ids = end_ids(table).tolist()
    return ids if not bound.strings else [] if is_refusing else ["a", "b"]


def add_to(app: FastAPI, service: Service) -> None:
    """Has the API's description show requests of what is served when it is asked for."""
    describe = app.openapi

    def described() -> Json:
        found = describe()
        served = [engine.attached() for engine in service.engines.values()]
        lookups = ((one, asked) for one in served if (asked := lookup(one)) is not None)
        shown, asked = next(lookups, (None, None))
        asked_in_v2 = None if shown is None or asked is None else infer(shown, asked)
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _show_names(operation, shown)
            if path.endswith("/infer"):
                _show(operations["post"], asked_in_v2)
        _show(found["paths"]["/v1/lookup"]["post"], asked)
        _show(found["paths"]["/v1/score"]["post"], next(filter(None, map(score, served)), None))
        return found

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI's documentation extends it


def _show(operation: Json, example: Json | None) -> None:
    """Gives a request its example; None: nothing that is served has one."""
    content = operation["requestBody"]["content"]["application/json"]
    content.pop("example", None)
    if example is not None:
        content["example"] = example


def _show_names(operation: Json, served: ServedVersion | None) -> None:
    """Fills in the model and the version of an operation's path."""
    values = {} if served is None else {"model": served.header.model, "version": served.version}
    for parameter in operation.get("parameters", ()):
        parameter.pop("example", None)
        if parameter["in"] == "path" and parameter["name"] in values:
            parameter["example"] = values[parameter["name"]]

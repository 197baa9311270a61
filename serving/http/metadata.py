"""Server and model descriptions in JSON: GET /v1/models, and V2's metadata, config and statistics. Requests
to try have a version's own features, and ids with rows."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from fastapi import FastAPI

from tableside.loader.model.model import SCORE
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.stored import StoredIds, StoredTable
from tableside.quant.rows.fetched import asked_table
from tableside.serving import VERSION
from tableside.serving.client.types import IdsInfo, ModelInfo, ModelMetadata, TableInfo, TensorInfo
from tableside.serving.http.inputs import kjt
from tableside.serving.http.inputs.tensors import STRINGS
from tableside.serving.http.openapi import Json
from tableside.serving.metrics.metrics import statistics
from tableside.serving.model.places import mask_name
from tableside.serving.model.version import ServedVersion, end_ids
from tableside.serving.service.service import Service


def describe_server(service: Service) -> dict[str, Any]:
    doors = ["HTTP: /v1 (JSON), /v2 (Open Inference Protocol)"]
    if service.regions is not None:
        doors.append("shared memory of clients")
    return {"version": VERSION, "devices": list(service.settings.devices), "doors": doors}


def describe_model(service: Service, name: str) -> ModelInfo:
    served = service.engines[name].attached()
    header, placements = served.header, served.placed.placements
    return {
        "name": name,
        "version": served.version,
        "sequence": served.sequence,
        "behind_seconds": service.engines[name].behind_s,
        "deltas": [
            {
                "sequence": d.sequence,
                "rows": d.entries,
                "bytes": d.segment.size,
                "made_at": d.change.made_at or None,
                "applied_at": d.change.applied_at,
            }
            for d in served.segment.deltas
        ],
        "versions": service.published(name),
        "created": header.created,
        "backend": served.backend.description,
        "segment_bytes": served.segment.size,
        "fp32_bytes": header.fp32_bytes,
        "load_seconds": header.load.get("seconds"),
        "tables": [_table(t, t.rows, t.bytes, placements, _describe_ids(t)) for t in header.tables]
        + [_table(r, r.count, 0, placements, _describe_remote_ids(r)) for r in header.remote],
        "scorer": None if served.scorer is None else served.scorer.describe(),
        "features": [
            {"name": f.name, "table": f.table, "pooling": f.pooling, "output": f.output}
            for f in header.features
        ],
        "example": lookup_example(served),
    }


def _table(
    t: StoredTable | RemoteTable, rows: int, size: int, placements: Mapping[str, str], ids: IdsInfo
) -> TableInfo:
    return {
        "name": t.name,
        "row_format": t.row_format,
        "rows": rows,
        "dim": t.dim,
        "bytes": size,
        "placement": placements[t.name],
        **ids,
    }


def model_metadata(service: Service, served: ServedVersion) -> ModelMetadata:
    return {
        "name": served.header.model,
        "versions": [str(v) for v in service.published(served.header.model)],
        "platform": "tableside",
        "inputs": _input_names(served),
        "outputs": _output_names(served),
        "parameters": {
            "backend": served.backend.description,
            "segment_bytes": served.segment.size,
            "tables": {t.name: f"{t.row_format} [{t.rows}, {t.dim}]" for t in served.header.tables}
            | {r.name: f"{r.row_format} [{r.count}, {r.dim}]" for r in served.header.remote},
            "table_ids": {t.name: _describe_ids(t) for t in served.header.tables}
            | {r.name: _describe_remote_ids(r) for r in served.header.remote},
            "pooling": {n: f.pooling.label for n, f in served.features.items()},
            **kjt.describe(served),
        },
    }


def _describe_remote_ids(r: RemoteTable) -> IdsInfo:
    return {"ids": r.id_kind, "id_count": r.count, "first_id": 0, "missing": r.missing, "backfilled": 0}


def model_statistics(served: ServedVersion) -> list[dict[str, Any]]:
    """The statistics extension's counts and nanoseconds, over all workers and versions."""
    found = statistics(served.header.model)
    count = found["lookup"][0]
    ns = {stage: {"count": n, "ns": round(seconds * 1e9)} for stage, (n, seconds) in found.items()}
    total = sum(ns[s]["ns"] for s in ("parse", "lookup", "encode"))
    nothing = {"count": 0, "ns": 0}
    return [
        {
            "name": served.header.model,
            "version": str(served.version),
            "inference_count": count,
            "execution_count": count,
            "inference_stats": {
                "success": {"count": count, "ns": total},
                "fail": {"count": found["refused"][0], "ns": 0},
                "queue": {"count": count, "ns": 0},
                "compute_input": ns["parse"],
                "compute_infer": ns["lookup"],
                "compute_output": ns["encode"],
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [],
        }
    ]


def server_metadata(service: Service) -> dict[str, Any]:
    extensions = ["binary_tensor_data", "statistics", "model_configuration"]
    if service.admin_token is not None:
        extensions.append("model_repository")
    if service.regions is not None:
        extensions.append("system_shared_memory")
        if service.link is not None:
            extensions.append("cuda_shared_memory")
    return {"name": "tableside", "version": VERSION, "extensions": extensions}


def model_configuration(served: ServedVersion) -> dict[str, Any]:

    def configured(t: TensorInfo) -> dict[str, Any]:
        kind = {STRINGS: "STRING"}.get(t["datatype"], t["datatype"])
        return {"name": t["name"], "data_type": f"TYPE_{kind}", "dims": t["shape"]}

    inputs = [{**configured(i), "optional": True} for i in _input_names(served)]
    outputs = [configured(o) for o in _output_names(served)]
    return {
        "name": served.header.model,
        "platform": "tableside",
        "backend": "tableside",
        "version_policy": {"specific": {"versions": [served.version]}},
        "max_batch_size": 0,
        "input": inputs,
        "output": outputs,
        "parameters": {"backend": {"string_value": served.backend.description}},
    }


def _input_names(served: ServedVersion) -> list[TensorInfo]:
    """Lists a model's inputs for metadata, with both forms of each feature."""
    dense = {} if served.scorer is None else served.scorer.dense
    described: list[TensorInfo] = [
        {"name": n, "datatype": "FP32", "shape": [-1, width]} for n, width in dense.items()
    ]
    for name, bound in served.features.items():
        ids = STRINGS if bound.strings else "INT64"
        described.append({"name": name, "datatype": ids, "shape": [-1, -1]})
        described.append({"name": f"{name}.values", "datatype": ids, "shape": [-1]})
        described.append({"name": f"{name}.lengths", "datatype": "INT32", "shape": [-1]})
        if bound.pooling.label != "none":
            described.append({"name": f"{name}.weights", "datatype": "FP32", "shape": [-1]})
    return described


def _output_names(served: ServedVersion) -> list[TensorInfo]:
    """Lists a model's outputs for metadata. Found masks are sent only if named."""
    described: list[TensorInfo] = [
        {"name": n, "datatype": "FP16" if f.half else "FP32", "shape": [-1, f.table.dim]}
        for n, f in served.features.items()
    ]
    described += [{"name": mask_name(n), "datatype": "BOOL", "shape": [-1]} for n in served.features]
    if served.scorer is not None:
        described.append({"name": SCORE, "datatype": "FP32", "shape": served.scorer.describe()["shape"]})
    return described


def _describe_ids(table: StoredTable) -> IdsInfo:
    ids = table.ids or StoredIds(table.rows)
    found: IdsInfo = {
        "ids": table.id_kind,
        "id_count": ids.count,
        "missing": ids.missing,
        "backfilled": ids.backfilled,
    }
    return {**found, "first_id": ids.first} if table.id_kind == "row" else found


_FEATURES = 3  # of a lookup, at most


def lookup_example(served: ServedVersion) -> Json | None:
    """Returns the body of a `/v1/lookup` that is answered; None: no id is known that has a row here."""
    known = ((name, [found]) for name in served.features if (found := _ids(served, name)))
    features = dict(islice(known, _FEATURES))
    return {"model": served.header.model, "features": features} if features else None


def score_example(served: ServedVersion) -> Json | None:
    """Returns the body of a `/v1/score`; None: there is no scorer, or an id is not known."""
    if served.scorer is None:
        return None
    ids = {i.feature: _ids(served, i.feature)[:1] for i in served.scorer.inputs if i.feature}
    dense = {name: [[0.5] * width] for name, width in served.scorer.dense.items()}
    found = {"model": served.header.model, "features": {name: [of] for name, of in ids.items()}}
    return {**found, **({"dense": dense} if dense else {})} if ids and all(ids.values()) else None


def infer_example(served: ServedVersion, asked: Json) -> Json:
    """Returns the body of an infer request. asked: of `lookup_example`."""
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
    if (asked := asked_table(table)) is not None:
        is_refusing, by_number = asked.default is None, not asked.owners.buckets
        ids = [0, asked.rows - 1] if by_number and asked.rows else [] if is_refusing else [0]
    else:
        row_map = table.row_map
        is_refusing = row_map is None or row_map.default_row is None
        if is_on_disk and row_map is not None and row_map.index is not None:
            ids = [] if is_refusing else [0]
        else:
            ids = end_ids(table).tolist()
    return ids if not bound.strings else [] if is_refusing else ["a", "b"]


def add_examples_to(app: FastAPI, service: Service) -> None:
    """Has the API's description show requests of what is served when it is asked for."""
    describe = app.openapi

    def described() -> Json:
        found = describe()
        served = [engine.attached() for engine in service.engines.values()]
        lookups = ((one, asked) for one in served if (asked := lookup_example(one)) is not None)
        shown, asked = next(lookups, (None, None))
        asked_in_v2 = None if shown is None or asked is None else infer_example(shown, asked)
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _show_names(operation, shown)
            if path.endswith("/infer"):
                _show(operations["post"], asked_in_v2)
        _show(found["paths"]["/v1/lookup"]["post"], asked)
        _show(found["paths"]["/v1/score"]["post"], next(filter(None, map(score_example, served)), None))
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

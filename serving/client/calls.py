"""The calls of both clients, as generators: they yield requests, are sent responses, and return results.

Request templates and models' schemas are cached here, bounded. Any thread may call: a lost or repeated entry
only costs time.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.loader.model.model import SCORE
from tableside.serving.client import compact as compact_form
from tableside.serving.client.compact import CompactAnswer, CompactForm, Keyed, Schema, given_as
from tableside.serving.client.features import Array, Columns, Ids, any_torch, array, columns, ids_of
from tableside.serving.client.keyed import KeyedJagged, KeyedVectors, from_torchrec, to_torchrec
from tableside.serving.client.messages import (
    FOUND,
    Bytes,
    Call,
    ClientError,
    FeatureError,
    HttpRequest,
    HttpResponse,
    check_status,
)
from tableside.serving.client.named import NamedForm, vectors
from tableside.serving.client.types import ModelInfo, ModelMetadata

V = TypeVar("V")
M = TypeVar("M")
# from as many on the compact form costs client and server less than the named one (benchmarks/client.py)
COMPACT_FEATURES = 32
DEGRADED = "degraded."  # and a table's name: a parameter of answers in which rows came late
LATE = "late."  # and a feature's name: which of its ids
_KEPT = 64


class LookedUp(NamedTuple, Generic[V, M]):
    """The answer to a lookup with `found=True`. vectors: as without it. found: feature -> bool mask [bags,
    ids a bag] or [ids], False for an id without a row, which got the default row."""

    vectors: V
    found: dict[str, M]


def take_masks(arrays: dict[str, Any], given: Columns) -> dict[str, Any]:
    """Removes the masks from a named response; returns them by feature. ClientError: a mask has another
    size."""
    shapes = dict(zip(given.names, (v.shape for v in given.values), strict=True))
    masks = {name: name.removesuffix(FOUND) for name in arrays if name.endswith(FOUND)}
    return {feature: _shaped(name, arrays.pop(name), [shapes[feature]])[0] for name, feature in masks.items()}


def cut(
    mask: Array,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    wanted: Collection[str],
    as_torch: bool,
) -> dict[str, Any]:
    """Splits a compact request's mask [ids] into those of the `wanted` features. shapes: of each feature's
    ids. ClientError: the mask has another size."""
    parts = zip(names, _shaped(f"kjt{FOUND}", mask, shapes), strict=True)
    return {name: given_as(part, as_torch) for name, part in parts if name in wanted}


def _shaped(name: str, mask: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Parts of a mask, numpy's or torch's, one after another, in these shapes."""
    ends = [0, *accumulate(map(prod, shapes))]
    if tuple(mask.shape) != (ends[-1],):
        raise ClientError(
            200, f"output {name} has shape {list(mask.shape)}; expected [{ends[-1]}], one an id"
        )
    return [mask[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]


class AnsweredBy(NamedTuple):
    """The state that answered: a version, and the sequence of its last change; 0: none."""

    version: int
    sequence: int


# the JSON of the last answer in this thread or task
_last_head: ContextVar[bytes] = ContextVar("tableside_last_head")


def answered_by() -> AnsweredBy:
    """Returns the state that answered this thread's or task's last lookup or score. ClientError: there was
    none.

        version, sequence = client.answered_by()
    """
    found = _last_answer()
    return AnsweredBy(int(found["model_version"]), int(found.get("parameters", {}).get("sequence", 0)))


def late_rows() -> dict[str, int]:
    """Returns by table how many ids of this thread's or task's last lookup or score got the default row, as
    theirs came late from a disk. ClientError: there was none.

        if late := client.late_rows():
            print(f"{sum(late.values())} rows did not come in time")
    """
    said = _last_answer().get("parameters", {})
    return {name.removeprefix(DEGRADED): int(n) for name, n in said.items() if name.startswith(DEGRADED)}


def late_ids() -> dict[str, NDArray[np.int64]]:
    """Returns by feature the places of its ids whose rows came late, in this thread's or task's last lookup
    with masks. ClientError: there was none.

        places = client.late_ids().get("clicked", ())
    """
    said = _last_answer().get("parameters", {})
    return {
        name.removeprefix(LATE): np.array(at.split(","), np.int64)
        for name, at in said.items()
        if name.startswith(LATE)
    }


def _last_answer() -> dict[str, Any]:
    if (head := _last_head.get(None)) is None:
        raise ClientError(0, "no lookup or score was answered in this thread or task yet; ask first")
    found: dict[str, Any] = orjson.loads(head)
    return found


@lru_cache(_KEPT)
def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version is not None else "")


class Calls:
    """The calls to one server."""

    def __init__(self) -> None:
        self._named, self._compact = lru_cache(_KEPT)(NamedForm), lru_cache(_KEPT)(compact_form.make_form)
        # False: the server does not know the compact form
        self._schemas: dict[str, Schema | Literal[False]] = {}

    def lookup(
        self,
        model: str,
        features: Mapping[str, Ids] | KeyedJagged,
        outputs: Sequence[str] | None,
        version: int | None,
        compact: bool | None,
        found: bool = False,
    ) -> Call[Any]:
        path = _path(model, version)
        if isinstance(features, Mapping):
            return (yield from self._infer(path, columns(features), {}, outputs, compact, found))
        return (yield from self._lookup_keyed(path, features, outputs, compact, found))

    def score(
        self,
        model: str,
        features: Mapping[str, Ids],
        dense: Mapping[str, Any] | None,
        version: int | None,
        compact: bool | None,
    ) -> Call[Any]:
        given = columns(features)
        arrays = {name: array(value, np.dtype("<f4"), name) for name, value in (dense or {}).items()}
        found = yield from self._infer(_path(model, version), given, arrays, [SCORE], compact)
        as_torch = not given.is_torch and any_torch([*(dense or {}).values()])
        return given_as(found[SCORE], as_torch)

    def gather(self, model: str, feature: str, ids: Any, at_once: int, version: int | None) -> Call[Any]:
        given = ids_of(ids, f"{feature}.ids")
        if given.ndim != 1:
            raise FeatureError(f"{feature}.ids: shape {list(given.shape)}; expected [ids]")
        if type(at_once) is not int or at_once < 1:
            raise ValueError(f"at_once is {at_once!r}; expected a number from 1")
        out, late = None, Counter[str]()
        for start in range(0, max(1, given.size), at_once):
            part = columns({feature: given[start : start + at_once, None]})
            found = yield from self._infer(_path(model, version), part, {}, [feature], False)
            if out is None:
                out = np.empty((given.size, found[feature].shape[1]), found[feature].dtype)
                version = answered_by().version
            out[start : start + at_once] = found[feature]
            late.update(late_rows())
        assert out is not None, "there was a request"
        answer = _last_answer()
        counts = {DEGRADED + table: count for table, count in late.items()}
        _last_head.set(orjson.dumps({**answer, "parameters": {**answer.get("parameters", {}), **counts}}))
        return given_as(out, any_torch([ids]))

    def models(self) -> Call[list[ModelInfo]]:
        return list((yield from self._get("/v1/models")).json()["models"])

    def metadata(self, model: str) -> Call[ModelMetadata]:
        found: ModelMetadata = (yield from self._get(_path(model, None))).json()
        return found

    def metrics(self) -> Call[str]:
        return (yield from self._get("/metrics")).text

    def is_ready(self) -> Call[bool]:
        try:
            return (yield HttpRequest("GET", "/v2/health/ready", may_wait=False)).status < 300
        except ClientError:
            return False

    # ---- both forms ----

    def _infer(
        self,
        path: str,
        given: Columns,
        dense: Mapping[str, Array],
        outputs: Sequence[str] | None,
        compact: bool | None,
        wants_found: bool = False,
    ) -> Call[Any]:
        if compact or (compact is None and _pays(given, outputs)):
            obstacle = compact_form.obstacle(given)
            if not obstacle:
                keyed = compact_form.keyed(given)
                found = yield from self._ask_compact(
                    path, keyed, dense, outputs, compact or False, wants_found
                )
                if not isinstance(found, str):
                    compact_request, answer = found
                    by_name = compact_request.vectors(answer, given.is_torch)
                    if answer.found is None:
                        return by_name
                    shapes = [v.shape for v in given.values]
                    return LookedUp(by_name, cut(answer.found, given.names, shapes, by_name, given.is_torch))
                obstacle = found
            if compact:
                raise FeatureError(f"these features cannot be sent in the compact form: {obstacle}")
        asked = None if outputs is None else tuple(outputs)
        form = self._named(given.names, given.kinds, tuple(dense), asked, wants_found, given.strings)
        response = yield from self._post(path, *form.encode(given, dense))
        by_name = vectors(form.outputs.read(check_status(response)), given.is_torch)
        if not wants_found:
            return by_name
        masks = take_masks(by_name, given)  # out of `by_name`
        return LookedUp(by_name, masks)

    def _lookup_keyed(
        self,
        path: str,
        features: KeyedJagged,
        outputs: Sequence[str] | None,
        compact: bool | None,
        wants_found: bool,
    ) -> Call[KeyedVectors | LookedUp[KeyedVectors, Any]]:
        if not isinstance(features, KeyedJagged):
            raise FeatureError(
                f"features are a {type(features).__name__}; expected a dict of features or a "
                "KeyedJaggedTensor"
            )
        given, lengths = from_torchrec(features)
        wanted = given.names if outputs is None else outputs
        found: tuple[CompactForm, CompactAnswer] | str
        if compact is False:
            found = "it has the compact form, and compact=False"
        elif unknown := set(wanted) - set(given.names):
            found = f"output {min(unknown)!r} is none of its keys"
        else:
            found = yield from self._ask_compact(path, given, {}, wanted, True, wants_found)
        if isinstance(found, str):
            raise FeatureError(
                f"this KeyedJaggedTensor cannot be looked up: {found}; a dict of Jagged features may be"
            )
        answer = found[1]
        keyed = to_torchrec(answer, features, lengths, wanted)
        if answer.found is None:
            return keyed
        return LookedUp(
            keyed, cut(answer.found, given.names, [(int(n),) for n in lengths.sum(1)], wanted, as_torch=True)
        )

    def _ask_compact(
        self,
        path: str,
        given: Keyed,
        dense: Mapping[str, Array],
        outputs: Sequence[str] | None,
        is_only_way: bool,
        wants_found: bool,
    ) -> Call[tuple[CompactForm, CompactAnswer] | str]:
        """Asks in the compact form; returns the reason if it cannot. is_only_way: the named form cannot
        replace it, so stale metadata is read again first."""
        asked = None if outputs is None else tuple(outputs)
        for attempt in (1, 2):
            is_new = path not in self._schemas
            schema = yield from self._schema(path)
            what = (given.names, given.weights is not None, tuple(dense), asked, wants_found)
            form = self._compact(schema or None, *what)
            if isinstance(form, str):
                if not is_only_way or is_new or attempt == 2:
                    return form
                self._schemas.pop(path, None)
                continue
            response = yield from self._post(path, *form.encode(given, dense))
            if response.status == 400 and attempt == 1 and compact_form.SCHEMA in response.text:
                self._schemas.pop(path, None)  # a version with other features is live
                continue
            return form, form.read(check_status(response))
        raise AssertionError("unreachable")

    def _schema(self, path: str) -> Call[Schema | Literal[False]]:
        found = self._schemas.get(path)
        if found is None:
            found = Schema.of((yield from self._get(path)).json()) or False
            if len(self._schemas) >= _KEPT:
                self._schemas.clear()
            self._schemas[path] = found
        return found

    # ---- requests ----

    def _get(self, path: str) -> Call[HttpResponse]:
        return check_status((yield HttpRequest("GET", path)))

    def _post(self, path: str, json_bytes: int, parts: tuple[Bytes, ...]) -> Call[HttpResponse]:
        response = yield HttpRequest("POST", f"{path}/infer", parts, json_bytes)
        if response.status == 200:
            _last_head.set(bytes(response.content[: response.json_bytes]))
        return response


def _pays(given: Columns, outputs: Sequence[str] | None) -> bool:
    """Whether the compact form is worth reading the metadata, and returns only what is wanted."""
    if len(given.names) < COMPACT_FEATURES or not given.is_uniform or given.kinds[0] not in "jJ":
        return False
    return outputs is None or set(outputs) >= set(given.names) or list(outputs) == [SCORE]

"""Prepares random lookups for the load generator, before the clock starts.

Each bag has 0 to 2 * ids ids, drawn uniformly; with `same`, exactly `ids` ids. The forms on the wire:

    named      per feature F.values INT64 [ids] and F.lengths INT32 [bags]; with `same` F INT64 [bags, ids]
    compact    kjt.values INT64 [ids] and kjt.lengths INT32 [features, bags], in the model's order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.serving.errors import ServingError

HEADER_LENGTH = "Inference-Header-Content-Length"
Form = Literal["named", "compact"]
FORMS: tuple[Form, ...] = get_args(Form)

REQUESTS = 512  # different ones of a run: twice as many as a server might remember by their headers
MAX_BYTES = 256 << 20  # of all prepared requests of a run
_DATATYPES = {np.dtype(np.int64): "INT64", np.dtype(np.int32): "INT32"}


@dataclass(frozen=True)
class Shape:
    """The size of a request: `batch` bags per feature of `ids` ids, on average or each (`same`). zipf: see
    `draw_ids`."""

    batch: int
    ids: int
    same: bool = False
    zipf: float | None = None

    def __str__(self) -> str:
        lengths = (
            "the same in every bag"
            if self.same
            else f"on average, 0 to {2 * self.ids} a bag, drawn anew for each request"
        )
        return f"batch {self.batch} x {self.ids} ids ({lengths})"


def make_requests(
    described: Mapping[str, Any],
    url: str,
    shape: Shape,
    form: Form = "named",
    *,
    count: int = REQUESTS,
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
    extra_headers: Mapping[str, str] | None = None,
) -> list[bytes]:
    """Makes binary lookups of all features of a model, as /v1/models describes it: 1 to `count`, within
    `max_bytes`. Both forms of one seed hold the same ids and lengths. ServingError: one request exceeds
    `max_bytes`, or a table has raw or string ids."""
    if raw := [(t["name"], t["ids"]) for t in described["tables"] if t.get("ids", "row") != "row"]:
        (table, kind) = raw[0]
        raise ServingError(
            f"table {table!r} of model {described['name']!r} has {kind} ids, which a server does not tell, "
            "so none can be drawn; load it with requests of your own"
        )
    ids_bytes = 8 * len(described["features"]) * shape.batch * shape.ids
    if ids_bytes > max_bytes:
        raise ServingError(
            f"a request of {shape} has {ids_bytes:,} bytes of ids; expected at most {max_bytes:,}: lower the "
            "batch or the ids"
        )
    rng = np.random.default_rng(seed)
    requests: list[bytes] = []
    size = 0
    while len(requests) < count:
        headers, body = encode(described, *draw(rng, described, shape), same=shape.same, form=form)
        request = request_bytes(
            f"{url}/v2/models/{described['name']}/infer", headers | dict(extra_headers or {}), body
        )
        size += len(request)
        if requests and size > max_bytes:
            break
        requests.append(request)
    return requests


def draw(
    rng: np.random.Generator, described: Mapping[str, Any], shape: Shape
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """One request's ids int64 [ids] and lengths int32 [features, bags], feature by feature and bag by bag."""
    tables = {t["name"]: (t.get("first_id", 0), t.get("id_count", t["rows"])) for t in described["tables"]}
    first_ids, feature_rows = np.array([tables[f["table"]] for f in described["features"]], np.int64).T
    bags = (len(feature_rows), shape.batch)
    lengths = rng.integers(0, 2 * shape.ids, bags, np.int32, endpoint=True)
    if shape.same:
        lengths = np.full(bags, shape.ids, np.int32)
    rows, first = (np.repeat(of_feature, lengths.sum(1)) for of_feature in (feature_rows, first_ids))
    return first + draw_ids(rng, rows, rows.shape, shape.zipf), lengths


def draw_ids(
    rng: np.random.Generator, rows: int | NDArray[np.int64], shape: tuple[int, ...], zipf: float | None
) -> NDArray[np.int64]:
    """Draws ids int64 in [0, rows), uniform or by Zipf's law with hot ids scattered over the table. rows: an
    int, or an array of that shape. zipf: the exponent, not 1; None: uniform."""
    if zipf is None:
        return rng.integers(0, rows, shape)
    power = 1.0 - zipf
    ranks = (((rows + 1.0) ** power - 1.0) * rng.random(shape) + 1.0) ** (1.0 / power)
    ranks = np.minimum(ranks, rows).astype(np.uint64) - np.uint64(1)
    # A bijection of the rows where they and the factor have no common divisor, which is a prime.
    scattered: NDArray[np.int64] = (ranks * np.uint64(2654435761) % np.asarray(rows, np.uint64)).astype(
        np.int64
    )
    return scattered


def encode(
    described: Mapping[str, Any],
    values: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    same: bool,
    form: Form,
) -> tuple[dict[str, str], bytes]:
    """Returns the HTTP headers and the body of a lookup. same: all lengths are equal, so the named form omits
    them."""
    if form == "compact":
        return _infer([("kjt.values", values), ("kjt.lengths", lengths)])
    tensors: list[tuple[str, NDArray[Any]]] = []
    ends = np.cumsum(lengths.sum(1))
    for feature, ids, bags in zip(described["features"], np.split(values, ends[:-1]), lengths, strict=True):
        if same:
            tensors.append((feature["name"], ids.reshape(len(bags), -1)))
        else:
            tensors += [(f"{feature['name']}.values", ids), (f"{feature['name']}.lengths", bags)]
    return _infer(tensors)


def _infer(tensors: Sequence[tuple[str, NDArray[Any]]]) -> tuple[dict[str, str], bytes]:
    inputs = [
        {
            "name": n,
            "datatype": _DATATYPES[a.dtype],
            "shape": a.shape,
            "parameters": {"binary_data_size": a.nbytes},
        }
        for n, a in tensors
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    head = head.ljust(-(-len(head) // 8) * 8)  # as the client does: aligned ids are read a little faster
    headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    return headers, head + b"".join(a.tobytes() for _, a in tensors)


def request_bytes(url: str, headers: Mapping[str, str], body: bytes, method: str = "POST") -> bytes:
    """One HTTP/1.1 request, ready to be sent again and again."""
    parts = urlsplit(url)
    lines = [
        f"{method} {parts.path or '/'} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Content-Length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body

"""What the C extension offers (`_native.c`)."""

from collections.abc import Callable, Sequence
from typing import Any

KIND_FIELDS: tuple[str, ...]
PLACE_FIELDS: tuple[str, ...]
ROW_MAP_FIELDS: tuple[str, ...]
LAYER_FIELDS: tuple[str, ...]
GPU_KIND_FIELDS: tuple[str, ...]
JOB_FIELDS: tuple[str, ...]
MOVE_FIELDS: tuple[str, ...]
MEASURED_FIELDS: tuple[str, ...]
BASE_FIELDS: tuple[str, ...]
PROBE_FIELDS: tuple[str, ...]
RESOLVE_FIELDS: tuple[str, ...]
FILL_FIELDS: tuple[str, ...]
MATRIX_FIELDS: tuple[str, ...]

def lookup(
    table: int,
    rows: int,
    row_bytes: int,
    dim: int,
    row_format: int,
    pooling: int,
    ids: Any,
    lengths: Any,
    weights: Any,
    out: Any,
    half: bool,
    threads: int,
    row_map: int,
) -> tuple[int, int, int, int] | None: ...
def run(
    kinds: bytes, places: Any, inputs: Any, outputs: Any, threads: int, ids: Any
) -> tuple[int, int, int, int] | bytes | None: ...
def quantize(
    row_format: int, source: int, values: Any, rows: int, dim: int, out: Any, row_bytes: int
) -> int: ...
def gather_rows() -> int: ...
def totals(kinds: bytes, places: Any) -> tuple[int, int, int, int]: ...
def lay_out(kinds: bytes, measured: bytes) -> tuple[bytes, bytes, bytes, bytes]: ...
def measure(
    kinds: bytes,
    places: Any,
    out_bytes: int,
    gather_bytes: int,
    pooled_block: int,
    unpooled_block: int,
    probe_block: int,
    resolve_block: int,
) -> bytes | None: ...
def place_batch(
    requests: list[Any], extras: list[int] | None, stays: list[bool] | None
) -> tuple[
    bytes,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    list[Any],
    tuple[int, int, int] | None,
    tuple[int, int, int, int] | None,
]: ...
def write_batch(
    requests: list[Any],
    bases: bytes,
    sources: list[Any] | None,
    target: Any,
    header_at: int,
    rows_at: int,
    locked: list[tuple[int, int]],
    from_bytes: int,
) -> list[tuple[int, int, int]]: ...
def size_fills(
    taken: list[Any], block: int
) -> tuple[int, int, list[int], list[tuple[int, int, int, int]]]: ...
def write_fills(taken: list[Any], block: int, jobs: int, programs: int, target: Any) -> None: ...
def move_all(moves: bytes, source: Any, target: Any) -> None: ...
def lengths_of(
    memory: Any, at: int, item_bytes: int, items: int, ids: int, form: int
) -> tuple[object, int] | None:
    """Lengths [bags], int32, and their address, which is valid as long as they live.

    memory, at: a buffer and the byte where `items` integers of `item_bytes` (4 or 8) begin. form, of
    `serving.modules.inputs`: LENGTHS; OFFSETS, where each bag begins among the `ids`; or ENDS, offsets with
    the end of the last bag.

    None: one is negative or above `ids`, the first offset is not 0, or `ids` is above `MOST_IDS`. The lookup
    refuses lengths that do not add up, and the negative ones of offsets that descend. ValueError: the
    integers do not lie in `memory`.
    """

def parts_of(memory: Any, lengths_at: int, features: int, bags: int, ids: int) -> bytes | None:
    """The first id of each feature, and its number of ids: int64 [2, features], of lengths int32 [features,
    bags] in `memory`.

    None: a length is negative or above `ids`, they do not add up to `ids`, or those are more than `MOST_IDS`.
    ValueError: they do not lie in `memory`, or there is no feature.
    """

def feature_places(
    parts: Any,
    order: list[int] | None,
    columns: Any,
    ids_at: int,
    lengths_at: int,
    bags: int,
    weights_at: int,
    out_at: int,
    out_row_bytes: int,
) -> bytes:
    """Places of lookups, int64 [lookups, fields of `Place`], over features of `bags` bags each. The kind
    of lookup k is k.

    parts: as of `parts_of`. order: the feature of each lookup, by its index; None: they are the same.
    columns: int64 [lookups], bytes from `out_at` to the first vector of each. ids_at, lengths_at, weights_at:
    of the first feature; -1: there are no weights. ValueError: `order` names no feature, or is not one for
    each lookup.
    """

def tensor_places(
    exchange: Any,
    given: Sequence[Any],
    dims: tuple[int, ...],
    new: Callable[..., Any],
    base: int,
    form: int,
    named: type,
) -> tuple[bytes, list[Any], list[object]] | None:
    """Places over tensors where they lie, int64 [lookups, fields of `Place`], their vectors, and what holds
    lengths meanwhile.

    exchange: `__dlpack_c_exchange_api__` of the tensors' type, or None where it has none. given: (form, ids,
    lengths or offsets, weights) of each lookup, with None for what is not there. dims: of its vectors. new:
    makes a contiguous tensor of a shape. base: the address that places count from. form: -1; or given is ids,
    or (ids, lengths or offsets), and this is the form of the tuples, while ids alone are FIXED, or IDS with
    IDS. named: a type of tuples (ids, offsets, lengths, weights), which may be given then, too. The vectors
    are [bags, dim], or [*shape of the ids, dim] of the form IDS.

    None: a tensor is not int64 ids, or not lengths or offsets of those ids, or not contiguous in host memory;
    or there are weights, or no exchange. The caller converts what it can, and refuses the rest.
    """

def device_places(
    exchange: Any, given: Sequence[Any], device_type: int, device_id: int, form: int, named: type
) -> tuple[bytes, bytes, int] | None:
    """Where tensors lie on a device, their shapes, and the ids of all, for `TensorLookup.stage_placed`.

    exchange, given, form, named: as of `tensor_places`. device_type, device_id: DLPack's. Places are int64
    [lookups, 5]: ids, offsets, weights, and ids again, -1 for what is not there, then how many ids; shapes
    int64 [lookups, 5]: bytes of an offset, offsets, length of a bag, bags (ids that are not pooled), whether
    there are weights.

    None: a tensor is not int64 ids, or not offsets, or not contiguous on the device; or there are lengths or
    weights, or no exchange. The caller converts what it can, and refuses the rest.
    """

def tensor_parts(
    exchange: Any, ids: Any, lengths: Any, features: int, base: int
) -> tuple[object, int, int, int, bytes] | None:
    """What holds int32 lengths, where ids and lengths lie, counted from `base`, the bags of a feature, and
    what `parts_of` says.

    ids: int64; lengths: int64 or int32 [features * bags]. None: they are of other types, not contiguous in
    host memory, or do not fit together; or there is no exchange. Where there is nothing the place is 0.
    """

def count_buckets(row_map: Any, ids: Any, counts: Any) -> int | None: ...
def put_in_buckets(row_map: Any, ids: Any, sources: Any, ends: Any, records: Any) -> None: ...
def distinct(
    records: Any, starts: Any, first: int, last: int, keep: int, own: int, kept: Any
) -> tuple[int, int, int] | None: ...
def build(
    records: Any, starts: Any, kept: Any, first: int, last: int, directory: Any, pilots: Any
) -> int | None: ...
def place_rows(row_map: Any, ids: Any, rows: Any, table_rows: int) -> int: ...
def sample_uses(sample: Any, places: Any, inputs: Any, salts: Any, half: int, ms: int) -> None: ...
def count_rows(counts: Any, rows: Any, found: Any, most: int, step: int) -> None: ...
def split_ids(
    inputs: Any,
    jobs: Any,
    tables: Any,
    ends: Any,
    distinct: Any,
    at: Any,
    blocks: Any,
    staging: Any,
) -> int: ...
def fill_filter(ids: Any, words: Any) -> None: ...
def fill_marks(numbers: Any, slots: Any, bits: Any, before: Any, order: Any) -> None: ...
def isas() -> tuple[str, ...]: ...
def use(name: str) -> None: ...
def prefetches() -> tuple[str, ...]: ...
def prefetch(name: str) -> None: ...
def measure_prefetches(
    address: int, rows: int, row_bytes: int, dim: int, row_format: int
) -> dict[str, float]: ...

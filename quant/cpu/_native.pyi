"""What the C extension offers (`_native.c`)."""

from collections.abc import Callable, Sequence
from typing import Any

KIND_FIELDS: tuple[str, ...]
PLACE_FIELDS: tuple[str, ...]
ROW_MAP_FIELDS: tuple[str, ...]
LEVEL_FIELDS: tuple[str, ...]
GATHER_FIELDS: tuple[str, ...]
GPU_KIND_FIELDS: tuple[str, ...]
JOB_FIELDS: tuple[str, ...]
MOVE_FIELDS: tuple[str, ...]
MEASURED_FIELDS: tuple[str, ...]
BASE_FIELDS: tuple[str, ...]
PROBE_FIELDS: tuple[str, ...]
RESOLVE_FIELDS: tuple[str, ...]

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
def run(kinds: bytes, places: Any, inputs: Any, outputs: Any, threads: int) -> tuple[int, int, int, int] | bytes | None: ...
def gather(jobs: bytes, inputs: Any, outputs: Any, threads: int) -> tuple[int, int, int, int] | None: ...
def quantize(row_format: int, source: int, values: Any, rows: int, dim: int, out: Any, row_bytes: int) -> int: ...
def gather_rows() -> int: ...
def totals(kinds: bytes, places: Any) -> tuple[int, int, int]: ...
def lay_out(
    kinds: bytes, places: Any, pooled_columns: int, unpooled_columns: int
) -> (
    tuple[
        int,
        int,
        int,
        int,
        int,
        bytes,
        bytes,
        bytes,
        bytes,
        tuple[bytes, bytes, bytes, int, int, int],
        tuple[bytes, bytes, bytes, int, int, int],
    ]
    | None
): ...
def measure(
    kinds: bytes, places: Any, out_bytes: int, pooled_block: int, unpooled_block: int, probe_block: int, resolve_block: int
) -> bytes | None: ...
def place_batch(
    requests: list[Any], extras: list[int] | None, stays: list[bool] | None
) -> tuple[
    bytes, int, int, int, int, int, int, int, list[Any], tuple[int, int, int] | None, tuple[int, int, int, int] | None
]: ...
def write_batch(
    requests: list[Any],
    bases: bytes,
    sources: list[Any],
    target: Any,
    header_at: int,
    locked: list[tuple[int, int]],
    from_bytes: int,
) -> list[tuple[int, int, int]]: ...
def move(moves: bytes, source: Any, target: Any, source_base: int, target_base: int) -> None: ...
def move_all(parts: Sequence[tuple[bytes, Any, int]], target: Any) -> None: ...
def lengths_of(memory: Any, at: int, item_bytes: int, items: int, ids: int, form: int) -> tuple[bytes, int] | None: ...
def parts_of(memory: Any, lengths_at: int, features: int, bags: int, ids: int) -> bytes | None: ...
def feature_places(
    parts: Any, order: list[int] | None, columns: Any, ids_at: int, lengths_at: int, bags: int, weights_at: int, out_at: int
) -> bytes: ...
def tensor_places(
    exchange: Any, given: Sequence[Any], dims: tuple[int, ...], new: Callable[..., Any], base: int
) -> tuple[bytes, list[Any], list[object]] | None: ...
def tensor_parts(
    exchange: Any, ids: Any, lengths: Any, features: int, base: int
) -> tuple[object, int, int, int, bytes] | None: ...
def count_buckets(row_map: Any, ids: Any, counts: Any) -> int | None: ...
def put_in_buckets(row_map: Any, ids: Any, sources: Any, ends: Any, records: Any) -> None: ...
def distinct(records: Any, starts: Any, first: int, last: int, keep: int, own: int, kept: Any) -> tuple[int, int, int] | None: ...
def build(records: Any, starts: Any, kept: Any, first: int, last: int, directory: Any, pilots: Any) -> int | None: ...
def find_rows(row_map: Any, ids: Any, rows: Any) -> None: ...
def fill_filter(ids: Any, words: Any) -> None: ...
def fill_marks(numbers: Any, slots: Any, bits: Any, before: Any, order: Any) -> None: ...
def isas() -> tuple[str, ...]: ...
def use(name: str) -> None: ...
def prefetches_into() -> int: ...
def prefetch_into(level: int) -> None: ...

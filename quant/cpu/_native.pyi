"""What the C extension offers (`_native.c`)."""

from typing import Any

KIND_FIELDS: tuple[str, ...]
PLACE_FIELDS: tuple[str, ...]
GATHER_FIELDS: tuple[str, ...]
GPU_KIND_FIELDS: tuple[str, ...]
JOB_FIELDS: tuple[str, ...]
MOVE_FIELDS: tuple[str, ...]

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
) -> tuple[int, int, int, int] | None: ...
def run(kinds: bytes, places: Any, inputs: Any, outputs: Any, threads: int) -> tuple[int, int, int, int] | None: ...
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
        tuple[bytes, bytes, bytes, int, int, int],
        tuple[bytes, bytes, bytes, int, int, int],
    ]
    | None
): ...
def move(moves: bytes, source: Any, target: Any, source_base: int, target_base: int) -> None: ...
def isas() -> tuple[str, ...]: ...
def use(name: str) -> None: ...
def prefetches_into() -> int: ...
def prefetch_into(level: int) -> None: ...

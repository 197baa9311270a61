from typing import Any

def isas() -> tuple[str, ...]: ...
def use(name: str) -> None: ...
def lookup(
    table_address: int,
    rows: int,
    row_bytes: int,
    dim: int,
    format: int,
    pooling: int,
    ids: Any,
    lengths: Any,
    weights: Any,
    out: Any,
    out_half: int,
    threads: int,
    /,
) -> tuple[int, int, int, int] | None: ...
def run(jobs: Any, inputs: Any, outputs: Any, threads: int, /) -> tuple[int, int, int, int] | None: ...
def gather_rows() -> int: ...
def quantize(format: int, source: int, values: Any, rows: int, dim: int, out: Any, row_bytes: int, /) -> int: ...

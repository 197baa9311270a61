from typing import Any

REGION_BYTES: int
REGION_SIZE: int

def sums(rows: Any, seed: int, first_block: int, out: Any, /) -> None: ...
def fetch(
    place: Any, checked: Any, regions: Any, rows: Any, out: Any, state: Any, is_ready: bool, /
) -> int: ...
def bring(
    place: Any,
    checked: Any,
    regions: Any,
    rows: Any,
    out: Any,
    state: Any,
    depth: int,
    patience_ms: int,
    all_ms: int,
    /,
) -> int: ...
def in_threads(
    owner: object,
    device: int,
    parts: int,
    wait_ms: int,
    place: Any,
    checked: Any,
    regions: Any,
    rows: Any,
    out: Any,
    state: Any,
    depth: int,
    patience_ms: int,
    all_ms: int,
    /,
) -> None: ...
def ask(owner: object, device: int, place: Any, rows: Any, most: int, /) -> None: ...
def away(place: Any, checked: Any, regions: Any, rows: Any, out: Any, /) -> int: ...

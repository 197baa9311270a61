"""What the C extension offers (`_layers.c`)."""

from typing import Any

LAYER_FIELDS: tuple[str, ...]
PIECE_FIELDS: tuple[str, ...]
SOURCE_FIELDS: tuple[str, ...]
PANEL: int

def run(
    layers: bytes,
    pieces: bytes,
    sources: bytes,
    weights: Any,
    inputs: Any,
    outputs: Any,
    rows: int,
    scores_at: int,
    threads: int,
) -> int: ...
def isas() -> tuple[str, ...]: ...
def use(name: str) -> None: ...

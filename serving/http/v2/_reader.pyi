"""What the C extension offers (`native/_reader.c`)."""

from typing import Any

PLACE_FIELDS: tuple[str, ...]
INPUTS_PER_BYTE: int

def names(words: bytes, text: bytes) -> object: ...
def read(
    names: object,
    tail: bytes,
    body: Any,
    header_bytes: int,
    gathered: Any | None,
    on_device: bytes | None,
) -> tuple[Any, ...] | None: ...
def read_json(text: bytes, is_score: bool) -> tuple[object, str, int | None] | None: ...
def lay_out_json(read: object, names: object) -> tuple[Any, ...] | None: ...
def floats(values: Any, is_half: bool) -> bytes:
    """Floats, or fp16 numbers, as a JSON list; null for those that JSON has no number for."""

def use_vectors(most: int) -> int:
    """Chooses the instruction set of `floats`: 0: of any processor, 1: AVX2, 2: AVX-512, or the next lower
    one that this processor has. Returns it."""

def vectors(names: object, places: Any, outputs: Any) -> bytearray:
    """A JSON object: for the feature of each place, the list of its vectors in `outputs`. ValueError: they do
    not lie there."""

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

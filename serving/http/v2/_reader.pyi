"""What the C extension offers (`native/_reader.c`)."""

from typing import Any

PLACE_FIELDS: tuple[str, ...]

def names(words: bytes, text: bytes) -> object: ...
def read(
    names: object,
    tail: bytes,
    body: Any,
    header_bytes: int,
    gathered: Any | None,
    on_device: bytes | None,
) -> tuple[Any, ...] | None: ...

"""What the C extension offers (`_headers.c`)."""

from typing import Any

def skeleton(header: Any) -> int | None: ...
def spans(header: Any, most: int) -> list[tuple[int, int, int]] | None: ...
def template(words: bytes, text: bytes) -> Any: ...
def numbers(template: Any, header: Any) -> bytes | None: ...
def match(
    template: Any, body: Any, header_bytes: int
) -> (
    tuple[
        bytes,
        int,
        int,
        int,
        int,
        bytes,
        tuple[tuple[int, int], ...] | None,
        bytes | None,
        tuple[int, bytes] | None,
        bytes,
        int,
    ]
    | None
): ...

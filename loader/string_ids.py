"""String ids: the id of a string is the xxh3-64 of its UTF-8 bytes (seed 0), as an int64.

A table of string ids is one of raw ids: behind what reads strings, an id is that number. Bytes are hashed as
they are, text is not normalized, and the empty string is one as any other. Two strings of a table with one id
are refused when it is loaded; of n strings two meet with a chance of n² / 2**65.

BYTES of the Open Inference Protocol: before each string its length, uint32, little-endian.
"""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import xxhash

from tableside.quant.contract import Ids

LENGTH_BYTES = 4


digest: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest  # of bytes, with a seed


def string_ids(strings: Sequence[bytes | str], seed: int = 0) -> Ids:
    """Returns the ids of strings, int64 [n]. seed: another one gives other numbers, to tell strings with one
    id apart. UnicodeEncodeError: text has half of a surrogate pair."""
    encoded = [s.encode() if isinstance(s, str) else s for s in strings]
    return np.fromiter(map(digest, encoded, repeat(seed)), np.uint64, len(strings)).view(np.int64)


def ids_of_bytes(data: Any) -> Ids | None:
    """Returns the ids of strings as BYTES, int64 [n]; None: their lengths do not add up to the data."""
    view, at, strings = memoryview(data).cast("B"), 0, list[bytes]()
    while at < len(view):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(view[at:start], "little")
        strings.append(bytes(view[start:at]))
    return string_ids(strings) if at == len(view) else None


def as_bytes(strings: Sequence[bytes]) -> bytes:
    """Returns strings as BYTES."""
    lengths = np.fromiter(map(len, strings), "<u4", len(strings)).view(f"V{LENGTH_BYTES}").tolist()
    return b"".join(chain.from_iterable(zip(lengths, strings, strict=True)))


def is_text(kind: Any) -> bool:
    """Returns whether a type of pyarrow's is of strings or bytes, or of categories of these."""
    import pyarrow as pa

    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = ("string", "large_string", "string_view", "binary", "large_binary", "fixed_size_binary")
    return any(getattr(pa.types, f"is_{name}")(of) for name in kinds)


def ids_of_column(column: Any, seed: int = 0) -> Ids:
    """Returns the ids of pyarrow's array of strings (`is_text`) without nulls, int64 [n]."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        indices: Ids = column.indices.to_numpy(zero_copy_only=False)
        return ids_of_column(column.dictionary, seed)[indices]
    if not pa.types.is_string_view(column.type):
        column = column.cast(pa.large_binary())
    return string_ids(column.to_pylist(), seed)

"""Compares Parquet page headers with their column chunks before Arrow reads a page.

Arrow allocates and fills as many bytes as a page header says, so a damaged one would take 2 GiB. A header is
a struct of Thrift's compact protocol (github.com/apache/parquet-format, PageHeader); field 3 is the page's
bytes in the file.
"""

import os
from collections.abc import Sequence
from typing import Any

_HEADER_BYTES, _LONGEST_HEADER_BYTES = 512, 16 << 20  # that are read at once; the longest that Arrow reads
_COMPRESSED_SIZE = 3
_PADDING_BYTES = 100  # Arrow's allowance: before 1.2.9 parquet-mr's footers left a header out
_DEEPEST = 8
_BOOLEANS, _INTEGERS, _BINARY, _STRUCT = (1, 2), (4, 5, 6), 8, 12  # kinds of values that page headers have


def check_pages(fd: int, metadata: Any, group: int, columns: Sequence[str]) -> None:
    """Raises OSError if a page of these columns of a row group exceeds its chunk, or has no header."""
    size, found = os.fstat(fd).st_size, metadata.row_group(group)
    inside = tuple(f"{name}." for name in columns)
    for column in map(found.column, range(found.num_columns)):
        if column.path_in_schema in columns or column.path_in_schema.startswith(inside):
            _check_chunk(fd, column, size, f"row group {group}, column {column.path_in_schema!r}")


def _check_chunk(fd: int, column: Any, size: int, where: str) -> None:
    first = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < first:
        first = column.dictionary_page_offset
    end = first + column.total_compressed_size
    if not 0 <= first <= end <= size:
        raise OSError(f"{where} lies at bytes {first:,} to {end:,}, the file ends at {size:,}")
    at, limit = first, min(end + _PADDING_BYTES, size)
    while at < end:
        page, header_bytes = _page(fd, at, min(limit - at, _LONGEST_HEADER_BYTES), where)
        if not 0 <= page <= limit - at - header_bytes:
            raise OSError(
                f"{where}: the page at byte {at:,} says {page:,} bytes, its column chunk ends at {end:,}"
            )
        at += header_bytes + page


def _page(fd: int, at: int, most: int, where: str) -> tuple[int, int]:
    """Returns a page's bytes, and those of its header, which are `most` at most."""
    length = min(_HEADER_BYTES, most)
    while True:
        try:
            fields: dict[int, int] = {}
            header_bytes = _skip_struct(os.pread(fd, length, at), 0, 0, fields)
            return fields[_COMPRESSED_SIZE], header_bytes
        except IndexError:  # it is longer
            if length >= most:
                raise OSError(f"{where}: the page header at byte {at:,} has no end") from None
            length = min(8 * length, most)
        except (KeyError, ValueError) as error:
            raise OSError(f"{where}: there is no page header at byte {at:,}") from error


def _skip_struct(data: bytes, at: int, depth: int, fields: dict[int, int] | None = None) -> int:
    """Returns the end of a struct. fields: receives its integers by number. IndexError: beyond `data`.
    ValueError: no struct."""
    if depth > _DEEPEST:
        raise ValueError("structs nested too deep")
    number = 0
    while kind := data[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(data, at)
        if kind & 15 in _INTEGERS and fields is not None:
            fields[number], at = _integer(data, at)
        elif kind & 15 not in _BOOLEANS:  # a boolean is its kind
            at = _skip(data, at, kind & 15, depth)
    return at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Returns the end of a value."""
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    if kind == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if kind == _STRUCT:
        return _skip_struct(data, at, depth + 1)
    raise ValueError(f"a value of kind {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return number >> 1 ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an unsigned integer of up to 64 bits, and its end."""
    number = 0
    for shift in range(0, 70, 7):
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
    raise ValueError("an integer without end")

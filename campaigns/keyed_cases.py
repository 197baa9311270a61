"""Tables of raw ids and files of changes that lie."""

import io
import itertools
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from campaigns.file_data import CHANGES, DATA, ROWS, SHAPE, Data, Write, archive, as_file


def _npy_of(dtype: str, shape: str, values: bytes = b"") -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + values


HONEST_CHANGES = {
    "t.ids.npy": _npy_of("<i8", "(8,)", np.arange(8).tobytes()),
    "t.vectors.npy": _npy_of("<f4", "(8, 4)", DATA),
}


def _changes_cases() -> Iterator[tuple[str, Data]]:
    """Archives of changes, one of whose headers lies."""
    shapes = [
        "(-8, -4)",
        f"({2**32}, {2**32})",
        f"(8, {2**62})",
        f"(8, {10**90})",
        "(True, 4)",
        "()",
        f"({2**61},)",
        f"({10**90},)",
    ]
    shapes += ["(" + "-" * 9000 + "8, 4)", "(" * 4000 + "8" + ",)" * 2000, "(" * 9000]
    for part, dtype in (("t.ids", "<i8"), ("t.vectors", "<f4")):
        lies = [(dtype, shape) for shape in shapes]
        lies += [(odd, "(8,)") for odd in ("|O", "|V99999999999", "<f16", "i4,i4", "<U2147483647")]
        for odd, shape in lies:
            lie = {f"{part}.npy": _npy_of(odd, shape, DATA)}
            yield (
                f"{part} of {odd} {shape:.30} ({len(shape)} characters)",
                archive({**HONEST_CHANGES, **lie}, root=""),
            )


def _varint(number: int) -> bytes:
    """A zigzag integer of Thrift's compact protocol."""
    number, found = number << 1, b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def parquet() -> bytes:
    """Ids and vectors, and a table for each row, as changes have them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), SHAPE[1])
    out = io.BytesIO()
    pq.write_table(
        pa.table({"id": np.arange(8), "vector": vectors, "table": ["t"] * 8}), out, use_dictionary=False
    )
    return out.getvalue()


def _page_says(size: int, column: int) -> bytes:
    """`parquet`, where the first page of a column says another size. Its header's fields are type,
    uncompressed size and compressed size; the file keeps its length."""
    import pyarrow.parquet as pq

    data = parquet()
    chunk = pq.read_metadata(io.BytesIO(data)).row_group(0).column(column)
    begin = at = chunk.data_page_offset
    for _ in range(2):  # fields
        at += 1
        while data[at] & 128:
            at += 1
        at += 1
    end = at + 1
    while data[end] & 128:
        end += 1
    changed = data[: at + 1] + _varint(size) + data[end + 1 :]
    stop, more = begin + chunk.total_compressed_size, len(changed) - len(data)
    return changed[:stop] + changed[stop + more :]


def _dynamicemb(size: int, folder: Path) -> Path:
    """A dump of eight keys whose file of values is a sparse one."""
    (folder / "t_emb_keys.rank_0.world_size_1").write_bytes(np.arange(8).tobytes())
    (values := folder / "t_emb_values.rank_0.world_size_1").touch()
    os.truncate(values, size)
    return folder


def keyed_cases() -> Iterator[tuple[str, Write]]:
    for what, data in _changes_cases():
        yield f"changes: {what}", as_file(f"{CHANGES}.npz", data)
    for name, size, column in itertools.product((CHANGES, "raw"), (10**9, 2**31 - 1, 10_000), range(2)):
        yield (
            f"{name}.parquet: a page of {size:,} bytes in column {column}",
            as_file(f"{name}.parquet", partial(_page_says, size, column)),
        )
    for size in (1 << 30, 1 << 40, 1 << 42):
        yield f"dynamicemb: {size:,} bytes of values", partial(_dynamicemb, size)

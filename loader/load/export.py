"""Exports a table of a published version, dequantized, in bounded memory.

    .parquet       columns `id` int64 and `vector` (lists of dim values)
    .npz           stored records `ids` int64 [rows] and `weights` [rows, dim]
    .safetensors   tensors `ids` I64 [rows] and `weights` [rows, dim]

A given name changes these to `NAME.ids` and `NAME.weight`. Rows come in the order of a partial tensor. Where
ids are row numbers from 0, .npz and .safetensors hold the weights alone. The file is renamed when complete.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tableside.loader.errors import ModelError
from tableside.loader.files import replacing
from tableside.loader.load.settings import Progress
from tableside.loader.versions.partial import PartialTensor
from tableside.quant import QuantError
from tableside.quant.contract import Floats, Ids
from tableside.quant.installed import require
from tableside.quant.row_format import FP16_MAX

SUFFIXES = (".parquet", ".npz", ".safetensors")
VALUE_FORMATS = ("fp32", "fp16")
CHUNK_BYTES = 4 << 20  # of fp32 values that are held together
_SAFETENSORS_DTYPES = {"int64": "I64", "float32": "F32", "float16": "F16"}


@dataclass(frozen=True)
class ExportResult:
    path: Path
    rows: int
    dim: int
    bytes: int


def export(
    tensor: PartialTensor,
    path: Path,
    values: str = "fp32",
    progress: Progress | None = None,
    name: str | None = None,
) -> ExportResult:
    """Writes a tensor's rows to `path`, in the format of its suffix; replaces a file. values: "fp32" or
    "fp16". name: prefix of arrays, so that several files form a checkpoint. ModelError: unknown suffix,
    values or folder, or a name for Parquet. QuantError: a value overflows fp16. After an error `path` is
    unchanged."""
    write = {".parquet": _write_parquet, ".npz": _write_npz, ".safetensors": _write_safetensors}.get(
        path.suffix
    )
    if write is None:
        raise ModelError(f"{path}: the suffix is {path.suffix!r}; expected one of: {', '.join(SUFFIXES)}")
    if values not in VALUE_FORMATS:
        raise ModelError(f"values are {values!r}; expected one of: {', '.join(VALUE_FORMATS)}")
    if name is not None and path.suffix == ".parquet":
        raise ModelError(
            f"{path}: a file of Parquet names no tensors; leave the name {name!r} out, or write another kind "
            "of file"
        )
    if not path.parent.is_dir():
        raise ModelError(f"{path}: there is no folder {path.parent}; make it first, or choose another file")
    dtype = np.dtype(np.float16 if values == "fp16" else np.float32)
    names = ("ids", "weights") if name is None else (f"{name}.ids", f"{name}.weight")
    rows = _ExportRows(tensor, dtype, progress or (lambda done, total: None), names)
    with replacing(path) as partial, partial.open("x+b") as file:
        write(file, rows)
        size = file.seek(0, os.SEEK_END)
        file.flush()
        os.fsync(file.fileno())
    return ExportResult(path, len(tensor), tensor.dim, size)


class _ExportRows:
    """Chunks of ids and of values in the wanted dtype."""

    def __init__(
        self, tensor: PartialTensor, dtype: np.dtype[Any], progress: Progress, names: tuple[str, str]
    ) -> None:
        """names: of ids and values."""
        self.tensor, self.dtype, self._progress, self._names = tensor, dtype, progress, names
        self.chunk_rows = max(1, CHUNK_BYTES // (4 * tensor.dim))
        self.has_ids = tensor.rows.table.row_map is not None

    def arrays(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...], Iterator[NDArray[Any]]]]:
        """Returns (name, dtype, shape, chunks) of what .npz and .safetensors hold."""
        tensor, (ids_name, values_name) = self.tensor, self._names
        ids = (ids_name, np.dtype(np.int64), (len(tensor),), tensor.id_chunks(self.chunk_rows))
        values = (values for _, values in self.chunks())
        weights = (values_name, self.dtype, (len(tensor), tensor.dim), values)
        return [ids, weights] if self.has_ids else [weights]

    def chunks(self) -> Iterator[tuple[Ids, NDArray[Any]]]:
        done = 0
        self._progress(done, len(self.tensor))
        for ids, values in self.tensor.chunks(self.chunk_rows):
            yield ids, self._converted(ids, values)
            done += ids.size
            self._progress(done, len(self.tensor))

    def _converted(self, ids: Ids, values: Floats) -> NDArray[Any]:
        if self.dtype == np.float32:
            return values
        if (large := np.flatnonzero((np.abs(values) > FP16_MAX).any(axis=1))).size:
            raise QuantError(
                f"the row of id {ids[large[0]]} has a value beyond ±{FP16_MAX:g}, fp16's largest; export it "
                "as fp32"
            )
        return values.astype(np.float16)


def _write_parquet(file: IO[bytes], rows: _ExportRows) -> None:
    require("a file of Parquet", "pyarrow", extra="eval")
    import pyarrow as pa
    import pyarrow.parquet as pq

    dim = rows.tensor.dim
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.from_numpy_dtype(rows.dtype), dim))])
    with pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for ids, values in rows.chunks():
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim)
            writer.write_table(pa.Table.from_arrays([pa.array(ids), vectors], schema=schema))


def _write_npz(file: IO[bytes], rows: _ExportRows) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, dtype, shape, chunks in rows.arrays():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as record:
                header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(record, header)
                _write_all(record, chunks)


def _write_safetensors(file: IO[bytes], rows: _ExportRows) -> None:
    header: dict[str, Any] = {}
    arrays, end = rows.arrays(), 0
    for name, dtype, shape, _ in arrays:
        begin, end = end, end + int(np.prod(shape)) * dtype.itemsize
        stored = _SAFETENSORS_DTYPES[dtype.name]
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for *_, chunks in arrays:
        _write_all(file, chunks)


def _write_all(file: IO[bytes], chunks: Iterable[NDArray[Any]]) -> None:
    for chunk in chunks:
        file.write(np.ascontiguousarray(chunk).data)

"""Tables of values that were quantized before, with their scales beside them: matrices of packed rows.

What ModelOpt, compressed-tensors and DeepSeek write of a table [rows, dim], and what it becomes
(`tableside.quant.row_format`):
    float8_e4m3fn [rows, dim]         scale: one, or one a row of fp32 or bf16  fp8_e4m3
    float8_e4m3fn [rows, dim]         scale: e8m0, or its bytes, [rows, dim / 32]           fp8_e4m3_block32
    uint8 [rows, dim / 2], F4 [rows, dim]  scale: e4m3 [rows, dim / 16], and one of fp32    nvfp4
No value is decoded: a row's values and scales are columns of bytes of the packed row. A table may lie in
tensors named `shard_0` or `shard_1` and so on, rows one after another: it is called `shard_*`.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tableside.loader.checkpoint.rows import SOURCES, Checkpoint, Matrix, RowShard, Tensor
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular
from tableside.quant import RowFormat, Source
from tableside.quant.cpu.backend import ITEM_TYPES

_E4M3, _E8M0, _BYTES, _FP4 = (
    frozenset(("f8_e4m3", "float8_e4m3fn")),
    frozenset(("f8_e8m0", "float8_e8m0fnu")),
    frozenset(("u8", "uint8")),
    frozenset(("f4", "float4_e2m1fn_x2")),
)
# At the end of a name, or before `.weight`
_SHARD = re.compile(
    r"(?<![A-Za-z0-9])(shards?[._-]?)([0-9]{1,9})(?=$|\.weight$|\.weight_packed$)", re.IGNORECASE
)
_ENDS = (".weight", ".weight_packed", "_packed", "")
_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales", "scale_inv")
_OF_TABLE = ("weight_scale_2", "weight_global_scale", "global_scale", "scale_2")


def add_scaled(found: Checkpoint) -> None:
    """Adds a checkpoint's matrices of packed rows, and those that its shards make."""
    scales: set[str] = set()
    for key, tensor in list(found.tensors.items()):
        dtype = tensor.dtype
        if len(tensor.shape) != 2 or min(tensor.shape) < 1 or dtype not in _E4M3 | _BYTES | _FP4:
            continue
        candidates = list(_beside(found, key, _SCALES))
        if not candidates:
            if dtype in _E4M3 and key not in scales:
                found.skip(key, f"dtype {dtype}, and no scale beside it, as {_stem(key)}.weight_scale")
            continue
        try:
            if len(candidates) > 1:
                raise CheckpointError(f"two tensors could be its scale: {' and '.join(candidates[:2])}")
            matrix = _matrix(found, key, tensor, candidates[0])
        except CheckpointError as error:
            if dtype in _E4M3 | _FP4 or found.tensors[candidates[0]].dtype in _E4M3:
                found.skip(key, str(error))
            continue
        found.replace(key, matrix)
        for used in (candidates[0], next(_beside(found, key, _OF_TABLE), None)):
            if used is not None:
                scales.add(used)
                found.matrices.pop(used, None)
                found.skip(used, "scales of a table of values that were quantized before")
    for key, parts in sorted(_shards(found).items()):
        try:
            found.replace(key, _joined(found, key, parts))
        except CheckpointError as error:
            found.skip(key, str(error))
        found.parts.update(part for _, part in parts)


def _shards(found: Checkpoint) -> dict[str, list[tuple[int, str]]]:
    """Returns tables of quantized values that lie in numbered tensors: key with `*` -> (number, tensor), also
    of tensors that are no matrix by themselves."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for key, tensor in found.tensors.items():
        if tensor.dtype in _E4M3 | _BYTES | _FP4 and (match := _SHARD.search(key)):
            name = f"{key[: match.start()]}{match[1]}*{key[match.end() :]}"
            groups.setdefault(name, []).append((int(match[2]), key))
    return {
        key: sorted(parts)
        for key, parts in groups.items()
        if key not in found.tensors and any(k in found.matrices for _, k in parts)
    }


def _joined(found: Checkpoint, key: str, parts: list[tuple[int, str]]) -> Matrix:
    """Returns the matrix of all parts. CheckpointError: one is missing or no matrix, or they differ in dim or
    dtype."""
    for place, (number, part) in enumerate(parts, min(parts[0][0], 1)):
        if number != place:
            raise CheckpointError(f"{key!r} has no part {place}, or two: {part!r} comes next")
        if part not in found.matrices:
            raise CheckpointError(f"its part {part!r} cannot be read: {found.skipped.get(part)}")
    matrices = [found.matrices[part] for _, part in parts]
    shards: list[RowShard] = []
    rows = 0
    for matrix in matrices:
        if (matrix.dim, matrix.source) != (matrices[0].dim, matrices[0].source):
            raise CheckpointError(
                f"{matrix.key!r} is of {matrix.source.label} [{matrix.rows}, {matrix.dim}], and "
                f"{matrices[0].key!r} of {matrices[0].source.label} and dim {matrices[0].dim}"
            )
        shards += [replace(shard, row=shard.row + rows) for shard in matrix.shards]
        rows += matrix.rows
    return Matrix(key, rows, matrices[0].dim, matrices[0].source, tuple(shards))


def _stem(key: str) -> str:
    return next(key.removesuffix(end) for end in _ENDS if key.endswith(end))


def _beside(found: Checkpoint, key: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the tensors that may be scales of `key`: named as it or its module; else as that of its
    shards."""
    stem = _stem(key)
    own = dict.fromkeys(
        named
        for at in (key, stem)
        for name in names
        for named in (f"{at}.{name}", f"{at}_{name.removeprefix('weight_')}")
        if named != key and named in found.tensors
    )
    if own or not (match := _SHARD.search(key)):
        yield from own
        return
    whole = key[: match.start()].rstrip("._-")
    yield from (k for name in names if (k := f"{whole}.{name}") in found.tensors)


def _matrix(found: Checkpoint, key: str, values: Tensor, scale_key: str) -> Matrix:
    """Returns the matrix of packed rows. CheckpointError: its scales are of no format that there is."""
    rows, width = values.shape
    scale = found.tensors[scale_key]
    if values.shards is None or (scale.shards is None and len(scale.shape) < 3):
        what = key if values.shards is None else scale_key
        raise CheckpointError(
            f"the values of {what} do not lie row after row; save it with .contiguous(), and in a "
            "distributed checkpoint as [rows, 1]"
        )
    of_rows = scale.shape in ((rows,), (rows, 1)) and rows > 1
    if values.dtype in _E4M3 and scale.dtype in SOURCES and (of_rows or scale.elements == 1):
        if of_rows:
            head = tuple(_row_scales(scale, rows))
        else:
            head = (_repeated(scale, rows, 0, _scalar(scale_key, scale).tobytes()),)
        return _packed(found, key, rows, width, RowFormat.FP8_E4M3, (*head, *_columns(values, 4)))
    if values.dtype in _E4M3 and scale.dtype in _E8M0 | _BYTES and scale.shape == (rows, width / 32):
        shards = (*_columns(values, 0), *_columns(scale, width))
        return _packed(found, key, rows, width, RowFormat.FP8_E4M3_BLOCK32, shards)
    dim = width if values.dtype in _FP4 else 2 * width
    if values.dtype not in _E4M3 and scale.dtype in _E4M3 and scale.shape == (rows, dim / 16):
        of_table = next(_beside(found, key, _OF_TABLE), None)
        if of_table is None:
            raise CheckpointError(f"of nvfp4, and no scale of the table, as {_stem(key)}.weight_scale_2")
        factor = _scalar(of_table, found.tensors[of_table])
        if not 0 < factor < np.inf:
            raise CheckpointError(f"scale {of_table} is {factor}; expected it above 0")
        if of_table.endswith("global_scale"):  # compressed-tensors keeps what values were multiplied by
            factor = np.float32(1) / factor
        at = dim // 2
        shards = (
            *_columns(values, 0, at),
            _repeated(scale, rows, at, factor.tobytes()),
            *_columns(scale, at + 4),
        )
        return _packed(found, key, rows, dim, RowFormat.NVFP4, shards)
    raise CheckpointError(
        f"{values.dtype} {list(values.shape)} with a scale {scale_key} of {scale.dtype} {list(scale.shape)}; "
        "expected e4m3 with one scale, one a row, or e8m0 for each 32 values, or fp4 with e4m3 for each 16"
    )


def _packed(
    found: Checkpoint, key: str, rows: int, dim: int, row_format: RowFormat, shards: tuple[RowShard, ...]
) -> Matrix:
    row_format.row_bytes(dim)
    return Matrix(key, rows, dim, Source(row_format), shards).check(found.path)


def _columns(tensor: Tensor, column: int, width: int | None = None) -> Iterator[RowShard]:
    """Yields a tensor's shards as bytes of packed rows from `column` on. width: of its rows in bytes; None:
    its items are bytes."""
    items = tensor.shape[1] if len(tensor.shape) == 2 else 1
    each = 1 if width is None else width / items
    for s in tensor.shards or ():
        yield replace(s, column=column + int(s.column * each), columns=int(s.columns * each))


def _row_scales(scale: Tensor, rows: int) -> Iterator[RowShard]:
    """Yields fp32 scales [rows] as the first 4 bytes of packed rows; of bf16 the upper two are read."""
    source = SOURCES[scale.dtype]
    if source is Source.FP32:
        yield from _columns(scale, 0, 4)
    elif source is Source.FP16:
        raise CheckpointError("its scales, one a row, are fp16; expected fp32 or bf16")
    else:
        yield _repeated(scale, rows, 0, bytes(2))
        yield from _columns(scale, 2, 2)


def _repeated(scale: Tensor, rows: int, column: int, data: bytes) -> RowShard:
    """A shard whose rows are all `data`, which `scale` tells."""
    assert scale.shards is not None
    return RowShard(scale.shards[0].path, 0, 0, rows, column, len(data), constant=data)


def _scalar(key: str, tensor: Tensor) -> np.float32:
    """Returns the only value of a tensor. CheckpointError: it has others, or cannot be read."""
    source = SOURCES.get(tensor.dtype)
    if tensor.elements != 1 or source is None or not tensor.shards:
        raise CheckpointError(f"scale {key} is {tensor.dtype} {list(tensor.shape)}; expected one float")
    shard = tensor.shards[0]
    with open(open_regular(shard.path, "a file of the checkpoint", CheckpointError), "rb") as file:
        data = os.pread(file.fileno(), source.item_bytes, shard.offset)
    if len(data) < source.item_bytes:
        raise CheckpointError(f"{shard.path}: it ends before {key}; it was truncated")
    if source is Source.BF16:  # the upper half of an fp32
        return np.float32(np.frombuffer(bytes(2) + data, "<f4")[0])
    return np.float32(np.frombuffer(data, ITEM_TYPES[source])[0])

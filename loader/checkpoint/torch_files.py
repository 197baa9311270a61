"""`torch.save` state dicts, read without torch: an archive (`archive`) with a pickle (`pickles`).

Nested dicts ({"state_dict": {...}}) are flattened with dots. Byte order, storage sizes, and tensors' offsets,
sizes and strides are checked. Globals beyond those of torch.load(weights_only=True) are refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tableside.loader.checkpoint.archive import Archive, ArchiveRecord
from tableside.loader.checkpoint.pickles import LIMIT_BYTES, ForbiddenGlobal, Name, PickleError, unpickle
from tableside.loader.checkpoint.rows import Checkpoint, whole
from tableside.loader.checkpoint.window import FileWindow
from tableside.loader.errors import CheckpointError

_ZIP_MAGIC = b"PK\x03\x04"
_LIMIT_NODES = 2_000_000  # dicts may share others, so a small file could name very many tensors
_LIMIT_DEPTH = 50

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex128": 16,
    "complex64": 8, "complex32": 4, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1,
    "quint2x4": 1,
}  # fmt: skip
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128", "QInt8": "qint8", "QUInt8": "quint8",
    "QInt32": "qint32", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of the file: `dtype` is None for one of bytes without a type."""

    dtype: str | None
    record: ArchiveRecord


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor within its storage. begin: offset of its first value in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    contiguous: bool
    storage: Storage


@dataclass(frozen=True, slots=True)
class Other:
    """A tensor of another kind: sparse, quantized, nested, meta. Its rows do not lie one after another."""


def read(path: Path, fd: int) -> Checkpoint:
    found = Checkpoint(path)
    for key, tensor in tensors(load(FileWindow(fd, path)), path):
        if isinstance(tensor, FileTensor):
            shards = whole(path, tensor.begin, tensor.shape, tensor.storage.record)
            found.add(key, tensor.shape, tensor.dtype, shards if tensor.contiguous else None)
        else:
            remedy = "save it dense, with .to_dense() or .dequantize()"
            found.skip(key, f"a sparse, quantized, nested or meta tensor; {remedy}")
    return found


def load(window: FileWindow) -> Any:
    """Returns what torch.save wrote, with `FileTensor` and `Other` for tensors. CheckpointError: damaged or
    unsafe."""
    path = window.path
    if window.bytes < 4 or window.read(0, 4) != _ZIP_MAGIC:
        raise CheckpointError(
            f"{path}: not a zip archive: damaged, or older than torch 1.6's format; load it with torch, and "
            "torch.save it again"
        )
    archive = Archive(window, "write it with torch.save, which does not compress")
    pickles = [name for name in archive.records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path}: {len(pickles)} records called data.pkl; expected the one that torch.save writes"
        )
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}constants.pkl" in archive.records:
        raise CheckpointError(
            f"{path}: a TorchScript program, not a state dict; torch.save its state_dict() alone"
        )
    _check_byte_order(archive, root, path)
    try:
        return unpickle(
            archive.read(pickles[0], LIMIT_BYTES), _NAMES, lambda pid: _storage(pid, archive, root, path)
        )
    except ForbiddenGlobal as error:
        raise CheckpointError(
            f"{path}: refused, it holds more than tensors and could run code ({error}); save its "
            "state_dict() alone"
        ) from None
    except PickleError as error:
        raise CheckpointError(
            f"{path}: cannot be read as a torch.save file, it may be half-written ({error})"
        ) from error


def _check_byte_order(archive: Archive, root: str, path: Path) -> None:
    # Before torch 2.1: little-endian machines wrote nothing else
    if f"{root}byteorder" not in archive.records:
        return
    order = archive.read(f"{root}byteorder", 100)
    if order == b"big":
        raise CheckpointError(
            f"{path}: its values are big-endian, and rows are read as they lie; on this machine: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    if order != b"little":
        raise CheckpointError(
            f"{path}: its byte order is {order!r}; expected b'little'; take another copy of the file"
        )


def _storage(pid: Any, archive: Archive, root: str, path: Path) -> Storage:
    """Returns the storage that a persistent id names, its size compared with its record's."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not Name:
        raise PickleError("a persistent id that is no storage's")
    (dtype, item_bytes), key, count = pid[1].value or (None, 0), pid[2], pid[4]
    if not item_bytes or type(key) is not str or type(count) is not int:
        raise PickleError("a persistent id that is no storage's")
    record = archive.records.get(f"{root}data/{key}")
    if record is None or record.bytes != count * item_bytes:
        raise CheckpointError(
            f"{path}: storage {key!r} should have {count} values of {item_bytes} bytes, its record has "
            f"{record.bytes if record else 'no'} bytes; the file is damaged"
        )
    return Storage(dtype, record)


# ---- stand-ins of what torch calls when it unpickles ----


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> FileTensor:
    return _strided(storage, offset, shape, strides, storage.dtype)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> FileTensor:
    return _strided(storage, offset, shape, strides, dtype.value)


def _strided(storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any) -> FileTensor:
    """Returns a tensor whose every value lies inside its storage; PickleError where one does not."""
    numbers = (offset, *shape, *strides)
    if (
        type(storage) is not Storage
        or len(shape) != len(strides)
        or not all(type(n) is int and n >= 0 for n in numbers)
    ):
        raise PickleError(
            f"a tensor of shape {shape!r:.100}, strides {strides!r:.100}, offset {offset!r:.100}"
        )
    item_bytes = DTYPE_BYTES.get(str(dtype), 1)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * item_bytes > storage.record.bytes:
        raise PickleError(
            f"a tensor of shape {list(shape)}, strides {list(strides)}, offset {offset} ends outside its "
            f"storage of {storage.record.bytes} bytes"
        )
    expected, contiguous = 1, True
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        contiguous = contiguous and (n == 1 or step == expected)
        expected *= n
    return FileTensor(
        str(dtype), tuple(shape), storage.record.offset + offset * item_bytes, contiguous, storage
    )


def _first(value: Any, *rest: Any) -> Any:
    return value


def _other(*arguments: Any) -> Other:
    return Other()


def _from_type(function: Any, kind: Any, arguments: Any, *rest: Any) -> Any:
    return function.make(*arguments)


def _empty_dict(*arguments: Any) -> dict[Any, Any]:
    if arguments:
        raise PickleError("a dict made of a call's arguments")
    return {}


def dropped(*arguments: Any) -> None:
    return None


def _names() -> dict[str, Name]:
    makes: dict[str, Callable[..., Any]] = {
        "collections.OrderedDict": _empty_dict,
        "collections.Counter": dropped,
        "torch.nn.parameter.Parameter": _first,
        "torch.serialization._get_layout": dropped,
        "torch.Size": tuple,
        "torch.Tensor": _other,
        "torch.device": dropped,
        "_codecs.encode": dropped,
        **{f"builtins.{kind}": dropped for kind in ("bytearray", "set", "complex")},
        **{f"__builtin__.{kind}": dropped for kind in ("bytearray", "set", "complex")},
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _first,
        "torch._utils._rebuild_parameter_with_state": _first,
        "torch._tensor._rebuild_from_type_v2": _from_type,
    }
    kinds = (
        "qtensor",
        "device_tensor_from_numpy",
        "sparse_tensor",
        "meta_tensor_no_storage",
        "nested_tensor",
    )
    makes |= {
        f"torch._utils._rebuild_{kind}": _other
        for kind in (*kinds, "wrapper_subclass", "device_tensor_from_cpu_tensor")
    }
    found = {full: Name(full, make) for full, make in makes.items()}
    schemes = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
    plain = [*DTYPE_BYTES, *schemes, "per_channel_affine_float_qparams"]
    found |= {f"torch.{name}": Name(f"torch.{name}", None, name) for name in plain}
    types = {f"torch.{d}{name}Storage": dtype for d in ("", "cuda.") for name, dtype in _STORAGES.items()}
    found |= {full: Name(full, None, (dtype, DTYPE_BYTES[dtype])) for full, dtype in types.items()}
    places = ("", "cuda.", "sparse.", "cuda.sparse.")
    found |= {
        f"torch.{place}{name}Tensor": Name(f"torch.{name}Tensor") for place in places for name in _STORAGES
    }
    found["torch.storage.UntypedStorage"] = Name("torch.storage.UntypedStorage", None, (None, 1))
    return found


_NAMES = _names()


# ---- tensors and where they lie ----


def tensors(loaded: Any, path: Path) -> Iterator[tuple[str, FileTensor | Other]]:
    """Yields (dotted key, tensor) of a tensor or of nested dicts of tensors."""
    waiting, seen = [("", loaded, 0)], 0
    while waiting:
        prefix, value, depth = waiting.pop()
        seen += 1
        if seen > _LIMIT_NODES or depth > _LIMIT_DEPTH:
            raise CheckpointError(
                f"{path}: a dict in it holds itself, or dicts are nested without end; save its state_dict() "
                "alone"
            )
        if isinstance(value, FileTensor | Other):
            yield prefix or "tensor", value
        elif type(value) is dict:
            named = ((key if isinstance(key, str) else repr(key), v) for key, v in value.items())
            inner = [(f"{prefix}.{key}" if prefix else key, v, depth + 1) for key, v in named]
            waiting += reversed([i for i in inner if isinstance(i[1], FileTensor | Other | dict)])

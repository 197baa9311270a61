"""Converts a request's features to arrays that can be sent, all features at a time (a request has
hundreds). Ids that are strings are an array of bytes objects, and sent as BYTES (loader.string_ids)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from tableside.loader.string_ids import as_bytes
from tableside.serving.client.messages import FeatureError

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True, default=Any)
Ids = Any  # an array or tensor [bags, ids a bag], a list of lists, a column of lists, or Jagged
Array = NDArray[Any]

_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")
_INT64, _INT32, _FP32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
_ARRAY = {np.ndarray}
_ARROW = "__arrow_c_array__", "__arrow_c_stream__", "__arrow_array__"  # of columns


@dataclass(frozen=True)
class Jagged(Generic[V_co]):
    """Ids with their bags: values int64 or strings [ids], lengths int32 [bags], weights fp32 [ids]; arrays,
    tensors or lists."""

    values: V_co
    lengths: Any = None
    weights: Any = None

    @classmethod
    def from_offsets(
        cls, values: V, offsets: Any, weights: Any = None, *, include_last_offset: bool = False
    ) -> "Jagged[V]":
        """Makes bags of integer offsets into values, as torch.nn.EmbeddingBag takes them: [bags], or, with
        `include_last_offset`, [bags + 1], where the number of values comes last. FeatureError: they do not
        ascend from 0 to the number of values.

            Jagged.from_offsets([1, 2, 3, 7], [0, 3])                               # [1, 2, 3] and [7]
            Jagged.from_offsets([1, 2, 3, 7], [0, 3, 4], include_last_offset=True)  # the same
        """
        starts = _flat(integers(offsets, "offsets"), "offsets", "bags")
        try:
            ids = len(values)  # type: ignore[arg-type]  # an array, tensor or list, or refused
        except TypeError as error:
            raise FeatureError(f"values are a {type(values).__name__}; expected [ids]") from error
        ends = starts if include_last_offset else np.append(starts, ids)
        lengths = np.diff(ends)
        is_empty = not (starts.size or ids or include_last_offset)
        if not is_empty and (not starts.size or starts[0] or ends[-1] != ids or (lengths < 0).any()):
            said = np.array2string(starts, threshold=8)
            raise FeatureError(f"offsets are {said}; expected numbers that ascend from 0 to {ids}")
        return Jagged(values, lengths.astype(np.int32), weights)


class _Rectangle(Jagged[Any]):
    """A feature with equally long bags: values [bags, ids a bag]."""


class Columns(NamedTuple):
    """A request's features by part, in order. kinds: a character per feature, "r": values [bags, ids a bag],
    "v": values alone, "j": with lengths; upper case: with weights. values: all int64 or all int32, but those
    of `strings`, bytes objects. lengths: int32 [bags]. weights: fp32 [ids]. is_torch: some ids are a torch
    tensor."""

    names: tuple[str, ...]
    kinds: str
    values: list[Array]
    lengths: list[Array]
    weights: list[Array]
    is_torch: bool
    strings: frozenset[str] = frozenset()

    @property
    def is_uniform(self) -> bool:
        """Whether all features are of one kind."""
        return self.kinds.count(self.kinds[:1]) >= len(self.kinds)


def columns(features: Mapping[str, Ids]) -> Columns:
    """The features' arrays. FeatureError: ids are no integers, have another shape, or do not fit."""
    names = tuple(features)
    given: list[Jagged] = list(features.values())
    is_torch = False
    if set(map(type, given)) != {Jagged}:
        is_torch = any(map(_is_torch, given))
        given = [_as_jagged(name, value) for name, value in features.items()]
    values = [j.values for j in given]
    lengths = [j.lengths for j in given]
    weights = [j.weights for j in given]
    if _are(lengths, _INT32) and set(map(type, weights)) == {type(None)}:  # most requests
        kinds, weights = "j" * len(given), []
    else:
        kinds = _kinds(given)
        weights = _floats(
            [f"{n}.weights" for n, w in zip(names, weights, strict=True) if w is not None], weights
        )
        lengths = _lengths(names, lengths)
    strings = frozenset[str]()
    if not (_are(values, _INT64) or _are(values, _INT32)):
        is_torch = is_torch or any_torch(values)
        values = _ids(names, kinds, values)
        strings = frozenset(n for n, v in zip(names, values, strict=True) if v.dtype == object)
    return Columns(names, kinds, values, lengths, weights, is_torch, strings)


def _kinds(given: list[Jagged]) -> str:
    found = ["r" if type(j) is _Rectangle else "v" if j.lengths is None else "j" for j in given]
    return "".join(k if j.weights is None else k.upper() for k, j in zip(found, given, strict=True))


def _as_jagged(name: str, value: Ids) -> Jagged:
    if isinstance(value, Jagged):
        return value
    if _is_pandas(value):
        is_plain = isinstance(value.dtype, np.dtype)
        value = value.tolist() if is_plain and value.dtype.kind == "O" else value.array
    if any(hasattr(value, method) for method in _ARROW):
        return _of_column(name, value)
    if isinstance(value, list | tuple):
        if not set(map(type, value)) <= {list, tuple} and not all(
            isinstance(b, list | tuple | np.ndarray) for b in value
        ):
            raise FeatureError(
                f"{name}: expected a list of bags, [[id, ...], ...], or Jagged(values, lengths); "
                "of one id a bag: [[id] for id in ids]"
            )
        try:
            given = [*chain.from_iterable(value)]
        except TypeError as error:
            raise FeatureError(f"{name}: a bag is no list ({error})") from error
        if bool in set(map(type, given)):
            raise FeatureError(f"{name}: bools are among the ids; expected integers")
        ids = ids_of(given, f"{name}.values")
        return Jagged(ids, np.fromiter(map(len, value), _INT32, len(value)))
    ids = ids_of(value, name)
    if ids.ndim != 2:
        raise FeatureError(
            f"{name}: shape {list(ids.shape)}; expected [bags, ids a bag], or Jagged(values, lengths)"
            + "; of one id a bag: ids[:, None]" * (ids.ndim == 1)
        )
    return _Rectangle(ids)


def _is_pandas(value: Any) -> bool:
    """Whether it is a pandas Series, or one of a class made from it (pandas is not imported to find out)."""
    is_ours = any(c.__module__.partition(".")[0] == "pandas" for c in type(value).__mro__)
    return is_ours and hasattr(value, "array") and hasattr(value, "dtype")


def _of_column(name: str, column: Any) -> Jagged:
    """Bags of a column of lists of pyarrow, polars or pandas; its ids are not copied. FeatureError: it is
    none, or lacks values."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise FeatureError(f"{name}: a column of {type(column).__module__} needs pyarrow") from error
    try:
        read = pa.chunked_array(column) if hasattr(column, "__arrow_c_stream__") else pa.array(column)
        lists = read.combine_chunks() if isinstance(read, pa.ChunkedArray) else read
        return _of_lists(name, lists, pa.types)
    except (TypeError, pa.ArrowException) as error:
        raise FeatureError(f"{name}: no column of lists of integers or strings ({error})") from error


def _of_lists(name: str, lists: Any, types: Any) -> Jagged:
    """The same of pyarrow's array. types: pyarrow's."""
    is_fixed = types.is_fixed_size_list(lists.type)
    if not (is_fixed or types.is_list(lists.type) or types.is_large_list(lists.type)):
        raise FeatureError(f"{name}: a column of {lists.type}; expected lists of integers or strings")
    ids = lists.flatten()
    if lists.null_count or ids.null_count:
        raise FeatureError(
            f"{name}: {lists.null_count} lists and {ids.null_count} ids are null; fill them, or leave them "
            "out"
        )
    values = ids.to_numpy(zero_copy_only=False)
    if is_fixed:
        return _Rectangle(ids_of(values.reshape(len(lists), lists.type.list_size), name))
    return Jagged(values, np.diff(lists.offsets.to_numpy()).astype(_INT32))


def _ids(names: Sequence[str], kinds: str, values: list[Any]) -> list[Array]:
    """Converts to integer arrays of one type, int32 if all are, else int64, and to strings."""
    checked = [
        ids_of(v, n if k == "r" else f"{n}.values") for n, k, v in zip(names, kinds, values, strict=True)
    ]
    for name, kind, found in zip(names, kinds, checked, strict=True):
        if kind != "r" and found.ndim != 1:
            raise FeatureError(f"{name}.values: shape {list(found.shape)}; expected [ids]")
    if set(map(_DTYPE, checked)) == {_INT32}:
        return checked
    return [v if v.dtype == object else v.astype(_INT64, copy=False) for v in checked]


def _lengths(names: Sequence[str], lengths: list[Any]) -> list[Array]:
    return [
        _flat(array(each, _INT32, f"{name}.lengths"), f"{name}.lengths", "bags")
        for name, each in zip(names, lengths, strict=True)
        if each is not None
    ]


def _floats(names: list[str], weights: list[Any]) -> list[Array]:
    given = [w for w in weights if w is not None]
    if _are(given, _FP32):
        return given
    return [_flat(array(each, _FP32, name), name, "ids") for name, each in zip(names, given, strict=True)]


def _are(arrays: list[Any], dtype: np.dtype[Any]) -> bool:
    """Whether all are numpy arrays of this type with one dimension."""
    return (
        set(map(type, arrays)) == _ARRAY
        and set(map(_DTYPE, arrays)) == {dtype}
        and set(map(_NDIM, arrays)) == {1}
    )


def _flat(found: Array, name: str, what: str) -> Array:
    if found.ndim != 1:
        raise FeatureError(f"{name}: shape {list(found.shape)}; expected [{what}]")
    return found


def _is_torch(value: Any) -> bool:
    """Whether ids are a torch tensor (torch is not imported to find out)."""
    found = value.values if isinstance(value, Jagged) else value
    return type(found).__module__.partition(".")[0] == "torch"


def any_torch(values: Sequence[Any]) -> bool:
    return any(map(_is_torch, values))


def ids_of(value: Any, name: str) -> Array:
    """Converts to an array of integers, as `integers`, or of strings, as bytes objects. FeatureError: they
    are neither."""
    if isinstance(value, list | tuple):
        shape, strings = (len(value),), value
    else:
        value = array(value, None, name)
        shape, strings = value.shape, value.reshape(-1).tolist() if value.dtype.kind in "OSTU" else ()
    if not (strings and isinstance(strings[0], str | bytes)):
        return integers(value, name)
    if odd := [s for s in strings if not isinstance(s, str | bytes)]:
        raise FeatureError(f"{name}: {odd[0]!r:.60} is among the strings; expected ids of one kind")
    found = np.empty(len(strings), object)
    try:
        found[:] = [s.encode() if isinstance(s, str) else s for s in strings]
    except UnicodeEncodeError as error:
        raise FeatureError(f"{name}: a string cannot be encoded ({error})") from error
    return found.reshape(shape)


def packed(strings: Array) -> Array:
    """Returns an array of strings as BYTES, uint8 [n]."""
    return np.frombuffer(as_bytes(strings.reshape(-1).tolist()), np.uint8)


def integers(value: Any, name: str) -> Array:
    """Converts to an int64 array, or keeps int32. FeatureError: they are no integers, or do not fit."""
    found = array(value, None, name)
    return found if found.dtype == _INT32 else array(found, _INT64, name)


def array(value: Any, dtype: np.dtype[Any] | None, name: str) -> Array:
    """Converts to a contiguous array of `dtype` (None: its own). FeatureError: the values are of another
    kind, or do not fit."""
    if isinstance(value, np.ma.MaskedArray):
        raise FeatureError(f"{name}: a masked array; expected values alone (compressed, or filled)")
    try:
        found = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    except (ValueError, TypeError) as error:
        raise FeatureError(f"{name}: not an array of numbers ({error})") from error
    if dtype is None:
        return np.asarray(found)
    if found.size and found.dtype.kind not in ("iu" if dtype.kind == "i" else "iuf"):
        raise FeatureError(f"{name}: {found.dtype}; expected {dtype}")
    converted: Array = np.asarray(found, dtype, order="C")
    if dtype.kind == "i" and found.size and found.dtype != dtype and not np.array_equal(converted, found):
        raise FeatureError(f"{name}: values do not fit in {dtype}")
    return converted


def joined(arrays: list[Array]) -> bytes | memoryview:
    """The bytes of the arrays, one after another; those of a single array are not copied."""
    if len(arrays) == 1:
        return memoryview(np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    try:
        return b"".join(arrays)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # not contiguous
        return b"".join(np.ascontiguousarray(a).data for a in arrays)

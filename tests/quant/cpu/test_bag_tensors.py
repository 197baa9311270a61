"""Bags as lookups take them: tensors that are read where they lie.

`make test-sanitized` runs these with the sanitizers, which see what a read beyond a buffer does not show
here.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bag_forms import ENDS, FIXED, IDS, LENGTHS, OFFSETS

from tableside.quant.contract import places_in
from tableside.quant.cpu.bags import tensor_parts, tensor_places

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
BY_INPUT = -1
reads_tensors = pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table")


def new(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def placed(given: list[Any], dims: tuple[int, ...] = (4,), make: Callable[..., Any] = new) -> Any:
    return tensor_places(EXCHANGE, given, dims, make, 0, BY_INPUT, tuple)


@reads_tensors
def test_tensors_are_placed_where_they_lie() -> None:
    """Every form, with int64 and int32 lengths and offsets."""
    ids, lengths = torch.arange(6), torch.tensor([1, 5])
    forms = [
        ((IDS, ids.view(2, 3), None, None), (6, 0, 6), (2, 3, 4), None),
        ((FIXED, ids.view(2, 3), None, None), (6, 3, 2), (2, 4), None),
        ((LENGTHS, ids, lengths.int(), None), (6, 0, 2), (2, 4), [1, 5]),
        ((LENGTHS, ids, lengths, None), (6, 0, 2), (2, 4), [1, 5]),
        ((OFFSETS, ids, torch.tensor([0, 1]), None), (6, 0, 2), (2, 4), [1, 5]),
        ((OFFSETS, ids, torch.tensor([0, 1]).int(), None), (6, 0, 2), (2, 4), [1, 5]),
        ((OFFSETS, ids, torch.tensor([0]), None), (6, 6, 1), (1, 4), None),
        ((ENDS, ids, torch.tensor([0, 1, 6]), None), (6, 0, 2), (2, 4), [1, 5]),
        ((ENDS, ids[:0], torch.tensor([0]), None), (0, 0, 0), (0, 4), []),
        ((LENGTHS, ids[:0], ids[:0], None), (0, 0, 0), (0, 4), []),
    ]
    found = placed([one for one, *_ in forms], (4,) * len(forms))
    places, outputs, held = found
    rows = places_in(places)
    for place, out, (one, (count, bag_length, vectors), shape, told) in zip(
        rows, outputs, forms, strict=True
    ):
        assert (place.ids, place.bag_length, place.bags, out.shape) == (count, bag_length, vectors, shape)
        assert place.ids_at == (one[1].data_ptr() if count else 0) and place.out_at == (
            out.data_ptr() if vectors else 0
        )
        assert (place.weights_at, place.found_at) == (-1, -1)
        if told is None:
            assert place.lengths_at == -1
        elif told:
            assert list((ctypes.c_int32 * vectors).from_address(place.lengths_at)) == told
    assert rows[2].lengths_at == forms[2][0][2].data_ptr() and len(held) == 6


FIVE = torch.arange(5)
WRONG = {
    "strided ids": (FIXED, torch.arange(8).view(2, 4)[:, 1:3], None, None),
    "ids of 32 bits": (FIXED, torch.zeros(1, 5, dtype=torch.int32), None, None),
    "ids that are floats": (FIXED, torch.zeros(1, 5), None, None),
    "ids elsewhere": (FIXED, torch.zeros(1, 5, dtype=torch.int64, device="meta"), None, None),
    "sparse ids": (IDS, torch.eye(2, dtype=torch.int64).to_sparse(), None, None),
    "no tensor": (IDS, 7, None, None),
    "no ids": (IDS, None, None, None),
    "bags of no second dimension": (FIXED, FIVE, None, None),
    "weights": (LENGTHS, FIVE, torch.tensor([5]), torch.ones(5)),
    "no lengths": (LENGTHS, FIVE, None, None),
    "lengths of fixed bags": (FIXED, FIVE.view(1, 5), torch.tensor([5]), None),
    "another form": (5, FIVE, None, None),
    "a negative form": (-1, FIVE, None, None),
    "not four": (IDS, FIVE, None),
    "no tuple": [IDS, FIVE, None, None],
    "strided lengths": (LENGTHS, FIVE, torch.tensor([5, 0, 0, 0], dtype=torch.int32)[::2], None),
    "lengths of two dimensions": (LENGTHS, FIVE, torch.tensor([[5]]), None),
    "lengths that are floats": (LENGTHS, FIVE, torch.tensor([5.0]), None),
    "a length above the ids": (LENGTHS, FIVE, torch.tensor([6]), None),
    "a length of 64 bits": (LENGTHS, FIVE, torch.tensor([2**32 + 5]), None),
    "a negative length": (LENGTHS, FIVE, torch.tensor([6, -1]), None),
    "a first offset of 1": (OFFSETS, FIVE, torch.tensor([1]), None),
    "a negative offset": (OFFSETS, FIVE, torch.tensor([0, -1]), None),
    "no end": (ENDS, FIVE, FIVE[:0], None),
    "ids that are repeated": (IDS, torch.zeros(1, dtype=torch.int64).expand(2**33), None, None),
}


@reads_tensors
@pytest.mark.parametrize("wrong", WRONG)
def test_other_tensors_are_left_to_the_caller(wrong: str) -> None:
    """Behind one that is good; no exception is left over."""
    assert placed([(IDS, FIVE, None, None), WRONG[wrong]], (4, 4)) is None
    assert placed([WRONG[wrong]], (4,)) is None
    assert placed([], (4,)) is None and placed([(IDS, FIVE, None, None)] * 2, (4,)) is None


@reads_tensors
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_parts_of_tensors_are_those_of_their_lengths(dtype: torch.dtype) -> None:
    """Where they lie, and what `parts_of` says; int64 lengths are converted; nothing is nowhere."""
    ids, lengths = torch.arange(6), torch.tensor([1, 2, 0, 3], dtype=dtype)
    found = tensor_parts(EXCHANGE, ids, lengths, 2, 8)
    assert found is not None
    held, ids_at, lengths_at, count, parts = found
    assert (ids_at, count) == (ids.data_ptr() - 8, 2)
    assert (held is lengths) == (dtype is torch.int32) == (lengths_at == lengths.data_ptr() - 8)
    assert list((ctypes.c_int32 * 4).from_address(lengths_at + 8)) == [1, 2, 0, 3]
    assert np.frombuffer(parts, np.int64).tolist() == [0, 3, 3, 3]
    nothing = tensor_parts(EXCHANGE, ids[:0], lengths[:0], 3, 8)
    assert nothing is not None and nothing[1:4] == (0, 0, 0)


@reads_tensors
@pytest.mark.parametrize(
    ("ids", "lengths", "features"),
    [
        (FIVE, torch.tensor([2, 3]), 3),
        (FIVE, torch.tensor([2, 3]), 0),
        (FIVE, torch.tensor([2, 3]), -(2**63)),
        (FIVE, torch.tensor([2, 3]), 2**62),
        (FIVE, torch.tensor([2, 4]), 2),
        (FIVE, torch.tensor([6, -1]), 2),
        (FIVE, torch.tensor([6, -1], dtype=torch.int32), 2),
        (FIVE, torch.tensor([2**32 + 2, 3]), 2),
        (FIVE, torch.tensor([[2, 3]]), 2),
        (FIVE, torch.tensor([2, 0, 3, 0])[::2], 2),
        (FIVE, torch.tensor([2.0, 3.0]), 2),
        (FIVE, [2, 3], 2),
        (FIVE.int(), torch.tensor([2, 3]), 2),
        (torch.arange(10)[::2], torch.tensor([2, 3]), 2),
        (FIVE.to("meta"), torch.tensor([2, 3]), 2),
        (torch.zeros(1, dtype=torch.int64).expand(2**33), torch.tensor([2**33]), 1),
    ],
)
def test_other_parts_are_left_to_the_caller(ids: torch.Tensor, lengths: Any, features: int) -> None:
    """No exception is left over."""
    assert tensor_parts(EXCHANGE, ids, lengths, features, 0) is None


class Table(ctypes.Structure):
    """DLPack's exchange table."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *(
            (name, ctypes.c_void_p)
            for name in ("previous", "allocate", "from_object", "to_object", "read", "stream")
        ),
    )


class Tensor(ctypes.Structure):
    """DLPack's tensor, as far as tests change it."""

    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_id", ctypes.c_int32))
    _fields_ += (
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


NAME = b"dlpack_exchange_api"
READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))


@reads_tensors
@pytest.mark.parametrize(
    "changes",
    [
        {"table": {"major": 2}},
        {"table": {"read": None}},
        {"device": 2},
        {"code": 1},
        {"bits": 16},
        {"lanes": 2},
        {"data": None},
    ],
    ids=str,
)
def test_what_the_table_says_of_a_tensor_counts(changes: dict[str, Any]) -> None:
    """Another version of the table, a GPU's memory, unsigned and short integers, and memory that is not
    there are left alone."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    real = Table.from_address(pointer_of(EXCHANGE, NAME))
    theirs = ctypes.cast(real.read, READ)
    is_changed = False

    @READ
    def read(tensor: torch.Tensor, to: Any) -> int:
        code = theirs(tensor, to)
        for name, value in changes.items() if is_changed else ():
            if name != "table":
                setattr(to.contents, name, value)
        return code

    table = Table(
        real.major, real.minor, None, None, None, None, ctypes.cast(read, ctypes.c_void_p).value, None
    )
    capsule, one = new_capsule(ctypes.addressof(table), NAME, None), [(IDS, FIVE, None, None)]
    assert tensor_places(capsule, one, (4,), new, 0, BY_INPUT, tuple) is not None
    assert tensor_parts(capsule, FIVE, torch.tensor([5]), 1, 0) is not None
    is_changed = True
    for name, value in changes.get("table", {}).items():
        setattr(table, name, value)
    assert tensor_places(capsule, one, (4,), new, 0, BY_INPUT, tuple) is None
    assert tensor_parts(capsule, FIVE, torch.tensor([5]), 1, 0) is None


@reads_tensors
def test_what_is_no_argument_of_a_lookup_is_refused() -> None:
    """What `new` raises comes out; so does a capsule of something else."""
    assert tensor_places(None, [], (), new, 0, BY_INPUT, tuple) is None

    def fails(*shape: int) -> torch.Tensor:
        raise MemoryError(f"none for {shape}")

    with pytest.raises(MemoryError, match=r"none for \(5, 4\)"):
        placed([(IDS, FIVE, None, None)], make=fails)
    with pytest.raises(RuntimeError):
        placed([(IDS, FIVE, None, None)], make=lambda *shape: None)
    with pytest.raises(TypeError):
        placed([("ids", FIVE, None, None)])
    with pytest.raises(TypeError):
        placed(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        tensor_places(torch.zeros(1).__dlpack__(), [], (), new, 0, BY_INPUT, tuple)

"""Files of torch.save that lie. Their pickles are put together from instructions, so that any of them can be
wrong."""

import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

from campaigns.file_data import DATA, SHAPE, Data, archive, of_record


def value(v: Any) -> bytes:
    """The instructions that push a plain value, and leave the memo as it is."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, 2)
    pickler.fast = True  # without a memo
    pickler.dump(v)
    return written.getvalue()[2:-1]


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


EMPTY = name("collections", "OrderedDict") + b")R"


def storage(
    kind: bytes = name("torch", "FloatStorage"), key: Any = "0", count: Any = 32, first: Any = "storage"
) -> bytes:
    return b"(" + value(first) + kind + value(key) + value("cpu") + value(count) + b"tQ"


def tensor(held: bytes = storage(), offset: Any = 0, shape: Any = SHAPE, strides: Any = (4, 1)) -> bytes:
    rest = value(offset) + value(shape) + value(strides) + b"\x89" + EMPTY
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + held + rest + b"tR"


def pt(program: bytes, **records: bytes | None) -> bytes:
    """A .pt whose data.pkl is `program`; records replace or, None, remove others."""
    found: dict[str, bytes | None] = {
        "data.pkl": b"\x80\x02" + program + b".",
        "byteorder": b"little",
        "data/0": DATA,
        "version": b"3\n",
        **{key.replace("__", "/"): data for key, data in records.items()},
    }
    return archive({key: data for key, data in found.items() if data is not None})


def held(*items: bytes) -> bytes:
    """A dict of tensors a, b, ..."""
    return b"}(" + b"".join(value(chr(97 + i)) + item for i, item in enumerate(items)) + b"u"


GOOD_PT = pt(held(tensor()))


def pt_cases() -> Iterator[tuple[str, Data]]:
    odd: list[Any] = [
        -1,
        2**31,
        2**63,
        2**70,
        1.0,
        float("inf"),
        float("nan"),
        "0",
        None,
        True,
        (),
        [0],
        {},
        b"0",
    ]
    for bad in odd:
        yield f"offset {bad!r:.30}", pt(held(tensor(offset=bad)))
        yield f"count {bad!r:.30}", pt(held(tensor(storage(count=bad))))
        for i in (0, 1):
            yield (
                f"shape[{i}] {bad!r:.30}",
                pt(held(tensor(shape=tuple(bad if j == i else n for j, n in enumerate(SHAPE))))),
            )
        yield f"strides[0] {bad!r:.30}", pt(held(tensor(strides=(bad, 1))))
        if bad not in ((), [0], {}, "0", b"0"):
            yield f"shape {bad!r:.30}", pt(held(tensor(shape=bad)))
            yield f"strides {bad!r:.30}", pt(held(tensor(strides=bad)))
        if bad != "0":
            yield f"storage's key {bad!r:.30}", pt(held(tensor(storage(key=bad))))
        yield f"persistent id of {bad!r:.30}", pt(held(tensor(storage(first=bad))))
        yield f"persistent id {bad!r:.30}", pt(value(bad) + b"Q")
    for key in ("1", "../data.pkl", "", "0\0", "0" * 10_000, "/etc/passwd"):
        yield f"storage's key {key!r:.30}", pt(held(tensor(storage(key=key))))
    for count in (0, 1, 31, 33, 64, 128):
        yield f"{count} values in a record of 32", pt(held(tensor(storage(count=count))))
    for kind in ("DoubleStorage", "HalfStorage", "ByteStorage"):
        yield f"a record of floats said to be {kind}", pt(held(tensor(storage(name("torch", kind)))))
    yield "one value beyond its storage", pt(held(tensor(offset=1)))
    yield "one row beyond its storage", pt(held(tensor(shape=(9, 4))))
    yield "strides beyond its storage", pt(held(tensor(strides=(5, 1))))
    yield "strides of 2**62", pt(held(tensor(strides=(2**62, 2**62))))
    yield "three strides", pt(held(tensor(strides=(4, 1, 1))))
    yield "a million dimensions", pt(held(tensor(shape=(1,) * 1_000_000, strides=(1,) * 1_000_000)))
    yield "a storage that is a tensor", pt(held(tensor(tensor())))
    yield "a storage that is a dict", pt(held(tensor(b"}")))
    yield (
        "a tensor of too few arguments",
        pt(held(name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage() + b"tR")),
    )
    yield (
        "a dtype that is a number",
        pt(held(name("torch._utils", "_rebuild_tensor_v3") + b"(" + storage() + value((0, 1, 1)) + b"tR")),
    )
    for order in (b"big", b"", b"little\n", b"LITTLE", b"middle", b"\0" * 50, b"l" * 1000):
        yield f"byteorder {order!r:.20}", pt(held(tensor()), byteorder=order)
    yield "a record that is missing", pt(held(tensor()), data__0=None)
    yield "no data.pkl", pt(b"", **{"data.pkl": None})
    yield "two data.pkl", archive({"c/data.pkl": b"\x80\x02}.", "d/data.pkl": b"\x80\x02}."}, root="")
    yield "a TorchScript program", pt(held(tensor()), **{"constants.pkl": b"\x80\x02)."})
    yield (
        "compressed",
        archive({"data.pkl": b"\x80\x02" + held(tensor()) + b".", "data/0": DATA}, compress=True),
    )
    yield "a record inside another", _inside()
    yield from _pickle_cases()


def _inside() -> bytes:
    """The directory's entry of data/0 names a local header that lies in another record's bytes."""
    record = GOOD_PT[GOOD_PT.rindex(b"PK\x03\x04", 0, GOOD_PT.index(b"c/data/0")) :][
        : 30 + len("c/data/0") + len(DATA)
    ]
    data = bytearray(pt(held(tensor()), x=record))
    at = of_record(data, b"c/data/0") + 42
    data[at : at + 4] = data.rindex(record, 0, data.index(b"PK\x01\x02")).to_bytes(4, "little")
    return bytes(data)


def _pickle_cases() -> Iterator[tuple[str, Data]]:
    dangerous = (
        "os system",
        "posix system",
        "builtins eval",
        "builtins exec",
        "builtins getattr",
        "torch load",
        "torch.hub load",
        "subprocess Popen",
        "numpy.core.multiarray scalar",
        "torch.nn.modules.linear Linear",
        "__main__ X",
        "torch jit",
        "torch.serialization add_safe_globals",
        "pickle loads",
        "collections defaultdict",
        "functools partial",
        "torch._utils _rebuild_tensor_v9",
        "torch float99",
        "importlib import_module",
        "builtins object",
    )
    for full in dangerous:
        module, what = full.split()
        yield f"global {full}", pt(b"}(" + value("a") + tensor() + value("b") + name(module, what) + b"u")
    call = name("torch", "Size")
    pieces = {
        "no instructions": b"",
        "no STOP": b"N",
        "an unknown instruction": b"\xff",
        "INST": b"(ios\nsystem\n",
        "OBJ": b"(" + call + b"o",
        "EXT1": b"\x82\x01",
        "EXT4": b"\x84\1\1\1\1",
        "NEWOBJ_EX": call + b")}\x92",
        "NEXT_BUFFER": b"\x97",
        "DUP": b"N2",
        "protocol 0's text": b"I1\n",
        "LONG": b"L1L\n",
        "REDUCE of a number": b"K\1)R",
        "REDUCE of a tensor": tensor() + b")R",
        "REDUCE of a dict": call + b"}R",
        "a call of a call": call + b")R)R",
        "REDUCE alone": b"R",
        "BUILD alone": b"b",
        "a key that is a list": b"}]N" + b"s",
        "a key that is a dict": b"}}Ns",
        "APPEND to a dict": b"}Na",
        "APPENDS to a tuple": b")(Ne",
        "SETITEMS in a list": b"](NNu",
        "SETITEM of a tuple": b")NNs",
        "SETITEMS of odd many": b"}(Nu",
        "no mark": b"}NNu",
        "TUPLE without a mark": b"t",
        "TUPLE3 of one": b"N\x87",
        "a memo that is not there": b"h\x05",
        "LONG_BINGET of nothing": b"j\xff\xff\xff\xff",
        "PUT of nothing": b"q\1",
        "a string of 4 GB": b"X\xff\xff\xff\xff",
        "a string of 2**63 bytes": b"\x8d" + b"\xff" * 8,
        "bytes of 2**62": b"\x8e" + bytes(7) + b"\x40",
        "a bytearray of 2**62": b"\x96" + bytes(7) + b"\x40",
        "an integer of 2 GB": b"\x8b\xff\xff\xff\x7f",
        "an integer of 10 kB": b"\x8b\x10\x27\0\0" + b"\1" * 10_000,
        "a global without end": b"cos",
        "a global of 1 MB": b"c" + b"x" * 1_000_000 + b"\ny\n",
        "no UTF-8": b"X\2\0\0\0\xff\xff}",
        "STACK_GLOBAL of numbers": b"K\1K\2\x93",
        "a frozenset of lists": b"(]\x91",
        "a set of lists": b"\x8f(]\x90",
    }
    for what, program in pieces.items():
        yield f"pickle: {what}", pt(program)
    deep = 200_000
    bombs = {
        "3 MB of empty dicts": b"(" + b"}" * 3_000_000 + b"t",
        "3 MB of empty lists": b"(" + b"]" * 3_000_000 + b"t",
        "3 MB of empty sets": b"(" + b"\x8f" * 3_000_000 + b"t",
        "3 MB of marks": b"(" * 3_000_000,
        "nested tuples": b")" + b"\x85" * deep,
        "nested tuples as a key": b"}" + b")" + b"\x85" * deep + b"Ns",
        "nested lists": b"]" * deep + b"a" * (deep - 1),
        "a memo of 2**32": b"Nr\xff\xff\xff\xff",
        "a memo of 3 MB": b"N" + b"\x94" * 3_000_000,
        "1.4 MB of OrderedDicts": EMPTY[:-2] + b"q\0" + b")Rh\0" * 350_000,
        "dicts that double 40 times": b"}q\0"
        + b"".join(b"0}(" + value("a") + b"h\0" + value("b") + b"h\0uq\0" for _ in range(40)),
        "a dict that holds itself": b"}q\0" + value("a") + b"h\0s",
        "nested dicts": b"}" + (value("a") + b"}") * 1000 + b"s" * 1000,
        "6,000,000 instructions": b"N0" * 3_000_000 + b"}",
    }
    for what, program in bombs.items():
        yield f"bomb: {what}", partial(pt, program)
    yield "bomb: a pickle of 80 MB", lambda: pt(held(tensor()) + b"N0" * 40_000_000)
    yield "bomb: 256 kB that inflate to 256 MB", lambda: archive({"data.pkl": bytes(1 << 28)}, compress=True)

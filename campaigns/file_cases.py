"""Checkpoints and files of changes that lie, made by hand: each case is named after its lie and writes one
file or folder.

`REFUSED` must be refused; `TRUE` may be refused or loaded, but then with the rows of the honest file
(`ROWS`). Pickles and archives are put together from their instructions and fields, so that any of them can be
wrong.
"""

import io
import itertools
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

SHAPE = (8, 4)
ROWS = np.arange(32, dtype="<f4").reshape(SHAPE)
DATA = ROWS.tobytes()
CHANGES = "changes"  # what files of changes are called, and no checkpoint
Write = Callable[[Path], Path]
Data = bytes | Callable[[], bytes]  # large ones are made when they are written


@dataclass(frozen=True)
class Case:
    """write(folder) -> the checkpoint's path."""

    name: str
    write: Write
    expected: Literal["refused", "true"]


def _file(name: str, data: Data) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data())
        return folder / name

    return write


# ---- safetensors ----


def safetensors(header: Any, values: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def _entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [0, 128], **changed}


def _safetensors_cases() -> Iterator[tuple[str, Data]]:
    odd: list[Any] = [None, True, 1.5, 4.0, "4", -1, 2**63, 2**64, 10**400, [], {}, [[8, 4]], "\0"]
    for value in odd:
        for i in (0, 1):
            shape: list[Any] = list(SHAPE)
            shape[i] = value
            yield f"shape[{i}] {value!r:.30}", safetensors({"a": _entry(shape=shape)})
            offsets: list[Any] = [0, 128]
            offsets[i] = value
            yield f"data_offsets[{i}] {value!r:.30}", safetensors({"a": _entry(data_offsets=offsets)})
        for name in ("dtype", "shape", "data_offsets"):
            if not (name == "shape" and value == []):
                yield f"{name} {value!r:.30}", safetensors({"a": _entry(**{name: value})})
        yield f"entry {value!r:.30}", safetensors({"a": value})
    for name in ("dtype", "shape", "data_offsets"):
        yield f"no {name}", safetensors({"a": {k: v for k, v in _entry().items() if k != name}})
    for dtype in ("f32", "F32 ", "F8", "FLOAT", "", "F64", "F16", "U8"):
        yield f"dtype {dtype!r}", safetensors({"a": _entry(dtype=dtype)})
    yield "one offset", safetensors({"a": _entry(data_offsets=[0])})
    yield "three offsets", safetensors({"a": _entry(data_offsets=[0, 64, 128])})
    yield "offsets the wrong way round", safetensors({"a": _entry(data_offsets=[128, 0])})
    yield "a field more", safetensors({"a": _entry(strides=[4, 1])})
    yield "a shape whose product is 2**64 + 32", safetensors({"a": _entry(shape=[2**32, 2**32 + 1])})
    yield "a million dimensions", safetensors({"a": _entry(shape=[1] * 1_000_000)})
    yield (
        "a hole between tensors",
        safetensors({"a": _entry(), "b": _entry(data_offsets=[132, 260])}, DATA + bytes(132)),
    )
    yield "a hole before the first", safetensors({"a": _entry(data_offsets=[4, 132])}, bytes(4) + DATA)
    yield (
        "tensors that overlap",
        safetensors({"a": _entry(), "b": _entry(data_offsets=[64, 192])}, DATA + bytes(64)),
    )
    yield "tensors that are the same bytes", safetensors({"a": _entry(), "b": _entry()})
    yield "bytes after the last tensor", safetensors({"a": _entry()}, DATA + b"x")
    yield "bytes missing", safetensors({"a": _entry()}, DATA[:-1])
    text = json.dumps(_entry()).encode()
    yield "a name twice", safetensors(b'{"a":' + text + b',"a":' + text + b"}")
    yield "a name twice, once escaped", safetensors(b'{"a":' + text + b',"\\u0061":' + text + b"}")
    yield "a field twice", safetensors(b'{"a":' + text[:-1] + b',"dtype":"F32"}}')
    yield "a trailing comma", safetensors(b'{"a":' + text + b",}")
    yield "two objects", safetensors(b'{"a":' + text + b"}{}")
    yield "text after the object", safetensors(b'{"a":' + text + b"} x")
    yield "a space first", safetensors(b' {"a":' + text + b"}")
    yield "a list", safetensors([_entry()])
    yield "no end", safetensors(b'{"a":' + text)
    yield "a name without end", safetensors(b'{"a')
    yield "no colon", safetensors(b'{"a" ' + text + b"}")
    yield "a name that is a number", safetensors(b"{1:" + text + b"}")
    yield "NaN for a number", safetensors(b'{"a":' + text.replace(b"128", b"NaN") + b"}")
    yield "Infinity for a number", safetensors(b'{"a":' + text.replace(b"128", b"Infinity") + b"}")
    yield "no UTF-8", safetensors(b'{"\xff":' + text + b"}")
    yield "UTF-16", safetensors(json.dumps({"a": _entry()}).encode("utf-16"))
    yield "a control character in a name", safetensors(b'{"a\n":' + text + b"}")
    yield "NUL", safetensors(bytes(100))
    yield "an empty header", safetensors(b"")
    yield "nested 100,000 deep", safetensors(b'{"a":' * 100_000)
    yield "lists nested 100,000 deep", safetensors(b'{"a":' + b"[" * 100_000)
    yield "metadata nested 100,000 deep", safetensors(b'{"__metadata__":' + b'{"a":' * 100_000)
    for value in (1, None, [], "x", {"a": 1}, {"a": {}}, {"a": None}):
        yield f"metadata {value!r}", safetensors({"__metadata__": value, "a": _entry()})
    for length in (0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001):
        yield f"a header of {length} bytes", struct.pack("<Q", length) + b"{}" + DATA
    yield "seven bytes", bytes(7)
    yield "no bytes", b""
    yield (
        "300,000 tensors",
        lambda: safetensors({f"t{i}": {**_entry(), "shape": [0]} for i in range(300_000)}, b""),
    )
    yield "30 MB of empty lists", lambda: safetensors(b'{"a":{"shape":[' + b"[]," * 10_000_000 + b"0]}}")
    yield "30 MB of empty objects", lambda: safetensors(b'{"a":{"shape":[' + b"{}," * 10_000_000 + b"0]}}")


def _index_cases() -> Iterator[tuple[str, Data]]:
    names: list[Any] = [
        "../c.safetensors",
        "/etc/passwd",
        "a/../c",
        "c\0.safetensors",
        "",
        ".",
        "..",
        "sub/c.safetensors",
        "gone",
        "a" * 300,
    ]
    names += [1, None, True, [], {}, ["c"], "fifo", "device", "folder", "\ud800"]
    for name in names:
        yield f"file {name!r:.30}", json.dumps({"weight_map": {"a": name}}).encode()
    for value in (None, 1, [], "x", [["a", "c"]]):
        yield f"weight_map {value!r}", json.dumps({"weight_map": value}).encode()
        yield f"{value!r}", json.dumps(value).encode()
    yield "nested 100,000 deep", b"[" * 100_000
    yield "objects nested 100,000 deep", b'{"weight_map":' * 100_000
    yield "a tensor that the file lacks", json.dumps({"weight_map": {"b": "c.safetensors"}}).encode()
    yield "no bytes", b""
    yield "no UTF-8", b'{"weight_map": {"\xff": "c.safetensors"}}'
    yield "a key without value", b'{"weight_map": {"a":}}'
    yield "20 MB", lambda: b'{"weight_map": {}, "x": "' + b"x" * 20_000_000 + b'"}'


def _index(data: Data) -> Write:
    def write(folder: Path) -> Path:
        (folder / "c.safetensors").write_bytes(safetensors({"a": _entry()}))
        os.mkfifo(folder / "fifo")
        (folder / "device").symlink_to("/dev/zero")
        (folder / "folder").mkdir()
        (folder / "model.safetensors.index.json").write_bytes(data if isinstance(data, bytes) else data())
        return folder

    return write


# ---- archives ----


def archive(records: dict[str, bytes], compress: bool = False, root: str = "c/") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            file.writestr(root + name, data)
    return out.getvalue()


_DIRECTORY_FIELDS = {
    "flags": (8, 2),
    "method": (10, 2),
    "crc": (16, 4),
    "packed size": (20, 4),
    "size": (24, 4),
    "name length": (28, 2),
    "extra length": (30, 2),
    "comment length": (32, 2),
    "disk": (34, 2),
    "local header": (42, 4),
    "signature": (0, 4),
}
_LOCAL_FIELDS = {
    "flags": (6, 2),
    "method": (8, 2),
    "crc": (14, 4),
    "packed size": (18, 4),
    "size": (22, 4),
    "name length": (26, 2),
    "extra length": (28, 2),
    "signature": (0, 4),
}
_END_FIELDS = {
    "disk": (4, 2),
    "first disk": (6, 2),
    "records here": (8, 2),
    "records": (10, 2),
    "directory size": (12, 4),
    "directory": (16, 4),
    "comment length": (20, 2),
    "signature": (0, 4),
}


def _archive_cases(good: bytes, record: bytes) -> Iterator[tuple[str, Data]]:
    """Each field of the headers of one record, and of the end record, with each of several wrong values."""
    places = {
        "directory": (good.index(b"PK\x01\x02", _of_record(good, record)), _DIRECTORY_FIELDS),
        "local header": (good.rindex(b"PK\x03\x04", 0, good.index(record)), _LOCAL_FIELDS),
        "end": (good.rindex(b"PK\x05\x06"), _END_FIELDS),
    }
    for part, (at, fields) in places.items():
        for field, (offset, width) in fields.items():
            old = int.from_bytes(good[at + offset : at + offset + width], "little")
            for new in {0, 1, 2**15, 256**width - 1, (old + 1) % 256**width, old ^ 1} - {old}:
                data = bytearray(good)
                data[at + offset : at + offset + width] = new.to_bytes(width, "little")
                yield f"{part}: {field} {new} instead of {old}", bytes(data)


def _of_record(good: bytes | bytearray, record: bytes) -> int:
    """Where the directory's entry of a record begins: the last entry that names it."""
    return good.rindex(b"PK\x01\x02", 0, good.rindex(record))


# ---- torch.save ----


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


def _pt_cases() -> Iterator[tuple[str, Data]]:
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
    at = _of_record(data, b"c/data/0") + 42
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


# ---- numpy ----


def npy(
    header: str | bytes, data: bytes = DATA, version: bytes = b"\x01\x00", length: int | None = None
) -> bytes:
    text = header.encode("latin-1") if isinstance(header, str) else header
    width = 2 if version[0] == 1 else 4
    return (
        b"\x93NUMPY"
        + version
        + (len(text) if length is None else length).to_bytes(width, "little")
        + text
        + data
    )


def _npy_header(shape: str = "(8, 4)", descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"


GOOD_NPY = npy(_npy_header())


def _npy_cases() -> Iterator[tuple[str, Data]]:
    shapes = (
        "(True, 4)",
        "(8, -4)",
        "(-8, -4)",
        "(8.0, 4)",
        "('8', 4)",
        "((8,), 4)",
        "[8, 4]",
        "8, 4",
        "(8 4)",
        "(8,, 4)",
        "None",
        "8",
        "(1e3, 4)",
        "(0x8, 4)",
        "(8, 4",
        "8, 4)",
        "(8, 5)",
        "(9, 4)",
        "(7, 4)",
        "(1, 1)",
        "()",
        "(32,)",
        "(99999999999999999999, 4)",
        "(4611686018427387904, 4)",
        "(9223372036854775807, 9223372036854775807)",
        "(4294967296, 4294967296)",
        "(8, 4) + (1,)",
        "(" * 4000,
        "(" + "8," * 3000 + ")",
        "-" * 4000 + "8",
        "[" * 3000 + "]" * 3000,
        "__import__('os')",
        "(8, 4)" + " " * 3000 + "x",
        "(" + " " * 4000 + "x)",
    )
    for shape in shapes:
        yield f"shape {shape[:30]}", npy(_npy_header(shape))
    for descr in (
        "'|O'",
        "'O'",
        "'>f4'",
        "'<f8'",
        "'<i4'",
        "'<U1'",
        "'<M8[ns]'",
        "'<f0'",
        "'<f999999'",
        "''",
        "4",
        "None",
        "'<f4', '<f4'",
        "[('a', '<f4')]",
        "[('a', '|O')]",
        "{'a': 1}",
        "('<f4', (4,))",
        "'<f4" + "4" * 4000 + "'",
        "'f4'",
        "b'<f4'",
        "'<f4'.__class__",
    ):
        yield f"descr {descr[:30]}", npy(_npy_header(descr=descr))
    for order in ("True", "0", "None", "'False'", "1", "false"):
        yield f"fortran_order {order}", npy(_npy_header(order=order))
    for length in (0, 1, 60, 10_001, 65_535):
        yield f"a header of {length} bytes", npy(_npy_header(), length=length)
    for length in (2**31, 2**32 - 1):
        yield f"a header of {length} bytes", npy(_npy_header(), version=b"\x02\x00", length=length)
    for version in (b"\0\0", b"\4\0", b"\xff\xff", b"\1\1"):
        yield f"version {version!r}", npy(_npy_header(), version=version)
    yield "no shape", npy("{'descr': '<f4', 'fortran_order': False}")
    yield "a shape twice", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (8, 4), 'shape': (8, 4)}")
    yield "a field more", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (8, 4), 'x': 1}")
    yield "no dict", npy("'<f4', False, (8, 4)")
    yield "no UTF-8 in version 3", npy(b"\xff" + _npy_header().encode(), version=b"\x03\x00")
    yield "no bytes", b""
    yield "the magic alone", b"\x93NUMPY"
    yield "another magic", b"\x93NUMPZ" + GOOD_NPY[6:]
    yield "a byte missing", GOOD_NPY[:-1]
    yield "a byte more", GOOD_NPY + b"x"
    yield "two arrays", GOOD_NPY + GOOD_NPY
    yield "a pickle of an object", npy(_npy_header("()", "'|O'"), pickle.dumps(ROWS))


GOOD_NPZ = archive({"a.npy": GOOD_NPY}, root="")


def _npz_cases() -> Iterator[tuple[str, Data]]:
    for what, data in _npy_cases():
        yield f"member with {what}", archive({"a.npy": data if isinstance(data, bytes) else data()}, root="")
    twice = archive({"a.npy": GOOD_NPY, "b.npy": GOOD_NPY}, root="")
    yield "a name twice", twice.replace(b"b.npy", b"a.npy")
    yield "a.npy beside a", archive({"a.npy": GOOD_NPY, "a": GOOD_NPY}, root="")
    yield "compressed", archive({"a.npy": GOOD_NPY}, compress=True, root="")
    yield "a bomb of 256 MB", lambda: archive({"a.npy": GOOD_NPY + bytes(1 << 28)}, compress=True, root="")
    yield "two local headers that are one", _same_local(twice)
    yield "bytes before the archive", b"x" * 10 + GOOD_NPZ
    yield "bytes after the archive", GOOD_NPZ + b"x"
    yield "another archive after it", GOOD_NPZ + GOOD_NPZ
    yield "the first half", GOOD_NPZ[: len(GOOD_NPZ) // 2]
    yield "no bytes", b""
    yield "an end record alone", b"PK\x05\x06" + bytes(18)
    yield "an end record of 2**16 - 1 records", b"PK\x05\x06" + bytes(4) + b"\xff" * 4 + bytes(10)


def _same_local(data: bytes) -> bytes:
    """Both entries of the directory name the first record's local header."""
    at = data.rindex(b"PK\x01\x02")
    return data[: at + 42] + bytes(4) + data[at + 46 :]


# ---- DCP ----


def made(full: str, state: dict[str, bytes]) -> bytes:
    """The instructions of an object of torch's, with its state."""
    module, _, what = full.rpartition(".")
    items = b"".join(value(key) + v for key, v in state.items())
    return name(f"torch.distributed.checkpoint.{module}", what) + b")\x81}(" + items + b"ub"


def size(*numbers: Any) -> bytes:
    return name("torch", "Size") + value((tuple(numbers),)) + b"R"


ITEM = pt(tensor())
ITEM_BYTES = len(ITEM)


@dataclass(frozen=True)
class Dcp:
    """The metadata of one tensor "a" of one chunk; each field may lie."""

    shape: bytes = size(*SHAPE)
    offsets: bytes = size(0, 0)
    sizes: bytes = size(*SHAPE)
    index: bytes = size(0, 0)
    file: Any = "__0_0.distcp"
    offset: Any = 0
    length: Any = ITEM_BYTES
    dtype: bytes = name("torch", "float32")
    chunks: int = 1
    more: bytes = b""

    def pickle(self) -> bytes:
        chunk = made("metadata.ChunkStorageMetadata", {"offsets": self.offsets, "sizes": self.sizes})
        properties = made("metadata.TensorProperties", {"dtype": self.dtype})
        entry = {"properties": properties, "size": self.shape, "chunks": b"](" + chunk * self.chunks + b"e"}
        index = made("metadata.MetadataIndex", {"fqn": value("a"), "offset": self.index, "index": b"N"})
        place = {
            "relative_path": value(self.file),
            "offset": value(self.offset),
            "length": value(self.length),
        }
        items = index + made("filesystem._StorageInfo", place) + self.more
        state = {
            "state_dict_metadata": held(made("metadata.TensorStorageMetadata", entry)),
            "storage_data": b"}(" + items + b"u",
        }
        return b"\x80\x02" + made("metadata.Metadata", state) + b"."


def dcp(metadata: bytes, item: bytes = ITEM) -> Write:
    def write(folder: Path) -> Path:
        os.mkfifo(folder / "fifo")
        (folder / "device").symlink_to("/dev/zero")
        (folder / "__0_0.distcp").write_bytes(item)
        (folder / ".metadata").write_bytes(metadata)
        return folder

    return write


def _dcp_cases() -> Iterator[tuple[str, Write]]:
    odd: list[Any] = [
        -1,
        2**31,
        2**63,
        2**70,
        0.5,
        float("inf"),
        float("-inf"),
        float("nan"),
        "0",
        None,
        True,
        (),
        [],
        {},
    ]
    for bad in odd:
        yield f"offset {bad!r:.30}", dcp(Dcp(offset=bad).pickle())
        yield f"length {bad!r:.30}", dcp(Dcp(length=bad).pickle())
        yield f"file {bad!r:.30}", dcp(Dcp(file=bad).pickle())
        for i in (0, 1):
            two = [bad if j == i else 0 for j in (0, 1)]
            yield f"offsets[{i}] {bad!r:.30}", dcp(Dcp(offsets=size(*two), index=size(*two)).pickle())
            yield (
                f"sizes[{i}] {bad!r:.30}",
                dcp(Dcp(sizes=size(*(bad if j == i else n for j, n in enumerate(SHAPE)))).pickle()),
            )
            yield (
                f"shape[{i}] {bad!r:.30}",
                dcp(Dcp(shape=size(*(bad if j == i else n for j, n in enumerate(SHAPE)))).pickle()),
            )
        yield f"index's offset {bad!r:.30}", dcp(Dcp(index=value((bad, bad))).pickle())
    for file in (
        "../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        "gone",
        "fifo",
        "device",
        "a/b",
        "__0_0.distcp\0",
        "x" * 300,
        "\ud800",
    ):
        yield f"file {file!r:.30}", dcp(Dcp(file=file).pickle())
    for dtype in (name("torch", "float16"), name("torch", "bfloat16"), value("float32"), b"N", value(1)):
        yield f"dtype {dtype!r}", dcp(Dcp(dtype=dtype).pickle())
    yield "a chunk twice", dcp(Dcp(chunks=2).pickle())
    yield "no chunk", dcp(Dcp(chunks=0).pickle())
    yield "a chunk of one dimension", dcp(Dcp(offsets=size(0), sizes=size(32), index=size(0)).pickle())
    yield "a chunk elsewhere", dcp(Dcp(offsets=size(1, 0), index=size(1, 0)).pickle())
    yield "a shape larger than its chunks", dcp(Dcp(shape=size(9, 4)).pickle())
    yield "a shape smaller than its chunks", dcp(Dcp(shape=size(7, 4)).pickle())
    other = made("metadata.MetadataIndex", {"fqn": value("b"), "offset": size(0, 0), "index": b"N"})
    place = {"relative_path": value("__0_0.distcp"), "offset": value(4), "length": value(20)}
    yield "two items that share bytes", dcp(Dcp(more=other + made("filesystem._StorageInfo", place)).pickle())
    zipped = {**place, "transform_descriptors": value(["zstd"])}
    yield (
        "an item that is transformed",
        dcp(
            Dcp(
                index=size(9, 9),
                more=made("metadata.MetadataIndex", {"fqn": value("a"), "offset": size(0, 0)})
                + made("filesystem._StorageInfo", zipped),
            ).pickle()
        ),
    )
    for what, item in {
        "nothing": b"",
        "a dict": pt(held(tensor())),
        "half an archive": ITEM[: len(ITEM) // 2].ljust(len(ITEM)),
        "numbers": pt(value(3)).ljust(len(ITEM)),
    }.items():
        yield f"an item that is {what}", dcp(Dcp().pickle(), item)
    whole = Dcp().pickle()
    for what, metadata in {
        "no bytes": b"",
        "another object": b"\x80\x02}.",
        "a number": b"\x80\x02K\1.",
        "half": whole[: len(whole) // 2],
        "os.system": b"\x80\x02" + name("os", "system") + b".",
        "torch.load": b"\x80\x02" + name("torch", "load") + b".",
        "3 MB of dicts": b"\x80\x02(" + b"}" * 3_000_000 + b"t.",
        "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
        "nested tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "Metadata without state": b"\x80\x02"
        + name("torch.distributed.checkpoint.metadata", "Metadata")
        + b")\x81.",
        "Metadata of lists": b"\x80\x02"
        + made("metadata.Metadata", {"state_dict_metadata": b"]", "storage_data": b"]"})
        + b".",
        "100 MB": bytes(100_000_000),
    }.items():
        yield f"metadata of {what}", dcp(metadata)


# ---- raw ids, and files of changes ----


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


def _parquet() -> bytes:
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
    """`_parquet`, where the first page of a column says another size. Its header's fields are type,
    uncompressed size and compressed size; the file keeps its length."""
    import pyarrow.parquet as pq

    data = _parquet()
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


def _keyed_cases() -> Iterator[tuple[str, Write]]:
    for what, data in _changes_cases():
        yield f"changes: {what}", _file(f"{CHANGES}.npz", data)
    for name, size, column in itertools.product((CHANGES, "raw"), (10**9, 2**31 - 1, 10_000), range(2)):
        yield (
            f"{name}.parquet: a page of {size:,} bytes in column {column}",
            _file(f"{name}.parquet", partial(_page_says, size, column)),
        )
    for size in (1 << 30, 1 << 40, 1 << 42):
        yield f"dynamicemb: {size:,} bytes of values", partial(_dynamicemb, size)


# ---- what is no file ----


def _special(name: str, make: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> Path:
        make(folder / name)
        return folder / name

    return write


def _holding(name: str, make: Callable[[Path], object], folder: Path) -> Path:
    """A folder that holds a special file."""
    make(folder / name)
    return folder


def _path(name: str, folder: Path) -> Path:
    return folder / name


def _special_cases() -> Iterator[tuple[str, Write]]:
    for suffix in ("safetensors", "safetensors.index.json", "pt", "npy", "npz", "bin", "unknown"):
        yield f"a FIFO called .{suffix}", _special(f"c.{suffix}", os.mkfifo)
        yield (
            f"/dev/zero called .{suffix}",
            _special(f"c.{suffix}", lambda path: path.symlink_to("/dev/zero")),
        )
        yield f"/dev/tty called .{suffix}", _special(f"c.{suffix}", lambda path: path.symlink_to("/dev/tty"))
        yield f"a folder called .{suffix}", _special(f"c.{suffix}", Path.mkdir)
        yield (
            f"a link to itself called .{suffix}",
            _special(f"c.{suffix}", lambda path: path.symlink_to(path)),
        )
    for name in (".metadata", "model.safetensors", "model.safetensors.index.json"):
        yield f"a folder whose {name} is a FIFO", partial(_holding, name, os.mkfifo)
        yield f"a folder whose {name} is a folder", partial(_holding, name, Path.mkdir)
    for odd in ("a\0b.pt", "x" * 300 + ".pt", "\ud800.pt"):
        yield f"a path {odd[:10]!r}", partial(_path, odd)


def cases() -> Iterator[Case]:
    """All of them."""
    for what, data in _safetensors_cases():
        yield Case(f"safetensors: {what}", _file("c.safetensors", data), "refused")
    for what, data in _index_cases():
        yield Case(f"index: {what}", _index(data), "refused")
    for what, data in _pt_cases():
        yield Case(f"pt: {what}", _file("c.pt", data), "refused")
    for what, data in _npy_cases():
        yield Case(f"npy: {what}", _file("a.npy", data), "refused")
    for what, data in _npz_cases():
        yield Case(f"npz: {what}", _file("c.npz", data), "refused")
    for what, data in _archive_cases(GOOD_PT, b"c/data/0"):
        yield Case(f"pt {what}", _file("c.pt", data), "true")
    for what, data in _archive_cases(GOOD_NPZ, b"a.npy"):
        yield Case(f"npz {what}", _file("c.npz", data), "true")
    for what, write in _dcp_cases():
        yield Case(f"dcp: {what}", write, "refused")
    for what, write in _keyed_cases():
        yield Case(what, write, "refused")
    for what, write in _special_cases():
        yield Case(f"no file: {what}", write, "refused")


HONEST = {
    "safetensors": _file("c.safetensors", safetensors({"a": _entry()})),
    "index": _index(json.dumps({"weight_map": {"a": "c.safetensors"}}).encode()),
    "pt": _file("c.pt", GOOD_PT),
    "npy": _file("a.npy", GOOD_NPY),
    "npz": _file("c.npz", GOOD_NPZ),
    "dcp": dcp(Dcp().pickle()),
    "changes": _file(f"{CHANGES}.npz", archive(HONEST_CHANGES, root="")),
    "changes in Parquet": _file(f"{CHANGES}.parquet", _parquet),
}

"""Checkpoints and files of changes that lie, made by hand: each case is named after its lie and writes one
file or folder.

Those that are `refused` must be; those that are `true` may be refused or loaded, but then with the rows of
the honest file (`ROWS`).
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from campaigns.array_cases import GOOD_NPY, GOOD_NPZ, npy_cases, npz_cases
from campaigns.dcp_cases import Dcp, dcp, dcp_cases
from campaigns.file_data import CHANGES, DATA, SHAPE, Data, Write, archive, archive_cases, as_file
from campaigns.keyed_cases import HONEST_CHANGES, keyed_cases, parquet
from campaigns.pt_cases import GOOD_PT, pt_cases


@dataclass(frozen=True)
class Case:
    """write(folder) -> the checkpoint's path."""

    name: str
    write: Write
    expected: Literal["refused", "true"]


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
        yield Case(f"safetensors: {what}", as_file("c.safetensors", data), "refused")
    for what, data in _index_cases():
        yield Case(f"index: {what}", _index(data), "refused")
    for what, data in pt_cases():
        yield Case(f"pt: {what}", as_file("c.pt", data), "refused")
    for what, data in npy_cases():
        yield Case(f"npy: {what}", as_file("a.npy", data), "refused")
    for what, data in npz_cases():
        yield Case(f"npz: {what}", as_file("c.npz", data), "refused")
    for what, data in archive_cases(GOOD_PT, b"c/data/0"):
        yield Case(f"pt {what}", as_file("c.pt", data), "true")
    for what, data in archive_cases(GOOD_NPZ, b"a.npy"):
        yield Case(f"npz {what}", as_file("c.npz", data), "true")
    for what, write in dcp_cases():
        yield Case(f"dcp: {what}", write, "refused")
    for what, write in keyed_cases():
        yield Case(what, write, "refused")
    for what, write in _special_cases():
        yield Case(f"no file: {what}", write, "refused")


HONEST = {
    "safetensors": as_file("c.safetensors", safetensors({"a": _entry()})),
    "index": _index(json.dumps({"weight_map": {"a": "c.safetensors"}}).encode()),
    "pt": as_file("c.pt", GOOD_PT),
    "npy": as_file("a.npy", GOOD_NPY),
    "npz": as_file("c.npz", GOOD_NPZ),
    "dcp": dcp(Dcp().pickle()),
    "changes": as_file(f"{CHANGES}.npz", archive(HONEST_CHANGES, root="")),
    "changes in Parquet": as_file(f"{CHANGES}.parquet", parquet),
}

"""Files .npy and .npz that lie."""

import pickle
from collections.abc import Iterator

from campaigns.file_data import DATA, ROWS, Data, archive


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


def npy_cases() -> Iterator[tuple[str, Data]]:
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


def npz_cases() -> Iterator[tuple[str, Data]]:
    for what, data in npy_cases():
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

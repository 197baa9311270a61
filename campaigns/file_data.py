"""What files that lie are made from: the rows of the honest file, archives, and lies of an archive's own
fields."""

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SHAPE = (8, 4)
ROWS = np.arange(32, dtype="<f4").reshape(SHAPE)
DATA = ROWS.tobytes()
CHANGES = "changes"  # what files of changes are called, and no checkpoint
Write = Callable[[Path], Path]
Data = bytes | Callable[[], bytes]  # large ones are made when they are written


def as_file(name: str, data: Data) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data if isinstance(data, bytes) else data())
        return folder / name

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


def archive_cases(good: bytes, record: bytes) -> Iterator[tuple[str, Data]]:
    """Each field of the headers of one record, and of the end record, with each of several wrong values."""
    places = {
        "directory": (good.index(b"PK\x01\x02", of_record(good, record)), _DIRECTORY_FIELDS),
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


def of_record(good: bytes | bytearray, record: bytes) -> int:
    """Where the directory's entry of a record begins: the last entry that names it."""
    return good.rindex(b"PK\x01\x02", 0, good.rindex(record))

"""Zip archives of torch.save and np.savez: stored, contiguous records with CRC-32 (PKWARE APPNOTE 6.3.9).

The central directory and each local header are read and compared. Compressed, encrypted, split, duplicate or
overlapping records are refused, and archives of too many records.
"""

import struct
from dataclasses import dataclass
from itertools import pairwise

from isal import isal_zlib

from tableside.loader.checkpoint.window import FileWindow
from tableside.loader.errors import CheckpointError

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_DIRECTORY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_UNKNOWN = 0xFFFFFFFF
LIMIT_RECORDS = 250_000
_LIMIT_DIRECTORY_BYTES = 64 << 20
_ENCRYPTED, _SIZES_FOLLOW = 0x1, 0x8


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes [offset, offset + bytes) of a file. crc: their CRC-32, or None if the writer left it out."""

    offset: int
    bytes: int
    crc: int | None


class Archive:
    """The records of a zip archive. CheckpointError: it is damaged, or of another kind."""

    def __init__(self, window: FileWindow, advice: str) -> None:
        """advice: how to write a file that can be read, for compressed ones."""
        self.window, self.advice = window, advice
        self.records: dict[str, ArchiveRecord] = {}
        try:
            self._read_directory()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._broken(str(error)) from error

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Returns a whole small record, its CRC-32 checked."""
        record = self.records[name]
        if record.bytes > limit_bytes:
            raise CheckpointError(
                f"{self.window.path}: record {name!r} has {record.bytes:,} bytes, more than the "
                f"{limit_bytes:,} that are read; save the tensors alone"
            )
        data = self.window.read(record.offset - self.window.begin, record.bytes)
        if record.crc is not None and isal_zlib.crc32(data) != record.crc:
            raise CheckpointError(
                f"{self.window.path}: the CRC-32 of record {name!r} is wrong, so bytes changed after they "
                "were written; take another copy of the file"
            )
        return data

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.window.path}: not a whole zip archive, it may be half-written or damaged ({what})"
        )

    def _read_directory(self) -> None:
        count, size, start = self._end()
        if count > LIMIT_RECORDS or size > _LIMIT_DIRECTORY_BYTES:
            raise CheckpointError(
                f"{self.window.path}: an archive of {count:,} records; at most {LIMIT_RECORDS:,} are read, "
                "save the tables alone"
            )
        data, at = self.window.read(start, size), 0
        places: list[tuple[int, int]] = []
        for _ in range(count):
            name, header, record, at = self._entry(data, at, start)
            if name in self.records:
                raise self._broken(f"record {name!r} is there twice")
            self.records[name] = record
            places.append((header, record.offset + record.bytes - self.window.begin))
        if at != size:
            raise self._broken(f"its directory has {size} bytes, {at} of them records")
        places.sort()
        if any(end > begin for (_, end), (begin, _) in pairwise(places)):
            raise self._broken("two records overlap")
        # Torch.serialization.set_crc32_options(False) writes zeros
        if not any(record.crc for record in self.records.values()):
            self.records = {name: ArchiveRecord(r.offset, r.bytes, None) for name, r in self.records.items()}

    def _end(self) -> tuple[int, int, int]:
        """Returns (records, bytes of the directory, its offset)."""
        size = self.window.bytes
        tail = self.window.read(max(0, size - _END.size - 65535), min(size, _END.size + 65535))
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or len(tail) < at + _END.size:
            raise self._broken("it has no end record")
        _, disk, first_disk, here, count, length, start, comment = _END.unpack_from(tail, at)
        if at + _END.size + comment != len(tail):
            raise self._broken("its end record is not at its end")
        end = size - len(tail) + at
        locator = at - _END64_LOCATOR.size
        if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
            _, disk64, end, disks = _END64_LOCATOR.unpack_from(tail, locator)
            signature, _, _, _, _, _, here, count64, length64, start64 = _END64.unpack(
                self.window.read(end, _END64.size)
            )
            narrow = (count, length, start)
            wide = (count64, length64, start64)
            unknown = (0xFFFF, _UNKNOWN, _UNKNOWN)
            agree = all(a in (b, u) for a, b, u in zip(narrow, wide, unknown, strict=True))
            if signature != b"PK\x06\x06" or disk64 or disks > 1 or not agree:
                raise self._broken("its two end records disagree")
            count, length, start = count64, length64, start64
        if here not in (count, 0xFFFF) or disk not in (0, 0xFFFF) or first_disk not in (0, 0xFFFF):
            raise self._broken("it is one part of several")
        if start + length != end:
            raise self._broken("its directory does not end where it should")
        return count, length, start

    def _entry(self, data: bytes, at: int, directory: int) -> tuple[str, int, ArchiveRecord, int]:
        """Returns (name, offset of the local header, record, offset of the next entry)."""
        fields = _DIRECTORY.unpack_from(data, at)
        signature, flags, method, crc, packed, size = fields[0], fields[3], fields[4], *fields[7:10]
        name_bytes, extra_bytes, comment_bytes, disk, header = *fields[10:14], fields[16]
        begin = at + _DIRECTORY.size
        raw = data[begin : begin + name_bytes]
        end = begin + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or end > len(data):
            raise self._broken("its directory is damaged")
        name = raw.decode("utf-8" if flags & 0x800 else "cp437")
        extra = data[begin + name_bytes : begin + name_bytes + extra_bytes]
        size, packed, header = self._large(name, extra, size, packed, header)
        if method or packed != size:
            raise CheckpointError(f"{self.window.path}: {name} is compressed; {self.advice}")
        if flags & _ENCRYPTED or disk not in (0, 0xFFFF) or b"\0" in raw:
            raise self._broken(f"record {name!r} is encrypted or has no usable name")
        start = self._data_start(name, raw, header, (flags, crc, size))
        if start + size > directory:
            raise self._broken(
                f"record {name!r} ends at byte {start + size}, the directory begins at {directory}"
            )
        return name, header, ArchiveRecord(self.window.begin + start, size, crc), end

    def _large(self, name: str, extra: bytes, *values: int) -> tuple[int, ...]:
        """Values of 32 bits, replaced by those of the zip64 field where they say so."""
        found, at = list(values), 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            if kind == 1:
                wide = [v[0] for v in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
                for i, value in enumerate(found):
                    if value == _UNKNOWN and wide:
                        found[i] = wide.pop(0)
            at += 4 + length
        return tuple(found)

    def _data_start(self, name: str, raw: bytes, header: int, expected: tuple[int, int, int]) -> int:
        """Returns the offset of a record's bytes; checks its local header against the directory."""
        local = _LOCAL.unpack(self.window.read(header, _LOCAL.size))
        signature, flags, method, crc, packed, size, name_bytes = local[0], local[2], local[3], *local[6:10]
        start = header + _LOCAL.size + int(name_bytes) + int(local[10])
        if signature != b"PK\x03\x04" or method or self.window.read(header + _LOCAL.size, name_bytes) != raw:
            raise self._broken(f"the local header of {name!r} does not fit the directory")
        if flags != expected[0]:
            raise self._broken(f"the two headers of {name!r} disagree")
        if not flags & _SIZES_FOLLOW and (crc != expected[1] or {packed, size} - {expected[2], _UNKNOWN}):
            raise self._broken(f"the two headers of {name!r} disagree")
        return start

"""The golden file of the segment's format version 2, where ids are not row numbers, and changes of it."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tableside.loader.segment.header import PRELUDE, Header, checksum

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden2.segment"
IDS = {"padded": np.array([-(2**63), -1, 0, 5, 2**63 - 1]), "beside": np.array([0, 99, 250])}


def resealed(
    change: Callable[[bytearray, Header], None], text: Callable[[bytes], bytes] = lambda t: t
) -> bytes:
    """The golden bytes with others in them, or another header, and right checksums: a writer's fault, not
    a disk's."""
    data = bytearray(GOLDEN.read_bytes())
    magic, version, header_bytes, size, _ = PRELUDE.unpack(data[:64])
    header = Header.from_json(bytes(data[64 : 64 + header_bytes]))
    change(data, header)
    written = text(bytes(data[64 : 64 + header_bytes]).rstrip()).ljust(header_bytes)
    assert len(written) == header_bytes
    sums = b"".join(
        struct.pack("<Q", checksum(bytes(data[s.offset : s.offset + s.bytes]))) for s in header.stored
    )
    data[64 : 64 + header_bytes + len(sums)] = written + sums
    data[:64] = PRELUDE.pack(magic, version, header_bytes, size, checksum(written + sums))
    return bytes(data)

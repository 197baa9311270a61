"""JSON files of an evaluation that hold their own checksum: a bit that flips in one is found. Each is
replaced as a whole.

{"xxh3": "hex xxh3-64 of the rest, as json.dumps(rest, sort_keys=True) writes it", ...the rest}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tableside.serving.errors import ServingError


class DamagedRecord(ServingError):
    """A record that does not hold what was written."""


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces the record; a kill leaves the one that was there."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"xxh3": _checksum(record), **record}, indent=1) + "\n")
    partial.replace(path)


def read_record(path: Path) -> dict[str, Any]:
    """The record. FileNotFoundError: there is none. DamagedRecord: it is not as it was written."""
    try:
        found = json.loads(path.read_text())
        expected = found.pop("xxh3")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedRecord(f"{path} is damaged, or of an older release ({error!r})") from error
    if (checksum := _checksum(found)) != expected:
        raise DamagedRecord(f"{path} is damaged: its checksum is {checksum}, expected {expected}")
    return dict(found)


def _checksum(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())

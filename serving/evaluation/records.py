"""JSON files of an evaluation with a checksum, each replaced as a whole.

{"xxh3": "hex xxh3-64 of json.dumps(rest, sort_keys=True)", ...the rest}
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from tableside.loader.model.specs import ModelSpec
from tableside.loader.versions.versions import Model
from tableside.serving.errors import ServingError

logger = logging.getLogger("tableside")
LOADED_FILE = "loaded.json"  # in OUT: path of a model.toml -> version, and what it was loaded from


class DamagedRecord(ServingError):
    """A record does not match its checksum."""


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


def remembered(out: Path, path: Path, spec: ModelSpec, root: Path) -> int | None:
    """Returns the version a model.toml was loaded as, if it is published and no source file changed since."""
    found = _read(out).get(str(path.resolve()))
    if not isinstance(found, dict) or found.get("from") != _stats(path, spec):
        return None
    version = found.get("version")
    return version if version in Model(root, spec.name).versions() else None


def remember(out: Path, path: Path, spec: ModelSpec, version: int) -> None:
    """Records the version a model.toml was loaded as."""
    out.mkdir(parents=True, exist_ok=True)
    write_record(
        out / LOADED_FILE,
        {**_read(out), str(path.resolve()): {"version": version, "from": _stats(path, spec)}},
    )


def _read(out: Path) -> dict[str, Any]:
    try:
        return read_record(out / LOADED_FILE)
    except FileNotFoundError:
        return {}
    except DamagedRecord as error:
        logger.warning("%s; what it names is loaded again", error)
        return {}


def _stats(path: Path, spec: ModelSpec) -> list[list[Any]]:
    """Names, sizes and times of all files that a version is made of."""
    checkpoint = sorted(spec.checkpoint.rglob("*")) if spec.checkpoint.is_dir() else [spec.checkpoint]
    program = [spec.scorer.program] if spec.scorer is not None and spec.scorer.program is not None else []
    files = [p.resolve() for p in (path, *checkpoint, *program) if p.is_file()]
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files]

"""Which version a model.toml was loaded as for an evaluation, so that one that was stopped goes on when it
is started again."""

import logging
from pathlib import Path
from typing import Any

from tableside.loader.model.model import ModelSpec
from tableside.loader.versions.versions import Model
from tableside.serving.evaluation.records import DamagedRecord, read_record, write_record

logger = logging.getLogger("tableside")

FILE = "loaded.json"  # in OUT: path of a model.toml -> version, and what it was loaded from


def remembered(out: Path, path: Path, spec: ModelSpec, root: Path) -> int | None:
    """The version, where it is still published, and neither the model.toml nor a file that it names has
    changed since."""
    found = _read(out).get(str(path.resolve()))
    if not isinstance(found, dict) or found.get("from") != _stats(path, spec):
        return None
    version = found.get("version")
    return version if version in Model(root, spec.name).versions() else None


def remember(out: Path, path: Path, spec: ModelSpec, version: int) -> None:
    """Notes what a model.toml was loaded as."""
    out.mkdir(parents=True, exist_ok=True)
    write_record(
        out / FILE, {**_read(out), str(path.resolve()): {"version": version, "from": _stats(path, spec)}}
    )


def _read(out: Path) -> dict[str, Any]:
    try:
        return read_record(out / FILE)
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

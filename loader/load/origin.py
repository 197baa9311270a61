"""Decides whether a load would give the live state again.

A load records a digest of model.toml and names, sizes and times of the checkpoint's files, so a rewrite with
the same size and time goes unnoticed, as with `make`. A checkpoint that was published as changes
(loader.load.as_delta) is recorded as their position.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.checkpoint.contents import fingerprint
from tableside.loader.errors import ModelError, SegmentError, VersionError
from tableside.loader.files import read_regular
from tableside.loader.load.plan import Sources
from tableside.loader.model.specs import ModelSpec
from tableside.loader.program import LARGEST_BYTES
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

CHECKPOINT = "load --as-delta"  # the stream whose positions are digests of checkpoints, and their paths


def spec_digest(spec: ModelSpec) -> str:
    """Returns a digest of model.toml and the scorer's program, without the paths of checkpoint and
    program."""
    scorer, program = spec.scorer, b""
    if scorer is not None and scorer.program is not None:
        program = read_regular(scorer.program, LARGEST_BYTES, "[scorer]'s program", ModelError)
        scorer = replace(scorer, program=None)
    # A dim that is not said leaves the digest what it was before tables could say one.
    said = asdict(replace(spec, checkpoint=Path(), scorer=scorer), dict_factory=_said)
    return xxhash.xxh3_128_hexdigest(json.dumps(said, default=str, sort_keys=True).encode() + b"\0" + program)


# keys that earlier builds did not know
_LATER = (
    *("dim", "row_alignment", "copies", "owners", "share", "disk_timeout_s", "strings", "redis"),
    *("ttl_s", "max_rows"),
)


def _said(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leaves out keys that earlier builds did not know, where they say nothing."""
    return {key: value for key, value in items if value not in (None, (), False) or key not in _LATER}


class Origin(NamedTuple):
    """What a load would read. spec: see `spec_digest`; files: names, sizes and times, sorted."""

    spec: str
    files: list[tuple[str, list[int]]]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self).encode())


def origin_of(spec: ModelSpec, sources: Sources) -> Origin:
    """Returns what a load of `spec` reads from these sources."""
    return Origin(spec_digest(spec), _by_name(fingerprint(sources.paths)))


def is_live(spec: ModelSpec, model: Model) -> bool:
    """Returns whether the live state was loaded whole from these files and is undamaged; never with rows on
    other hosts. LoaderError: a file is unreadable."""
    if not model.record().current or any(t.owners for t in spec.tables):
        return False
    try:
        live = attach_state(model, None, "header")
    except (SegmentError, VersionError):  # it is damaged, or is known to be, or a delta is gone
        return False
    source = live.header.source
    if source.get("spec") != spec_digest(spec) or live.header.owner is not None:
        return False
    with open_checkpoint(spec.checkpoint) as checkpoint:
        origin = origin_of(spec, Sources(spec.tables, checkpoint))
    if live.change is not None and (position := live.change.positions.get(CHECKPOINT)) is not None:
        return position.partition(" ")[0] == origin.digest
    return "reused" not in source and origin.files == _by_name(source["files"])


def _by_name(files: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    return sorted((Path(path).name, list(stats)) for path, stats in files.items())

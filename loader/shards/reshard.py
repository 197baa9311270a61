"""Resharding: turns a model's version into one model per owner, owners' models into others, or back into one.

Owner k of n of model `ads` is the model `ads-owner-k-of-n`: a whole segment with the features and scorer of
`ads`. It has the ids of its share (loader.shards.shares); others are missing ids. Each id has exactly one
owner.

All segments are written before the first is published; meanwhile shared memory holds the tables twice.
"""

import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tableside.loader.errors import ModelError, VersionError
from tableside.loader.load.settings import Progress
from tableside.loader.model.tiers import owner_name, refuse_times
from tableside.loader.segment.header import Header, Owner
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.segment import Segment
from tableside.loader.shards.shares import Share, copy_share, parts_of, shares_of
from tableside.loader.versions.states import check_bare
from tableside.loader.versions.versions import Model, models


@dataclass(frozen=True)
class ReshardSettings:
    """from_owners: current owners, 1: the model is whole; version: of the whole model, None: live; group: may
    read the new models; user: a trusted owner of models."""

    from_owners: int = 1
    version: int | None = None
    activate: bool = True
    group: str | None = None
    user: str | None = None


@dataclass(frozen=True)
class Holding:
    """Contents of one model. rows: all stored; ids: with a row of their own; bytes: of its segment."""

    model: str
    version: int
    rows: int
    ids: int
    bytes: int


@dataclass(frozen=True)
class ReshardResult:
    before: tuple[Holding, ...]
    after: tuple[Holding, ...]


def owner_names(model: str, owners: int) -> list[str]:
    """Returns the models of so many owners; one owner has the model itself."""
    return [model] if owners == 1 else [owner_name(model, number, owners) for number in range(owners)]


def reshard(
    root: Path, name: str, owners: int, settings: ReshardSettings = ReshardSettings()
) -> ReshardResult:
    """Publishes a version of model `name` as `owners` models; for one owner, as the model itself.
    VersionError: parts are missing or of several versions. ModelError: a table is too small. SegmentError:
    damage. After an error before the first publication nothing stays."""
    if owners < 1 or settings.from_owners < 1 or owners == settings.from_owners:
        raise ModelError(
            f"model {name!r} from {settings.from_owners} to {owners} owners; expected two numbers that "
            "differ, of 1 or more"
        )
    segments = _attached(root, name, settings)
    refuse_times(t.name for t in segments[0].header.tables if t.has_times)
    for segment in segments:
        segment.verify()
    shares = {t.name: shares_of(parts_of(segments, t.name), owners) for t in segments[0].header.tables}
    whole = segments[0].header
    version = whole.version if whole.owner is None else whole.owner.version
    with ExitStack() as stack:
        targets = [Model(root, n, settings.user) for n in owner_names(name, owners)]
        numbers = [stack.enter_context(model.loading(settings.group)) for model in targets]
        written = []
        for k, (model, number) in enumerate(zip(targets, numbers, strict=True)):
            owner = None if owners == 1 else Owner(name, version, k, owners)
            mine = {table: of_owners[k] for table, of_owners in shares.items()}
            written.append(_write(segments[0], mine, model, number, owner))
        for model, number in zip(targets, numbers, strict=True):
            model.publish(number, settings.activate)
    return ReshardResult(tuple(holding_of(s.header, s.size) for s in segments), tuple(written))


def _attached(root: Path, name: str, settings: ReshardSettings) -> list[Segment]:
    """Returns the segments that hold the model, not verified, in the owners' order."""
    _check_owners(root, name, settings)
    if settings.from_owners == 1:
        model = Model(root, name, settings.user)
        segment = model.attach(settings.version, "header")
        check_bare(model, segment.header.version, "reshard")
        if segment.header.remote and not segment.header.owned:
            raise VersionError(
                f"{segment.path} has rows in Redis, which are not cut; load shares of a checkpoint"
            )
        if segment.header.owned:
            raise VersionError(
                f"{segment.path} has rows on other hosts; reshard the models of their owners, "
                f"{owner_name(name, 0, len(segment.header.owned[0].shares))} and so on"
            )
        if (owner := segment.header.owner) is not None:
            raise VersionError(
                f"{segment.path} is owner {owner.number} of {owner.owners} of model {owner.model!r}; name "
                f"that model: tableside reshard {owner.model} --from {owner.owners}"
            )
        return [segment]
    models = [Model(root, n, settings.user) for n in owner_names(name, settings.from_owners)]
    segments = [model.attach(_number(model, settings.version), "header") for model in models]
    for model, segment in zip(models, segments, strict=True):
        check_bare(model, segment.header.version, "reshard")
    first = segments[0].header.owner
    for number, segment in enumerate(segments):
        version = 0 if first is None else first.version
        if segment.header.owner != Owner(name, version, number, settings.from_owners):
            raise VersionError(
                f"{segment.path} holds {_described(segment.header)}; expected owner {number} of "
                f"{settings.from_owners} of version {version} of {name!r}, as {segments[0].path} does; say "
                "which with --version, or reshard it again"
            )
    if len({segment.header.source.get("sample") for segment in segments}) > 1:
        raise VersionError(
            f"the owners of {name!r} were loaded from different checkpoints; load them from one"
        )
    return segments


def _check_owners(root: Path, name: str, settings: ReshardSettings) -> None:
    """Raises VersionError, with the known owners, if one of the models has no version."""
    published = {m.name for m in models(root, settings.user) if m.versions()}
    lacking = [n for n in owner_names(name, settings.from_owners) if n not in published]
    if not lacking:
        return
    owned = re.compile(re.escape(name) + r"-owner-(\d+)-of-(\d+)")
    counts = Counter(int(found[2]) for n in published if (found := owned.fullmatch(n)))
    there = ["the whole model (--from 1)"] if name in published else []
    there += [f"{here} of {owners} owners (--from {owners})" for owners, here in sorted(counts.items())]
    raise VersionError(
        f"{lacking[0]!r} is not published in {root}; of model {name!r} there is: "
        f"{', '.join(there) or 'nothing'}; say with --from how many owners hold it now"
    )


def _number(model: Model, version: int | None) -> int | None:
    """Returns the newest version of an owner's model cut from `version` of the whole; None: the live one."""
    if version is None:
        return None
    for number in reversed(model.versions()):
        owner = model.attach(number, "header").header.owner
        if owner is not None and owner.version == version:
            return number
    raise VersionError(
        f"model {model.name!r} in {model.root} has nothing of version {version}; reshard that version first"
    )


def _described(header: Header) -> str:
    owner = header.owner
    if owner is None:
        return "a whole model"
    return f"owner {owner.number} of {owner.owners} of version {owner.version} of {owner.model!r}"


def _write(
    source: Segment, shares: dict[str, Share], model: Model, version: int, owner: Owner | None
) -> Holding:
    """Writes and seals what one owner has. Caller holds the model's load lock."""
    header = plan_owner(source.header, shares, model.name, version, owner)
    if owner is not None:  # what tells owners of other rows apart, as a load of one share
        said = {"sample": f"{source.content():016x}"} | source.header.source
        header = replace(header, source=said)
    return write_shares(model, header, shares, source.program() if header.scorer is not None else b"")


def write_shares(
    model: Model,
    header: Header,
    shares: dict[str, Share],
    program: bytes = b"",
    progress: Progress | None = None,
) -> Holding:
    """Writes and seals a planned version. progress: counts rows. Caller holds the model's load lock."""
    started, rows, total = time.monotonic(), 0, sum(t.rows for t in header.tables)

    def done(count: int) -> None:
        nonlocal rows
        rows += count
        if progress is not None:
            progress(rows, total)

    with model.writer(header.version, header, program) as writer:
        for table in writer.header.tables:
            copy_share(writer, table, shares[table.name], done)
        sealed = writer.seal(
            {"seconds": time.monotonic() - started, "source_bytes": float(writer.header.table_bytes)}
        )
    return holding_of(sealed, writer.size)


def plan_owner(of: Header, shares: dict[str, Share], name: str, version: int, owner: Owner | None) -> Header:
    """Plans the header of an owner's segment; chunks keep their rows."""
    tables = plan_tables(replace(t, rows=shares[t.name].rows, ids=shares[t.name].ids) for t in of.tables)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(of, model=name, version=version, created=created, tables=tables, load={}, owner=owner)


def holding_of(header: Header, size: int) -> Holding:
    rows, ids = sum(t.rows for t in header.tables), sum(t.id_count for t in header.tables)
    return Holding(header.model, header.version, rows, ids, size)

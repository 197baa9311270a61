"""Moving: an owner of another number of them takes its rows from the present owners, as they lie there.

It copies its part of the owners' versions, and of the deltas over them: all in one state, which all of them
have. The new version goes on in that state, with its mark and its positions in streams (loader.deltas.hosts).
Where an owner was compacted, versions have changes of different places of the stream, so the new version
alone is no state; with its delta it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tableside.loader.deltas.hosts import ids_here
from tableside.loader.errors import ModelError, VersionError
from tableside.loader.load.settings import Progress, thread_count
from tableside.loader.model.tiers import owner_name
from tableside.loader.segment.delta import delta_name
from tableside.loader.segment.delta_writer import DeltaEntries, merge, own_entries, write_delta
from tableside.loader.segment.header import Change, Header, Owner, checksum
from tableside.loader.segment.segment import Segment, open_segment
from tableside.loader.shards.reshard import (
    ReshardResult,
    ReshardSettings,
    holding_of,
    plan_owner,
    write_shares,
)
from tableside.loader.shards.shares import Share, parts_of, share_of
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.published import PARTIAL
from tableside.loader.versions.states import writing
from tableside.loader.versions.versions import Model

DEFAULTS = ReshardSettings()


def take_share(
    root: Path,
    number: int,
    owners: int,
    sources: Sequence[Segment],
    settings: ReshardSettings = DEFAULTS,
    progress: Progress | None = None,
) -> ReshardResult:
    """Publishes the share of owner `number` of `owners`. sources: one state of all present owners, in their
    order; progress: counts rows. ModelError: there is no such owner, or it would have no row. VersionError:
    the sources are no such state. SegmentError: damage. After an error nothing stays."""
    if not 0 <= number < owners or owners == len(sources):
        raise ModelError(
            f"share {number} of {owners}, of {len(sources)} owners; expected another number of them, and a "
            "share from 0 on; for a host that is to take another's place, copy the folder of its model "
            "(docs/hosts.md)"
        )
    of = _whole(sources)
    bases = [source.base for source in sources]
    shares = {t.name: share_of(parts_of(bases, t.name), number, owners) for t in bases[0].header.tables}
    model = Model(root, owner_name(of.model, number, owners), settings.user)
    with model.loading(settings.group) as version, model.opened() as folder:
        header = _planned(sources, shares, model, version, replace(of, number=number, owners=owners))
        written = write_shares(model, header, shares, progress=progress)
        if (change := sources[0].change) is None:
            model.publish(version, settings.activate)
        else:
            _publish(model, folder, version, sources, change, settings.activate)
    return ReshardResult(tuple(holding_of(s.header, s.size) for s in bases), (written,))


def _whole(sources: Sequence[Segment]) -> Owner:
    """Returns what the sources say of the model. VersionError: they are not all of its owners in one
    state."""
    first = sources[0].header.owner
    for number, source in enumerate(sources):
        owner = source.header.owner
        if first is None or owner is None or owner != Owner(first.model, owner.version, number, len(sources)):
            raise VersionError(
                f"{source.base.path} is not that of owner {number} of {len(sources)}; expected all owners in "
                "their order"
            )
        changes = [
            None if s.change is None else (s.change.mark, s.change.positions) for s in (source, sources[0])
        ]
        if changes[0] != changes[1]:
            raise VersionError(
                f"{source.base.path} has changes up to {changes[0]}, and {sources[0].base.path} up to "
                f"{changes[1]}; expected those of one state: take the share again"
            )
    assert first is not None
    return first


def _planned(
    sources: Sequence[Segment], shares: dict[str, Share], model: Model, version: int, owner: Owner
) -> Header:
    """Plans the new version. Its scorer stays where it is: owners give rows."""
    header = plan_owner(sources[0].header, shares, model.name, version, owner)
    header = replace(header, scorer=None, evaluation=None, merged=None, origin=0)
    contents = [s.header.origin or s.base.content() for s in sources]
    if (change := sources[0].change) is None or not any(s.header.origin for s in sources):
        return header
    origin = checksum(repr((owner.number, owner.owners, contents)).encode())
    return replace(header, merged=replace(change, sequence=0, below=0, mark=0, after=0), origin=origin)


def _publish(
    model: Model, folder: Folder, version: int, sources: Sequence[Segment], change: Change, activate: bool
) -> None:
    """Writes the changes over the written version, and publishes both."""
    with writing(model, folder):
        sequence = model.record().latest_sequence + 1
        base = open_segment(folder, model.folder / f"{version}{PARTIAL}", "header")
        tables = merge(base, _entries(sources, base), thread_count(0))
        change = replace(change, sequence=sequence, below=0, after=sequence)
        name = delta_name(version, sequence)
        with folder.replacing(name) as partial:
            write_delta(folder.path / partial, folder.create(partial), base.header, change, tables)
        try:
            model.publish(version, activate, sequence)
        except BaseException:
            folder.unlink(name)
            raise


def _entries(sources: Sequence[Segment], base: Segment) -> Iterator[tuple[str, list[DeltaEntries]]]:
    """Yields the sources' changes of rows that a version has, by table, the newest last."""
    for source in sources:
        for name, entries in own_entries(source.deltas):
            mine = [one.only(ids_here(base.tables[name], one.ids)) for one in entries]
            if any(one.ids.size for one in mine):
                yield name, mine

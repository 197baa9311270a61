"""What the tables of a model take, whole or cut into shares, without a row being read or written.

A checkpoint's are planned as a load plans them; of raw ids the ids are read, to count those of each bucket.
A published version's are cut as `tableside reshard` cuts them.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import ModelError
from tableside.loader.hot.counts import RowCounts
from tableside.loader.hot.hot import hot_path
from tableside.loader.load.backfill import Backfill
from tableside.loader.load.plan import Sources, plan, stored_table
from tableside.loader.load.raw_ids import CountedIds, Indexing
from tableside.loader.load.scorer import stored_scorer
from tableside.loader.load.settings import Progress
from tableside.loader.model.specs import ModelSpec, TableSpec
from tableside.loader.model.tiers import can_have_tier, refuse_times
from tableside.loader.segment.header import TABLE_ALIGNMENT_BYTES, Header
from tableside.loader.segment.layout import lay_out, plan_tables
from tableside.loader.segment.stored import StoredTable
from tableside.loader.shards.shares import parts_of, shares_of
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.versions import Model


@dataclass(frozen=True, eq=False)
class SizedTable:
    """A table that may be cut. most_owners: 1: it has no tier. cut: returns the share (number, owners) as it
    is stored, (0, 1): all of it. uses: how often its rows are asked for; None: nobody counts."""

    name: str
    most_owners: int
    cut: Callable[[int, int], StoredTable]
    uses: Callable[[int, int], int] | None = None


@dataclass(frozen=True, eq=False)
class SizedModel:
    """A model's tables, but those in Redis. header: of a version without tables; program: its scorer's
    archive."""

    tables: tuple[SizedTable, ...]
    header: Header
    program: bytes

    def bytes(self, local: Iterable[SizedTable]) -> int:
        """Returns the bytes of a version that has these tables whole, and the scorer."""
        return _laid_out(self.header, (t.cut(0, 1) for t in local), self.program)

    def share_bytes(self, tables: Iterable[SizedTable], number: int, owners: int) -> int:
        """Returns the bytes of an owner's version, which has a share of each of these tables."""
        cut = (t.cut(number, owners) for t in tables)
        return _laid_out(replace(self.header, scorer=None), cut)


def _laid_out(header: Header, tables: Iterable[StoredTable], program: bytes = b"") -> int:
    """Returns the bytes of a version's files in memory; what a header says of a checkpoint is left out."""
    header = replace(header, tables=plan_tables(tables))
    return lay_out(header, program, TABLE_ALIGNMENT_BYTES, has_files=True).bytes


def sized_checkpoint(spec: ModelSpec, model: Model, progress: Progress) -> SizedModel:
    """Sizes what a load would publish as `model`, whatever tiers of hosts it has now. progress: counts raw
    ids. LoaderError: model or checkpoint are wrong."""
    tables = [t for t in spec.tables if not t.redis]
    refuse_times(t.name for t in tables if t.raw is not None and t.raw.has_times)
    with open_checkpoint(spec.checkpoint) as checkpoint:
        sources = Sources(spec.tables, checkpoint)
        scorer, program = stored_scorer(spec, sources.dims)
        raw_ids = sum(sources.rows[t.name] for t in tables if t.raw is not None)
        work = Indexing(model.root, _no_scratch, 1, raw_ids, progress)
        sized = tuple(_sized(t, sources, model, work) for t in tables)
    header = Header(spec.name, 1, "", (), spec.features, scorer=scorer, evaluation=spec.evaluation)
    return SizedModel(sized, header, program)


def _sized(t: TableSpec, sources: Sources, model: Model, work: Indexing) -> SizedTable:
    dim, most = sources.dims[t.name], sources.rows[t.name] if t.raw is None else t.raw.buckets
    counted = None
    if t.raw is not None:
        backfill = Backfill(model.root, t, dim) if t.missing.policy == "backfill" else None
        counted = CountedIds(t, t.raw, sources.keyed[t.name], backfill, work)

    def cut(number: int, owners: int) -> StoredTable:
        share = None if owners == 1 else (number, owners)
        if counted is not None:
            rows, ids = counted.stored(share)
            return stored_table(t, rows, dim, ids)
        (planned,) = plan([t], sources, model, _no_scratch, 1, lambda done, total: None, share)
        return stored_table(t, planned.rows, dim, planned.ids)

    return SizedTable(t.name, most if can_have_tier(str(t.missing)) else 1, cache(cut))


def _no_scratch() -> int:
    raise AssertionError("tables of raw ids are counted, not indexed")


def sized_version(model: Model) -> SizedModel:
    """Sizes the live version of a model, without the changes over it, and finds how often rows were asked
    for. ModelError: its rows lie on other hosts. VersionError: none is live."""
    segment = model.attach(verify="header")
    header = segment.header
    if header.is_over_hosts:
        raise ModelError(
            f"model {model.name!r} is one of several hosts already; expected a whole one, or the model.toml "
            "that describes it, whose tiers are planned anew"
        )
    refuse_times(t.name for t in header.tables if t.has_times)
    counts = None
    with suppress(FileNotFoundError), Folder(hot_path(model.root, model.name)) as folder:
        counts = RowCounts.opened(folder, segment)

    def sized(t: StoredTable) -> SizedTable:
        parts = parts_of([segment], t.name)
        shares = cache(lambda owners: shares_of(parts, owners))

        def cut(number: int, owners: int) -> StoredTable:
            share = shares(owners)[number]
            return t if owners == 1 else replace(t, rows=share.rows, ids=share.ids)

        def uses(number: int, owners: int) -> int:
            runs = shares(owners)[number].runs
            return 0 if counts is None else sum(counts.uses(t.name, run.start, run.stop) for run in runs)

        most = t.rows if t.index is None else t.index.buckets
        is_counted = counts is not None and t.name in counts.tables
        can_be_cut = can_have_tier("error" if t.ids is None else t.ids.missing)
        return SizedTable(t.name, most if can_be_cut else 1, cache(cut), uses if is_counted else None)

    bare = replace(header, tables=(), files=(), source={}, load={})
    program = b"" if header.scorer is None else segment.program()
    return SizedModel(tuple(map(sized, header.tables)), bare, program)

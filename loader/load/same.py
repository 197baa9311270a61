"""Tables that are in a checkpoint what they are in the live version: a load links their files.

A table with a file of its own is compared before anything is written, up to the first rows that differ: these
end it soon where a table was trained. So a load needs room for what changed, and no GPU gets a second copy.
"""

from typing import Any

from tableside.loader.checkpoint import Checkpoint
from tableside.loader.errors import ModelError, SegmentError, VersionError
from tableside.loader.load.comparison import Comparison, Unfit, check_shape
from tableside.loader.load.plan import Sources
from tableside.loader.load.reuse import LiveTables, checked
from tableside.loader.load.settings import LoadSettings, Progress, thread_count
from tableside.loader.model.specs import TableSpec
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend


def add_same(
    reused: LiveTables,
    model: Model,
    checkpoint: Checkpoint,
    backend: CpuBackend,
    settings: LoadSettings,
    progress: Progress,
) -> None:
    """Adds those of the other tables that are as the live version has them, whose files are verified.
    progress: counts rows. CheckpointError: rows are damaged. Caller holds the load lock."""
    segment = reused.segment or _live(model)
    if segment is None:
        return
    same: dict[str, StoredTable] = {}
    verified: dict[str, Any] = {}
    others = [t for t in reused.others if not t.redis]
    candidates = [(file, t) for file in segment.files for t in others if t.name == file.table]
    rows = {t.name: t.rows for t in segment.header.tables}
    before, total = 0, sum(rows[t.name] for _, t in candidates)
    for file, spec in candidates:

        def shown(done: int, of: int, before: int = before) -> None:
            progress(min(before + done, total), total)

        before += rows[spec.name]
        try:
            stored = checked(spec, segment, backend)
            if stored.row_bytes != spec.row_bytes(stored.dim):
                continue
            found = _compare(spec, segment, checkpoint, settings, shown)
            segment.verify_file(file, thread_count(settings.threads))
        except (Unfit, ModelError, SegmentError):  # it changed, or is damaged: it is loaded
            continue
        same[spec.name] = stored
        verified |= found
    reused.add(segment, same, verified)


def _live(model: Model) -> Segment | None:
    if not model.record().current:
        return None
    try:
        segment = model.attach(verify="header")
    except (SegmentError, VersionError):  # damaged, or known to be
        return None
    return None if segment.header.owner is not None else segment


def _compare(
    spec: TableSpec, segment: Segment, checkpoint: Checkpoint, settings: LoadSettings, progress: Progress
) -> dict[str, Any]:
    """Returns what verified the rows. Unfit: a table differs."""
    sources = Sources([spec], checkpoint)
    check_shape(spec, segment.tables[spec.name], sources)
    work = Comparison(segment.tables, checkpoint, sources, settings, progress, 0)
    if work.entries(spec).ids.size:
        raise Unfit(f"table {spec.name!r} differs")
    work.checks.finish()
    return work.checks.describe() | {name: dict(k.verification) for name, k in sources.keyed.items()}

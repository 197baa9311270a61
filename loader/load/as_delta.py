"""A checkpoint as changes of the live state: `tableside load --as-delta`.

Every row of the checkpoint is read, checked and quantized as a load does, and compared with the live state's.
The rows that differ, ids that came and ids that are gone become one delta (loader.deltas.apply). Its position
of the stream CHECKPOINT is the digest of model.toml and the checkpoint's files, and the checkpoint's path.
Nothing is published where a delta cannot say it: a damaged live state, another model.toml, other rows of row
numbers, ids that come twice, a mean of all rows, or more changes than MOST_SHARE of the rows' bytes. Private
memory holds the changed rows, and a byte for each live row of raw ids.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.deltas.apply import ApplyResult, apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.load.comparison import Comparison, Unfit, check_shape
from tableside.loader.load.origin import CHECKPOINT, Origin, origin_of
from tableside.loader.load.plan import Sources
from tableside.loader.load.settings import DEFAULTS, LoadSettings, Progress
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model

MOST_SHARE = 0.1  # of the rows' bytes


class LoadedDelta(NamedTuple):
    """result: what was published, None: nothing, and `why_not` says why. compared: rows."""

    result: ApplyResult | None
    why_not: str = ""
    compared: int = 0


def load_as_delta(
    spec: ModelSpec, root: Path, settings: LoadSettings = DEFAULTS, progress: Progress | None = None
) -> LoadedDelta:
    """Publishes what differs in a checkpoint as the next state of the live version. progress: counts rows.
    Errors: of `load` and `apply`; nothing changes then."""
    model, started = Model(root, spec.name), time.monotonic()
    with open_checkpoint(spec.checkpoint) as checkpoint, model.loading():
        try:
            live, segment = _live(model)
            sources = Sources(spec.tables, checkpoint)
            origin = origin_of(spec, sources)
            _check_model(spec, segment, sources, origin)
            shown = progress or (lambda done, total: None)
            work = Comparison(segment.tables, checkpoint, sources, settings, shown, MOST_SHARE)
            packed = PackedChanges(segment)
            for table in spec.tables:
                entries = work.entries(table)
                if entries.ids.size:
                    packed.tables[table.name] = [entries]
                    packed.rows += entries.ids.size
            work.checks.finish()
        except Unfit as error:
            return LoadedDelta(None, str(error))
        positions = {} if segment.change is None else segment.change.positions
        batch = ChangeBatch((), CHECKPOINT, f"{origin.digest} {spec.checkpoint}", positions.get(CHECKPOINT))
        applied = apply(model, batch, packed=packed, over=live)
        applied = replace(applied, seconds=time.monotonic() - started)
        return LoadedDelta(applied, compared=sum(sources.rows.values()))


def _live(model: Model) -> tuple[State, Segment]:
    """Returns the live state, verified. Unfit: there is none, or it is damaged."""
    try:
        if not (live := state_of(model.record())).version:
            raise Unfit("no version is live")
        return live, attach_state(model, live, "full")
    except (SegmentError, VersionError) as error:
        raise Unfit(str(error)) from error


def _check_model(spec: ModelSpec, segment: Segment, sources: Sources, origin: Origin) -> None:
    header = segment.header
    if remote := [t.name for t in spec.tables if t.owners or t.redis]:
        raise Unfit(f"the rows of table {remote[0]!r} have owners, or lie in Redis")
    if header.source.get("spec") != origin.spec or header.owner is not None:
        raise Unfit(f"version {header.version} was loaded with another model.toml or program")
    for t in spec.tables:
        check_shape(t, segment.base.tables[t.name], sources)

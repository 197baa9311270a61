"""The loop of a follower: read a batch, apply it, tell; until it shall stop, or something is wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tableside.loader.deltas.apply import ApplyResult, ApplySettings, apply
from tableside.loader.deltas.merging import Merges
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.errors import ChangeError, VersionError
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.errors import SourceError
from tableside.serving.follow.room import when_there_is_room
from tableside.serving.follow.source import ChangeSource, IsStopping
from tableside.serving.follow.window import Skip, Window


@dataclass(frozen=True)
class Step:
    """A batch that was applied. position: where the source was read to; read_s, apply_s: how long it was
    waited for and written.

    lag_s: from when its oldest change was made to when it became visible; None: the source does not say.
    """

    applied: ApplyResult
    position: str
    read_s: float
    apply_s: float
    lag_s: float | None


def follow(
    model: Model,
    source: ChangeSource,
    rows: int,
    every_s: float,
    is_stopping: IsStopping,
    told: Callable[[Step], None],
    *,
    settings: ApplySettings = ApplySettings(),  # noqa: B008  (frozen)
    reset: bool = False,
    skip: Skip | None = None,
) -> None:
    """Applies batch after batch until `is_stopping`; the one under way is finished.

    A batch ends with about `rows` changes, or so early that its first one is visible `every_s` seconds after
    it could be read, by how long the last batch took from its end on; but not before half of that time. Where
    shared memory is full, room is waited for.

    Each batch begins at the position that the model's state keeps, and the state keeps where it ends: so each
    change is applied once, whatever ends this process. reset: the first batch begins where the source was
    told to, not at what is kept. skip: takes a change that the model refuses, which is left out then.
    SourceError: a change is refused, and all before it are applied; changes are gone or out of order; or
    somebody else applies this source. LoaderError: nothing of a batch is visible.
    """
    last: str | None = None
    is_again = False  # another version became live while the batch was read or applied
    due = time.monotonic() + every_s
    with Merges(model, settings.threads) as merges:
        while not is_stopping():
            segment = attach_state(model, None, "header")
            kept = None if segment.change is None else segment.change.positions.get(source.name)
            if last is not None and kept != last:
                raise SourceError(
                    f"{source.name}: this follower applied it up to {last}, and the model's state says "
                    f"{kept or 'nothing of it'}; another follower applies it too, or another version was "
                    "activated: end one of "
                    "them, and start this one again"
                )
            began = time.monotonic()
            after = None if reset else kept
            window = Window(PackedChanges(segment, settings.backend), after, after, skip=skip)
            window.read(source, rows, due, is_stopping)
            read = time.monotonic()
            due = read + every_s
            if not window.has_come:
                continue
            assert window.position is not None
            try:
                batch = window.batch(source, kept)
                applied = when_there_is_room(
                    partial(apply, model, batch, settings, window.packed, merges), is_stopping
                )
            except ChangeError as error:
                raise SourceError(
                    f"{source.name}: up to {window.position}, it was refused: {error}"
                ) from error
            except VersionError:
                if is_again:
                    raise
                is_again = True
                continue
            if applied is None:
                break
            visible, took_s = time.time(), time.monotonic() - read
            due = read + max(every_s - took_s, every_s / 2)  # the next one will take about as long
            reset = is_again = False
            lag_s = None if window.made_at is None else visible - window.made_at
            last = window.position
            told(Step(applied, last, read - began, took_s, lag_s))

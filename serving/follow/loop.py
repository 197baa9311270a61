"""The loop of a follower: read a batch, apply it, tell; until it shall stop, or something is wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tableside.loader.apply import Applied, ApplySettings, apply, position_of
from tableside.loader.errors import ChangeError, VersionError
from tableside.loader.versions import Model
from tableside.serving.errors import SourceError
from tableside.serving.follow.source import IsStopping, Source


@dataclass(frozen=True)
class Step:
    """A batch that was applied. position: where the source was read to; read_s, apply_s: how long it was waited for and written.

    lag_s: from when its oldest change was made to when it became visible; None: the source does not say.
    """

    applied: Applied
    position: str
    read_s: float
    apply_s: float
    lag_s: float | None


def follow(
    model: Model,
    source: Source,
    rows: int,
    every_s: float,
    is_stopping: IsStopping,
    told: Callable[[Step], None],
    *,
    settings: ApplySettings = ApplySettings(),  # noqa: B008  (frozen)
    reset: bool = False,
) -> None:
    """Applies batches of about `rows` changes, or of `every_s` seconds, until `is_stopping`; the one under way is finished.

    Each batch begins at the position that the model's state keeps, and the state keeps where it ends: so each change is applied
    once, whatever ends this process. reset: the first batch begins where the source was told to, not at what is kept.
    SourceError: changes are gone or out of order, or somebody else applies this source. LoaderError: nothing of a batch
    is visible.
    """
    last: str | None = None
    is_again = False  # another state became live while the batch was applied
    while not is_stopping():
        kept = position_of(model, source.name)
        if last is not None and kept != last:
            raise SourceError(
                f"{source.name}: this follower applied it up to {last}, and the model's state says {kept or 'nothing of it'}; "
                "another follower applies it too, or another version was activated: end one of them, and start this one again"
            )
        began = time.monotonic()
        batch = source.read(None if reset else kept, rows, every_s)
        if batch is None:
            continue
        assert batch.position is not None
        read = time.monotonic()
        try:
            applied = apply(model, replace(batch, after=kept), settings)
        except ChangeError as error:
            raise SourceError(
                f"{source.name}: what lies behind {batch.after or 'its begin'}, up to {batch.position}, was refused: {error}"
            ) from error
        except VersionError:
            if is_again:
                raise
            is_again = True
            continue
        visible = time.time()
        reset = is_again = False
        lag_s = None if batch.made_at is None else visible - batch.made_at
        last = batch.position
        told(Step(applied, batch.position, read - began, time.monotonic() - read, lag_s))

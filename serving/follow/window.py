"""What comes from a source until a batch ends: read slice by slice and packed while the rest is waited for.

A slice that is refused is read again in halves, so that what lies before the change that does not fit is
applied, and that change is known by its own position.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.errors import ChangeError
from tableside.serving.errors import SourceError
from tableside.serving.follow.source import ChangeSource, IsStopping

_SLICE_S, _SLICE_ROWS = 0.1, 100_000  # that are read before they are packed, about
_MOST_POSITIONS = 1024  # that a slice is taken to have where it is halved
Skip = Callable[[str, ChangeError], None]  # what is done with the change at a position that is left out


@dataclass
class Window:
    """The changes of one batch. after, position: the places in the source before the first and behind the
    last one; a position that is `after` still says that nothing came. made_at: when the oldest was made,
    of time.time(); None: not known. skip: takes a change that is refused; None: none may be left out."""

    packed: PackedChanges
    after: str | None
    position: str | None
    made_at: float | None = None
    skip: Skip | None = None

    def read(self, source: ChangeSource, rows: int, until: float, is_stopping: IsStopping) -> None:
        """Reads until there are some `rows`, or it is `until`, of time.monotonic(), or the follower shall
        stop. What is there by then is read as well.

        SourceError: changes are gone, out of order, or not what they must be. Where others came before them,
        these are a window, and the error comes with the next one.
        """
        while True:
            left, asked = until - time.monotonic(), min(_SLICE_ROWS, rows - self.packed.rows)
            try:
                is_behind = self._add(source, asked, min(_SLICE_S, max(0.0, left))) >= asked
            except SourceError:
                if not self.has_come:
                    raise
                return
            if self.packed.rows >= rows or (left <= 0 and not is_behind) or is_stopping():
                return

    @property
    def has_come(self) -> bool:
        """Whether there is anything to apply, be it a place without changes."""
        return self.position != self.after

    def batch(self, source: ChangeSource, kept: str | None) -> ChangeBatch:
        """What `loader.deltas.apply` is told beside the packed changes. kept: the place that the model's
        state has."""
        return ChangeBatch((), source.name, self.position, kept, self.made_at)

    def _add(self, source: ChangeSource, rows: int, wait_s: float) -> int:
        """Reads some rows and packs them; returns how many. SourceError: what comes next is refused, or
        cannot be read."""
        before, most = self.packed.rows, None
        while (part := source.read(self.position, rows, wait_s, most)) is not None:
            assert part.position is not None
            try:
                self.packed.add(part.changes)
            except ChangeError as error:
                if most != 1:
                    most, wait_s = (most or _MOST_POSITIONS) // 2, 0.0
                    continue
                if self.skip is None:
                    raise SourceError(
                        f"{source.name}: what lies at {part.position} was refused: {error}"
                    ) from error
                self.skip(part.position, error)
                most = None
            else:
                if not self.has_come:
                    self.made_at = part.made_at
            self.position = part.position
            if most is None or self.packed.rows - before >= rows:
                break
        return self.packed.rows - before

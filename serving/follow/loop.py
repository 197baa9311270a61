"""A follower: opens a source, reads batches and applies them, logs bad changes, and starts compactions."""

import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from tableside.loader.deltas.apply import ApplyResult, ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.compact import delta_share
from tableside.loader.deltas.merging import Merges
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.errors import ChangeError, NoSpace, VersionError
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.errors import ServingError, SourceError
from tableside.serving.follow.folder import FolderSource
from tableside.serving.follow.source import ChangeSource, IsStopping, pause

_SLICE_S, _SLICE_ROWS = 0.1, 100_000  # that are read before they are packed, about
_MOST_POSITIONS = 1024  # that a slice is taken to have where it is halved
Skip = Callable[[str, ChangeError], None]  # what is done with the change at a position that is left out
_AGAIN_S, _LONGEST_S = 0.1, 5.0  # between two attempts, doubled each time
_log = logging.getLogger("tableside.follow")
T = TypeVar("T")
_command_log = logging.getLogger("tableside")


@dataclass
class Window:
    """The changes of one batch. after, position: its bounds in the source; equal: no changes. quiet_s:
    without changes, after which more of its group are not waited for. made_at: time.time() of the oldest, or
    None. skip: takes a refused change; None: refuse. passed, group: as of `ChangeBatch`."""

    packed: PackedChanges
    after: str | None
    position: str | None
    quiet_s: float = 0.0
    made_at: float | None = None
    skip: Skip | None = None
    passed: list[str] = field(default_factory=list)
    group: str = ""
    is_group_end: bool = False
    came_at: float = 0.0

    def read(self, source: ChangeSource, rows: int, until: float, is_stopping: IsStopping) -> None:
        """Reads until `rows` rows, or `until` (time.monotonic()), or a stop; then reads what is there. Of a
        group it reads all, and nothing behind it. SourceError: changes are gone, out of order or invalid;
        after other changes, it is raised by the next window."""
        while True:
            left, asked = until - time.monotonic(), min(_SLICE_ROWS, rows - self.packed.rows)
            wait_s = min(_SLICE_S, max(0.0, left if self._is_quiet() else self.quiet_s))
            try:
                is_behind = self._add(source, asked, wait_s) >= asked
            except SourceError:
                if not self.has_come:
                    raise
                return
            if self.packed.rows >= rows or self.is_group_end or is_stopping():
                return
            if left <= 0 and not is_behind and self._is_quiet():
                return

    def _is_quiet(self) -> bool:
        """Whether no more of the group is waited for."""
        return not self.group or time.monotonic() - self.came_at >= self.quiet_s

    @property
    def has_come(self) -> bool:
        """Whether there is anything to apply, be it a place without changes."""
        return self.position != self.after

    def batch(self, source: ChangeSource, kept: str | None) -> ChangeBatch:
        """Returns the batch's metadata for `loader.deltas.apply`. kept: the position in the model's state."""
        return ChangeBatch((), source.name, self.position, kept, self.made_at, self.passed)

    def _add(self, source: ChangeSource, rows: int, wait_s: float) -> int:
        """Reads and packs some rows; returns how many. SourceError: the next ones are refused, or
        unreadable."""
        before, most = self.packed.rows, None
        while (part := source.read(self.position, rows, wait_s, most)) is not None:
            assert part.position is not None
            if self.has_come and part.group != self.group:
                self.is_group_end = True  # it is read again
                break
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
            self.position, self.group, self.is_group_end = part.position, part.group, part.is_group_end
            self.passed += part.passed or [part.position]
            self.came_at = time.monotonic()
            if part.is_group_end:
                break
            if most is None or self.packed.rows - before >= rows:
                break
        return self.packed.rows - before


def when_there_is_room(write: Callable[[], T], is_stopping: IsStopping) -> T | None:
    """Calls `write`, again while shared memory is full; returns its result, or None at a stop."""
    since: float | None = None
    again_s = _AGAIN_S
    while True:
        try:
            found = write()
        except (NoSpace, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSPC:
                raise
            if since is None:
                since = time.monotonic()
                _log.warning("%s; nothing of the batch is visible, trying again", error)
        else:
            if since is not None:
                _log.warning("there was room again after %.1f s", time.monotonic() - since)
            return found
        pause(again_s, is_stopping)
        if is_stopping():
            return None
        again_s = min(2 * again_s, _LONGEST_S)


@dataclass(frozen=True)
class Step:
    """An applied batch. position: the source's; read_s, apply_s: seconds of waiting and writing. lag_s: from
    the oldest change to its visibility; None: unknown."""

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
    """Applies batches until `is_stopping`, and finishes the current one.

    A batch ends at about `rows` changes, or early enough to be visible `every_s` seconds after its first
    change, estimated from the last batch, but not before half of that. Full shared memory is waited for.
    reset: begin at the source's start, not at the kept position. skip: takes a refused change, which is then
    left out. SourceError: a change is refused (all before it are applied), changes are gone or out of order,
    or another process applies this source. LoaderError: nothing of a batch is visible.
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
                    "activated: end one of them, and start this one again"
                )
            began = time.monotonic()
            after = None if reset else kept
            window = Window(PackedChanges(segment), after, after, every_s, skip=skip)
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


class BadChangeFile:
    """Writes refused changes to a file and counts them. ServingError: the file cannot be written.

        {"source": "redis:ads-rows", "position": "1732300000000-0", "at": 1732300001.5, "error": "…", …}

    The source adds the change's content. A kill before the next state repeats the line.
    """

    def __init__(self, source: ChangeSource, path: Path) -> None:
        self.count = 0
        self._source, self._path = source, path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ServingError(
                f"--skip-bad {path}: {error.strerror}; name a file that can be written"
            ) from error

    def __call__(self, position: str, error: ChangeError) -> None:
        now = round(time.time(), 3)
        line = {"source": self._source.name, "position": position, "at": now, "error": str(error)}
        try:
            self._file.write(json.dumps({**line, **self._source.content(position)}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as failed:
            raise ServingError(
                f"--skip-bad {self._path}: {failed.strerror}; {position} was not left out"
            ) from failed
        self.count += 1
        _log.warning(
            "%s: left out what lies at %s, which was refused: %s", self._source.name, position, error
        )

    def __enter__(self) -> "BadChangeFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Compactions:
    """Runs `tableside compact` when deltas exceed a share `at` of the version's bytes (0: never), one at a
    time. keep_s: versions that were live in so many seconds stay."""

    def __init__(self, model: Model, at: float, keep_s: float) -> None:
        self._model, self._at, self._keep_s = model, at, keep_s
        self._running: subprocess.Popen[str] | None = None

    def look(self, applied: ApplyResult) -> None:
        """After a batch: starts a compaction if it is due, and logs the result of the last one."""
        if not self._at or not self._has_ended():
            return
        if delta_share(attach_state(self._model, None, "header")) <= self._at:
            return
        told = self._model.name, self._at, applied.state.version
        _command_log.info("%s: changes take more than %g of version %d; compacting", *told)
        command = [sys.executable, "-m", "tableside", "compact", self._model.name]
        command += ["--root", str(self._model.root)]
        command += ["--keep-for", f"{self._keep_s:.0f}s"] if self._keep_s else []
        command += [] if self._model.owner is None else ["--owner", self._model.owner]
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _has_ended(self) -> bool:
        if (process := self._running) is None:
            return True
        if process.poll() is None:
            return False
        text = process.communicate()[0].strip()
        _command_log.log(logging.ERROR if process.returncode else logging.INFO, "%s", text)
        self._running = None
        return True

    def finish(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._has_ended()


def open_source(
    text: str,
    name: str | None,
    table: str | None,
    start: str,
    is_stopping: IsStopping,
    group_s: float = 0.0,
    strings: Container[str] = (),
) -> ChangeSource:
    """Opens a folder, or the URL of a Redis stream or of Kafka's topics. name: in the state; None:
    "folder:PATH", "redis:KEY" or "kafka:TOPIC". table: of rows that name none. start: "start", "end" or a
    position, if none is kept. group_s: for a model over several hosts, seconds between two batches. strings:
    tables whose ids are strings. SourceError: it is none of these. MissingBackend: its client is not
    installed."""
    if text.startswith("kafka://"):
        from tableside.serving.follow.kafka_topics import KafkaTopics

        if group_s:
            raise SourceError(
                "a model over several hosts takes changes in one order, and partitions have none; follow a "
                "folder or a Redis stream"
            )
        return KafkaTopics(text, name, table, start, is_stopping, strings)
    if "://" in text:
        from tableside.serving.follow.redis_stream import RedisStream, split_url

        _, key = split_url(text)
        return RedisStream(text, name or f"redis:{key}", table, start, is_stopping, group_s, strings)
    folder = Path(text)
    return FolderSource(folder, name or f"folder:{folder.resolve()}", table, start, is_stopping, group_s > 0)

"""A folder of change files, NUMBER.parquet, NUMBER.npz or NUMBER.jsonl, numbered in steps of one.

Write a file under another name and rename it when it is whole; other names are ignored. The position is the
number of the last applied file; applied files may be removed. A file's mtime says when it was made.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tableside.loader.deltas.change_files import SUFFIXES, read_changes, rows_in
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.hosts import passed_file
from tableside.loader.errors import ChangeError
from tableside.serving.errors import SourceError
from tableside.serving.follow.source import PAUSE_S, IsStopping, pause, refusing

_CLOCK_NS = 1_000_000_000  # a change of a folder may have the same time as one before it, for that long


class FolderSource:
    """The files of a folder. table: of files that name none. start: "start", "end", or a number. in_groups:
    a file is a group."""

    def __init__(
        self,
        folder: Path,
        name: str,
        table: str | None,
        start: str,
        is_stopping: IsStopping,
        in_groups: bool = False,
    ) -> None:
        """SourceError: there is no such folder, or `start` is no number."""
        if not folder.is_dir():
            raise SourceError(
                f"{folder}: there is no such folder; make it, or name a Redis stream as "
                "redis://HOST?stream=KEY, or a topic as kafka://HOST/TOPIC"
            )
        self.name, self._folder, self._table, self._is_stopping = name, folder, table, is_stopping
        self._in_groups = in_groups
        self._files: dict[int, Path] = {}
        self._seen_ns = -1
        self._begin = self._number(start) if start not in ("start", "end") else None
        if start == "end":
            self._begin = max(self._scan(), default=None)

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        """As `Source.read`. SourceError: a number is left out, or there twice."""
        position = self._begin if after is None else self._number(after)
        most = 1 if self._in_groups else most
        end, found, counted = time.monotonic() + wait_s, list[Path](), 0
        while True:
            while counted < rows and len(found) != most and (path := self._next(position)):
                try:
                    # a file that does not say how many it has is a batch of its own
                    counted += rows_in(path) or rows
                except ChangeError as error:
                    if not found:
                        return ChangeBatch(refusing(error), self.name, path.stem, after, path.stat().st_mtime)
                    most = len(found)  # what came before it is applied
                    break
                position = int(path.stem)
                found.append(path)
            left = end - time.monotonic()
            if counted >= rows or len(found) == most or left <= 0 or self._is_stopping():
                break
            pause(min(left, PAUSE_S), self._is_stopping)
        if not found:
            return None
        changes = itertools.chain.from_iterable(map(self._changes, found))
        batch = ChangeBatch(changes, self.name, str(position), after, found[0].stat().st_mtime)
        if not self._in_groups:
            return batch
        passed = [passed_file(str(position), found[0])]
        return replace(batch, passed=passed, group=str(position), is_group_end=True)

    def content(self, position: str) -> dict[str, str]:
        """Returns the file's path; the file stays."""
        return {"file": str(self._scan().get(self._number(position), self._folder))}

    def close(self) -> None:
        """Nothing is open."""

    def _changes(self, path: Path) -> Iterator[TableChanges]:
        return read_changes(path, self._table)

    def _next(self, position: int | None) -> Path | None:
        """Returns the file after a position, or None. position None: the first file."""
        files = self._changed()
        if position is not None and position + 1 in files:
            return files[position + 1]
        later = [n for n in files if position is None or n > position]
        if not later:
            return None
        # A file that came while the folder was read may be missing from what was read; one with a smaller
        # number came before it.
        files = self._scan()
        first = min(n for n in files if position is None or n > position) if files else min(later)
        if position is not None and first != position + 1:
            raise SourceError(
                f"{self._folder}: the file after number {position} is number {first}; expected "
                f"{position + 1}; put that one "
                f"there, or leave out what is missing with --reset --from {first - 1}"
            )
        return files.get(first)

    def _changed(self) -> dict[int, Path]:
        """Returns number -> file; lists the folder again if it may have changed."""
        changed_ns = self._folder.stat().st_mtime_ns
        if changed_ns != self._seen_ns:
            self._scan()
            self._seen_ns = changed_ns if time.time_ns() - changed_ns > _CLOCK_NS else -1
        return self._files

    def _scan(self) -> dict[int, Path]:
        files: dict[int, Path] = {}
        for path in self._folder.iterdir():
            if path.suffix in SUFFIXES and path.stem.isdecimal() and path.stem.isascii():
                if other := files.get(int(path.stem)):
                    raise SourceError(
                        f"{self._folder}: {path.name} and {other.name} have one number; expected one file of "
                        "each"
                    )
                files[int(path.stem)] = path
        self._files = files
        return files

    def _number(self, position: str) -> int:
        if not (position.isdecimal() and position.isascii()):
            raise SourceError(f"{self._folder}: a position is the number of a file; found {position!r}")
        return int(position)

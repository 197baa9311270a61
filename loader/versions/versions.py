"""Versions of models in shared memory: publish, activate, attach, remove.

    ROOT/MODEL/3.segment            a version, immutable
    ROOT/MODEL/3.1.rows             its first large table (loader.segment.layout), perhaps of version 2, too
    ROOT/MODEL/3.node1.segment      a copy of it on another NUMA node (loader.versions.copies)
    ROOT/MODEL/3.segment.verified   notes that it was read whole on this host (loader.versions.verified)
    ROOT/MODEL/3.damaged            marks version 3 as changed after publication; it is not attached any more
    ROOT/MODEL/4.segment.partial    a load under way, or left by a killed one (a load or `gc` removes it)
    ROOT/MODEL/current              the live version, replaced as a whole (loader.versions.record)
    ROOT/MODEL/3+17.delta           delta 17 over version 3 (loader.segment.delta, loader.versions.states)
    ROOT/MODEL/SEED.redis           keys of rows in Redis (loader.redis.keys)
    ROOT/MODEL/load.lock            held (flock) by the model's one load
    ROOT/MODEL/record.lock          held while `current` changes or a version is removed

Readers take no lock; a mapped segment outlives its unlinking. Version numbers are never reused. No other user
can change the files or hold a lock (loader.versions.folder).
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tableside.loader.errors import AccessError, SegmentError, VersionError
from tableside.loader.redis.keys import clear_keys, notes_in
from tableside.loader.segment.delta import delta_name
from tableside.loader.segment.header import Header
from tableside.loader.segment.segment import Segment, open_segment
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.copies import copying_writer, fill_copies
from tableside.loader.versions.folder import (
    Folder,
    deltas_of,
    leftovers_of,
    make_folder,
    newest_delta,
    open_to_group,
    others_of,
    versions_with,
)
from tableside.loader.versions.published import DAMAGED, PARTIAL, SEGMENT, PublishedModel, model_names
from tableside.loader.versions.record import (
    VersionRecord,
    flip,
    intended,
    reserve_room,
    unless_full,
    write_next,
)

DEFAULT_ROOT = Path("/dev/shm/tableside")


class Model(PublishedModel):
    """A model whose versions are published, activated and removed as well; holds no file open."""

    @contextlib.contextmanager
    def loading(self, group: str | None = None) -> Iterator[int]:
        """Holds the load lock, clears leftovers, yields the next version number; of a version that is not
        published nothing stays. group: may read the model. VersionError: another load runs."""
        self._make_folders()
        if group is not None:
            with Folder(self.root, self.owner) as root, self.opened() as folder:
                open_to_group(folder, group)
                # The way to the model; what other models there are stays private
                open_to_group(root, group, 0o711)
        busy = f"another load of model {self.name!r} is under way"
        with self.opened() as folder, folder.lock("load.lock", 0, busy):
            self._clear_leftovers(folder)
            self._clear_redis(folder)
            with folder.lock("record.lock"):
                reserve_room(folder)
            version = max([self._readable_record().latest, *self.versions()], default=0) + 1
            try:
                yield version
            finally:
                self._clear_partials(folder)
                self._clear_redis(folder)

    def writer(
        self,
        version: int,
        header: Header,
        program: bytes = b"",
        kept: Mapping[str, Segment] = MappingProxyType({}),
        nodes: Sequence[int] = (),
    ) -> SegmentWriter:
        """Creates the files of a version. Needs `loading`. kept: tables -> versions of this model whose files
        are linked. nodes: NUMA nodes that get a copy each; empty: it lies once, anywhere. NoSpace: as of
        SegmentWriter. SegmentError: memory cannot be bound."""
        path = self.folder / f"{version}{PARTIAL}"
        with self.opened() as folder:
            if nodes:
                return copying_writer(folder, path, header, program, kept, nodes)
            return SegmentWriter(path, header, program, folder.create(path.name), folder, kept)

    def create_scratch(self, version: int) -> int:
        """Creates an unlinked file and returns its descriptor. Needs `loading`."""
        with self.opened() as folder:
            return folder.create_unnamed(f"{version}.scratch.partial")

    def publish(self, version: int, activate: bool = True, sequence: int = 0) -> None:
        """Publishes the sealed partial; `activate` makes it live with delta `sequence` (0: none). Needs
        `loading`. Writes the record first, so that a full file system publishes nothing."""
        with self.opened() as folder:
            fill_copies(folder, version)
        with self.opened() as folder, folder.lock("record.lock"):
            before = self._readable_record() if activate else self.record()
            lived = self._lived(before)
            latest, newest = max(version, before.latest), max(sequence, before.latest_sequence)
            after = replace(before, latest=latest, lived=tuple(lived), latest_sequence=newest)
            if activate:
                lived = [v for v in lived if v != version] + [version]
                after = replace(after, current=version, lived=tuple(lived), sequence=sequence)
            # Of a killed compaction to another version of this number
            for stale in set(deltas_of(folder, version)) - {sequence}:
                folder.unlink(delta_name(version, stale))
            write_next(folder, after)
            folder.rename(f"{version}{PARTIAL}", f"{version}{SEGMENT}")
            try:
                flip(folder)
            except OSError:
                folder.unlink(f"{version}{SEGMENT}")
                raise

    def activate(self, version: int, sequence: int | None = None) -> None:
        """Makes a version live with delta `sequence` (0: none; None: newest). VersionError: missing.
        SegmentError: damaged."""
        self.attach(version)
        with self.opened() as folder, folder.lock("record.lock"):
            if not folder.exists(f"{version}{SEGMENT}"):  # removed while it was verified
                raise self._missing(f"version {version} is not published")
            if sequence and sequence not in (kept := deltas_of(folder, version)):
                known = ", ".join(f"{version}+{s}" for s in kept) or "none"
                raise VersionError(
                    f"model {self.name!r} keeps no delta {version}+{sequence}; it has: {known}"
                )
            self._record_version(folder, version, sequence)

    def remove(self, version: int) -> None:
        """Unlinks a version that is not live; mappings of it stay valid."""
        if version not in self.versions():
            raise self._missing(f"version {version} is not published")
        with self.opened() as folder, folder.lock("record.lock"):
            if self.record().current == version:
                raise VersionError(
                    f"version {version} of {self.name!r} is live; activate another one first, or remove the "
                    "whole model"
                )
            self._unlink(folder, [version])
        self._forget_redis()

    def remove_all(self) -> int:
        """Removes and counts all versions. The record stays, so that no number is given again."""
        if not self.versions():
            raise self._missing("it is not published")
        busy = f"a load of model {self.name!r} is under way"
        with self.opened() as folder, folder.lock("load.lock", 0, busy), folder.lock("record.lock"):
            self._clear_partials(folder)
            versions = self.versions()
            is_flipped = False
            with unless_full():
                self._record_version(folder, 0)
                is_flipped = True
            self._unlink(folder, versions)
            if not is_flipped:  # now there is room
                self._record_version(folder, 0)
            self._clear_redis(folder)
        return len(versions)

    def collect(self, keep: int, age_s: float = 0.0) -> list[Path]:
        """Removes leftovers, older versions that never were live, and all but the `keep` newest that were, or
        were live in the last `age_s` seconds. Keeps the live version and those not activated yet.
        VersionError: keep is negative."""
        if keep < 0:
            raise VersionError(
                f"keep is {keep}; expected how many versions stay beside the live one, 0 or more"
            )
        removed: list[Path] = []
        try:
            folder = self.opened()
        except FileNotFoundError:
            return []
        with folder:
            # Else a load is under way: it is its own
            with contextlib.suppress(VersionError), folder.lock("load.lock", 0):
                removed += self._clear_leftovers(folder)
            with folder.lock("record.lock"):
                record = self.record()
                lived = sorted(v for v in self._lived(record) if v != record.current)
                never = [v for v in self.versions() if v not in lived and v < record.current]
                old = lived[: max(0, len(lived) - keep)]
                if age_s:
                    after = dict(zip(lived, [*lived[1:], record.current], strict=True))
                    since = time.time() - age_s
                    old = [v for v in old if os.stat(self.path(after[v])).st_mtime < since]
                removed += self._unlink(folder, never + old)
        return removed + self._forget_redis()

    def mark_damaged(self, version: int, file: str = "") -> None:
        """Marks a version as damaged, for all processes. file: the damaged one; other versions that have it
        are marked, too."""
        with self.opened() as folder:
            for damaged in {version, *versions_with(folder, file)}:
                with contextlib.suppress(FileExistsError):
                    os.close(folder.create(f"{damaged}{DAMAGED}"))

    @contextlib.contextmanager
    def alone(self, name: str, wait_s: float = 600.0) -> Iterator[None]:
        """Holds the lock `name` of this model; waits up to `wait_s`."""
        self._make_folders()
        with self.opened() as folder, folder.lock(name, wait_s):
            yield

    # ---- parts ----

    def _make_folders(self) -> None:
        make_folder(self.root, self.owner)
        make_folder(self.folder, self.owner)

    def _readable_record(self) -> VersionRecord:
        """Returns the record, or an empty one if it is unreadable; for writers, who replace it."""
        try:
            return self.record()
        except AccessError:
            raise
        except VersionError:
            return VersionRecord()

    def _record_version(self, folder: Folder, version: int, sequence: int | None = None) -> None:
        """Flips to `version` with delta `sequence` (0: none; None: newest). Needs the record lock."""
        before = self._readable_record()
        lived = [v for v in self._lived(before) if v != version] + ([version] if version else [])
        sequence = newest_delta(folder, version, before.latest_sequence) if sequence is None else sequence
        latest = max([before.latest, version, *self.versions()])
        write_next(folder, VersionRecord(version, latest, tuple(lived), sequence, before.latest_sequence))
        flip(folder)

    def _unlink(self, folder: Folder, versions: list[int]) -> list[Path]:
        """Unlinks versions after recording their numbers, or later if space is short. Needs the record
        lock."""
        before, latest = self._readable_record(), max(versions, default=0)
        is_on_record = latest <= before.latest
        if not is_on_record:
            with unless_full():
                self._record_version(folder, before.current, before.sequence)
                is_on_record = True
        for version in versions:
            names = [f"{version}{SEGMENT}", f"{version}{DAMAGED}", *others_of(folder)[version]]
            for name in (*names, *(delta_name(version, s) for s in deltas_of(folder, version))):
                folder.unlink(name)
        if not is_on_record:
            write_next(folder, replace(self._readable_record(), latest=latest, lived=tuple(self.versions())))
            flip(folder)
        return [self.path(v) for v in versions]

    def _clear_leftovers(self, folder: Folder) -> list[Path]:
        """Removes partials and a version whose load died before it was live. Needs the load lock."""
        cleared = self._clear_partials(folder)
        with folder.lock("record.lock"):
            meant, before = intended(folder), self._readable_record()
            is_new = meant is not None and before.latest < meant.latest == meant.current
            if meant is not None and is_new and folder.exists(f"{meant.latest}{SEGMENT}"):
                cleared += self._unlink(folder, [meant.latest])
        return cleared

    def _clear_partials(self, folder: Folder) -> list[Path]:
        """Removes what unfinished loads left. Needs the load lock."""
        leftovers = leftovers_of(folder)
        for name in leftovers:
            folder.unlink(name)
        return [self.folder / name for name in leftovers]

    def _clear_redis(self, folder: Folder) -> list[Path]:
        """Removes rows from Redis that no version has. Needs the load lock."""
        if not notes_in(folder):
            return []
        try:
            headers = [open_segment(folder, self.path(v), "header").header for v in self.versions()]
        except (SegmentError, FileNotFoundError):  # it is damaged, or goes just now: its rows are not known
            return []
        used = {t.redis.seed for h in headers for t in h.remote if t.redis is not None}
        return [self.folder / name for name in clear_keys(folder, used)]

    def _forget_redis(self) -> list[Path]:
        """The same, unless a load is under way: that one does it at its end."""
        with contextlib.suppress(VersionError), self.opened() as folder, folder.lock("load.lock", 0):
            return self._clear_redis(folder)
        return []


def models(root: Path, owner: str | None = None) -> list[Model]:
    """Returns every model under `root`, by name."""
    return [Model(root, name, owner) for name in model_names(root, owner)]

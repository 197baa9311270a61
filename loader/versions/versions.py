"""Versions of models in shared memory: publish, activate, attach, remove.

    ROOT/MODEL/3.segment            a version, immutable
    ROOT/MODEL/3.1.rows             its first large table (loader.segment.layout), perhaps of version 2, too
    ROOT/MODEL/3.node1.segment      a copy of it on another NUMA node (loader.versions.copies)
    ROOT/MODEL/3.segment.verified   notes that it was read whole on this host (loader.versions.verified)
    ROOT/MODEL/3.damaged            marks version 3 as changed after publication; it is not attached any more
    ROOT/MODEL/4.segment.partial    a load under way, or left by a killed one (a load or `gc` removes it)
    ROOT/MODEL/current              the live version, replaced as a whole (loader.versions.record)
    ROOT/MODEL/3+17.delta           delta 17 over version 3 (loader.segment.delta, loader.versions.states)
    ROOT/MODEL/load.lock            held (flock) by the model's one load
    ROOT/MODEL/record.lock          held while `current` changes or a version is removed

Readers take no lock; a mapped segment outlives its unlinking. Version numbers are never reused. No other user
can change the files or hold a lock (loader.versions.folder).
"""

import contextlib
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tableside.loader.errors import AccessError, SegmentError, VersionError
from tableside.loader.model.model import NAME, check_name
from tableside.loader.model.nearest import did_you_mean
from tableside.loader.segment.delta import delta_name
from tableside.loader.segment.header import Header
from tableside.loader.segment.segment import Segment, Verify, open_segment
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.copies import check_copy, copying_writer, fill_copies, nodes_of, on_node
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
from tableside.loader.versions.partial import PartialTensor, partial_tensor
from tableside.loader.versions.record import (
    VersionRecord,
    flip,
    intended,
    read_record,
    reserve_room,
    unless_full,
    write_next,
)
from tableside.loader.versions.verified import verified_at, verify_once

DEFAULT_ROOT = Path("/dev/shm/tableside")
_PARTIAL, _SEGMENT, _DAMAGED = ".segment.partial", ".segment", ".damaged"


class Model:
    """The published versions of one model under `root`; holds no file open. owner: a user trusted beside this
    user and root. node: the NUMA node whose copies are attached, where a version has one. Every method raises
    AccessError where another user could change its files."""

    def __init__(self, root: Path, name: str, owner: str | None = None, node: int | None = None) -> None:
        self.root, self.name, self.owner, self.node = root, check_name(name), owner, node
        self.folder = root / name

    def on(self, node: int | None) -> "Model":
        """Returns this model with the copies of a NUMA node."""
        return Model(self.root, self.name, self.owner, node)

    # ---- questions ----

    def record(self) -> VersionRecord:
        """Reads the record; VersionRecord() if never published. VersionError: it is damaged."""
        try:
            with self.opened() as folder:
                return read_record(folder, self.name)
        except FileNotFoundError:
            return VersionRecord()

    def versions(self) -> list[int]:
        """Returns the published versions, oldest first."""
        return self._numbers(_SEGMENT)

    def loading_versions(self) -> list[int]:
        """Returns versions being loaded, or left by a killed load."""
        return self._numbers(_PARTIAL)

    def damaged_versions(self) -> list[int]:
        """Returns the published versions marked as damaged."""
        return self._numbers(_DAMAGED)

    def check_known(self) -> None:
        """Raises VersionError if nothing was ever published or is being loaded."""
        try:
            with self.opened():
                return
        except FileNotFoundError:
            raise self._missing("it was never published") from None

    def path(self, version: int) -> Path:
        return self.folder / f"{version}{_SEGMENT}"

    def current(self) -> int:
        """Returns the live version. VersionError: none is live."""
        if version := self.record().current:
            return version
        raise self._missing("no version is live")

    def last_good(self) -> list[int]:
        """Returns published, undamaged versions that were live once, newest first."""
        lived, damaged = self._lived(self.record()), self.damaged_versions()
        return [v for v in reversed(lived) if v not in damaged]

    def good(self) -> int:
        """Returns the live version, or the last good one if it is damaged. VersionError: none is live."""
        current = self.current()
        return current if current not in self.damaged_versions() else next(iter(self.last_good()), current)

    def attach(self, version: int | None = None, verify: Verify = "full") -> Segment:
        """Maps a version (None: live). SegmentError: damaged. VersionError: not published."""
        # The live version may be replaced and removed between reading its number and opening it
        for _ in range(3):
            number = self.current() if version is None else version
            try:
                return self._attach(number, verify)
            except FileNotFoundError:
                if version is not None or self.record().current == number:
                    break
        raise self._missing(f"version {number} is not published")

    def nodes(self, version: int) -> list[int]:
        """Returns the NUMA nodes on which a version lies; empty: nobody chose one."""
        with self.opened() as folder:
            return nodes_of(folder, version)

    def attach_all(self, version: int, verify: Verify) -> Iterator[Segment]:
        """Attaches a version, then each copy of it. Errors: as of `attach`."""
        for node in (None, *self.nodes(version)[1:]):
            yield self.on(node).attach(version, verify)

    def tensor(self, table: str, version: int | None = None, verify: Verify = "full") -> PartialTensor:
        """Returns a table of a version as a `PartialTensor`. Errors: see `attach`; VersionError: no such
        table."""
        return partial_tensor(self.attach(version, verify), table)

    def _attach(self, version: int, verify: Verify) -> Segment:
        path = self.path(version)
        with self.opened() as folder:
            if folder.exists(f"{version}{_DAMAGED}"):
                what = f"{path}: rows were found to have changed after they were written"
                raise SegmentError(f"{what}; activate another version, or load it again")
            if self.node is not None and folder.exists(copy := on_node(path.name, self.node)):
                check_copy(folder, path.name, copy)
                path = self.folder / copy
            segment = open_segment(folder, path, "always" if verify == "always" else "header")
            if verify == "full":
                verify_once(folder, segment)
        found = segment.header
        if (found.model, found.version) != (self.name, version):
            raise SegmentError(
                f"{path} holds version {found.version} of model {found.model!r}; expected version {version} "
                f"of {self.name!r}; "
                "somebody put it there under another name: remove it, and load the model again"
            )
        return segment

    def _missing(self, what: str) -> VersionError:
        versions, hint = self.versions(), ""
        if not versions:
            # Another user's root, in which only the models that one may read are open
            with contextlib.suppress(PermissionError):
                hint = did_you_mean(self.name, [m.name for m in models(self.root, self.owner)])
        known = ", ".join(map(str, versions)) or "none"
        remedy = hint or "; publish one with: tableside load model.toml"
        return VersionError(f"model {self.name!r} in {self.root}: {what} (versions there: {known}){remedy}")

    def verified_at(self, segment: Segment) -> float | None:
        """Returns when a process of this host read every byte of a version or delta; None: none did."""
        with self.opened() as folder:
            return verified_at(folder, segment)

    # ---- actions ----

    def verify(
        self,
        segment: Segment,
        verify: Verify,
        threads: int = 1,
        rest: float = 0.0,
        checked: Container[str] = (),
    ) -> float:
        """Reads an attached version or delta as `verify` says; returns when its bytes were read last, of
        time.time(), 0: never. threads, rest: of `Segment.verify`; checked: of `verify_once`. SegmentError: a
        checksum is wrong."""
        if verify == "header":
            return 0.0
        if verify == "full":
            with self.opened() as folder:
                return verify_once(folder, segment, threads, rest, checked)
        segment.verify(threads, rest)
        return time.time()

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
            with folder.lock("record.lock"):
                reserve_room(folder)
            version = max([self._readable_record().latest, *self.versions()], default=0) + 1
            try:
                yield version
            finally:
                self._clear_partials(folder)

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
        path = self.folder / f"{version}{_PARTIAL}"
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
            after = replace(before, latest=max(version, before.latest), lived=tuple(lived))
            if activate:
                lived = [v for v in lived if v != version] + [version]
                after = replace(after, current=version, lived=tuple(lived), sequence=sequence)
            # Of a killed compaction to another version of this number
            for stale in set(deltas_of(folder, version)) - {sequence}:
                folder.unlink(delta_name(version, stale))
            write_next(folder, after)
            folder.rename(f"{version}{_PARTIAL}", f"{version}{_SEGMENT}")
            try:
                flip(folder)
            except OSError:
                folder.unlink(f"{version}{_SEGMENT}")
                raise

    def activate(self, version: int, sequence: int | None = None) -> None:
        """Makes a version live with delta `sequence` (0: none; None: newest). VersionError: missing.
        SegmentError: damaged."""
        self.attach(version)
        with self.opened() as folder, folder.lock("record.lock"):
            if not folder.exists(f"{version}{_SEGMENT}"):  # removed while it was verified
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
        return len(versions)

    def collect(self, keep: int) -> list[Path]:
        """Removes leftovers, older versions that never were live, and all but the `keep` newest that were.
        Keeps the live version and those not activated yet. VersionError: keep is negative."""
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
                removed += self._unlink(folder, never + lived[: max(0, len(lived) - keep)])
        return removed

    def mark_damaged(self, version: int, file: str = "") -> None:
        """Marks a version as damaged, for all processes. file: the damaged one; other versions that have it
        are marked, too."""
        with self.opened() as folder:
            for damaged in {version, *versions_with(folder, file)}:
                with contextlib.suppress(FileExistsError):
                    os.close(folder.create(f"{damaged}{_DAMAGED}"))

    @contextlib.contextmanager
    def alone(self, name: str, wait_s: float = 600.0) -> Iterator[None]:
        """Holds the lock `name` of this model; waits up to `wait_s`."""
        self._make_folders()
        with self.opened() as folder, folder.lock(name, wait_s):
            yield

    # ---- parts ----

    def opened(self) -> Folder:
        """Opens the folder. FileNotFoundError: never published. AccessError: another user could change it."""
        with Folder(self.root, self.owner, only_a_way=True) as root:
            return Folder(self.folder, self.owner, root)

    def _make_folders(self) -> None:
        make_folder(self.root, self.owner)
        make_folder(self.folder, self.owner)

    def _numbers(self, suffix: str) -> list[int]:
        try:
            with self.opened() as folder:
                names = folder.names()
        except FileNotFoundError:
            return []
        numbers = [n.removesuffix(suffix) for n in names if n.endswith(suffix)]
        return sorted(int(n) for n in numbers if n.isdecimal() and n.isascii())

    def _lived(self, record: VersionRecord) -> list[int]:
        """Returns the published versions that were live once, by the last time they became so."""
        published = self.versions()
        return published if record.lived is None else [v for v in record.lived if v in published]

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
            names = [f"{version}{_SEGMENT}", f"{version}{_DAMAGED}", *others_of(folder)[version]]
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
            if meant is not None and is_new and folder.exists(f"{meant.latest}{_SEGMENT}"):
                cleared += self._unlink(folder, [meant.latest])
        return cleared

    def _clear_partials(self, folder: Folder) -> list[Path]:
        """Removes what unfinished loads left. Needs the load lock."""
        leftovers = leftovers_of(folder)
        for name in leftovers:
            folder.unlink(name)
        return [self.folder / name for name in leftovers]


def models(root: Path, owner: str | None = None) -> list[Model]:
    """Returns every model under `root`, by name."""
    try:
        with Folder(root, owner) as folder:
            names = [n for n in folder.names() if NAME.fullmatch(n) and (root / n).is_dir()]
    except FileNotFoundError:
        return []
    return [Model(root, n, owner) for n in names]

"""Versions of models in shared memory: publish, activate, attach, remove.

    ROOT/MODEL/3.segment            a version, immutable
    ROOT/MODEL/4.segment.partial    a load under way, or what a killed one left (the next load or `gc` removes it)
    ROOT/MODEL/current              {"current": 3, "latest": 4}, replaced as a whole: the flip; current 0: none is live
    ROOT/MODEL/load.lock            held (flock) by the one load of this model
    ROOT/MODEL/record.lock          held for the moment of changing `current` or removing a version

The kernel drops a lock when its holder dies. Readers take no lock: they map a segment and keep it; one that is unlinked
meanwhile lives as long as it is mapped. A version's number is never given twice, so a name means one set of bytes.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loader.errors import SegmentError, VersionError
from loader.model import NAME, check_name
from loader.segment import Segment, Verify

DEFAULT_ROOT = Path("/dev/shm/tableside")


@dataclass(frozen=True)
class Record:
    """Which version is live (0: none), and the highest number that was ever published."""

    current: int = 0
    latest: int = 0


class Model:
    """The published versions of one model under `root`. Holds no file open."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, check_name(name)
        self.folder = root / name

    # ---- questions ----

    def record(self) -> Record:
        """The flip record; a model that was never published has Record(0, 0)."""
        path = self.folder / "current"
        try:
            raw = json.loads(path.read_bytes())
            return Record(int(raw["current"]), int(raw["latest"]))
        except FileNotFoundError:
            return Record()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise VersionError(
                f"{path} is unreadable ({error!r}); write it anew with: tableside activate {self.name} VERSION"
            ) from error

    def versions(self) -> list[int]:
        """Published versions, oldest first."""
        names = [p.name.removesuffix(".segment") for p in self.folder.glob("*.segment")]
        return sorted(int(n) for n in names if n.isdecimal())

    def path(self, version: int) -> Path:
        return self.folder / f"{version}.segment"

    def current(self) -> int:
        """The live version; VersionError where there is none."""
        if version := self.record().current:
            return version
        raise self._missing("no version is live")

    def attach(self, version: int | None = None, verify: Verify = "full") -> Segment:
        """Maps a version (None: the live one). SegmentError: it is damaged. VersionError: it is not published."""
        for _ in range(3):  # the live version may be replaced and removed between reading its number and opening it
            number = self.current() if version is None else version
            try:
                return Segment(self.path(number), verify)
            except FileNotFoundError:
                if version is not None or self.record().current == number:
                    break
        raise self._missing(f"version {number} is not published")

    def _missing(self, what: str) -> VersionError:
        known = ", ".join(map(str, self.versions())) or "none"
        return VersionError(
            f"model {self.name!r} in {self.root}: {what} (versions there: {known}); publish one with: tableside load model.toml"
        )

    # ---- actions ----

    @contextlib.contextmanager
    def loading(self) -> Iterator[int]:
        """Holds the load lock; yields the next version's number. Clears what a killed load left behind.

        VersionError: another load of this model is under way.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VersionError(f"cannot make {self.folder}: {error.strerror}; choose another --root") from error
        with self._lock("load.lock", wait=False) as free:
            if not free:
                raise VersionError(f"another load of model {self.name!r} is under way; wait for it, or end that process")
            self._clear_partials()
            yield self._next_version()

    def partial_path(self, version: int) -> Path:
        return self.folder / f"{version}.segment.partial"

    def publish(self, version: int, activate: bool = True) -> None:
        """Makes the sealed partial of `version` visible, and live where `activate`. Caller holds `loading`.

        The record is written before anything is visible, so that a full file system publishes nothing.
        """
        with self._lock("record.lock"):
            before = self._readable_record() if activate else self.record()
            self._write_new_record(Record(version if activate else before.current, max(version, before.latest)))
            self.partial_path(version).rename(self.path(version))
            try:
                self._flip()
            except OSError:
                self.path(version).unlink()
                raise

    def activate(self, version: int) -> None:
        """Makes a published version the live one. VersionError: it is not there. SegmentError: it is damaged."""
        if not self.path(version).exists():
            raise self._missing(f"version {version} is not published")
        Segment(self.path(version))
        with self._lock("record.lock"):
            if not self.path(version).exists():  # removed while it was verified
                raise self._missing(f"version {version} is not published")
            self._record_version(version)

    def remove(self, version: int) -> None:
        """Unlinks a version that is not live; who has it mapped keeps it."""
        if not self.path(version).exists():
            raise self._missing(f"version {version} is not published")
        with self._lock("record.lock"):
            if self.record().current == version:
                raise VersionError(
                    f"version {version} of {self.name!r} is live; activate another one first, or remove the whole model"
                )
            self._unlink([version])

    def remove_all(self) -> int:
        """Removes every version; returns how many there were. Servers keep what they have mapped.

        The record stays, without a live version, so that no number is given again.
        """
        if not self.versions():
            raise self._missing("it is not published")
        with self._lock("load.lock", wait=False) as free:
            if not free:
                raise VersionError(f"a load of model {self.name!r} is under way; wait for it, or end that process")
            with self._lock("record.lock"):
                versions = self.versions()
                self._record_version(0)
                self._unlink(versions)
        return len(versions)

    def collect(self, keep: int) -> list[Path]:
        """Removes leftovers of killed loads, and published versions but the live one and the `keep` newest others."""
        if not self.folder.is_dir():
            return []
        removed = []
        with self._lock("load.lock", wait=False) as free:
            if free:
                removed += self._clear_partials()
        with self._lock("record.lock"):
            live = self.record().current
            others = [v for v in self.versions() if v != live]
            removed += self._unlink(others[: max(0, len(others) - max(0, keep))])
        return removed

    # ---- parts ----

    def _next_version(self) -> int:
        return max([self._readable_record().latest, *self.versions()], default=0) + 1

    def _readable_record(self) -> Record:
        """The record, or an empty one where it is unreadable: for writers, who are about to replace it."""
        try:
            return self.record()
        except VersionError:
            return Record()

    def _record_version(self, version: int) -> None:
        """Flips to `version`. Caller holds the record lock."""
        self._write_new_record(Record(version, max([self._readable_record().latest, version, *self.versions()])))
        self._flip()

    def _write_new_record(self, record: Record) -> None:
        """Writes the next record beside the current one. Caller holds the record lock."""
        (self.folder / "current.new").write_text(json.dumps({"current": record.current, "latest": record.latest}))

    def _flip(self) -> None:
        os.replace(self.folder / "current.new", self.folder / "current")

    def _unlink(self, versions: list[int]) -> list[Path]:
        """Unlinks versions, after their numbers are on record. Caller holds the record lock."""
        if not versions:
            return []
        self._record_version(self._readable_record().current)
        paths = [self.path(v) for v in versions]
        for path in paths:
            path.unlink(missing_ok=True)
        return paths

    def _clear_partials(self) -> list[Path]:
        """Removes unfinished segments. Caller holds the load lock."""
        leftovers = list(self.folder.glob("*.partial"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return leftovers

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Holds a lock of this model's folder, `name`, waiting for who has it; the kernel frees it with a killed holder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock(name):
            yield

    @contextlib.contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Holds a file lock; yields False, without it, where `wait` is False and another process has it.

        The folder exists, and stays: a lock's file is never removed, so all who wait for it wait for the same one.
        """
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(fd)
            yield False
            return
        try:
            yield True
        finally:
            os.close(fd)


def models(root: Path) -> list[Model]:
    """Every model that has a folder under `root`, by name."""
    if not root.is_dir():
        return []
    return [Model(root, p.name) for p in sorted(root.iterdir()) if p.is_dir() and NAME.fullmatch(p.name)]


def damaged(model: Model) -> dict[int, str]:
    """Reads every byte of every version; the error of each that is damaged."""
    found = {}
    for version in model.versions():
        try:
            Segment(model.path(version))
        except SegmentError as error:
            found[version] = str(error)
    return found

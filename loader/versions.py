"""Versions of models in shared memory: publish, activate, attach, remove.

    ROOT/MODEL/3.segment            a version, immutable
    ROOT/MODEL/4.segment.partial    a load under way, or what a killed one left (the next load or `gc` removes it)
    ROOT/MODEL/current              {"current": 3, "latest": 4}, replaced as a whole: the flip
    ROOT/MODEL/load.lock            held (flock) by the one load of this model
    ROOT/MODEL/record.lock          held for the moment of changing `current` or removing a version

The kernel drops a lock when its holder dies. Readers take no lock: they map a segment and keep it; one that is unlinked
meanwhile lives as long as it is mapped. A version's number is never given twice, so a name means one set of bytes.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loader.errors import SegmentError, VersionError
from loader.model import check_name
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
        except (ValueError, KeyError, TypeError) as error:
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
        """Makes the sealed partial of `version` visible, and live where `activate`. Caller holds `loading`."""
        os.rename(self.partial_path(version), self.path(version))
        with self._lock("record.lock"):
            current = version if activate else self._readable_record().current
            self._write_record(Record(current, max(version, self._readable_record().latest)))

    def activate(self, version: int) -> None:
        """Makes a published version the live one. VersionError: it is not there. SegmentError: it is damaged."""
        if not self.path(version).exists():
            raise self._missing(f"version {version} is not published")
        Segment(self.path(version))
        with self._lock("record.lock"):
            latest = max([self._readable_record().latest, version, *self.versions()])
            self._write_record(Record(version, latest))

    def remove(self, version: int) -> None:
        """Unlinks a version that is not live; who has it mapped keeps it."""
        if not self.folder.is_dir():
            raise self._missing(f"version {version} is not published")
        with self._lock("record.lock"):
            record = self._readable_record()
            if record.current == version:
                raise VersionError(
                    f"version {version} of {self.name!r} is live; activate another one first, or remove the whole model"
                )
            self._write_record(
                Record(
                    record.current,
                    max([record.latest, version if self.path(version).exists() else 0, *self.versions()]),
                )
            )
            try:
                self.path(version).unlink()
            except FileNotFoundError:
                raise self._missing(f"version {version} is not published") from None

    def remove_all(self) -> int:
        """Removes the model with every version; returns how many there were. Servers keep what they have mapped."""
        if not self.folder.is_dir():
            raise self._missing("it is not published")
        with self._lock("load.lock", wait=False) as free:
            if not free:
                raise VersionError(f"a load of model {self.name!r} is under way; wait for it, or end that process")
            count = len(self.versions())
            shutil.rmtree(self.folder)
        return count

    def collect(self, keep: int) -> list[Path]:
        """Removes leftovers of killed loads, and published versions but the live one and the `keep` newest others."""
        removed = []
        with self._lock("load.lock", wait=False) as free:
            if free:
                removed += self._clear_partials()
        live = self.record().current
        others = [v for v in self.versions() if v != live]
        for version in others[: max(0, len(others) - keep)]:
            self.remove(version)
            removed.append(self.path(version))
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

    def _write_record(self, record: Record) -> None:
        temporary = self.folder / "current.new"  # one writer: the record lock is held
        temporary.write_text(json.dumps({"current": record.current, "latest": record.latest}))
        os.replace(temporary, self.folder / "current")

    def _clear_partials(self) -> list[Path]:
        """Removes unfinished segments. Caller holds the load lock."""
        leftovers = list(self.folder.glob("*.partial"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return leftovers

    @contextlib.contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Holds a file lock; yields False, without it, where `wait` is False and another process has it."""
        if not self.folder.is_dir():
            yield True
            return
        while True:
            fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    yield False
                    return
                if not _is_still(fd, self.folder / name):
                    continue  # the model was removed while we waited, and its lock with it
                yield True
                return
            finally:
                os.close(fd)


def _is_still(fd: int, path: Path) -> bool:
    """Whether `path` still names the open file `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def models(root: Path) -> list[Model]:
    """Every model that has a folder under `root`, by name."""
    if not root.is_dir():
        return []
    return [Model(root, p.name) for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")]


def damaged(model: Model) -> dict[int, str]:
    """Reads every byte of every version; the error of each that is damaged."""
    found = {}
    for version in model.versions():
        try:
            Segment(model.path(version))
        except SegmentError as error:
            found[version] = str(error)
    return found

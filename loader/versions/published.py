"""The published versions of a model, for readers: which there are, which one is live, attaching one. Readers
take no lock; a mapped segment outlives its unlinking. The files are those of `loader.versions.versions`."""

import contextlib
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Self

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.model.model import NAME, check_name
from tableside.loader.model.nearest import did_you_mean
from tableside.loader.segment.segment import Segment, Verify, open_segment
from tableside.loader.versions.copies import check_copy, nodes_of, on_node
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.partial import PartialTensor, partial_tensor
from tableside.loader.versions.record import VersionRecord, read_record
from tableside.loader.versions.verified import verified_at, verify_once

PARTIAL, SEGMENT, DAMAGED = ".segment.partial", ".segment", ".damaged"


class PublishedModel:
    """The published versions of one model under `root`; holds no file open. owner: a user trusted beside this
    user and root. node: the NUMA node whose copies are attached, where a version has one. Every method raises
    AccessError where another user could change its files."""

    def __init__(self, root: Path, name: str, owner: str | None = None, node: int | None = None) -> None:
        self.root, self.name, self.owner, self.node = root, check_name(name), owner, node
        self.folder = root / name

    def on(self, node: int | None) -> Self:
        """Returns this model with the copies of a NUMA node."""
        return type(self)(self.root, self.name, self.owner, node)

    def record(self) -> VersionRecord:
        """Reads the record; VersionRecord() if never published. VersionError: it is damaged."""
        try:
            with self.opened() as folder:
                return read_record(folder, self.name)
        except FileNotFoundError:
            return VersionRecord()

    def versions(self) -> list[int]:
        """Returns the published versions, oldest first."""
        return self._numbers(SEGMENT)

    def loading_versions(self) -> list[int]:
        """Returns versions being loaded, or left by a killed load."""
        return self._numbers(PARTIAL)

    def damaged_versions(self) -> list[int]:
        """Returns the published versions marked as damaged."""
        return self._numbers(DAMAGED)

    def check_known(self) -> None:
        """Raises VersionError if nothing was ever published or is being loaded."""
        try:
            with self.opened():
                return
        except FileNotFoundError:
            raise self._missing("it was never published") from None

    def path(self, version: int) -> Path:
        return self.folder / f"{version}{SEGMENT}"

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
        try:
            with self.opened() as folder:
                return nodes_of(folder, version)
        except FileNotFoundError:
            return []

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
            if folder.exists(f"{version}{DAMAGED}"):
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
                others = [n for n in model_names(self.root, self.owner) if n != self.name]
                hint = did_you_mean(self.name, others)
        known = ", ".join(map(str, versions)) or "none"
        remedy = hint or "; publish one with: tableside load model.toml"
        return VersionError(f"model {self.name!r} in {self.root}: {what} (versions there: {known}){remedy}")

    def verified_at(self, segment: Segment) -> float | None:
        """Returns when a process of this host read every byte of a version or delta; None: none did."""
        with self.opened() as folder:
            return verified_at(folder, segment)

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

    def opened(self) -> Folder:
        """Opens the folder. FileNotFoundError: never published. AccessError: another user could change it."""
        with Folder(self.root, self.owner, only_a_way=True) as root:
            return Folder(self.folder, self.owner, root)

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


def model_names(root: Path, owner: str | None = None) -> list[str]:
    """Returns the names of the models under `root`, sorted."""
    try:
        with Folder(root, owner) as folder:
            return [n for n in folder.names() if NAME.fullmatch(n) and (root / n).is_dir()]
    except FileNotFoundError:
        return []

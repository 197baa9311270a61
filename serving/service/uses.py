"""What running servers are asked for, while somebody wants to know: a folder that workers look for.

    ROOT/.uses-MODEL/           locked by who asks, as long as workers shall sample
        asked                   JSON: began (time.monotonic of this host), seconds
        VERSION-RANDOM.uses     what a worker samples (quant.cpu.uses), 1 MiB

The folder goes with whoever made it. One that is not locked is a killed one's, and nobody samples for it.
"""

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import AccessError
from tableside.loader.files import take_lock
from tableside.loader.versions.folder import Folder
from tableside.quant.cpu.uses import Uses, changes_of, read_uses, sample_uses
from tableside.serving.errors import ServingError
from tableside.serving.model.request import Features

_BYTES = 1 << 20  # of a sample
_ASKED = "asked"
_FILE = re.compile(r"([0-9]+)-[0-9a-f]+\.uses")
_LOCK_S, _READS, _PAUSE_S = 5.0, 100, 0.01


def salts_of(tables: Iterable[str]) -> NDArray[np.uint64]:
    """Returns the salts of tables by their names [n]: the same in every process."""
    return np.array(
        [int.from_bytes(blake2b(t.encode(), digest_size=8).digest(), "little") for t in tables], np.uint64
    )


def _path(root: Path, model: str) -> Path:
    return root / f".uses-{model}"


@dataclass(frozen=True)
class Asking:
    """A folder that workers write samples to. seconds: for how long."""

    path: Path
    began: float
    seconds: float

    def wait(self) -> None:
        """Waits until workers have sampled."""
        time.sleep(max(0.0, self.began + self.seconds - time.monotonic()))

    def read(self, version: int, features: int) -> list[Uses]:
        """Returns the samples of the workers that serve a version."""
        found = []
        for file in sorted(self.path.glob("*.uses")):
            named = _FILE.fullmatch(file.name)
            if named is not None and int(named[1]) == version:
                found.append(_read(file, features))
        return found


def _read(path: Path, features: int) -> Uses:
    """ServingError: the process that writes it ended while it did."""
    with path.open("rb") as file:
        for _ in range(_READS):
            data = os.pread(file.fileno(), _BYTES, 0)
            found = read_uses(data, features)
            if found is not None and changes_of(os.pread(file.fileno(), 8, 0)) == changes_of(data):
                return found
            time.sleep(_PAUSE_S)
    raise ServingError(f"{path} is cut short: a worker ended while it wrote there; ask again")


@contextlib.contextmanager
def asking(root: Path, model: str, seconds: float) -> Iterator[Asking]:
    """Has the workers of this host that serve a model of `root` sample what they are asked for. ServingError:
    another process asks, or the root cannot be written to."""
    path = _path(root, model)
    try:
        if path.exists():
            with Folder(path) as old:
                if not take_lock(old.fd):
                    raise ServingError(f"another process samples the ids of {model} ({path}): wait for it")
                shutil.rmtree(path)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ServingError(f"cannot make {path}: {error.strerror}; ask as the user who publishes") from error
    with Folder(path) as folder:
        try:
            if not take_lock(folder.fd, _LOCK_S):
                raise ServingError(f"{path} is locked by another process: wait for it")
            found = Asking(path, time.monotonic(), seconds)
            with folder.replacing(_ASKED) as partial:
                fd = folder.create(partial)
                os.write(fd, json.dumps({"began": found.began, "seconds": seconds}).encode())
                os.close(fd)
            yield found
        finally:
            shutil.rmtree(path, ignore_errors=True)


class LiveSample:
    """What one worker samples of one model while it is asked. Belongs to one thread."""

    def __init__(self, folder: Folder, began: float, seconds: float) -> None:
        self._folder, self._began, self._seconds = folder, began, seconds
        self._samples: dict[Features, tuple[mmap.mmap, NDArray[np.uint64]]] = {}
        self.has_room = True

    @classmethod
    def wanted(cls, root: Path, model: str, owner: str | None) -> "LiveSample | None":
        """Opens the folder of whoever asks; None: nobody does. AccessError: it is another user's."""
        try:
            folder = Folder(_path(root, model), owner)
        except FileNotFoundError:
            return None
        try:
            if _is_locked(folder):
                return cls(folder, **json.loads(folder.read(_ASKED)))
        except (FileNotFoundError, AccessError):
            pass  # who asks begins or ends now
        folder.close()
        return None

    @property
    def is_wanted(self) -> bool:
        return time.monotonic() < self._began + self._seconds and _is_locked(self._folder)

    def add(self, features: Features, places: Any, inputs: Any) -> None:
        """Adds a request of a version with these features. OSError: there is no room for the sample."""
        if (sample := self._samples.get(features)) is None:
            sample = self._samples[features] = self._new(features)
        ms = int(1000 * (time.monotonic() - self._began))
        if ms < 1000 * self._seconds:
            sample_uses(sample[0], places, inputs, sample[1], ms >= 500 * self._seconds, ms)

    def _new(self, features: Features) -> tuple[mmap.mmap, NDArray[np.uint64]]:
        fd = self._folder.create(f"{features.version}-{uuid.uuid4().hex}.uses")
        try:
            os.posix_fallocate(fd, 0, _BYTES)  # else writing to it could end the process
            return mmap.mmap(fd, _BYTES), salts_of(features.tables)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._folder.close()


def _is_locked(folder: Folder) -> bool:
    if not take_lock(folder.fd, is_shared=True):
        return True
    fcntl.flock(folder.fd, fcntl.LOCK_UN)
    return False

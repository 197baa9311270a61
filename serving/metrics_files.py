"""The files that workers count in. Each server has a folder. In it lie a file for each worker and type, and for each type one
file with the counts of all workers that ended.

prometheus_client maps `counter_PID.db` and `histogram_PID.db` into each worker (`serving.shared_counts`). Here they are summed:

* `fold` adds what a worker that ended had counted to `counter_folded.db` and `histogram_folded.db`, and removes its files.
  1. The sums, and the entry "folded PID" = 1, are written to a file of another name, which is then renamed.  2. The worker's file
  is removed.  3. The entry becomes 0, in place, as another process may get that PID.
* `totals` lists the folder first, then reads the folded file, then the workers' files whose PIDs that one does not list. A file
  that is gone by then was folded meanwhile, and reading begins again. So a scrape has every count once, whenever a fold, or a
  kill that ends a fold, comes in between.
"""

import contextlib
import fcntl
import functools
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict

from tableside.loader.huge_pages import huge_page_bytes
from tableside.serving import worker_gauges
from tableside.serving.errors import ServingError
from tableside.serving.shared_counts import NOWHERE, REMEDY, VARIABLE, SharedCounts, entry_bytes, reserve

logger = logging.getLogger("tableside")

TYPES = ("counter", "histogram")
_FOLDED = "folded "  # and a PID: the entry of a file that is in the sums
_TORN = (ValueError, RuntimeError, KeyError, IndexError, TypeError, struct.error)  # what a torn file makes of its parser
_TRIES = 100  # of a reader; each further one takes a fold that ends meanwhile
_NAME = "tableside_worker_restarts"
RESTARTS = json.dumps([_NAME, f"{_NAME}_total", {}, "Workers that ended by themselves, or were killed, and were replaced."])
_supervisor: dict[str, SharedCounts] = {}  # by folder: the supervisor's own counts
_reported: set[str] = set()  # torn files, which are logged once


# ---- the folder ----


@contextlib.contextmanager
def metrics_folder(root: Path) -> Iterator[None]:
    """A folder among the models for the workers' counts: in memory, and out of reach of what cleans temporary folders.

    It lies beside `root` where the models are another user's, and in /dev/shm where `root` is on a hugetlbfs, whose smallest file
    is a huge page. Folders of servers that were killed are removed: nobody holds their locks. Where no folder can be made the
    server runs without counts.
    """
    if not os.access(root, os.W_OK):
        root = root.parent
    if root.is_dir() and huge_page_bytes(root):
        root = Path("/dev/shm")
    for stale in root.glob(".metrics-*"):
        _remove_if_free(stale)
    lock = -1
    folder = root / ".metrics-none"  # is not there: every file in it is refused
    try:
        folder, lock = _new_folder(root)
    except OSError as error:
        logger.error(
            "no folder for metrics in %s (%s): served without counters and histograms; free shared memory (tableside gc), then "
            "start the server again",
            root,
            error.strerror,
        )
    os.environ[VARIABLE] = str(folder)
    worker_restarted(0)  # so that the counter is there
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if (counts := _supervisor.pop(str(folder), None)) is not None:
            counts.close()
        if lock >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _new_folder(root: Path) -> tuple[Path, int]:
    """A new folder, and the lock on it: on the folder itself, so that it takes no file."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=".metrics-", dir=root))
        with contextlib.suppress(FileNotFoundError):  # another server that starts may hold it for a stale one
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        logger.debug("%s belongs to a server that runs", folder)
    finally:
        os.close(lock)


# ---- folding: in the supervisor ----


def worker_ended(pid: int | None) -> None:
    """Folds what a worker of this server counted. Called when it has been joined; again does nothing."""
    if pid is not None and (folder := os.environ.get(VARIABLE)):
        fold(Path(folder), pid)
        with contextlib.suppress(OSError):  # it does not count any more in any case
            worker_gauges.forget(Path(folder), pid)


def worker_restarted(times: int = 1) -> None:
    """Counts that a worker ended by itself, or was killed, and is replaced. In the supervisor, whose file no fold touches."""
    if not (folder := os.environ.get(VARIABLE)) or not Path(folder).is_dir():
        return
    if folder not in _supervisor:
        _supervisor[folder] = SharedCounts(f"{folder}/counter_supervisor.db")
    counts = _supervisor[folder]
    counts.write_value(RESTARTS, counts.read_value(RESTARTS)[0] + times, 0.0)  # type: ignore[no-untyped-call]


def fold(folder: Path, pid: int) -> None:
    """Adds what the process `pid`, which has ended, counted to the folded files, and removes its own.

    Only the supervisor folds. Where there is no room the files stay as they are, and still count.
    """
    for kind in TYPES:
        try:
            _end_fold(folder, kind)
            _fold(folder, kind, pid)
        except OSError as error:
            logger.warning("%s_%d.db in %s is kept: folding it failed (%s); %s", kind, pid, folder, error.strerror, REMEDY)


def _fold(folder: Path, kind: str, pid: int) -> None:
    folded, dead = folder / f"{kind}_folded.db", folder / f"{kind}_{pid}.db"
    if not dead.exists():
        return
    sums = dict(_counts(_read_or_report(folded))) if folded.exists() else {}
    for key, value in _counts(_read_or_report(dead)):
        sums[key] = sums.get(key, 0.0) + value
    is_folded, partial = f"{_FOLDED}{pid}", folded.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    reserve(partial, mmap.PAGESIZE + sum(map(entry_bytes, (*sums, is_folded))))
    file: Any = MmapedDict(str(partial))  # type: ignore[no-untyped-call]
    try:
        for key, value in (*sums.items(), (is_folded, 1.0)):
            file.write_value(key, value, 0.0)
        partial.replace(folded)
        dead.unlink()
        file.write_value(is_folded, 0.0, 0.0)
    finally:
        file.close()


def _end_fold(folder: Path, kind: str) -> None:
    """Ends a fold that was killed after its sums had been renamed."""
    folded = folder / f"{kind}_folded.db"
    listed = _listed(_read_or_report(folded)) if folded.exists() else ()
    for pid in listed:
        (folder / f"{kind}_{pid}.db").unlink(missing_ok=True)
        file: Any = MmapedDict(str(folded))  # type: ignore[no-untyped-call]
        file.write_value(f"{_FOLDED}{pid}", 0.0, 0.0)
        file.close()


# ---- reading: in whichever worker is asked ----


def collect(folder: Path) -> Iterator[Metric]:
    """Counters and histograms, summed over all workers of the server, those that ended included. A torn file is left out."""
    for kind, sums in totals(folder).items():
        yield from _metrics(kind, sums)


def totals(folder: Path) -> dict[str, dict[str, float]]:
    """type -> prometheus_client's key of a value -> its sum over workers. ServingError: folds come in between over and over."""
    for _ in range(_TRIES):
        try:
            return {kind: _total(folder, kind) for kind in TYPES}
        except FileNotFoundError:
            continue
    raise ServingError(f"metrics files in {folder} went {_TRIES} times while they were read; ask again")


def _total(folder: Path, kind: str) -> dict[str, float]:
    """FileNotFoundError: a file was folded meanwhile."""
    files = sorted(folder.glob(f"{kind}_*.db"))  # first: of what goes after this, the folded file knows
    folded = folder / f"{kind}_folded.db"
    found = _read_or_report(folded) if folded.exists() else {}
    sums = dict(_counts(found))
    skipped = {folded, *(folder / f"{kind}_{pid}.db" for pid in _listed(found))}
    for file in files:
        if file not in skipped:
            for key, value in _counts(_read_or_report(file)):
                sums[key] = sums.get(key, 0.0) + value
    return sums


def _counts(found: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((key, value) for key, value in found.items() if key != NOWHERE and not key.startswith(_FOLDED))


def _listed(found: Mapping[str, float]) -> list[str]:
    """The PIDs whose files are in the sums, and may still be there."""
    return [key.removeprefix(_FOLDED) for key, value in found.items() if key.startswith(_FOLDED) and value]


def _read_or_report(file: Path) -> dict[str, float]:
    """The values of a file; none of one that is torn, which is logged once. FileNotFoundError: it is gone."""
    try:
        found: dict[str, float] = {}
        if file.stat().st_size:  # else its worker has just begun
            found = {key: value for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file))}  # type: ignore[no-untyped-call]
            for key, _ in _counts(found):
                _parsed(key)
    except _TORN as error:
        if str(file) not in _reported:
            logger.warning("metrics file %s is damaged and left out: %r", file, error)
        _reported.add(str(file))
        return {}
    return found


@functools.cache
def _parsed(key: str) -> tuple[str, str, dict[str, str], str]:
    """Family, name, labels and help of a value."""
    family, name, labels, text = json.loads(key)
    return str(family), str(name), dict(labels), str(text)


def _metrics(kind: str, sums: Mapping[str, float]) -> Iterator[Metric]:
    """The metrics of a type; the buckets of histograms are added up, each counting those below it."""
    found: dict[str, Metric] = {}
    buckets: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, str, float]]] = {}
    for key, value in sums.items():
        family, name, labels, text = _parsed(key)
        metric = found.setdefault(family, Metric(family, text, kind))
        if (bound := labels.get("le")) is None:
            metric.add_sample(name, labels, value)
        else:
            others = tuple((n, v) for n, v in labels.items() if n != "le")
            buckets.setdefault((family, others), []).append((float(bound), bound, value))
    for (family, others), counts in buckets.items():
        total = 0.0
        for _, bound, value in sorted(counts):
            total += value
            found[family].add_sample(f"{family}_bucket", {**dict(others), "le": bound}, total)
        found[family].add_sample(f"{family}_count", dict(others), total)
    yield from found.values()

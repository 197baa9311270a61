"""The room that a change of one of ten tables takes in shared memory, and the time.

    python benchmarks/shared_files.py               # a model of 3.2 GB; some 4 minutes, 8 GB of /dev/shm and
                                                    # 11 GB of the folder for temporary files
    python benchmarks/shared_files.py --rows 300000 # smaller; printed and not written

Once with a file for each large table, as versions are written, and once with one file for all, as they were.
A load of a whole checkpoint in which one table changed, `load --only` of one table, and a compaction after
changes of one, all while two workers serve the model and take the new version; the old one is removed then
(`--keep 0`). The peak is the most that lies in the file
system until that is done. Every byte of each new version is read and verified, and all rows are compared.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import console, report, shared_folder
from http_cases import serving
from large_model import until

from tableside import Client
from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment import layout
from tableside.loader.segment.memory import available_bytes
from tableside.loader.versions.versions import Model

TABLES, ROWS, DIM, CHANGED, NAME = 10, 4_000_000, 64, "t0", "m"
SIDES = {"a file for each large table": layout.LARGE_PAGES, "one file": 1 << 40}
MOST = 1.15  # of the model and what changed


@contextmanager
def peak_bytes(where: Path) -> Iterator[list[int]]:
    """The most bytes taken meanwhile of what was free at the beginning; looked at every 2 ms."""
    found, stop, before = [0], threading.Event(), available_bytes(where)

    def look() -> None:
        while not stop.wait(0.002):
            found[0] = max(found[0], before - available_bytes(where))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def new_version(model: Model, url: str, old: int) -> None:
    """Waits until both workers answer from the live version, and removes the old one."""
    with Client(url) as client:
        in_a_row = 0

        def reached() -> bool:
            nonlocal in_a_row
            (served,) = client.models()
            in_a_row = in_a_row + 1 if served["version"] == model.current() else 0
            return in_a_row >= 32

        until(reached, "the new version")
    model.remove(old)


def specs(folder: Path, rows: int) -> list[ModelSpec]:
    """Checkpoints in fp16: a first one, one in which one table changed, and one of another change of that
    table alone."""
    base = np.random.default_rng(7).standard_normal((rows, DIM), dtype=np.float32).astype(np.float16)
    first = {f"t{n}": base + np.float16(n) for n in range(TABLES)}
    for name, arrays in (
        ("first", first),
        ("second", first | {CHANGED: -first[CHANGED]}),
        ("third", {CHANGED: base * np.float16(2)}),
    ):
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    tables = {f"t{n}": {"key": f"t{n}", "row_format": "int8", "row_alignment": 16} for n in range(TABLES)}
    names = [f"{name}.npz" for name in ("first", "second", "third")]
    return [parse_model({"name": NAME, "checkpoint": name, "tables": tables}, folder) for name in names]


def check(model: Model, before: dict[str, np.ndarray], changed: slice) -> None:
    """All tables but one are the bytes of before, and rows `changed` of that one are others."""
    after = model.attach(verify="always")
    for name, rows in before.items():
        same = np.array_equal(after.tables[name].packed, rows)
        assert same == (name != CHANGED), name
    assert (after.tables[CHANGED].packed[changed] != before[CHANGED][changed]).any(1).all()


def measure(side: str, root: Path, of: list[ModelSpec]) -> Iterator[dict[str, Any]]:
    layout.LARGE_PAGES = SIDES[side]
    first, second, third = of
    load(first, root)
    model = Model(root, NAME)
    size = model.attach().size
    changes = np.random.default_rng(8).standard_normal((1000, DIM), dtype=np.float32)

    works: dict[str, tuple[Callable[[], object], slice]] = {
        "load": (lambda: load(second, root), slice(None)),
        "load --only": (lambda: load(third, root, LoadSettings(only=(CHANGED,))), slice(None)),
        "compact": (lambda: compact(model), slice(0, 1000)),
    }
    command = "-m", "tableside", "serve", NAME, "--root", root, "--port", 0, "--workers", 2
    with serving(*command, "--scrub-hours", 0) as server:
        for what, (work, changed) in works.items():
            if what == "compact":
                apply(model, ChangeBatch(iter([TableChanges(CHANGED, np.arange(1000), changes)])))
            old = model.current()
            held = model.attach(old)  # and read, as a served version has been
            before = {name: table.packed.copy() for name, table in held.tables.items()}
            del held
            with peak_bytes(root) as peak:
                started = time.perf_counter()
                work()
                seconds = time.perf_counter() - started
                new_version(model, server.url, old)
            check(model, before, changed)
            changed_bytes = before[CHANGED].nbytes
            yield {
                "what": what,
                "written as": side,
                "model GB": size / 1e9,
                "changed GB": changed_bytes / 1e9,
                "peak GB": (size + peak[0]) / 1e9,
                "of model + changed": (size + peak[0]) / (size + changed_bytes),
                "seconds": seconds,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="of each table (default: %(default)s)")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        of = specs(Path(folder), options.rows)
        for side in SIDES:
            with shared_folder() as root:
                for row in measure(side, root, of):
                    found.append(row)
                    console.print(row)
    for row in found:
        if row["written as"] != "one file":
            row["met"] = row["of model + changed"] <= MOST
    if options.rows == ROWS:
        report("shared_files", "Room for a change of one of ten tables", found)


if __name__ == "__main__":
    main()

"""Hostile checkpoints and files of changes: handmade lies (`file_cases`) and random changes of fields, given
to the real loader in a bounded child.

The child may use 4 GiB of addresses beyond what it begins with. It opens each checkpoint, loads what matrices
it finds, and says what came of it and by how much its memory grew. Outcomes:

    refused    an error of one line that names the file
    true       loaded, and every matrix has the honest file's rows
    other      loaded, with other rows: no checksum covers what changed (safetensors, .npy, fields of a pickle
               made anew)
    broken     another exception, a signal, an error of several lines, no answer in time, memory beyond the
               bound; must be 0
"""

import argparse
import json
import random
import resource
import select
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import numpy as np

from campaigns import file_cases, file_data
from campaigns.common import console, folders, random_of
from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.deltas.change_files import read_changes, rows_in
from tableside.loader.errors import LoaderError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.segment import Segment

BEYOND_BYTES = 4 << 30
GROWTH_BYTES = 1 << 30  # the most that one file may cost
DEADLINE_S = 300
_LOADED = 4  # matrices of a file that are loaded
_SPECIAL = (0, 1, 0x7F, 0x80, 0xFF)


# ---- the child ----


def _memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def _load(path: Path, root: Path) -> tuple[str, str]:
    """Loads the first tables of a checkpoint: matrices, else tables of raw ids, whose rows are not
    compared."""
    with open_checkpoint(path) as found:
        keys = [k for k, m in found.matrices.items() if m.check(found.path).bytes < 1 << 26][:_LOADED]
        refused = [k for k in found.matrices if found.matrix(k).bytes >= 1 << 26]
        raw = [] if found.matrices else list(found.keyed_tables)[:_LOADED]
    if not keys and not raw:
        return (
            "refused",
            f"{path}: no matrix in it ({len(refused)} of them too large here, {len(found.skipped)} left out)",
        )
    tables = {f"t{i}": {"key": key, "row_format": "fp32"} for i, key in enumerate(keys)}
    tables |= {f"r{i}": {"key": key, "row_format": "fp32", "ids": "raw"} for i, key in enumerate(raw)}
    spec = parse_model({"name": "m", "checkpoint": str(path), "tables": tables}, Path())
    served = Segment(load(spec, root, LoadSettings(threads=1)).path).tables
    honest = file_data.ROWS.tobytes()
    same = all(
        t.dim == file_data.SHAPE[1] and np.ascontiguousarray(t.packed).tobytes() == honest
        for t in served.values()
    )
    return ("true", "") if same else ("other", f"rows of {[*keys, *raw]} differ")


def _read_changes(path: Path) -> tuple[str, str]:
    rows = rows_in(path)
    vectors = [c.vectors.tobytes() for c in read_changes(path, None)]
    return ("true", "") if b"".join(vectors) == file_data.DATA else ("other", f"{rows} rows differ")


def _try(path: Path, root: Path) -> tuple[str, str]:
    try:
        return _read_changes(path) if path.stem == file_data.CHANGES else _load(path, root)
    except LoaderError as error:
        text = str(error)
        named = (
            str(path) in text
            or repr(str(path))[1:-1] in text
            or path.name in text
            or str(path.parent) in text
        )
        if "\n" in text.replace(str(path), "") or not named:
            return "broken", f"an error of several lines, or without the file's name: {text}"
        return "refused", text
    finally:
        shutil.rmtree(root, ignore_errors=True)


def child(root: Path) -> None:
    """Reads a path a line (JSON); answers each with a line: outcome, why, and bytes by which memory grew
    at its peak."""
    _try(Path("/nothing"), root)
    limit = _memory("VmSize") + BEYOND_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
        before = _memory("VmRSS")
        try:
            outcome, why = _try(Path(json.loads(line)), root)
        except Exception as error:  # noqa: BLE001  (what it is, is what the campaign reports)
            outcome, why = "broken", f"{type(error).__name__}: {error!s:.300}"
        grown = _memory("VmHWM") - before
        if grown > GROWTH_BYTES:
            outcome, why = "broken", f"memory grew by {grown >> 20:,} MiB; {why}"
        print(json.dumps([outcome, why, grown]), flush=True)


# ---- the parent ----


@dataclass(frozen=True)
class Answer:
    outcome: str
    why: str
    grown_bytes: int = 0


class Child:
    """A child that tries checkpoints, replaced where one killed it or kept it busy. A context manager."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, path: Path) -> Answer:
        """What the loader makes of a checkpoint."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(str(path)).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            return Answer(*json.loads(line))
        self.close()
        return Answer(
            "broken",
            f"the child ended with {process.returncode}" if ready else f"no answer in {DEADLINE_S} s",
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "campaigns.files", "--child", str(self._root)]
        repository = Path(__file__).parent.parent
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repository, close_fds=True
        )
        return self._process

    def close(self) -> None:
        """Ends the child."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random changes: bits, bytes, numbers of 2, 4 or 8 bytes, parts that are cut out, doubled or
    filled."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, width = rng.randrange(len(found)), rng.choice((1, 2, 4, 8))
        match rng.randrange(5):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.choice(_SPECIAL)
            case 2:
                found[at : at + width] = bytes([rng.choice(_SPECIAL)]) * width
            case 3:
                found[at : at + rng.randrange(1, 20)] = b""
            case _:
                found[at:at] = found[at : at + rng.randrange(1, 20)]
        found = found or bytearray(b"x")
    return bytes(found)


def run(mutations: int, seed: int) -> dict[str, Any]:
    """Tries every handmade case, and `mutations` random ones of each honest file. "KIND.OUTCOME" -> how
    many; "failures"."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    grown = 0
    with folders() as (root, _), Child(root / "m") as asked:
        for case in file_cases.cases():
            with TemporaryDirectory(dir="/dev/shm", prefix="tableside-files-") as folder:
                answer = asked.ask(case.write(Path(folder)))
            counts[f"handmade.{answer.outcome}"] += 1
            grown = max(grown, answer.grown_bytes)
            if answer.outcome not in ("refused", case.expected):
                failures.append(f"{case.name}: {answer.outcome}, {answer.why}")
        for kind, write in file_cases.HONEST.items():
            for number in range(mutations):
                with TemporaryDirectory(dir="/dev/shm", prefix="tableside-files-") as folder:
                    path = write(Path(folder))
                    files = [p for p in sorted(Path(folder).iterdir()) if p.is_file() and not p.is_symlink()]
                    rng = random_of(seed, kind, number)
                    victim = rng.choice(files)
                    victim.write_bytes(mutate(victim.read_bytes(), rng))
                    answer = asked.ask(path)
                counts[f"{kind}.{answer.outcome}"] += 1
                grown = max(grown, answer.grown_bytes)
                if answer.outcome == "broken" or (answer.outcome == "other" and kind in ("pt", "npz")):
                    failures.append(f"{kind} {number}: {answer.outcome}, {answer.why}")
    return {**counts, "grown_mib": grown >> 20, "failures": failures}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mutations", type=int, default=1000, help="random changes of each kind (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    figures = run(given.mutations, given.seed)
    for failure in figures.pop("failures"):
        console.print(failure, markup=False)
    console.print_json(json.dumps(figures))
    sys.exit(1 if any("broken" in name for name in figures) else 0)


if __name__ == "__main__":
    main()

"""Loads of values that were quantized before, beside copies of the same bytes into shared memory.

    python benchmarks/copied_load.py        # docs/ngram.md shows it

A safetensors file with a table of 256 e4m3 values a row and its e8m0 scales, in the page cache. A load reads
it, puts values and scales together, checks every row, hashes it, and publishes it. Beside it `cp` into the
same /dev/shm, and a copy by as many threads as the load has, in pieces as large. In turns; the bytes that
were published are compared first.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import console, report, shared_folder
from load import in_threads
from safetensors.torch import save_file

from tableside.loader.load.load import load
from tableside.loader.load.settings import PIECE_BYTES
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.versions.versions import Model

DIM, ROUNDS = 256, 7


def write_checkpoint(path: Path, gib: float) -> int:
    """Returns its rows."""
    rows = int(gib * 2**30) // (DIM + DIM // 32)
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 0x7F, (rows, DIM), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(110, 130, (rows, DIM // 32), dtype=np.uint8))
    save_file({"t.weight": values.view(torch.float8_e4m3fn), "t.weight_scale": scales}, path)
    return rows


def by_threads(path: Path, to: Path) -> float:
    """Seconds of a copy by as many threads as cores."""
    size, step = path.stat().st_size, 16 << 20
    source, target = os.open(path, os.O_RDONLY), os.open(to, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.posix_fallocate(target, 0, size)

    def part(number: int) -> None:
        buffer = bytearray(PIECE_BYTES)
        for at in range(number * step, min((number + 1) * step, size), PIECE_BYTES):
            piece = memoryview(buffer)[: min(PIECE_BYTES, size - at)]
            os.preadv(source, [piece], at)
            os.pwrite(target, piece, at)

    seconds = in_threads(part, -(-size // step))
    os.close(source)
    os.close(target)
    return seconds


def by_cp(path: Path, to: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(path), str(to)], check=True)
    return time.perf_counter() - started


def by_load(spec: ModelSpec, root: Path) -> float:
    started = time.perf_counter()
    load(spec, root)
    seconds = time.perf_counter() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    gib = parser.parse_args().gib
    with tempfile.TemporaryDirectory() as folder, shared_folder() as root:
        path, copy = Path(folder) / "t.safetensors", root / "copy"
        root.mkdir()
        rows = write_checkpoint(path, gib)
        table = {"key": "t.weight", "row_format": "fp8_e4m3_block32"}
        spec = parse_model({"name": "t", "checkpoint": str(path), "tables": {"t": table}}, Path(folder))
        load(spec, root)
        packed = Model(root, "t").attach().tables["t"].packed
        data = path.read_bytes()[-rows * (DIM + DIM // 32) :]
        values, scales = data[: rows * DIM], data[rows * DIM :]
        assert packed[:, :DIM].tobytes() == values and packed[:, DIM : DIM + DIM // 32].tobytes() == scales
        del packed, data, values, scales
        calls: dict[str, Callable[[], float]] = {
            "load": lambda: by_load(spec, root),
            "cp": lambda: by_cp(path, copy),
            "threads": lambda: by_threads(path, copy),
        }
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(ROUNDS + 1):
            for name, call in calls.items():
                copy.unlink(missing_ok=True)
                shutil.rmtree(root / "t", ignore_errors=True)
                seconds = call()
                if number:
                    found[name].append(seconds)
            console.print(f"round {number} of {ROUNDS}")
        size = path.stat().st_size
    medians = {name: sorted(times)[ROUNDS // 2] for name, times in found.items()}
    result = [
        {"way": name, "seconds": t, "GB/s": size / t / 1e9, "of the load": medians["load"] / t}
        for name, t in medians.items()
    ]
    report("copied_load", f"a load of {size / 1e9:.1f} GB of e4m3 beside copies", result, gib=gib)


if __name__ == "__main__":
    main()

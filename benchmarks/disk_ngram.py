"""Rows of an n-gram table on a disk: a decode step's rows beside fio on the same file, and tokens a second.

    python benchmarks/disk_ngram.py                    # 8 GB of fp8 rows below build/; some two minutes
    python benchmarks/disk_ngram.py --gb 1             # smaller; printed and not written

A token takes 48 uniform rows of 264 bytes (256 fp8 values, a scale for each 32) through `RowGather` on the
CPU. Rows: one token after another, nothing in the page cache, beside fio's reads of 4 KiB at random places of
the same file, 48 at a time, and by 32 threads without a pause. Tokens: two transformer layers of width 1024
before the memory and two behind it, one sequence, with the table in /dev/shm, on the disk, and on the disk
with `prefetch` before the first layer. Vectors are compared first; ways take turns.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import report, shared_folder
from disk_rows import ROUNDS, SECONDS, TABLE, fio, forget, options_of
from make_model import publish_random

from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat
from tableside.torch import RowGather

DIM, HEADS, WIDTH, TOKENS, TURNS, ROW_FORMAT = 256, 48, 1024, 8, 60, RowFormat.FP8_E4M3_BLOCK32


class Ids:
    """Rows of one token after another, none of which came before."""

    def __init__(self, rows: int) -> None:
        self._rows, self._random = rows, torch.Generator().manual_seed(1)

    def __call__(self) -> torch.Tensor:
        return torch.randint(0, self._rows, (HEADS,), generator=self._random)


def cold(segment: Segment, module: RowGather, ids: Ids) -> float:
    """Rows a second."""
    forget(segment.files[1].path, segment)
    rows, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < SECONDS:
        module(ids())
        rows += HEADS
    return rows / elapsed


class Decoder(torch.nn.Module):
    """A language model's step for one sequence, but for its attention's past."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True) for _ in range(4)
        ]
        self.layers = torch.nn.ModuleList(layers)
        self.memory = torch.nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, hidden: torch.Tensor, rows: Callable[[], torch.Tensor]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 2:
                hidden = hidden + self.memory(rows().float().flatten())
            hidden = layer(hidden)
        return hidden


@torch.no_grad()
def tokens(decoder: Decoder, begin: Callable[[torch.Tensor], Callable[[], torch.Tensor]], ids: Ids) -> float:
    """Seconds of a few tokens."""
    hidden, began = torch.zeros(1, 1, WIDTH), time.perf_counter()
    for _ in range(TOKENS):
        decoder(hidden, begin(ids()))
    return time.perf_counter() - began


def main() -> None:
    options = options_of(__doc__)
    root = options.folder / "disk-ngram"
    table = {TABLE: (int(options.gb * 1e9) // ROW_FORMAT.row_bytes(DIM, 4), DIM, ROW_FORMAT.label)}
    ids = Ids(table[TABLE][0])
    torch.set_num_threads(1)
    try:
        with shared_folder() as memory:
            for each in (root, memory):
                publish_random(each, "m", table, pooling="none")
            segment = Model(root, "m").attach(verify="header")
            disk, here = (RowGather("m", TABLE, root=str(r), verify="header") for r in (root, memory))
            asked = ids()
            torch.testing.assert_close(disk(asked), here(asked), rtol=0, atol=0)
            torch.testing.assert_close(disk.prefetch(asked).wait(), here(asked), rtol=0, atol=0)
            read: dict[str, list[float]] = {"ours": [], "fio, 48 at a time": [], "fio, 32 threads": []}
            for _ in range(ROUNDS):
                read["ours"].append(cold(segment, disk, ids))
                read["fio, 48 at a time"].append(fio(segment, False, HEADS))
                read["fio, 32 threads"].append(fio(segment, False))
            ours = read["ours"]
            rows = [
                {
                    "reads": name,
                    "k_s": statistics.median(each) / 1e3,
                    "ours over it": statistics.median(a / b for a, b in zip(ours, each, strict=True)),
                }
                for name, each in read.items()
            ]
            ways: dict[str, Callable[[torch.Tensor], Callable[[], torch.Tensor]]] = {
                "in /dev/shm": lambda ids: lambda: here(ids),
                "on the disk": lambda ids: lambda: disk(ids),
                "on the disk, ahead": lambda ids: disk.prefetch(ids).wait,
            }
            decoder = Decoder().eval()
            found: dict[str, list[float]] = {name: [] for name in ways}
            forget(segment.files[1].path, segment)
            for _ in range(TURNS):
                for name, begin in ways.items():
                    found[name].append(tokens(decoder, begin, ids))
        resident = sum(found["in /dev/shm"])
        steps: list[dict[str, Any]] = [
            {"table": name, "tokens_s": TOKENS * TURNS / sum(each), "of resident": resident / sum(each)}
            for name, each in found.items()
        ]
        if options.gb < 8:
            os.environ["TRIAL"] = "1"
        report("disk_ngram", f"n-gram rows of {options.gb:g} GB on a disk", steps, decode=rows)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

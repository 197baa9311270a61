"""Published tables as PyTorch modules, against torch.nn.EmbeddingBag over fp32 rows and FBGEMM's IntNBit
module.

int8 rows of D 64, uniform ids, 20 a bag. Every side gets what its users give it: ours and torch's int64 ids
and offsets, FBGEMM's module int32 ids and offsets. With 26 features ours gets TorchRec's KeyedJaggedTensor,
FBGEMM's one module all tables, and torch has a module for each. Before anything is timed our vectors are
compared with FBGEMM's, of the same bytes, bit for bit, and with torch's, whose rows are ours, dequantized.
FBGEMM's module is called as it is in compiled rows too: it does not compile.

The overhead is what a call takes beyond the kernel itself, called with places that were made before, on the
same ids.
"""

import argparse
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch
from common import alternate, report, shared_folder
from make_model import publish_random

from tableside.loader.tbe.tbe import TbeTable, bind, init_tbe
from tableside.quant import LookupKind, Place, Pooling
from tableside.quant.cpu.address_space import BASE, MEMORY
from tableside.torch import Bags, EmbeddingBags

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

DIM, IDS, MANY = 64, 20, 26
BATCHES = (1, 64, 4096)
TARGETS = {1: 3.0, 64: 1.0, 4096: 1.3}  # times FBGEMM's rows/s
OVERHEAD_US = 8.0
# Sums of 20 values below 8 in another order: 20 additions, each rounded to half an ulp of at most 160.
TOLERANCE = IDS * IDS * 8 * 2.0**-24


class Sides:
    """The features of one published model, on all sides."""

    def __init__(self, root: str, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.ours = EmbeddingBags(model, root=root, threads=threads, verify="header")
        served = self.ours._published.now().served
        self.names = self.ours.features
        self.served, tables = served, [served.features[name].table for name in self.names]
        self.rows = tables[0].rows
        self.fbgemm = init_tbe(
            [TbeTable(n, self.rows, DIM, t.row_format) for n, t in zip(self.names, tables, strict=True)]
        )
        bind(self.fbgemm, served.segment, self.names)
        values = [
            torch.from_numpy(served.backend.lookup(t, np.arange(t.rows), pooling=Pooling.NONE))
            for t in tables
        ]
        self.torch_device = [torch.nn.EmbeddingBag.from_pretrained(v, mode="sum") for v in values]

    def calls(self, batch: int, rng: np.random.Generator, compiles: bool) -> dict[str, Callable[[], Any]]:
        """A call of each side, over batches that are enough not to stay in the caches."""
        features = len(self.names)
        count = max(4, min(500, 2_000_000 // (batch * IDS * features)))
        ids = [torch.from_numpy(rng.integers(0, self.rows, features * batch * IDS)) for _ in range(count)]
        offsets = torch.arange(0, batch * IDS, IDS)
        ends = torch.arange(0, features * batch * IDS + 1, IDS, dtype=torch.int32)
        lengths = torch.full((features * batch,), IDS, dtype=torch.int32)
        given: list[Any] = [KeyedJaggedTensor(list(self.names), i, lengths=lengths) for i in ids]
        if features == 1:
            given = [{self.names[0]: (i, offsets)} for i in ids]
        ours, fbgemm, plain = (
            cycle(given),
            cycle([i.int() for i in ids]),
            cycle([i.chunk(features) for i in ids]),
        )
        module: Any = self.ours
        modules: list[Any] = list(self.torch_device)
        if compiles:
            torch.compiler.reset()
            module, modules = torch.compile(module), [torch.compile(m) for m in modules]
        return {
            "ours": lambda: module(next(ours)),
            "fbgemm": lambda: self.fbgemm(next(fbgemm), ends),
            "torch": lambda: [m(i, offsets) for m, i in zip(modules, next(plain), strict=True)],
        }

    def case(self, batch: int, compiles: bool) -> dict[str, Any]:
        """Compares the sides, then times them."""
        calls = self.calls(batch, np.random.default_rng(batch), compiles)
        found = calls["ours"]()
        found = found[self.names[0]] if len(self.names) == 1 else found.values()
        assert torch.equal(found, calls["fbgemm"]()), "FBGEMM's vectors differ"
        torch.testing.assert_close(found, torch.cat(calls["torch"](), 1), rtol=0, atol=TOLERANCE)
        seconds = alternate(calls)
        ids, ratio = len(self.names) * batch * IDS, seconds["fbgemm"] / seconds["ours"]
        return {
            "features": len(self.names),
            "threads": torch.get_num_threads(),
            "called": "compiled" if compiles else "eager",
            "batch": batch,
            **{f"{side} us": s * 1e6 for side, s in seconds.items()},
            **{f"{side} M rows/s": ids / s / 1e6 for side, s in seconds.items()},
            "of fbgemm": ratio,
            "of torch": seconds["torch"] / seconds["ours"],
            "target": TARGETS[batch],
            "met": bool(ratio >= TARGETS[batch]),
        }

    def overhead(self, form: str) -> dict[str, Any]:
        """What a call with one bag, or 64 of them, takes beyond the kernel."""
        name, bags = self.names[0], 64 if form.endswith("64") else 1
        ids = torch.arange(bags * IDS) * 7 % self.rows
        lengths, offsets = torch.full((bags,), IDS, dtype=torch.int32), torch.arange(0, bags * IDS, IDS)
        told = {name: Bags(ids, lengths=lengths) if form.startswith("lengths") else (ids, offsets)}
        out = torch.empty(bags, DIM)
        bound = self.served.features[name]
        place = Place(
            0,
            ids.data_ptr() - BASE,
            ids.numel(),
            lengths.data_ptr() - BASE,
            0,
            bags,
            -1,
            out.data_ptr() - BASE,
        )
        planner = self.served.backend.planner(
            [LookupKind(bound.table, bound.pooling)], torch.get_num_threads()
        )
        kernel = planner.plan(np.array([place], np.int64).tobytes())
        kernel.run(MEMORY, MEMORY)
        assert torch.equal(out, self.ours(told)[name])
        seconds = alternate({"kernel": lambda: kernel.run(MEMORY, MEMORY), "module": lambda: self.ours(told)})
        added = (seconds["module"] - seconds["kernel"]) * 1e6
        return {
            "form": form,
            "kernel us": seconds["kernel"] * 1e6,
            "module us": seconds["module"] * 1e6,
            "overhead us": added,
            "target us": OVERHEAD_US,
            "met": added <= OVERHEAD_US,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="rows of the one table (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="threads of each side (default: 1 2)"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with shared_folder() as root:
        publish_random(root, "one", {"f0": (options.rows, DIM, "int8")})
        publish_random(root, "many", {f"f{n}": (options.rows // MANY, DIM, "int8") for n in range(MANY)})
        for threads in options.threads:
            for model in ("one", "many"):
                sides = Sides(str(root), model, threads)
                rows += [
                    sides.case(batch, compiles)
                    for compiles in (False, True)
                    if model == "one" or not compiles
                    for batch in BATCHES
                ]
        one = Sides(str(root), "one", 1)
        overheads = [
            one.overhead(form) for form in ("lengths of 1", "offsets of 1", "lengths of 64", "offsets of 64")
        ]
        del one, sides
    report("torch_module", "a PyTorch module against FBGEMM's and torch's, int8 D 64", rows)
    report("torch_module_overhead", "what a module adds to the kernel, one feature, one core", overheads)


if __name__ == "__main__":
    main()

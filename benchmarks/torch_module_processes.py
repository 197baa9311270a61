"""What processes take that look up in the same tables: published ones through a PyTorch module, and copies of
their own.

Memory is PSS (shared pages divided by their users) summed over 1, 2 and 4 processes, while all of them hold
their tables and have read every row. What they hold:

    published   tableside.torch.EmbeddingBags over one version in shared memory, int8
    torchrec    TorchRec's EmbeddingBagCollection, quantized by itself to int8, read by torch.load; it has
                each table twice, as it was quantized and in rows of 16 bytes' multiples for FBGEMM's module
    fp32        torch.nn.EmbeddingBag over the same rows, dequantized, read by torch.load
    nothing     Python, torch and TorchRec alone; `tables MB` of the others is what they take beside that,
                without the pages of libraries, which processes of others share too

Before anything is measured the vectors of all three are compared. Ours and fp32's are sums of the same values
in another order; TorchRec quantizes the rows once more.
"""

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from common import report, shared_folder
from make_model import publish_random
from process_memory import memory_together

from tableside.loader.versions.versions import Model
from tableside.torch import EmbeddingBags

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.inference.modules import quantize_embeddings

DIM, TABLES, IDS, BAGS = 64, 4, 20, 4096
PROCESSES = (1, 2, 4)
KINDS = ("published", "torchrec", "fp32")
TARGET = 0.1  # of a copy of the tables: the most that a further process with published ones adds


def save(root: Path, folder: Path, rows: int) -> None:
    """The published rows as fp32 modules' weights, and as TorchRec's quantized collection."""
    model = Model(root, "ads")
    weights = {
        f"t{n}": torch.cat([torch.from_numpy(v) for _, v in model.tensor(f"t{n}").chunks()])
        for n in range(TABLES)
    }
    torch.save(weights, folder / "fp32.pt")
    configs = [
        EmbeddingBagConfig(name=t, embedding_dim=DIM, num_embeddings=rows, feature_names=[t]) for t in weights
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    collection.load_state_dict({f"embedding_bags.{t}.weight": w for t, w in weights.items()}, assign=True)
    holder = torch.nn.ModuleDict({"collection": collection})
    torch.save(
        quantize_embeddings(holder, dtype=torch.qint8, inplace=True)["collection"], folder / "torchrec.pt"
    )


def read(kind: str, folder: Path, root: Path) -> Any:
    """What a process calls with a KeyedJaggedTensor, [bags, tables * DIM]."""
    if kind == "published":
        bags = EmbeddingBags("ads", root=str(root), verify="header")
        return lambda features: bags(features).values()
    if kind == "torchrec":
        collection = torch.load(folder / "torchrec.pt", weights_only=False)
        return lambda features: collection(features).values()
    weights = torch.load(folder / "fp32.pt", weights_only=True)
    modules = {
        t: torch.nn.EmbeddingBag.from_pretrained(w, mode="sum", include_last_offset=True)
        for t, w in weights.items()
    }
    return lambda features: torch.cat(
        [m(features[t].values(), features[t].offsets()) for t, m in modules.items()], 1
    )


def batch(ids: torch.Tensor) -> KeyedJaggedTensor:
    """Bags of IDS of these ids [bags * IDS], for every table."""
    lengths = torch.full((TABLES * (ids.numel() // IDS),), IDS, dtype=torch.int32)
    return KeyedJaggedTensor([f"t{n}" for n in range(TABLES)], ids.repeat(TABLES), lengths=lengths)


def held(kind: str, folder: Path, root: Path, rows: int) -> Any:
    """What a process holds that has read every row. Its vectors are let go."""
    torch.set_num_threads(1)
    if kind == "nothing":
        return None
    call = read(kind, folder, root)
    for start in range(0, rows, BAGS * IDS):
        call(batch(torch.arange(start, start + BAGS * IDS) % rows))
    return call


def compare(folder: Path, root: Path, rows: int) -> None:
    """Asserts that all three give the same vectors, within what their rows and sums are rounded by."""
    features = batch(torch.randint(0, rows, (BAGS * IDS,), generator=torch.Generator().manual_seed(0)))
    with torch.inference_mode():
        found = {kind: read(kind, folder, root)(features) for kind in KINDS}
    weights = torch.load(folder / "fp32.pt", weights_only=True)
    most = max(float(w.abs().max()) for w in weights.values())
    widest = max(float((w.max(1).values - w.min(1).values).max()) for w in weights.values())
    sums = IDS * IDS * most * 2.0**-24  # IDS additions, each rounded to half an ulp of at most IDS * most
    # A value is off by half a step, and by what rounding scale and bias to fp16 makes of it.
    again = IDS * (widest / 255 / 2 + (widest + most) * 2.0**-11)
    torch.testing.assert_close(found["published"], found["fp32"], rtol=0, atol=sums)
    torch.testing.assert_close(found["torchrec"], found["fp32"], rtol=0, atol=sums + again)


def measure(folder: Path, root: Path, rows: int) -> list[dict[str, Any]]:
    found = {
        (kind, n): memory_together(held, (kind, folder, root, rows), n)
        for kind in ("nothing", *KINDS)
        for n in PROCESSES
    }
    pss = {at: sum(one["pss"] for one in of_it) / 1e6 for at, of_it in found.items()}
    without_files = {
        at: sum(one["pss"] - one["pss_file"] for one in of_it) / 1e6 for at, of_it in found.items()
    }
    tables = {(kind, n): mb - without_files["nothing", n] for (kind, n), mb in without_files.items()}
    return [
        {
            "tables": kind,
            "processes": n,
            "pss MB": pss[kind, n],
            "shared memory MB": sum(one["pss_shmem"] for one in found[kind, n]) / 1e6,
            "tables MB": tables[kind, n],
            "of fp32": tables[kind, n] / tables["fp32", n],
        }
        for kind, n in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of each of the four tables (default: %(default)s)"
    )
    options = parser.parse_args()
    with shared_folder() as root, tempfile.TemporaryDirectory() as name:
        publish_random(root, "ads", {f"t{n}": (options.rows, DIM, "int8") for n in range(TABLES)})
        segment_mb = Model(root, "ads").attach(verify="header").size / 1e6
        save(root, Path(name), options.rows)
        compare(Path(name), root, options.rows)
        rows = measure(Path(name), root, options.rows)
    tables = {(row["tables"], row["processes"]): row["tables MB"] for row in rows}
    added = {kind: (tables[kind, 4] - tables[kind, 1]) / 3 for kind in KINDS}
    report(
        "torch_module_processes",
        f"processes that look up in {TABLES} tables of {options.rows:,} rows, D {DIM}",
        rows,
        segment_mb=segment_mb,
        added_mb={
            kind: round(mb, 1) for kind, mb in added.items()
        },  # by each further process, beside Python and torch
        target=f"a further process adds at most {TARGET} of the segment",
        met=bool(added["published"] <= TARGET * segment_mb),
    )


if __name__ == "__main__":
    main()

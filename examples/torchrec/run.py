"""A TorchRec DLRM, trained, and its EmbeddingBagCollection swapped for published tables: what that does to
AUC and memory.

Trains TorchRec's own DLRM on clicks with a planted structure, in a minute on two cores; publishes its tables
as int8; swaps them in (`tableside.torch.swap_embeddings`); and compares with TorchRec's quantized collection
(`quantize_embeddings`): AUC on held-out rows, and the memory that 1, 2 and 4 processes take together, Python
and torch included. Exit code 0 only if no quantized model loses more than 0.002 of AUC, and a second process
with published tables saves at least half of what a copy of them takes.
"""

import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.dlrm import DLRM

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.serving.evaluation.quality import quality
from tableside.torch import swap_embeddings

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from process_memory import memory_together

console = Console(highlight=False, soft_wrap=True, width=120)
DIM, DENSE, HISTORY = 64, 4, 5
ROWS = {"user": 2_000_000, "item": 60_000}
FEATURES = {"user": ["user"], "item": ["item", "history"]}  # of each table
TRAINED, HELD_OUT, BATCH = 1_500_000, 50_000, 4096
COLLECTION = "sparse_arch.embedding_bag_collection"
Kind = Literal["fp32", "published", "torchrec"]


class Clicks:
    """Rows: a user, an item, items that the user clicked before, four numbers; and whether the item was
    clicked."""

    def __init__(self, rows: int, seed: int) -> None:
        hidden, rng = np.random.default_rng(0), np.random.default_rng(seed)
        tastes = hidden.standard_normal((2_000, 4), np.float32)[np.arange(ROWS["user"]) % 2_000]
        kinds = hidden.standard_normal((ROWS["item"], 4), np.float32)
        weight = hidden.standard_normal(DENSE)
        self.user = (ROWS["user"] * rng.random(rows) ** 4).astype(np.int64)
        self.item = (ROWS["item"] * rng.random(rows) ** 4).astype(np.int64)
        self.history = (ROWS["item"] * rng.random((rows, HISTORY)) ** 4).astype(np.int64)
        self.context = rng.standard_normal((rows, DENSE)).astype(np.float32)
        logit = (tastes[self.user] * (kinds[self.item] + 0.3 * kinds[self.history].mean(1))).sum(1)
        self.label = (rng.random(rows) < 1 / (1 + np.exp(1.0 - logit - 0.7 * self.context @ weight))).astype(
            np.float32
        )

    def batch(self, rows: slice) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """The numbers [rows, DENSE] and the ids of these rows."""
        ids = {"user": self.user[rows, None], "item": self.item[rows, None], "history": self.history[rows]}
        values = torch.from_numpy(np.concatenate([of.reshape(-1) for of in ids.values()]))
        lengths = torch.from_numpy(
            np.concatenate([np.full(len(of), of.shape[1], np.int32) for of in ids.values()])
        )
        features = KeyedJaggedTensor(keys=list(ids), values=values, lengths=lengths)
        return torch.from_numpy(self.context[rows]), features


def new_model(device: str = "cpu") -> DLRM:
    """TorchRec's DLRM. device: of the tables; on "meta" they take no memory."""
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=FEATURES[name],
            pooling=PoolingType.MEAN,
        )
        for name, rows in ROWS.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    for bags in collection.embedding_bags.values():
        bags.sparse = True  # a step touches the rows of its batch alone
    return DLRM(collection, DENSE, [64, DIM], [128, 64, 1])


def train(clicks: Clicks) -> DLRM:
    torch.manual_seed(0)
    model = new_model()
    for bags in model.sparse_arch.embedding_bag_collection.embedding_bags.values():
        torch.nn.init.normal_(bags.weight, std=0.05)
    tables = [p for n, p in model.named_parameters() if COLLECTION in n]
    dense = [p for n, p in model.named_parameters() if COLLECTION not in n]
    optimizers = [torch.optim.Adagrad(tables, lr=0.05), torch.optim.Adam(dense, lr=0.002)]
    for at in track(range(0, len(clicks.label) - BATCH, BATCH), "training", console=console, transient=True):
        rows = slice(at, at + BATCH)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(*clicks.batch(rows)).squeeze(1), torch.from_numpy(clicks.label[rows])
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.eval()


def publish(model: DLRM, folder: Path, root: Path) -> None:
    """Its tables as int8, and the model's weights without them and with them in `folder`."""
    state = model.state_dict()
    torch.save(state, folder / "trained.pt")
    torch.save({name: value for name, value in state.items() if COLLECTION not in name}, folder / "dense.pt")
    torch.save(quantize_embeddings(model, dtype=torch.qint8, inplace=False), folder / "torchrec.pt")
    spec: dict[str, Any] = {
        "name": "dlrm",
        "checkpoint": "trained.pt",
        "tables": {t: {"key": f"{COLLECTION}.embedding_bags.{t}.weight", "row_format": "int8"} for t in ROWS},
        "features": {f: {"table": t, "pooling": "mean"} for t, of in FEATURES.items() for f in of},
    }
    load(parse_model(spec, folder), root)


def read(kind: Kind, folder: Path, root: Path) -> torch.nn.Module:
    """The trained model with its own tables, published ones, or TorchRec's quantized ones."""
    if kind == "torchrec":
        quantized: torch.nn.Module = torch.load(folder / "torchrec.pt", weights_only=False)
        return quantized
    model = new_model("meta").eval()
    if kind == "published":
        swap_embeddings(model, "dlrm", root=str(root), verify="header")
    state = torch.load(folder / ("dense.pt" if kind == "published" else "trained.pt"))
    model.load_state_dict(state, strict=kind == "fp32", assign=True)
    return model


def scores(model: torch.nn.Module, clicks: Clicks) -> np.ndarray:
    with torch.inference_mode():
        parts = [
            model(*clicks.batch(slice(at, at + BATCH))).squeeze(1)
            for at in range(0, len(clicks.label), BATCH)
        ]
    found: np.ndarray = torch.sigmoid(torch.cat(parts)).numpy()
    return found


def serving(kind: Kind, folder: Path, root: Path) -> torch.nn.Module:
    """What a serving process holds, once it has scored rows."""
    torch.set_num_threads(1)
    model = read(kind, folder, root)
    scores(model, Clicks(HELD_OUT, 3))
    return model


def memory(kind: Kind, processes: int, folder: Path, root: Path) -> int:
    """Bytes of so many serving processes together, by PSS: what is shared counts once."""
    return sum(found["pss"] for found in memory_together(serving, (kind, folder, root), processes))


def main() -> None:
    started = time.monotonic()
    clicks, held_out = Clicks(TRAINED, 1), Clicks(HELD_OUT, 2)
    model = train(clicks)
    console.print(f"trained on {TRAINED:,} rows in {time.monotonic() - started:.0f} s")
    root = Path("/dev/shm") / f"tableside-torchrec-{uuid.uuid4().hex[:8]}"
    kinds: tuple[Kind, ...] = ("fp32", "published", "torchrec")
    table = Table("tables", "AUC", *(f"{n} processes, MB" for n in (1, 2, 4)), box=None)
    auc, taken = {}, {}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            publish(model, folder, root)
            for kind in kinds:
                auc[kind] = quality(held_out.label, scores(read(kind, folder, root), held_out)).auc or 0.0
                taken[kind] = [memory(kind, n, folder, root) for n in (1, 2, 4)]
                table.add_row(kind, f"{auc[kind]:.5f}", *(f"{size / 1e6:,.0f}" for size in taken[kind]))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    console.print(table)
    added = {kind: taken[kind][1] - taken[kind][0] for kind in kinds}
    console.print(
        "a further process adds "
        + ", ".join(f"{size / 1e6:,.0f} MB ({kind})" for kind, size in added.items())
    )
    lost = [kind for kind in kinds if auc[kind] < auc["fp32"] - 0.002]
    if lost or added["torchrec"] - added["published"] < sum(ROWS.values()) * DIM / 2:
        raise SystemExit(f"FAILED: {lost=}, {added=}")


if __name__ == "__main__":
    main()

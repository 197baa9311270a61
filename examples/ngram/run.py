"""A language model with an n-gram memory in three minutes: trained, its table published in every format that
such tables have, and decoded by two processes that share the published copy.

The model reads bytes: two transformer layers, and between them a memory as published models have it (Engram).
The last two and the last three bytes are hashed, by two hashes each, into rows of one table, and a gate
decides how much of them is added. It is trained on this repository's pages. Then the table is published from
fp32 in each format, and from an fp8 checkpoint whose bytes are copied. For each: the perplexity on pages that
were held out, and the tokens that two processes decode through `RowGather`. They must be those of the
dequantized table inside one process.

    python examples/ngram/run.py --seconds 60
"""

import argparse
import math
import multiprocessing
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch.nn import functional

from tableside.loader.load.load import load
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat
from tableside.torch import RowGather

console = Console(highlight=False, soft_wrap=True, width=110)
PAGES = Path(__file__).resolve().parent.parent.parent
VOCABULARY, WIDTH, CONTEXT, LAYERS, BATCH = 256, 128, 64, 2, 32
NGRAMS, ROWS, DIM = (2, 2, 3, 3), (8191, 8179, 8171, 8167), 32  # of each head; the numbers of rows are primes
MULTIPLIERS = (1_000_003, 998_244_353, 15_485_863, 982_451_653)
FIRSTS = [sum(ROWS[:n]) for n in range(len(ROWS))]
HEADS = list(zip(FIRSTS, ROWS, strict=True))
DECODED, PROMPT = 120, b"A version is a "
Rows = Callable[[torch.Tensor], torch.Tensor]  # ids [..., heads] -> vectors [..., heads * DIM]


def ids_of(tokens: torch.Tensor) -> torch.Tensor:
    """Row numbers of each position's n-grams among their head's, [..., length, heads]."""
    found = []
    for length, rows, multiplier in zip(NGRAMS, ROWS, MULTIPLIERS, strict=True):
        mixed = torch.zeros_like(tokens)
        for back in range(length):
            mixed = (mixed * multiplier + functional.pad(tokens, (back, 0))[..., : tokens.shape[-1]] + 1) % (
                1 << 31
            )
        found.append(mixed % rows)
    return torch.stack(found, -1)


class Memory(torch.nn.Module):
    """The table inside the process, as it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(sum(ROWS), DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids + torch.tensor(FIRSTS))
        return rows.flatten(-2)


class LanguageModel(torch.nn.Module):
    """Everything but the memory, which a call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.gate, self.value = (torch.nn.Linear(len(ROWS) * DIM, WIDTH) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Logits [batch, length, VOCABULARY]."""
        memory = rows(ids_of(tokens)).float()
        length = tokens.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        for number, layer in enumerate(self.layers):
            if number == 1:
                hidden = hidden + torch.sigmoid(self.gate(memory)) * self.value(memory)
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of pages to train on, and of every fourth one, which is held out."""
    pages = [page.read_bytes() for page in sorted((PAGES / "docs").glob("*.md"))]
    held_out = b"".join(pages[::4])
    others = b"".join(page for number, page in enumerate(pages) if number % 4)
    return torch.tensor(list(others)), torch.tensor(list(held_out))


def windows(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = starts[:, None] + torch.arange(CONTEXT + 1)
    return data[at][:, :-1], data[at][:, 1:]


def train(data: torch.Tensor, seconds: float) -> tuple[LanguageModel, Memory]:
    torch.manual_seed(0)
    model, memory = LanguageModel(), Memory()
    optimizer = torch.optim.Adam([*model.parameters(), *memory.parameters()], 2e-3)
    started, step = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        inputs, wanted = windows(data, torch.randint(0, len(data) - CONTEXT - 1, (BATCH,)))
        loss = functional.cross_entropy(model(inputs, memory).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            console.print(
                f"step {step}: {time.monotonic() - started:.0f} s, perplexity {math.exp(loss.item()):.2f}"
            )
    return model.eval(), memory


@torch.no_grad()
def perplexity(model: LanguageModel, rows: Rows, data: torch.Tensor) -> float:
    """On windows that lie one after another."""
    starts = torch.arange(0, len(data) - CONTEXT - 1, CONTEXT)[:1024]
    total = 0.0
    for some in starts.split(64):
        inputs, wanted = windows(data, some)
        total += functional.cross_entropy(
            model(inputs, rows).flatten(0, 1), wanted.flatten(), reduction="sum"
        ).item()
    return math.exp(total / (len(starts) * CONTEXT))


@torch.no_grad()
def decode(model: LanguageModel, rows: Rows) -> list[int]:
    """The likeliest byte, and so on."""
    tokens = list(PROMPT)
    for _ in range(DECODED):
        logits = model(torch.tensor([tokens[-CONTEXT:]]), rows)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def engine(root: str, name: str, weights: dict[str, torch.Tensor], results: Any) -> None:
    """A process that decodes through the published table. It holds no copy of it."""
    torch.set_num_threads(1)
    model = LanguageModel()
    model.load_state_dict(weights)
    rows = RowGather(name, "ngram", heads=HEADS, output=torch.float32, root=root)
    results.put(decode(model.eval(), rows))


def publish(root: Path, name: str, table: torch.Tensor, row_format: str) -> None:
    """From fp32; "fp8 checkpoint" from one whose bytes are copied."""
    path = root / f"{name}.safetensors"
    if row_format == "fp8 checkpoint":
        scale = table.abs().max() / 448
        values = (table / scale).to(torch.float8_e4m3fn)
        save_file({"ngram.weight": values, "ngram.weight_scale": scale}, path)
        spec = first_model(path, name, RowFormat.INT8, root).spec
    else:
        save_file({"ngram.weight": table}, path)
        described = {"ngram": {"key": "ngram.weight", "row_format": row_format}}
        features = {"ngram": {"table": "ngram", "pooling": "none"}}
        told = {"name": name, "checkpoint": path.name, "tables": described, "features": features}
        spec = parse_model(told, root)
    load(replace(spec, checkpoint=path), root)


def measure(
    root: Path, model: LanguageModel, memory: Memory, held_out: torch.Tensor, row_format: str
) -> list[str]:
    """Publishes the table, compares the tokens; a line for people."""
    name = row_format.replace(" ", "-")
    publish(root, name, memory.table.weight.detach(), row_format)
    rows = RowGather(name, "ngram", heads=HEADS, output=torch.float32, root=str(root))
    inside = Memory()
    whole = RowGather(name, "ngram", output=torch.float32, root=str(root))
    inside.table.weight.data = whole(torch.arange(sum(ROWS)))
    expected = decode(model, inside)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(root), name, model.state_dict(), results)
    engines = [context.Process(target=engine, args=arguments) for _ in range(2)]
    for one in engines:
        one.start()
    found = [results.get(timeout=300) for _ in engines]
    for one in engines:
        one.join()
    if any(tokens != expected for tokens in found):
        raise SystemExit(f"{row_format}: the processes decoded other tokens than the table inside one gives")
    error = (inside.table.weight - memory.table.weight).abs().max().item()
    table = Model(root, name).attach().tables["ngram"]
    size = f"{table.rows * table.row_bytes / 1e6:.1f} MB"
    return [row_format, size, f"{error:.2g}", f"{perplexity(model, rows, held_out):.3f}", "equal"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of training (default: 60)")
    seconds = parser.parse_args().seconds
    data, held_out = text()
    console.print(f"training on {len(data):,} bytes for {seconds:.0f} s")
    model, memory = train(data, seconds)
    without = perplexity(model, lambda ids: torch.zeros(*ids.shape[:-1], len(ROWS) * DIM), held_out)
    shown = Table("row format", "table", "largest error", "perplexity", "tokens of two processes", box=None)
    fp32 = memory.table.weight
    exact = f"{perplexity(model, memory, held_out):.3f}"
    shown.add_row("fp32, in the process", f"{fp32.numel() * 4 / 1e6:.1f} MB", "0", exact, "")
    root = Path("/dev/shm") / f"tableside-ngram-{uuid.uuid4().hex[:8]}"
    root.mkdir()
    try:
        for row_format in ("fp8_e4m3_block32", "fp8_e4m3", "nvfp4", "int8", "int4", "fp8 checkpoint"):
            shown.add_row(*measure(root, model, memory, held_out, row_format))
            console.print(f"{row_format}: published, decoded")
    finally:
        shutil.rmtree(root)
    console.print(shown)
    console.print(f"without the memory: perplexity {without:.3f}")


if __name__ == "__main__":
    main()

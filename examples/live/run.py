"""Live updates in half a minute: a trainer writes rows to a stream, a follower applies them, a server answers
with them.

The tastes of users drift while it runs. A model of the beginning gets worse with every second; the one that
is served is trained on, and its rows reach the server through Redis (or through a folder of files, where
redis-server is not installed). Every half second fresh clicks are scored over HTTP, by the served rows and by
those of the beginning, and the trainer's clock is looked up: a row that holds the time at which the trainer
wrote it, so that its age is the lag from training to answer. Draws both to a PNG.

Exit code 0 only if the served model ends with the better AUC, no clock goes back, and 99 of 100 lags are at
most --lag-s.
"""

import argparse
import contextlib
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client
from tableside.serving.evaluation.quality import quality

console = Console(highlight=False, soft_wrap=True, width=120)
STEP_S, BATCH, EVERY_S, LOOK_S, CHECKED = 0.1, 4096, 0.5, 0.5, 4_000
LEAST_LOOKS, LATE_S = 5, 60.0
USERS, ITEMS, DIM, HIDDEN = 2_000, 1_000, 16, 6
TURN_S = 25.0  # after so long what users liked is what they dislike
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Tables = dict[str, tuple[np.ndarray, np.ndarray]]  # table -> ids, vectors
Send = Callable[[Tables], None]


# ---- clicks, and a model that is trained on them ----


class World:
    """Users and items have hidden tastes; those of items turn with time, in planes of two dimensions."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._users, self._items = rng.standard_normal((USERS, HIDDEN)), rng.standard_normal((ITEMS, HIDDEN))

    def events(self, rows: int, at_s: float, rng: np.random.Generator) -> tuple[Ids, Ids, Floats]:
        """(users, items, whether they clicked) [rows] of an instant. A click is likelier where tastes
        agree."""
        users, items = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
        c, s = np.cos(np.pi * at_s / TURN_S), np.sin(np.pi * at_s / TURN_S)
        tastes = self._items[items].reshape(rows, HIDDEN // 2, 2)
        turned = np.stack(
            [c * tastes[..., 0] - s * tastes[..., 1], s * tastes[..., 0] + c * tastes[..., 1]], -1
        )
        logit = (self._users[users] * turned.reshape(rows, HIDDEN)).sum(1)
        return users, items, (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float64)


class Towers:
    """A vector for each user and item; the logit of a click is their dot product. Trained by Adagrad with
    a fading memory."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.rows = {
            "user": rng.standard_normal((USERS, DIM)) * 0.1,
            "item": rng.standard_normal((ITEMS, DIM)) * 0.1,
        }
        self._seen = {"user": np.ones((USERS, 1)), "item": np.ones((ITEMS, 1))}

    def train(self, users: Ids, items: Ids, clicked: Floats, rate: float = 0.3) -> None:
        """One step on some events."""
        u, v = self.rows["user"][users], self.rows["item"][items]
        wrong = (clicked - 1 / (1 + np.exp(-(u * v).sum(1))))[:, None]
        for table, ids, gradient in (("user", users, wrong * v), ("item", items, wrong * u)):
            total = np.zeros_like(self.rows[table])
            np.add.at(total, ids, gradient)
            self._seen[table] = 0.98 * self._seen[table] + (total**2).mean(1, keepdims=True)
            self.rows[table] += rate * total / np.sqrt(self._seen[table])

    def logits(self, users: Ids, items: Ids) -> Floats:
        found: Floats = (self.rows["user"][users] * self.rows["item"][items]).sum(1)
        return found


# ---- ways from the trainer to the follower ----


def to_redis(url: str, key: str) -> Send:
    """An entry for each table."""
    import redis

    client = redis.Redis.from_url(url)

    def send(tables: Tables) -> None:
        with client.pipeline(transaction=True) as line:
            for table, (ids, vectors) in tables.items():
                fields: dict[Any, Any] = {
                    "table": table,
                    "ids": ids.tobytes(),
                    "vectors": vectors.astype("<f4").tobytes(),
                }
                line.xadd(key, fields, maxlen=10_000, approximate=True)
            line.execute()

    return send


def to_folder(folder: Path) -> Send:
    """A file for all tables, written under another name and renamed."""
    number = 0

    def send(tables: Tables) -> None:
        nonlocal number
        number += 1
        arrays: dict[str, Any] = {f"{t}.ids": ids for t, (ids, _) in tables.items()}
        arrays |= {f"{t}.vectors": vectors.astype("<f4") for t, (_, vectors) in tables.items()}
        partial = folder / "next.partial"
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.rename(folder / f"{number}.npz")

    return send


@contextlib.contextmanager
def stream(folder: Path) -> Iterator[tuple[str, str]]:
    """(what `tableside follow` is given, what the trainer is given) of a Redis stream, or of a folder."""
    command, socket = shutil.which("redis-server"), folder / "redis.sock"
    try:
        import redis
    except ImportError:
        command = None
    if command is None:
        console.print(
            "redis-server or tableside[redis] is not installed, so rows go through a folder of files"
        )
        (folder / "changes").mkdir()
        yield str(folder / "changes"), str(folder / "changes")
        return
    quiet = ["--port", "0", "--save", "", "--dir", str(folder), "--unixsocket", str(socket)]
    server = subprocess.Popen([command, *quiet], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis.from_url(f"unix://{socket}")
        until(lambda: socket.exists() and client.ping(), "redis-server")
        yield f"unix://{socket}?stream=rows", f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(10)


def until(is_there: Callable[[], Any], what: str, wait_s: float = 20) -> None:
    end = time.monotonic() + wait_s
    while not is_there():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come up within {wait_s} s")
        time.sleep(0.02)


# ---- the trainer, a process of its own ----


def train(place: str, towers: Towers, world: World, began: float, stop: Any) -> None:
    """Trains on the clicks of the present and sends the rows that changed, with the clock, until it is
    stopped."""
    send = to_redis(place, "rows") if "://" in place else to_folder(Path(place))
    rng = np.random.default_rng(7)
    while not stop.wait(max(0.0, STEP_S - (time.time() - began) % STEP_S)):
        users, items, clicked = world.events(BATCH, time.time() - began, rng)
        towers.train(users, items, clicked)
        changed: dict[str, Ids] = {"user": np.unique(users), "item": np.unique(items)}
        tables: Tables = {table: (ids, towers.rows[table][ids]) for table, ids in changed.items()}
        send(tables | {"clock": (np.zeros(1, np.int64), np.full((1, 2), time.time() - began))})


# ---- the model, the server, what is measured ----


def publish(towers: Towers, folder: Path, root: Path) -> None:
    """The towers and the clock as a model whose scorer is the dot product."""
    rows: dict[str, Any] = {table: values.astype(np.float32) for table, values in towers.rows.items()}
    np.savez(folder / "towers.npz", clock=np.zeros((1, 2), np.float32), **rows)
    formats = {"user": "int8", "item": "int8", "clock": "fp32"}
    model = {
        "name": "live",
        "checkpoint": "towers.npz",
        "tables": {t: {"key": t, "row_format": f} for t, f in formats.items()},
        "features": {t: {"table": t, "pooling": "sum"} for t in formats},
        "scorer": {"kind": "dot", "features": ["user", "item"]},
    }
    load(parse_model(model, folder), root)


@dataclass
class Looks:
    """What was seen of the server, look by look."""

    at_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    clock_s: list[float] = field(default_factory=list)
    live_auc: list[float] = field(default_factory=list)
    first_auc: list[float] = field(default_factory=list)


def look(client: Client, world: World, first: Towers, began: float, seconds: float) -> Looks:
    """Scores fresh clicks and reads the clock, again and again. Where rows come late it looks on until it
    saw some."""
    found, rng, clock = Looks(), np.random.default_rng(8), {"clock": np.zeros((1, 1), np.int64)}
    while (now := time.time() - began) < seconds or (
        len(found.at_s) < LEAST_LOOKS and now < seconds + LATE_S
    ):
        users, items, clicked = world.events(CHECKED, now, rng)
        scores = client.score("live", {"user": users[:, None], "item": items[:, None]})
        written = float(client.lookup("live", clock)["clock"][0, 0])
        if written > 0:  # the first rows have come
            answered = time.time() - began
            found.at_s.append(answered)
            found.lag_s.append(answered - written)
            found.clock_s.append(written)
            found.live_auc.append(quality(clicked, scores).auc or 0.0)
            found.first_auc.append(quality(clicked, first.logits(users, items)).auc or 0.0)
        time.sleep(max(0.0, LOOK_S - (time.time() - began - now)))
    return found


@contextlib.contextmanager
def follower(source: str, root: Path) -> Iterator[list[dict[str, Any]]]:
    """`tableside follow` for the length of the block; what it said of each batch is there when the block
    has ended."""
    steps: list[dict[str, Any]] = []
    command = ["follow", "live", source, "--every-s", str(EVERY_S), "--json", "--root", str(root)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, "-m", "tableside", *command], stdout=said)
        try:
            yield steps
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
        if code:
            raise SystemExit(f"FAILED: the follower ended with {code}; its error stands above")
        said.seek(0)
        steps.extend(map(json.loads, said))


def draw(found: Looks, most_lag_s: float, path: Path) -> None:
    """Lag and AUC over time."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    above.plot(found.at_s, found.live_auc, label="served, updated")
    above.plot(found.at_s, found.first_auc, label="as it was published")
    above.set_ylabel("AUC of fresh clicks")
    above.legend()
    below.plot(found.at_s, found.lag_s)
    below.axhline(most_lag_s, color="grey", linestyle=":")
    below.set_ylim(bottom=0)
    below.set_ylabel("lag, trained to answered, s")
    below.set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="how long tastes drift (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/live.png"), help="the plot (default: %(default)s)"
    )
    parser.add_argument(
        "--lag-s", type=float, default=1.5, help="that 99 of 100 lags may have (default: %(default)s)"
    )
    options = parser.parse_args()
    world, towers, rng = World(), Towers(), np.random.default_rng(6)
    for _ in range(150):
        towers.train(*world.events(BATCH, 0.0, rng))
    first, root = Towers(), Path("/dev/shm") / f"tableside-live-{uuid.uuid4().hex[:8]}"
    first.rows = {table: rows.copy() for table, rows in towers.rows.items()}
    spawn = multiprocessing.get_context("spawn")
    try:
        with tempfile.TemporaryDirectory() as text:
            folder, stop = Path(text), spawn.Event()
            publish(towers, folder, root)
            with (
                stream(folder) as (source, place),
                local_server(["live"], root=root) as server,
                Client(server.url) as client,
                follower(source, root) as steps,
            ):
                began = time.time()
                trainer = spawn.Process(target=train, args=(place, towers, world, began, stop))
                trainer.start()
                try:
                    found = look(client, world, first, began, options.seconds)
                finally:
                    stop.set()
                    trainer.join(30)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    tell(found, steps, options.lag_s, options.out)


def tell(found: Looks, steps: list[dict[str, Any]], most_lag_s: float, out: Path) -> None:
    """Draws, prints, and judges."""
    if len(found.at_s) < LEAST_LOOKS or not steps:
        raise SystemExit(
            f"FAILED: {len(found.at_s)} looks at updated rows, {len(steps)} batches; give it more --seconds"
        )
    draw(found, most_lag_s, out)
    lag = np.quantile(found.lag_s, [0.5, 0.99])
    rows = sum(step["rows"] for step in steps)
    console.print(
        f"{rows:,} rows in {len(steps)} batches; lag from training to answer p50 {lag[0]:.2f} s, p99 "
        f"{lag[1]:.2f} s"
    )
    console.print(
        f"AUC in the end: served {found.live_auc[-1]:.3f}, as it was published {found.first_auc[-1]:.3f}; "
        f"drawn to {out}"
    )
    went_back = bool((np.diff(found.clock_s) < 0).any())
    if lag[1] > most_lag_s or found.live_auc[-1] < found.first_auc[-1] + 0.02 or went_back:
        raise SystemExit(
            f"FAILED: {lag[1]=:.2f}, {found.live_auc[-1]=:.3f}, {found.first_auc[-1]=:.3f}, {went_back=}"
        )


if __name__ == "__main__":
    main()

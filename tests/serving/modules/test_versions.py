"""Modules and versions: what they follow, what stays, and that no call mixes two."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_tables import FEATURES, ROWS
from raw_loads import publish_raw
from support import flip_bit, until

from tableside.loader.errors import VersionError
from tableside.loader.versions.versions import Model
from tableside.quant.errors import Problem
from tableside.serving.model.version import ServedVersion
from tableside.serving.modules import published
from tableside.torch import BadFeatureIds, EmbeddingBags, Embeddings

Tables = dict[str, np.ndarray]
PublishAgain = Callable[..., Any]
IDS = torch.tensor([[1, 2], [3, 499]])


def scaled(tables: Tables, by: float) -> Tables:
    return {name: by * values for name, values in tables.items()}


def test_a_live_module_takes_a_new_version_by_itself(
    model: str, publish_again: PublishAgain, tables: Tables
) -> None:
    """The thread that looks takes it, without a call of `refresh`; all modules of the source change
    together."""
    bags, other = EmbeddingBags("ads", root=model), Embeddings("ads", ["user_ids"], root=model)
    before = bags({"user_sum": IDS, "item_mean": IDS, "page_sum": IDS})["user_sum"]
    publish_again(scaled(tables, 2))
    until(lambda: bags.version == 2, what="the new version")
    assert other.version == 2
    assert torch.equal(bags({"user_sum": IDS, "item_mean": IDS, "page_sum": IDS})["user_sum"], 2 * before)


def test_a_pinned_module_stays(model: str, publish_again: PublishAgain, tables: Tables) -> None:
    """follow=None keeps the version of its making, and `version` names any other."""
    pinned = Embeddings("ads", ["user_ids"], root=model, follow=None)
    publish_again(scaled(tables, 2))
    live, first = (
        Embeddings("ads", ["user_ids"], root=model),
        Embeddings("ads", ["user_ids"], root=model, follow=None, version=1),
    )
    assert not pinned.refresh()
    assert (pinned.version, live.version, first.version) == (1, 2, 1)
    told = {"user_ids": IDS}
    assert torch.equal(2 * pinned(told)["user_ids"], live(told)["user_ids"])
    assert torch.equal(first(told)["user_ids"], pinned(told)["user_ids"])
    with pytest.raises(VersionError, match="version 7 is not published"):
        Embeddings("ads", root=model, follow=None, version=7)


@pytest.mark.drawn(0.5)
def test_a_call_reads_one_version(model: str, publish_again: PublishAgain, tables: Tables) -> None:
    """Threads that call while versions change get both features of the same version, every time."""
    features = ["user_ids", "item_ids"]
    module, ids = Embeddings("ads", features, root=model), torch.arange(ROWS)
    one = module(dict.fromkeys(features, ids))
    mixed: list[float] = []
    seen: set[float] = set()
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            found = module(dict.fromkeys(features, ids))
            by = [float(found[f][0, 0] / one[f][0, 0]) for f in features]
            seen.update(by)
            if not all(torch.equal(found[f], one[f] * by[0]) for f in features):
                mixed.append(by[0])

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for by in (2.0, 4.0, 8.0):
            publish_again(scaled(tables, by))
            module.refresh()
            until(lambda by=by: by in seen, what="a call of the new version")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not mixed
    assert {1.0, 2.0, 4.0, 8.0} == seen | {1.0}


def test_a_replaced_version_is_unmapped(model: str, publish_again: PublishAgain, tables: Tables) -> None:
    """Its segment goes with the last call that reads it; the vectors that it gave stay."""
    module = Embeddings("ads", ["user_ids"], root=model)
    vectors = module({"user_ids": IDS})["user_ids"]
    kept = vectors.clone()
    path = str(Path(model) / "ads" / "1.segment")
    assert path in Path("/proc/self/maps").read_text()
    publish_again(scaled(tables, 2))
    gc.disable()  # it goes at once, not when cycles are looked for
    try:
        module.refresh()
    finally:
        gc.enable()
    assert path not in Path("/proc/self/maps").read_text()
    assert torch.equal(vectors, kept)


@pytest.mark.drawn(0.5)
def test_tables_go_with_the_last_module(model: str) -> None:
    """One attachment for all modules of a source; none is left behind them."""
    first, second = EmbeddingBags("ads", root=model), Embeddings("ads", root=model)
    assert first._published is second._published
    held = weakref.ref(first._published)
    del first
    assert held() is not None
    del second
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("by_refresh")
@pytest.mark.parametrize("change", ["dim", "feature", "pooling"])
@pytest.mark.drawn(1)
def test_a_version_that_modules_cannot_read_is_not_taken(
    model: str, publish_again: PublishAgain, tables: Tables, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The present one is read on, and the log says what differs; the next good one is taken."""
    module = EmbeddingBags("ads", ["user_sum"], root=model)
    features = {n: f for n, f in FEATURES.items() if change != "feature" or n != "user_sum"}
    if change == "pooling":
        features["user_sum"] = {"table": "user", "pooling": "mean"}
    publish_again({**tables, "user": tables["user"][:, :8].copy()} if change == "dim" else tables, features)
    assert not module.refresh()
    assert module.version == 1
    assert (
        "version 2 of ads is not taken by modules: feature 'user_sum' has dim 16 and pooling sum"
        in caplog.text
    )
    publish_again(tables)
    assert module.refresh() and module.version == 3


@pytest.mark.usefixtures("by_refresh")
def test_features_that_no_module_reads_may_change(
    model: str, publish_again: PublishAgain, tables: Tables
) -> None:
    """Only what was asked for is held to its dims and pooling."""
    module = EmbeddingBags("ads", ["user_sum"], root=model)
    publish_again({"user": tables["user"]}, {"user_sum": FEATURES["user_sum"]})
    assert module.refresh() and module.version == 2


@pytest.mark.usefixtures("by_refresh")
def test_a_new_version_is_warmed_up_before_it_is_read(
    model: str, publish_again: PublishAgain, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is looked up in once while calls still read the one before."""
    module = Embeddings("ads", ["user_ids"], root=model)
    warm_up, warmed = ServedVersion.warm_up, []

    def noted(served: ServedVersion) -> None:
        warm_up(served)
        warmed.append((served.version, module.version))

    monkeypatch.setattr(ServedVersion, "warm_up", noted)
    publish_again(scaled(tables, 2))
    assert module.refresh() and module.version == 2
    assert warmed == [(2, 1)]


@pytest.mark.usefixtures("by_refresh")
def test_damaged_rows_are_not_taken(model: str, publish_again: PublishAgain, tables: Tables) -> None:
    """A version is verified before it is read; the last good one stays."""
    module = Embeddings("ads", ["user_ids"], root=model)
    expected = module({"user_ids": IDS})["user_ids"]
    publish_again(scaled(tables, 2))
    flip_bit(Model(Path(model), "ads").path(2), -10000, os.SEEK_END)
    assert not module.refresh()
    assert torch.equal(module({"user_ids": IDS})["user_ids"], expected)


def test_the_watch_outlives_an_error(
    model: str, publish_again: PublishAgain, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one source raises, others are looked at, and so is that one the next time."""
    module = Embeddings("ads", ["user_ids"], root=model)
    module({"user_ids": IDS})
    failed = threading.Event()
    look = published.PublishedTables.look

    def fail_once(self: published.PublishedTables) -> bool:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("as a fault of the file system")
        return look(self)

    monkeypatch.setattr(published.PublishedTables, "look", fail_once)
    publish_again(scaled(tables, 2))
    until(lambda: module.version == 2, what="the new version")
    assert failed.is_set()


@pytest.mark.parametrize("missing", ["error", "zero"])
def test_raw_ids_follow_the_policy_of_their_table(root: Path, tmp_path: Path, missing: str) -> None:
    """Ids of 64 bits find their rows; one that the table lacks is refused or gets the default row."""
    ids = np.array([-(2**62), -1, 7, 2**61], np.int64)
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    publish_raw(tmp_path, root, {"t": (ids, values)}, {"t": {"missing": missing}}, row_format="fp32")
    module = EmbeddingBags("demo", root=str(root))
    (feature,) = module.features
    found = module({feature: torch.from_numpy(ids).view(2, 2)})[feature]
    assert torch.equal(found, torch.from_numpy(values).view(2, 2, 8).sum(1))
    told = {feature: torch.tensor([[7, 8]])}
    if missing == "zero":
        assert torch.equal(module(told)[feature], torch.from_numpy(values[2:3]))
        return
    with pytest.raises(
        BadFeatureIds, match=f"feature '{feature}': id 8 at position 1 is not among the table's 4 ids"
    ) as error:
        module(told)
    assert error.value.problem is Problem.MISSING


@pytest.mark.thorough
def test_the_thread_that_looks_ends_with_the_process(model: str) -> None:
    """Before Python takes its threads away, which in the middle of torch's code ends the process with
    SIGABRT."""
    script = (
        "import atexit, torch\n"
        "from tableside.serving.modules.published import watch\n"
        "from tableside.torch import Embeddings\n"
        f"module = Embeddings('ads', ['user_ids'], root={model!r})\n"
        "module({'user_ids': torch.arange(3)})\n"
        "assert watch._thread.is_alive()\n"
        "end = watch.end\n"
        "watch.end = lambda: (end(), print('alive' if watch._thread.is_alive() else 'ended'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr

"""Counts of ids without a row of their own, as modules tell them: on the CPU and on a GPU (--device),
against sums by hand."""

import sys
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables as devices
import torch
from raw_loads import publish_raw
from support import rows_of

from tableside.quant.contract import Unfound
from tableside.serving.modules import pending
from tableside.torch import BadFeatureIds, EmbeddingBags, Embeddings

NONE = Unfound(0, 0)


@pytest.fixture
def publish_tables(root: Path, tmp_path: Path) -> Callable[..., str]:
    """Publishes a next version of `demo`: tables of the raw ids 0, 2, 4 ... with a default row, and one
    that refuses others."""

    def run(ids: int = 50) -> str:
        tables = {
            name: (2 * np.arange(ids), rows_of(ids, 8, n)) for n, name in enumerate(("a", "b", "strict"))
        }
        publish_raw(tmp_path, root, tables, {"a": {"missing": "zero"}, "b": {"missing": "mean"}})
        return str(root)

    return run


def there(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor if device in ("cpu", "interpreter") else tensor.to(device)


def modules(root: str, device: str, **options: Any) -> EmbeddingBags:
    return EmbeddingBags("demo", root=root, device=device, **options)


@pytest.fixture(params=["cpu", "device"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "device":
        pytest.importorskip("triton")
        return str(devices.DEVICE)
    return "cpu"


@pytest.mark.drawn(1)
def test_ids_without_a_row_are_counted_by_feature(publish_tables: Callable[..., str], device: str) -> None:
    """Over calls of several shapes, and over modules of one source; nothing is counted that has a row."""
    root = publish_tables()
    bags = modules(root, device)
    assert bags.missing_ids() == dict.fromkeys(("a", "b", "strict"), NONE)
    even = there(torch.arange(0, 12, 2).view(2, 3), device)
    bags(dict.fromkeys(("a", "b", "strict"), even))
    assert set(bags.missing_ids().values()) == {NONE}
    bags({"a": even + 1, "b": even, "strict": even})
    bags(
        {
            "a": even[:1] + torch.tensor([0, 1, 1], device=even.device),
            "b": even[:1] * 1001 + 1,
            "strict": even[:1],
        }
    )
    assert bags.missing_ids() == {"a": Unfound(8, 0), "b": Unfound(3, 0), "strict": NONE}
    other = EmbeddingBags("demo", ["b"], root=root, device=device)
    other({"b": even - 1})
    assert other.missing_ids() == {"b": Unfound(9, 0)} and bags.missing_ids()["b"] == Unfound(9, 0)


@pytest.mark.drawn(1)
def test_ids_of_keyed_tensors_are_counted(publish_tables: Callable[..., str], device: str) -> None:
    """Features in another order than the module's, among others."""
    torchrec = pytest.importorskip("torchrec")
    bags = EmbeddingBags("demo", ["a", "b"], root=publish_tables(), device=device)
    values, lengths = torch.tensor([0, 1, 3, 2, 4, 5, 99, 6]), torch.tensor([1, 2, 1, 1, 2, 1])
    told = torchrec.KeyedJaggedTensor(
        ["b", "other", "a"], there(values, device), lengths=there(lengths.int(), device)
    )
    for _ in range(2):
        bags(told)
    assert bags.missing_ids() == {"a": Unfound(4, 0), "b": Unfound(4, 0)}


def test_refused_ids_are_not_counted(publish_tables: Callable[..., str]) -> None:
    """The call raises, whatever its other features lack."""
    bags = EmbeddingBags("demo", root=publish_tables())
    with pytest.raises(BadFeatureIds):
        bags(dict.fromkeys(("a", "b", "strict"), torch.tensor([[1]])))
    assert set(bags.missing_ids().values()) == {NONE}


@pytest.mark.usefixtures("by_refresh")
@pytest.mark.drawn(1)
def test_counts_go_on_over_versions(publish_tables: Callable[..., str], device: str) -> None:
    """They are those of the source, and nothing of a version that went is lost."""
    bags = modules(publish_tables(), device)
    odd = there(torch.tensor([[1, 2, 99]]), device)
    bags({"a": odd, "b": odd, "strict": odd * 0})
    publish_tables(60)
    assert bags.refresh() and bags.version == 2
    bags({"a": odd, "b": odd * 0, "strict": odd * 0})
    assert bags.missing_ids() == {"a": Unfound(4, 0), "b": Unfound(2, 0), "strict": NONE}


@pytest.mark.drawn(1)
def test_rows_of_an_older_version_are_counted_apart(root: Path, tmp_path: Path, device: str) -> None:
    """As `backfilled`, where the table took them from a version before."""
    publish_raw(tmp_path, root, {"t": (np.arange(10), rows_of(10, 8))}, {"t": {"missing": "zero"}}, "old")
    publish_raw(tmp_path, root, {"t": (np.arange(5), rows_of(5, 8))}, {"t": {"missing": "backfill:old@1"}})
    bags = modules(str(root), device)
    bags({"t": there(torch.tensor([[0, 7, 8, 12]]), device)})
    assert bags.missing_ids() == {"t": Unfound(1, 2)}


def test_threads_lose_no_count() -> None:
    """Four at once, which take turns as often as the interpreter lets them."""
    counted, before = pending.Missing(), sys.getswitchinterval()
    one = [Unfound(3, 1)]

    def call() -> None:
        for _ in range(5000):
            counted.add("a", one)

    threads = [threading.Thread(target=call) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counted.of("a") == {"a": Unfound(4 * 5000 * 3, 4 * 5000)}


@pytest.mark.usefixtures("by_refresh")
@pytest.mark.drawn(0.25)
def test_versions_that_were_let_go_stay_counted(
    publish_tables: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each version has counts of its own there; those of versions that are gone are added up, and
    are not kept."""
    pytest.importorskip("triton")
    monkeypatch.setattr(pending, "_FOLLOWED", 2)
    bags = EmbeddingBags("demo", ["a"], root=publish_tables(), device=devices.DEVICE)
    for count in range(1, 5):
        if count > 1:
            publish_tables(50 + count)
            assert bags.refresh()
        bags({"a": there(torch.ones((1, count), dtype=torch.int64), devices.DEVICE)})
    bags.check()
    assert bags.missing_ids() == {"a": Unfound(1 + 2 + 3 + 4, 0)}
    assert len(bags._published.missing._followed) <= 2


def _count(module: EmbeddingBags, ids: torch.Tensor, pipe: Any) -> None:
    before = module.missing_ids()
    module({"a": ids})
    pipe.send((before["a"], module.missing_ids()["a"]))


def test_a_forked_process_counts_its_own(publish_tables: Callable[..., str]) -> None:
    """From 0, and nothing of it comes to its parent."""
    bags, ids = EmbeddingBags("demo", ["a"], root=publish_tables()), torch.tensor([[1, 3, 4]])
    bags({"a": ids})
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=_count, args=(bags, ids, theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == (NONE, Unfound(2, 0))
    child.join()
    assert bags.missing_ids() == {"a": Unfound(2, 0)}


def test_fbgemms_backend_counts_too(publish_tables: Callable[..., str]) -> None:
    """As the native kernel, and modules that are not pooled as those that are."""
    root = publish_tables()
    bags = EmbeddingBags("demo", ["a"], root=root, backend="fbgemm")
    bags({"a": torch.tensor([[1, 3, 4]])})
    assert bags.missing_ids() == {"a": Unfound(2, 0)}


def test_sequences_are_counted(root: Path, publish: Callable[..., Any]) -> None:
    """Of a table whose ids are row numbers, none is without a row."""
    publish({"t": rows_of(9, 8)}, features={"s": {"table": "t", "pooling": "none"}})
    words = Embeddings("demo", root=root)
    words({"s": torch.arange(9)})
    assert words.missing_ids() == {"s": NONE}

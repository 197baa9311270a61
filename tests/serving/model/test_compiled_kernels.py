"""Kernels compiled once for a machine, before they are launched. No GPU: a stand-in for the driver says
which one there is."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from drivers import stand_in_driver
from support import rows_of

from tableside.loader.versions.versions import Model
from tableside.quant.gpu.kernels.wanted import KernelKey, WantedKernels
from tableside.serving.model import compiled_kernels
from tableside.serving.model.compiled_kernels import (
    are_compiled,
    begin_to_compile,
    compile_ahead,
    compile_once,
    kernels_of_server,
    kernels_wanted,
)
from tableside.serving.settings import ServerSettings

Publish = Callable[..., Any]
WANTED = WantedKernels(
    KernelKey(1 << 2), pooled=False, unpooled=False, has_maps=True, is_indirect=(False,)
)  # one kernel


@pytest.fixture(autouse=True)
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "cache"


@pytest.mark.thorough
def test_one_compiles_and_the_others_wait_for_it(
    triton_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever comes later finds everything there, and does nothing."""
    caplog.set_level(logging.INFO)
    found: list[list[Any] | None] = []
    threads = [threading.Thread(target=lambda: found.append(compile_once(WANTED, 90))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (compiled,) = [one for one in found if one is not None]
    assert sorted(one.name for one in compiled) == ["resolve", "resolve, with deltas"]
    assert len([*triton_cache.rglob("*.cubin")]) == 2
    assert caplog.text.count("another process compiles kernels; this one waits") == 2
    assert compile_once(WANTED, 90) is None


def test_what_kernels_depend_on_is_in_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another architecture, release of Triton, or set is not taken for this one."""
    names = {compiled_kernels._digest(WANTED, 90), compiled_kernels._digest(WANTED, 80)}
    names.add(compiled_kernels._digest(WantedKernels(KernelKey(1 << 3), False, False, True, (False,)), 90))
    monkeypatch.setattr(compiled_kernels, "version_of", lambda name: "99")
    names.add(compiled_kernels._digest(WANTED, 90))
    monkeypatch.setattr(compiled_kernels, "has_driver", lambda: True)
    names.add(compiled_kernels._digest(WANTED, 90))
    assert len(names) == 5


def test_a_cache_that_cannot_be_written_to_is_told(
    triton_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else happens: first launches compile."""
    triton_cache.write_text("no folder")
    compile_ahead(WANTED, 90)
    assert "kernels are compiled when they are first launched, as they cannot be before" in caplog.text


@pytest.mark.thorough
def test_a_server_compiles_what_its_engines_will_launch(
    tmp_path: Path,
    root: Path,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While they start: an engine that asks for the same finds it there."""
    caplog.set_level(logging.INFO)
    stand_in_driver(tmp_path, monkeypatch, 8, 0)
    monkeypatch.setattr(
        compiled_kernels, "has_driver", lambda: True
    )  # which this process would find had it begun with it
    publish({"t": rows_of(10, 8)}, features={"f": {"table": "t", "pooling": "none"}})
    segment = Model(root, "demo").attach()
    settings = ServerSettings(devices=("0", "1"), workers=2, placement="hbm")
    thread = begin_to_compile(settings, [segment])
    assert thread is not None
    thread.join()
    assert "kernels for sm_80: 3 in" in caplog.text  # the lookup, what deltas need, and what launches them
    assert compile_once(kernels_of_server(settings, segment), 80) is None
    for others in (
        ServerSettings(),
        ServerSettings(devices=("0",), placement="host"),
        ServerSettings(devices=("interpreter",)),
    ):
        assert begin_to_compile(others, [segment]) is None and not are_compiled(others)


def test_settings_say_which_kernels_are_wanted(root: Path, publish: Publish) -> None:
    """Those of the placement, the cache's policy, and of whoever gathers."""
    publish(
        {"a": rows_of(10, 8), "b": rows_of(10, 64)},
        features={"f": {"table": "a", "pooling": "sum"}, "g": {"table": "b"}},
    )
    segment = Model(root, "demo").attach()

    def wanted(**settings: Any) -> WantedKernels:
        return kernels_of_server(ServerSettings(devices=("0",), **settings), segment)

    assert segment.tables["b"].row_bytes == 68 and wanted().key.is_tight  # padded to 80 in slots
    widths = 16, 80
    assert wanted() == kernels_wanted(segment, "auto") and wanted().cached_row_bytes == widths
    assert wanted().is_indirect == (False, True) and wanted().gathers == (False, True)
    assert wanted(placement="hbm").is_indirect == (False,) and not wanted(placement="hbm").cached_row_bytes
    assert wanted(placement="cached").is_indirect == (True,) and wanted(placement="hybrid").is_indirect == (
        False,
        True,
    )
    assert wanted(placement="cached", gather_threads=0).gathers == (False,)
    assert wanted(placement="cached", gather_threads=3).gathers == (True,)
    assert not wanted(cache_policy="lru").is_lfu and not wanted().tensor_features
    assert kernels_wanted(segment, "auto", tensors=True).tensor_features == 2

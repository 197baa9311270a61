"""Settings of workers on a GPU: which are refused, which tables go to HBM, and how devices are shared."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tables
from planned_tables import planned_tables
from servers import publish_demo
from support import run_tableside

from tableside.quant import QuantError, RowFormat, choose
from tableside.quant.cache.tables import map_bytes
from tableside.quant.gpu.residence import plan
from tableside.quant.gpu.residence.cached import Cached
from tableside.quant.gpu.residence.in_hbm import InHbm
from tableside.quant.gpu.residence.residence import Room, TableSize
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import size_of
from tableside.serving.settings import ServerSettings
from tableside.serving.workers.supervisor import Supervisor
from tableside.serving.workers.worker import WorkerConfig, WorkerProcess, make_application

pytestmark = pytest.mark.gpu
HOME: Any = SimpleNamespace(cache=None)  # a device without a cache


@pytest.mark.drawn(0.5)
def test_more_devices_than_workers_are_refused(root: Path, tmp_path: Path) -> None:
    publish_demo(root, tmp_path)
    result = run_tableside("serve", "demo", "--devices", "0,1", root=root)
    assert result.returncode == 1
    assert "start at least --workers 2" in result.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "0,0", "--workers", "2"), "devices 0,0 name one twice"),
        (("--placement", "hbm"), "placement and hbm_budget are for GPUs; say which ones with --devices"),
        (("--hbm-budget", "8GiB"), "placement and hbm_budget are for GPUs"),
    ],
)
def test_gpu_settings_that_mean_nothing_are_refused(options: tuple[str, ...], message: str) -> None:
    result = run_tableside("serve", "demo", *options)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.drawn(0.5)
def test_devices_are_numbers(root: Path) -> None:
    result = run_tableside("serve", "demo", "--devices", "cuda:0", root=root)
    assert result.returncode != 0
    assert "device 'cuda:0' is not the number of a GPU; expected for instance 0,1" in result.stderr


def test_smallest_tables_go_to_hbm_first() -> None:
    stored = planned_tables(
        [(name, name, RowFormat.INT8, rows, 12) for name, rows in (("a", 50), ("b", 10), ("c", 20))]
    )
    sizes = [size_of(t) for t in stored]
    assert {t.name: t.bytes for t in sizes} == {"a": 800, "b": 160, "c": 320}
    tight = [t._replace(row_bytes=16 - 12 * (t.name == "a")) for t in sizes]
    plan.check_padding(tight, dict.fromkeys("abc", "hbm"))
    plan.check_padding(tight, {"a": "host", "b": "zero_copy", "c": "zero_copy"})
    plan.check_padding(tight, {"a": "cached", "b": "zero_copy", "c": "zero_copy"})
    with pytest.raises(QuantError, match="those of table a take 4 bytes"):
        plan.check_padding(tight, {"a": "zero_copy", "b": "cached", "c": "zero_copy"})

    def chosen(placement: str, budget: int, tables: list[TableSize] = sizes) -> dict[str, str]:
        return plan.choose(tables, placement, budget, HOME)

    assert chosen("auto", 480) == {"a": "zero_copy", "b": "hbm", "c": "hbm"}
    assert chosen("auto", 479) == {"a": "zero_copy", "b": "hbm", "c": "zero_copy"}
    assert chosen("auto", 0) == dict.fromkeys("abc", "zero_copy")
    assert chosen("zero_copy", 0) == dict.fromkeys("abc", "zero_copy")
    assert chosen("hybrid", 0) == dict.fromkeys("abc", "zero_copy")
    assert chosen("hybrid", 1024) == dict.fromkeys("abc", "hybrid")
    assert chosen("hybrid", 1279) == dict.fromkeys("abc", "hybrid")
    assert chosen("hybrid", 1280) == dict.fromkeys("abc", "hbm")
    wide = [size_of(t) for t in planned_tables([("w", "w", RowFormat.INT8, 1 << 31, 128)])]
    assert chosen("auto", 900 << 20, wide) == {"w": "zero_copy"}  # the cache's maps alone take a GiB
    assert chosen("auto", 2 << 30, wide) == {"w": "cached"}
    stored = [t._replace(is_stored=t.name != "c") for t in sizes]
    assert chosen("auto", 319, stored) == {"a": "stored", "b": "hbm", "c": "zero_copy"}
    assert chosen("auto", 479, stored) == {"a": "stored", "b": "stored", "c": "hbm"}
    assert chosen("auto", 480, stored) == {"a": "stored", "b": "hbm", "c": "hbm"}
    assert chosen("auto", 1280, stored) == dict.fromkeys("abc", "hbm")
    small, large = sizes[1]._replace(name="s"), TableSize("d", 1 << 26, 16, is_stored=True)
    half, all_of_it = large._replace(name="h", rows=1 << 25), 1 << 30
    assert chosen("auto", all_of_it, [small, large, half]) == {
        "s": "hbm",
        "d": "stored",
        "h": "hbm",
    }
    on_disk = [t._replace(is_stored=True) for t in wide]
    assert chosen("auto", 2 << 30, on_disk) == {"w": "stored"}
    assert chosen("cached", 2 << 30, on_disk) == {"w": "cached_stored"}
    assert chosen("zero_copy", 2 << 30, on_disk) == {"w": "zero_copy"}
    raw = [t._replace(index_bytes=1) for t in on_disk]
    assert chosen("cached", 2 << 30, raw) == {"w": "stored"}
    with pytest.raises(QuantError, match=r"needs 1,280 bytes, the budget of this worker is 1,279"):
        chosen("hbm", 1279)


def room(budget: int, **more: Any) -> Room:
    unused = {"same": {}, "open_cache": None, "cache_settings": None, "label": "", "readers": {}}
    return Room(**{"home": HOME, "budget": budget, "growth": 0, "is_stashable": False, **unused, **more})


def test_tables_that_are_stashed_take_whole_pages() -> None:
    sizes = [TableSize("a", 10, 16), TableSize("b", 1 << 17, 16), TableSize("c", 1 + (1 << 17), 16)]
    assert InHbm.plan(sizes, room(0)).bytes == 160 + (2 << 20) + (2 << 20) + 16
    assert InHbm.plan(sizes, room(0, is_stashable=True)).bytes == (2 + 2 + 4) << 20


def test_a_cache_has_what_the_maps_of_two_versions_leave() -> None:
    """Whoever comes later finds it open, and takes maps alone."""
    sizes, opened = [TableSize("a", 1 << 20, 32), TableSize("b", 1 << 20, 16)], list[Any]()
    maps = sum(map_bytes(t.rows) for t in sizes)
    ways = {"open_cache": lambda *how: opened.append(how), "cache_settings": lambda size: size}
    planned = Cached.plan(sizes, room(8 << 20, growth=1 << 20, **ways))
    assert (planned.bytes, planned.kept_bytes) == (0, 7 << 20)
    assert opened == [((7 << 20) - 2 * maps, 16, 48 << 20)]
    later = Cached.plan(sizes, room(0, home=SimpleNamespace(cache=object())))
    assert (later.bytes, later.kept_bytes) == (maps, 0)
    with pytest.raises(QuantError, match=f"take {2 * maps:,} bytes; the budget leaves {2 * maps:,}; give it"):
        Cached.plan(sizes, room(2 * maps, **ways))


def test_processes_of_a_gpu_share_two_fifths_of_its_memory() -> None:
    """Where no budget is given. An evaluation's pool says how many processes there are; a server has one
    for each GPU."""
    placer = Placer(ServerSettings(devices=(tables.serve_device(),), sharing=3), choose())
    placer.open()
    assert placer.gpu is not None
    assert placer._budget == int(placer.gpu.device.memory_bytes * 0.4 / 3)


def test_workers_are_spread_over_devices_and_replaced_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    settings = ServerSettings(models=("demo",), workers=3, devices=("4", "7"))
    supervisor = Supervisor(WorkerConfig(settings, make_application), [], lambda: None)
    monkeypatch.setattr(WorkerProcess, "start", lambda worker: None)
    for _ in range(3):
        supervisor.workers.append(supervisor._started(supervisor._device()))
    assert [w.device for w in supervisor.workers] == ["4", "7", "4"]
    assert supervisor.workers[1].config.settings.devices == ("7",)
    asked = [w.config.settings.engine for w in supervisor.workers]
    assert asked == [supervisor._engines[device].address for device in "474"] and asked[0] != asked[1]
    monkeypatch.setattr(WorkerProcess, "kill", lambda worker: None)
    for place, device in ((1, "7"), (0, "4")):
        ended = supervisor.workers[place]
        ended.is_ready = True
        supervisor._replace_ended(place, ended)
        assert supervisor.workers[place] is not ended and supervisor.workers[place].device == device
    for engine in supervisor._engines.values():
        engine.close()

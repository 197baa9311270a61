"""`tableside plan`: a published model and files of requests in, hit rates and a command out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from json_keys import documented_keys, keys_of
from support import run_tableside

pa = pytest.importorskip("pyarrow", reason="the eval extra brings it")
import pyarrow.parquet as pq  # noqa: E402

from tableside.loader.load.load import load  # noqa: E402
from tableside.loader.model.model import parse_model  # noqa: E402
from tableside.loader.versions.states import attach_state  # noqa: E402
from tableside.loader.versions.versions import Model  # noqa: E402
from tableside.serving.errors import ServingError  # noqa: E402
from tableside.serving.planning.plan import plan  # noqa: E402

ROWS = {"item": 2000, "user": 300}


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    tables = {name: np.zeros((rows, 16), np.float32) for name, rows in ROWS.items()}
    features = {"clicked": {"table": "item"}, "seen": {"table": "item"}, "user": {"table": "user"}}
    publish(tables, features=features, eval={"label": "label", "columns": {"seen": "views"}})
    return Model(root, "demo")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """4,000 requests: lists of ids, of which one in a hundred has no row, and an id a row."""
    rng = np.random.default_rng(2)
    lists = [(rng.zipf(1.2, 3) % 2020).tolist() for _ in range(4000)]
    views = [(rng.zipf(1.2, int(n)) % 2000).tolist() for n in rng.integers(0, 5, 4000)]
    columns = {"clicked": lists, "views": views, "user": rng.integers(0, 300, 4000)}
    pq.write_table(pa.table(columns), tmp_path / "requests.parquet", row_group_size=500)
    return tmp_path / "requests.parquet"


@pytest.mark.drawn(0.25)
def test_what_the_command_says(model: Model, data: Path) -> None:
    found = run_tableside("plan", "demo", data, "--json", root=model.root)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert keys_of(said) == documented_keys("plan")
    asked = pq.read_table(data)
    ids = asked["clicked"].combine_chunks().flatten().to_numpy()
    assert said["rows"] == 4000 and said["ids_without_row"] == (ids >= 2000).sum() > 0
    assert said["ids"] == ids.size + len(asked["views"].combine_chunks().flatten()) + 4000
    assert [t["name"] for t in said["tables"]] == ["item", "user"] and said["sampled"] == 1
    assert said["tables"][1]["used_rows"] == 300
    for policy in "lru", "lfu":
        rates = [size[policy] for size in said["sizes"]]
        assert rates == sorted(rates) and 0 < rates[0] < rates[-1] <= 1
    whole = said["sizes"][-1]["bytes"]
    assert whole == sum(ROWS.values()) * (32 + 24), (
        "rows of 20 bytes, padded for a GPU, and what finds a slot"
    )
    text = run_tableside("plan", "demo", data, root=model.root).stdout
    assert f"--hbm-budget {said['bytes']} --cache-policy {said['policy']}" in text and " *" in text


@pytest.mark.drawn(0.25)
def test_a_size_for_a_hit_rate(model: Model, data: Path) -> None:
    def chosen(*options: object) -> dict[str, Any]:
        told = run_tableside("plan", "demo", data, "--json", *options, root=model.root).stdout
        return dict(json.loads(told))

    most = {size["bytes"]: max(size["lru"], size["lfu"]) for size in chosen()["sizes"]}
    enough = chosen("--hit-rate", 0.7)["bytes"]
    assert most[enough] >= 0.7 > most[enough // 2]
    found = run_tableside("plan", "demo", data, "--json", "--hit-rate", 1, root=model.root)
    assert json.loads(found.stdout)["bytes"] == max(most), "first uses never find their row"
    assert f"no size has 100.0%: the largest one has {max(most.values()):.1%}" in found.stderr
    said = chosen("--sizes", "64KiB,16KiB")
    assert [size["bytes"] for size in said["sizes"]] == [16384, 65536]


@pytest.mark.drawn(0.25)
def test_what_one_gib_more_is_worth(model: Model, data: Path) -> None:
    """All rows fit into it, so it has what the largest size has; a miss costs what is said."""

    def told(*options: object) -> dict[str, Any]:
        return dict(
            json.loads(run_tableside("plan", "demo", data, "--json", *options, root=model.root).stdout)
        )

    said, whole = told("--sizes", "8KiB"), told()["sizes"][-1][told()["policy"]]
    gained = whole - said["sizes"][0][said["policy"]]
    more = said["one_gib_more"]
    assert more["hit_rate"] == pytest.approx(whole) and gained > 0.1
    assert said["miss_us"] == 0.003 and more["saved_us_of_1000_ids"] == pytest.approx(3 * gained)
    costly = told("--sizes", "8KiB", "--miss-us", 2)
    assert costly["one_gib_more"]["saved_us_of_1000_ids"] == pytest.approx(2000 * gained)
    assert costly["miss_us"] == 2


@pytest.mark.drawn(0.25)
def test_curves_are_drawn(model: Model, data: Path, tmp_path: Path) -> None:
    """A line for each policy and table, from many misses to few, downwards; a single size is one point."""
    file = tmp_path / "curves.svg"
    assert run_tableside("plan", "demo", data, "--svg", file, root=model.root).returncode == 0
    drawn = ElementTree.parse(file).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in drawn.iter(f"{space}text")]
    assert {"LRU", "LFU", "item", "user", "0 %", "100 %"} <= set(texts)
    lines = [line.attrib["points"].split() for line in drawn.iter(f"{space}polyline")]
    assert len(lines) == 4 and {len(line) for line in lines} == {9}
    down = [float(point.split(",")[1]) for point in lines[0]]
    assert down == sorted(down) and down[0] < down[-1], "less of the ids miss, the larger the cache"
    one = run_tableside("plan", "demo", data, "--svg", file, "--sizes", "64KiB", root=model.root)
    assert one.returncode == 0 and ElementTree.parse(file).getroot() is not None
    found = run_tableside("plan", "demo", data, "--svg", tmp_path / "none" / "c.svg", root=model.root)
    assert found.returncode == 1 and "none/c.svg" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.drawn(0.25)
def test_data_that_is_not_the_models(model: Model, data: Path, tmp_path: Path) -> None:
    found = run_tableside("plan", "demo", tmp_path / "none.parquet", root=model.root)
    assert found.returncode == 1 and "none.parquet does not exist" in found.stderr
    (tmp_path / "other.jsonl").write_text('{"clicked": [1], "user": 3}\n')
    found = run_tableside("plan", "demo", tmp_path / "other.jsonl", root=model.root)
    assert found.returncode == 1 and "has no column 'views'" in found.stderr
    one = tmp_path / "one.jsonl"
    one.write_text('{"clicked": [1], "views": [], "user": 3}\n')
    assert run_tableside("plan", "demo", one, root=model.root).returncode == 0
    segment = attach_state(model, None, "header")
    one.write_text('{"clicked": [5000], "views": [], "user": null}\n')
    with pytest.raises(ServingError, match="no ids of rows"):
        plan(segment, one, batch_rows=10)


@pytest.mark.drawn(0.25)
def test_rows_on_a_disk_are_planned_for_a_hot_segment(tmp_path: Path, disk: Path) -> None:
    """Of the table that is read from there, as its rows are, and the command for it."""
    np.savez(tmp_path / "c.npz", big=np.zeros((20_000, 32), np.float32), small=np.zeros((10, 8), np.float32))
    raw = {
        "name": "m",
        "checkpoint": "c.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in ("big", "small")},
        "features": {t: {"table": t} for t in ("big", "small")},
    }
    load(parse_model(raw, tmp_path), disk)
    rows = [f'{{"big": [{n % 7}, {n}], "small": [1]}}\n' for n in range(600)]
    (tmp_path / "r.jsonl").write_text("".join(rows))
    found = json.loads(run_tableside("plan", "m", tmp_path / "r.jsonl", "--json", root=disk).stdout)
    assert found["setting"] == "host_cache" and [t["name"] for t in found["tables"]] == ["big"]
    assert (found["policy"], found["ids"]) == ("lfu", 1200)
    assert found["sizes"][-1]["bytes"] == 20_000 * 128  # what finds them lies beside the budget
    text = run_tableside("plan", "m", tmp_path / "r.jsonl", root=disk).stdout
    assert f"tableside serve m --host-cache {found['bytes']}" in text
    (chosen,) = (size for size in found["sizes"] if size["bytes"] == found["bytes"])
    assert text.rstrip().endswith(f"# {chosen['lfu']:.1%}"), "what a hot segment has, not what LRU would"

"""The generated tables of README.md and docs/ are those of the result files, and those say what was
measured, and where."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import common
import figures
import plots
import pytest
import run_all
import scale

from tableside.serving.settings import ServerSettings

TOP = Path(__file__).parent.parent
RESULTS = sorted((TOP / "benchmarks" / "results").glob("*.json"))
TEXTS = {str(p.relative_to(TOP)): p.read_text() for p in figures.pages()}
HISTORY = "docs/log.md"


# ---- texts ----


@pytest.mark.parametrize("name", TEXTS)
def test_the_tables_of_a_page_are_those_of_the_results(name: str) -> None:
    assert figures.with_tables(TEXTS[name]) == TEXTS[name], "run make figures"


def test_every_table_stands_on_one_page() -> None:
    assert sorted(figures.MARKED.findall("".join(TEXTS.values()))) == sorted(figures.tables())


@pytest.mark.parametrize("name", sorted({*TEXTS} - {HISTORY}))
def test_prose_holds_no_measured_number(name: str) -> None:
    """Neither a mark of one nor a rate, which is always measured; tables and code may."""
    prose = re.sub(r"(?s:^```.*?^```$)|^(?:\|| {4}).*$", "", TEXTS[name], flags=re.MULTILINE)
    assert "<!--f:" not in TEXTS[name]
    assert re.findall(r"\d [kMG]? ?(?:rows|keys|ids|requests|lookups)/s|\d [GM]B/s|\d µs", prose) == []


def test_every_result_file_is_used() -> None:
    """By a table, by a plot, or by a text that names it."""
    specs = [spec for table in figures.tables().values() for spec in (table, *table["rows"])]
    used = {spec["file"] for spec in specs if "file" in spec}
    named = set(re.findall(r"results/(\w+)\.json", "".join(TEXTS.values())))
    used |= set(
        re.findall(r'(?:read_result|rows_of)\("(\w+)"', (TOP / "benchmarks" / "plots.py").read_text())
    )
    assert named <= {path.stem for path in RESULTS}
    assert {path.stem for path in RESULTS} - used - named == set()


def test_limits_that_a_page_names_are_the_defaults() -> None:
    """Each row of the table names settings, and their values stand before the answer beyond them."""
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| ((?:`\w+`(?:, )?)+) \|$",
        (TOP / "docs" / "running.md").read_text(),
        re.MULTILINE,
    )
    named = [(name, cell) for _, cell, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) == 15
    for name, cell in named:
        default = ServerSettings.model_fields[name].default
        assert re.search(rf"(?<!\d){as_written(default, name)}(?!\d)", cell), (
            f"{name} is {default}; the text says: {cell}"
        )


def as_written(value: float, name: str) -> str:
    """A default as the table has it: 64 MiB, or a plain number; seconds may share one unit."""
    unit = next(
        ((f" {u}", n) for u, n in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if not value % (1 << n)), ("", 0)
    )
    return f"{value / (1 << unit[1]):.0f}{unit[0]}" if name.endswith("_bytes") else f"{value:.0f}"


# ---- plots ----


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_drawn_from_the_results_that_are_there(name: str) -> None:
    """Its file has the hash of what would be drawn now."""
    found = plots.HASH.search((plots.IMAGES / f"{name}.svg").read_text())
    assert found and found[1] == plots.hash_of(plots.PLOTS[name]()), (
        "the results are newer than the plot: make plots"
    )


@pytest.mark.parametrize("name", plots.PLOTS)
@pytest.mark.drawn(3)
def test_a_plot_is_drawn_alike_every_time(name: str, tmp_path: Path) -> None:
    """Byte for byte, by the matplotlib that drew the file."""
    matplotlib = pytest.importorskip("matplotlib")
    committed = (plots.IMAGES / f"{name}.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip(f"another matplotlib than {matplotlib.__version__} drew it")
    plots.draw(plots.PLOTS[name](), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == committed


def test_the_plots_are_shown() -> None:
    """Two by README.md, beside a drawing by hand; every one by some text; and no other images are there."""
    shown = {path.stem: re.findall(r"images/(\w+)\.svg\)", path.read_text()) for path in figures.pages()}
    assert len(shown["README"]) == 3 and DRAWING in shown["README"]
    assert {name for names in shown.values() for name in names} == {*plots.PLOTS, DRAWING}
    assert {path.name for path in plots.IMAGES.iterdir()} == {
        f"{name}.svg" for name in (*plots.PLOTS, DRAWING)
    }


DRAWING = "overview"  # of how it works, for which there are no results


# ---- result files ----


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_file_says_what_was_measured(path: Path) -> None:
    """Strict JSON; one commit; the command, the hardware, the versions and the date."""
    machine: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)["machine"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", machine["commit"])
    assert machine["command"].startswith("python ")
    assert machine["cpu"] and machine["kernel"] and machine["cores"] >= 1 and machine["memory_gib"] > 0
    assert re.fullmatch(r"3\.\d+\.\d+", machine["python"]) and machine["numpy"] and machine["torch"]
    assert datetime.fromisoformat(machine["date"]).tzinfo is not None


def test_every_result_file_has_a_benchmark_that_writes_it() -> None:
    """Campaigns write theirs where `--out` says. A benchmark names those that are written on request."""
    code = "".join(path.read_text() for path in (TOP / "benchmarks").glob("*.py"))
    found = {path.stem for path in RESULTS if not path.stem.startswith("campaign_")}
    assert found <= set(re.findall(r'(?:report\(\s*"|--as )(\w+)', code))


def test_every_benchmark_that_needs_no_gpu_is_run_by_make_bench() -> None:
    """All files that write a result and are not called gpu_*, and nothing else."""
    folder = TOP / "benchmarks"
    reporting = {
        p.name for p in folder.glob("*.py") if re.search(r"^ +report\(", p.read_text(), re.MULTILINE)
    }
    assert {name for name in reporting if not name.startswith("gpu_")} == {
        b.split()[0] for b in run_all.BENCHMARKS
    }
    assert "benchmarks/run_all.py" in (TOP / "Makefile").read_text()


# ---- the tables themselves ----

ROWS = [
    {"format": "int8", "ids": "uniform", "us": 118.166, "M rows/s": 1.5},
    {"format": "int8", "ids": "zipf", "us": 91.898, "M rows/s": 2},
    {"format": "int4", "ids": "uniform", "us": 107.619, "M rows/s": None},
]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table over a result file that is made here."""
    table: dict[str, Any] = {"head": ["rows", "µs"], "file": "f", "cells": ["{us:.1f}"]}
    monkeypatch.setattr(figures, "tables", lambda: {"t": table})
    monkeypatch.setattr(figures, "read_result", lambda _: {"rows": ROWS, "others": ROWS[2:]})
    return table


@pytest.mark.parametrize(
    ("added", "row", "printed"),
    [
        ({}, {"where": {"format": "int4"}}, "| a | 107.6 |"),
        ({"where": {"format": "int8"}}, {"where": {"ids": "zipf"}}, "| a | 91.9 |"),
        ({}, {"where": {"format": "int8"}}, "| a | 91.9–118.2 |"),
        ({}, {"where": {"format": ["int4", "int8"], "ids": "uniform"}}, "| a | 107.6–118.2 |"),
        (
            {"columns": [{"ids": "zipf"}, {"ids": "uniform"}]},
            {"where": {"format": "int8"}},
            "| a | 91.9 | 118.2 |",
        ),
        (
            {},
            {"where": {"format": "int8"}, "cells": ["{M rows/s:.0f} M rows/s, {us:.0f}"]},
            "| a | 2 M rows/s, 92–118 |",
        ),
        ({"list": "others"}, {}, "| a | 107.6 |"),
    ],
)
def test_a_row_is_printed(
    planted: dict[str, Any], added: dict[str, Any], row: dict[str, Any], printed: str
) -> None:
    """Values that are printed alike are printed once."""
    planted |= {**added, "rows": [{"label": "a", **row}]}
    text = figures.with_tables("a\n<!--table:t-->\n| old |\n<!--/table-->\nb")
    assert text == f"a\n<!--table:t-->\n\n| rows | µs |\n| --- | --- |\n{printed}\n\n<!--/table-->\nb"
    assert figures.with_tables(text) == text


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"where": {"format": "int2"}}, r"table 't', row 'a': f.json has no row with {'format': 'int2'}"),
        ({"cells": ["{ms:.1f}"]}, "table 't', row 'a': 'ms'"),
        ({"cells": ["{M rows/s:.1f}"]}, r"table 't', row 'a': expected numbers, found \[1.5, 2, None\]"),
    ],
)
def test_a_cell_without_a_value_is_an_error(planted: dict[str, Any], row: dict[str, Any], fault: str) -> None:
    planted["rows"] = [{"label": "a", **row}]
    with pytest.raises(figures.FigureError, match=fault):
        figures.table_text("t")


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(figures.FigureError, match=r"figures.toml has no table 'tt'"):
        figures.with_tables("<!--table:tt-->\n<!--/table-->")


@pytest.mark.drawn(0.5)
def test_what_64_hosts_would_do_follows_from_the_results() -> None:
    """A disk that is twice as fast makes half of the time, and longer answers take more of the network."""

    def faster(file: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((TOP / "benchmarks" / "results" / f"{file}.json").read_text())
        if file == "load":
            found["rows"] = [{**row, "load GB/s": 2 * row["load GB/s"]} for row in found["rows"]]
        return found | ({"bytes_ratio": 2.0} if file == "hosts" else {})

    now, then = scale.lists(figures.read_result), scale.lists(faster)
    for before, after in zip(now["maps"], then["maps"], strict=True):
        assert after["cold min"] == before["cold min"] / 2
        assert before["owners"] * before["hosts of each"] == scale.HOSTS
        assert before["share GB"] * before["owners"] == pytest.approx(scale.MODEL_BYTES / 1e9, rel=0.001)
    received = [next(p["hosts"] for p in lists["parts"] if p["part"] == "received") for lists in (now, then)]
    ratio = json.loads((TOP / "benchmarks" / "results" / "hosts.json").read_text())["bytes_ratio"]
    assert received[1] / received[0] == pytest.approx(2 / ratio)


# ---- how results are kept ----


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for results, in a tree that is a commit."""
    folder = tmp_path / "benchmarks" / "results"
    folder.parent.mkdir()
    monkeypatch.setattr(common, "RESULTS", folder)
    monkeypatch.setattr(common, "machine", lambda: {"commit": "0123abc"})
    monkeypatch.delenv("TRIAL", raising=False)
    return folder


def test_a_result_is_written_whole(results: Path) -> None:
    """What was there before stays where writing fails."""
    common.report("r", "title", [{"us": 1.5}], missed=[])
    assert json.loads((results / "r.json").read_text())["rows"] == [{"us": 1.5}]
    with pytest.raises(UnicodeEncodeError):
        common.write_whole(results / "r.json", "a half \ud800")
    assert json.loads((results / "r.json").read_text())["rows"] == [{"us": 1.5}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_refused(results: Path, value: float) -> None:
    with pytest.raises(
        common.ResultError, match=r"r.json: rows\[1\]: us is (nan|inf); expected a finite number"
    ):
        common.report("r", "title", [{"us": 1.0}, {"us": value}])
    assert not results.exists()


@pytest.mark.parametrize(("found", "fault"), [("0123abc-dirty", "commit first"), ("", "set COMMIT")])
def test_a_result_of_no_commit_is_refused(
    results: Path, monkeypatch: pytest.MonkeyPatch, found: str, fault: str
) -> None:
    monkeypatch.setattr(common, "machine", lambda: {"commit": found})
    with pytest.raises(common.ResultError, match=fault):
        common.report("r", "title", [{"us": 1.0}])
    assert not results.exists()


def test_a_trial_writes_nothing(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "machine", lambda: {"commit": "0123abc-dirty"})
    monkeypatch.setenv("TRIAL", "1")
    common.report("r", "title", [{"us": 1.0}])
    assert not results.exists()


def test_a_tree_is_dirty_by_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results and texts may change while benchmarks run."""
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(common, "TOP", tmp_path)
    for name in ("benchmarks/results/r.json", "docs/figures.toml", "README.md", "quant/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "a")):
        common._git(*command)
    clean = common.commit()
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    for name in ("benchmarks/results/r.json", "docs/figures.toml", "README.md"):
        (tmp_path / name).write_text("2")
    assert common.commit() == clean
    (tmp_path / "quant/a.py").write_text("2")
    assert common.commit() == f"{clean}-dirty"


def test_where_there_is_no_git_the_environment_names_the_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "TOP", tmp_path)
    monkeypatch.setenv("COMMIT", "0123abc")
    assert common.commit() == "0123abc"

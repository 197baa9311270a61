"""The figures of README.md and docs/ are those of the result files, and those say what was measured, and where."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import common
import figure_values
import figures
import plots
import pytest
import run_all

from tableside.serving.settings import ServerSettings

TOP = Path(__file__).parent.parent
RESULTS = sorted((TOP / "benchmarks" / "results").glob("*.json"))
TEXTS = {str(p.relative_to(TOP)): p for p in figures.documents()}


def read(name: str) -> figures.Text:
    return figures.read_text(name, TEXTS[name].read_text())


# ---- texts ----


@pytest.mark.parametrize("name", TEXTS)
def test_the_numbers_of_a_text_are_those_of_the_result_files(name: str) -> None:
    """As they are printed; and a number that looks measured names its file or says why it has none."""
    assert figures.faults_of(read(name)) == []


def test_every_key_is_named_by_a_text() -> None:
    assert set(figure_values.keys()) - figures.used_keys([read(name) for name in TEXTS]) == set()


def test_every_result_file_is_used() -> None:
    """By a figure of a text, by a plot, or by a text that names it."""
    texts = "".join(path.read_text() for path in TEXTS.values())
    used = {spec["file"] for spec in figure_values.keys().values()}
    named = set(re.findall(r"results/(\w+)\.json", texts))
    used |= set(re.findall(r'(?:read_result|rows_of)\("(\w+)"', (TOP / "benchmarks" / "plots.py").read_text()))
    assert named <= {path.stem for path in RESULTS}
    assert {path.stem for path in RESULTS} - used - named == set()


def test_limits_that_operations_md_names_are_the_defaults() -> None:
    """Each row of the table names settings, and their values stand before the answer beyond them."""
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| ((?:`\w+`(?:, )?)+) \|$", (TOP / "docs" / "operations.md").read_text(), re.MULTILINE
    )
    named = [(name, cell) for _, cell, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(named) == 15
    for name, cell in named:
        default = ServerSettings.model_fields[name].default
        assert re.search(rf"(?<!\d){as_written(default, name)}(?!\d)", cell), f"{name} is {default}; the text says: {cell}"


def as_written(value: float, name: str) -> str:
    """A default as the table has it: 64 MiB, or a plain number; seconds may share one unit."""
    unit = next(((f" {u}", n) for u, n in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if not value % (1 << n)), ("", 0))
    return f"{value / (1 << unit[1]):.0f}{unit[0]}" if name.endswith("_bytes") else f"{value:.0f}"


# ---- plots ----


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_drawn_from_the_results_that_are_there(name: str) -> None:
    """Its file has the hash of what would be drawn now."""
    found = plots.HASH.search((plots.IMAGES / f"{name}.svg").read_text())
    assert found and found[1] == plots.hash_of(plots.PLOTS[name]()), "the results are newer than the plot: make plots"


@pytest.mark.parametrize("name", plots.PLOTS)
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
    shown = {path.stem: re.findall(r"images/(\w+)\.svg\)", path.read_text()) for path in TEXTS.values()}
    assert len(shown["README"]) == 3 and DRAWING in shown["README"]
    assert {name for names in shown.values() for name in names} == {*plots.PLOTS, DRAWING}
    assert {path.name for path in plots.IMAGES.iterdir()} == {f"{name}.svg" for name in (*plots.PLOTS, DRAWING)}


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
    """Campaigns write theirs where `--out` says."""
    code = "".join(path.read_text() for path in (TOP / "benchmarks").glob("*.py"))
    found = {path.stem for path in RESULTS if not path.stem.startswith("campaign_")}
    assert found <= set(re.findall(r'report\(\s*"(\w+)"', code))


def test_every_benchmark_that_needs_no_gpu_is_run_by_make_bench() -> None:
    """All files that write a result and are not called gpu_*, and nothing else."""
    folder = TOP / "benchmarks"
    reporting = {p.name for p in folder.glob("*.py") if re.search(r"^ +report\(", p.read_text(), re.MULTILINE)}
    assert {name for name in reporting if not name.startswith("gpu_")} == {b.split()[0] for b in run_all.BENCHMARKS}
    assert "benchmarks/run_all.py" in (TOP / "Makefile").read_text()


# ---- the comparison itself ----

ROWS = [
    {"format": "int8", "ids": "uniform", "us": 118.166, "theirs": 211.9},
    {"format": "int8", "ids": "zipf", "us": 91.898, "theirs": 204.8},
    {"format": "int4", "ids": "uniform", "us": 107.619, "theirs": None},
]
KEYS: dict[str, dict[str, Any]] = {
    "one": {"file": "f", "where": {"format": "int8", "ids": "uniform"}, "field": "us"},
    "ms": {"file": "f", "where": {"format": "int8"}, "field": "us", "take": "range", "scale": 1e-3},
    "both": {"file": "f", "where": {"ids": "uniform"}, "each": {"format": ["int8", "int4"]}, "field": "us"},
    "fields": {"file": "f", "where": {"format": "int8"}, "each": {"field": ["us", "theirs"], "ids": ["uniform", "zipf"]}},
    "ratio": {"file": "f", "where": {"ids": "zipf"}, "field": "us", "over": "theirs"},
    "of-uniform": {"file": "f", "where": {"format": "int8", "ids": "zipf"}, "field": "us", "over": {"ids": "uniform"}},
    "copy": {"file": "f", "field": "copy_gb_s"},
    "two-rows": {"file": "f", "where": {"format": "int8"}, "field": "us"},
    "no-number": {"file": "f", "where": {"format": "int4"}, "field": "theirs"},
    "rows-s": {"file": "f", "field": "rows_per_s"},
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a result file that is made here."""
    monkeypatch.setattr(figure_values, "keys", lambda: KEYS)
    monkeypatch.setattr(figure_values, "read_result", lambda _: {"rows": ROWS, "copy_gb_s": 4202.8, "rows_per_s": 680262.9})


def faults(text: str) -> list[str]:
    return [fault.partition(": ")[2] for fault in figures.faults_of(figures.read_text("a.md", text))]


@pytest.mark.parametrize(
    "text",
    [
        "It takes 118<!--f:one--> µs, or 118.2<!--f:one--> µs.",
        "It takes 0.092–0.118<!--f:ms--> ms.",
        "| int8 / int4 | 118 / 108<!--f:both--> |",
        "| x | 118 / 92 | 212 / 205<!--f:fields--> |",
        "It takes 0.45<!--f:ratio--> of the time, **0.78<!--f:of-uniform--> ×** that of uniform ids.",
        "Copies run at 4,203<!--f:copy--> GB/s, or at 4203<!--f:copy--> GB/s.",
        "It does 680,000<!--f:rows-s--> rows/s.",
        "The goal is 1.1 × <!--f:none goal-->, with 4 × as many, in 64 MiB.",
        "`118 µs`\n\n    118 µs\n\n```\n118 µs\n```\n",
    ],
)
def test_numbers_that_are_right(planted: None, text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("It takes 119<!--f:one--> µs.", "119 of one is 118 in its file"),
        ("It takes 118.3<!--f:one--> µs.", "118.3 of one is 118.2 in its file"),
        ("It takes 0.092–0.119<!--f:ms--> ms.", "0.119 of ms is 0.118 in its file"),
        ("It does 690,000<!--f:rows-s--> rows/s.", "690,000 of rows-s is 680,000 in its file"),
        ("It takes 118<!--f:won--> µs.", "won is no key"),
        ("It takes 118<!--f:two-rows--> µs.", "two-rows: 2 rows have {'format': 'int8'}; expected one"),
        ("It takes 118<!--f:no-number--> µs.", "the field 'theirs' is None; expected a number"),
        ("It takes 118<!--f:ms--> µs.", "'ms' has 2 values, and 1 numbers stand before it"),
        ("It takes 118 µs.", "no marker behind 118"),
        ("It takes\n118–120 µs, 0.4 / 0.5 GB, 0.6 ×, 7 M rows/s.", "no marker behind 118"),
        ("It takes 118<!--f:none whatever--> µs.", "the reason 'whatever' is none of"),
        ("It takes 118.123<!--f:none log--> µs.", "docs/log.md has no 118.123"),
        ("| a | b |\n| --- | --- |\n| D 64 | 118<!--f:one--> |\n| D 32 | 72 |\n", "no marker behind 72"),
        ("## What it costs\n\n| a | b |\n| --- | --- |\n| D 64 | 118 |\n", "no marker behind 118"),
    ],
)
def test_numbers_that_are_wrong(planted: None, text: str, fault: str) -> None:
    assert any(fault in found for found in faults(text)), faults(text)


def test_each_unmarked_number_of_a_series_is_named(planted: None) -> None:
    numbers = "118 and 120 and 0.4 and 0.5 and 0.6 and 7"
    assert faults("It takes 118–120 µs, 0.4 / 0.5 GB, 0.6 ×, 7 M rows/s.") == [f"no marker behind {numbers}"]


def test_numbers_are_written_as_they_were_printed(planted: None) -> None:
    text = "1<!--f:one--> 0.1–0.15<!--f:ms--> 700,000<!--f:rows-s--> 1.5<!--f:copy--> 9<!--f:none goal-->"
    right = "118<!--f:one--> 0.1–0.12<!--f:ms--> 680,000<!--f:rows-s--> 4,202.8<!--f:copy--> 9<!--f:none goal-->"
    assert figures.corrected(figures.read_text("a.md", text)) == right


@pytest.mark.parametrize(
    ("value", "text", "printed"),
    [
        (680_262.9, "680,000", "680,000"),  # three digits are kept where zeros may be rounded ones
        (684_262.9, "680,000", "684,000"),
        (20_087, "20,100", "20,100"),
        (1366.5, "1367", "1366"),
        (999.6, "99", "1,000"),
        (0.04512, "0.045", "0.045"),
        (12.6, "9", "13"),
    ],
)
def test_a_number_as_it_is_printed(value: float, text: str, printed: str) -> None:
    assert figure_values.as_printed(value, text) == printed


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
    with pytest.raises(common.ResultError, match=r"r.json: rows\[1\]: us is (nan|inf); expected a finite number"):
        common.report("r", "title", [{"us": 1.0}, {"us": value}])
    assert not results.exists()


@pytest.mark.parametrize(("found", "fault"), [("0123abc-dirty", "commit first"), ("", "set COMMIT")])
def test_a_result_of_no_commit_is_refused(results: Path, monkeypatch: pytest.MonkeyPatch, found: str, fault: str) -> None:
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


def test_where_there_is_no_git_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "TOP", tmp_path)
    monkeypatch.setenv("COMMIT", "0123abc")
    assert common.commit() == "0123abc"

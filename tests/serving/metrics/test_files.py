"""Files of counts: what killed processes counted is counted once."""

import os
import signal
import threading
from pathlib import Path

import pytest
from counts import add, counting, let_go, line, python
from prometheus_client import Metric

from tableside.serving.metrics.counters import Count, Histogram, LabelledMetric, Observations, counted
from tableside.serving.metrics.files import NAMES_AT, VARIABLE, CountsFile, heads, metrics_folder, sums

# ---- one file for each process at once ----


def test_a_file_is_taken_over_with_its_counts(tmp_path: Path) -> None:
    """By one process, and only when its own has ended; names of before are counted on, and new ones come
    behind them."""
    first = CountsFile(tmp_path)
    add(first, "requests", 3)
    add(first, "seconds", 0.5, 1, 0)
    second = CountsFile(tmp_path)
    add(second, "requests", 10)
    assert sums(tmp_path) == {"requests": {(): [13]}, "seconds": {(): [0.5, 1, 0]}}
    let_go(first)
    third = CountsFile(tmp_path)
    add(third, "ids", 7)
    add(third, "seconds", 0.25, 0, 1)
    assert sums(tmp_path) == {"requests": {(): [13]}, "seconds": {(): [0.75, 1, 1]}, "ids": {(): [7]}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["counts_0", "counts_1"]
    for file in (second, third):
        let_go(file)


ENDING = """
import os, signal, sys
from tableside.serving.metrics.counters import Counter
one = Counter("tableside_one_total", "", ["label"])
for _ in range(3):
    one.labels("a").inc()
one.labels(sys.argv[1]).inc(2)
print("counted", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_scrapes_beside_processes_that_end_see_every_count_once(tmp_path: Path) -> None:
    """Sums never fall and never rise by more than was counted; there are no more files than processes at
    once."""
    counted = seen = 0.0
    for turn in range(8):
        processes = [counting(ENDING, tmp_path, f"b{turn}") for _ in range(3)]
        while any(process.poll() is None for process in processes):
            found = sums(tmp_path).get("tableside_one_total", {}).get(("a",), [0])[0]
            assert seen <= found <= counted + 9
            seen = found
        for process in processes:
            out, error = process.communicate()
            assert (process.returncode, out) == (-signal.SIGKILL, "counted\n"), error
        counted += 9
        assert sums(tmp_path)["tableside_one_total"] == {
            ("a",): [counted],
            **{(f"b{t}",): [6] for t in range(turn + 1)},
        }
    assert {p.name for p in tmp_path.iterdir()} <= {"counts_0", "counts_1", "counts_2"}


KILLED = """
import os, signal, sys
left = int(sys.argv[1])
def dying(function):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            if function is pwrite:
                function(arguments[0], arguments[1][:9], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
pwrite = os.pwrite
os.posix_fallocate, os.ftruncate, os.pwrite = dying(os.posix_fallocate), dying(os.ftruncate), dying(os.pwrite)
from tableside.serving.metrics.counters import Counter
one = Counter("tableside_one_total", "", ["label"])
for label in range(4):
    one.labels(str(label)).inc()
    print(flush=True)
"""


@pytest.mark.thorough
def test_a_process_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """At each step: what it counted until then is there, and whoever takes its file over counts on."""
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        counted, statuses = [0] * 4, []
        for left in (step, step, 100):
            process = counting(KILLED, folder, left)
            out, error = process.communicate(timeout=300)
            assert process.returncode in (0, -signal.SIGKILL), error
            counted = [value + (label < out.count("\n")) for label, value in enumerate(counted)]
            found = sums(folder).get("tableside_one_total", {})
            assert found == {(str(label),): [value] for label, value in enumerate(counted) if value}, (
                f"killed at step {step}"
            )
            statuses.append(process.returncode)
        assert statuses[-1] == 0
        assert [p.name for p in folder.iterdir()] == ["counts_0"]
        if statuses[0] == 0:
            break
    assert step == 6  # the file gets its size, is reserved, and four names are written


def test_what_a_worker_does_goes_with_it(tmp_path: Path) -> None:
    """Only the beginnings of files whose processes live are read; who takes one over begins anew."""
    one = CountsFile(tmp_path)
    one.set_head(range(8))
    assert list(heads(tmp_path)) == [(0, 1, 2, 3, 4, 5, 6, 7)]
    let_go(one)
    assert not list(heads(tmp_path))
    one = CountsFile(tmp_path)
    assert list(heads(tmp_path)) == [(0,) * 8]
    let_go(one)


def test_threads_count_at_once() -> None:
    values = memoryview(bytearray(24)).cast("d")
    count, observed = Count(values), Observations(values[1:], [])

    def run() -> None:
        for _ in range(20_000):
            count.inc()
            observed.observe(2)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values.tolist() == [80_000, 160_000, 80_000]


# ---- damaged files ----


def test_names_that_were_cut_short_count_nothing(tmp_path: Path) -> None:
    """They are neither read nor taken over."""
    one = CountsFile(tmp_path)
    add(one, "requests", 5)
    with (tmp_path / "counts_0").open("ab") as file:
        file.write(line("ids")[:-1])
    assert sums(tmp_path) == {"requests": {(): [5]}}
    let_go(one)
    one = CountsFile(tmp_path)
    add(one, "bytes", 6)
    assert sums(tmp_path) == {"requests": {(): [5]}, "bytes": {(): [6]}}
    let_go(one)


def test_damaged_files_are_left_out_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = CountsFile(tmp_path)
    add(one, "requests", 5)
    (tmp_path / "counts_8").touch()  # one that just begins
    for number, text in enumerate((b"garbage\n", b"[1]\n", b"3\n", b'["a",[]]\n'), 10):
        path = tmp_path / f"counts_{number}"
        path.write_bytes(bytes(100))
        os.truncate(path, NAMES_AT)
        with path.open("ab") as file:
            file.write(text)
    for _ in range(3):
        assert sums(tmp_path) == {"requests": {(): [5]}}
    for number in range(10, 14):
        assert caplog.text.count(f"metrics file {tmp_path}/counts_{number} is damaged and left out") == 1
    assert "counts_8" not in caplog.text
    let_go(one)


# ---- what Prometheus sees ----


def shown(metric: Metric) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for s in metric.samples}


def test_buckets_count_those_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Prometheus has it: cumulative, the last one being the count. A value that is a bound counts under
    it."""
    monkeypatch.setattr(LabelledMetric, "declared", [])
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    histogram = Histogram("s", "h", ["model"], (1e-5, 0.1, 1))
    for value in (0.05, 0.1, 0.5):
        histogram.labels("m").observe(value)
    histogram.labels("m").add(1.5)
    histogram.labels("m").add_all([0.1, 7])
    (metric,) = counted(tmp_path)
    assert shown(metric) == {
        ("s_bucket", "m", "1e-05"): 0,
        ("s_bucket", "m", "0.1"): 3,
        ("s_bucket", "m", "1.0"): 4,
        ("s_bucket", "m", "+Inf"): 6,
        ("s_count", "m"): 6,
        ("s_sum", "m"): pytest.approx(9.25),
    }


TALLYING = """
import sys
from pathlib import Path
from tableside.serving.metrics import files, metrics
request = type("R", (), dict(ids=3, vectors=2, row_bytes=5, out_bytes=7))()
counts = metrics.ModelMetrics("first", "v2")
for turn in range(3):
    counts.answered(request, 11, metrics.Stages(0.0, 2e-5, 5e-5, 50.0))
    for model in range(5000):
        metrics.IDS.labels(f"turn{turn}.{model}").inc()  # more is reserved
found = files.sums(Path(sys.argv[1]))
assert len(found["tableside_ids_total"]) == 15001
firsts = {name: {labels: v for labels, v in of.items() if labels[0] == "first"} for name, of in found.items()}
print(firsts)
"""


@pytest.mark.drawn(0.5)
def test_a_request_is_counted_where_metrics_are_read(tmp_path: Path) -> None:
    """Counts, sums and buckets that are added to in place, also after more was reserved."""
    out, error = counting(TALLYING, tmp_path, tmp_path).communicate(timeout=300)
    found = eval(out or error)
    assert found["tableside_ids_total"] == {("first",): [9]}
    assert found["tableside_requests_total"] == {("first", "v2", "ok"): [3]}
    stages = found["tableside_stage_seconds"]
    assert stages["first", "v2", "encode"] == [pytest.approx(3 * (50.0 - 5e-5)), *[0] * 13, 3]
    assert stages["first", "v2", "lookup"][1:3] == [0, 3]


def test_a_folder_that_is_just_made_is_not_taken_for_a_stale_one(tmp_path: Path) -> None:
    """Many servers that start at once: each keeps its own folder until it ends, and then none is left."""
    code = (
        "import os, sys; from pathlib import Path; from tableside.serving.metrics.files import "
        "metrics_folder\n"
    )
    code += "from tableside.serving.metrics.files import VARIABLE\n"
    code += (
        "for _ in range(100):\n    with metrics_folder(Path(sys.argv[1])): assert "
        "Path(os.environ[VARIABLE]).is_dir()"
    )
    processes = [python(code, tmp_path) for _ in range(3)]
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0 and not error, error
    assert not list(tmp_path.iterdir())


def test_counts_lie_beside_the_root_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that may only read what is published has its folder next to that."""
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with metrics_folder(tmp_path / "root"):
        assert Path(os.environ[VARIABLE]).parent == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_the_variable_goes_with_the_server(tmp_path: Path) -> None:
    with metrics_folder(tmp_path):
        assert Path(os.environ[VARIABLE]).parent == tmp_path
    assert VARIABLE not in os.environ and not list(tmp_path.iterdir())

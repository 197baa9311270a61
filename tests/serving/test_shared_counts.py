"""How a worker counts: bytes are reserved, and each process has a file of its own, after a fork too."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from tableside.serving.shared_counts import VARIABLE, SharedCounts


def python(code: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


COUNTING = """
import resource, sys
from pathlib import Path
from tableside.serving import metrics, metrics_files
metrics.IDS.labels("first").inc()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
for model in range(2000):
    metrics.IDS.labels(f"model{model}").inc()
    metrics.IDS.labels("first").inc()
found = metrics_files.totals(Path(sys.argv[2]))["counter"]
print(len(found), next(value for key, value in found.items() if '"first"' in key))
"""


@pytest.mark.parametrize(("limit", "is_refused"), [(resource.RLIM_INFINITY, False), (1 << 16, True)], ids=["room", "no room"])
def test_values_without_room_are_left_out(tmp_path: Path, limit: int, is_refused: bool) -> None:
    """The kernel refuses that a file grows: what has its place counts on, what has none is logged once and left out."""
    process = python(COUNTING, limit, tmp_path, env={**os.environ, VARIABLE: str(tmp_path)})
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    values, first = out.split()
    assert float(first) == 2001
    assert (int(values) < 1000) == is_refused and (int(values) == 2001) != is_refused
    assert error.count("new ones are left out; free shared memory (tableside gc)") == is_refused


def test_bytes_are_reserved_before_they_are_written(tmp_path: Path) -> None:
    """A file has as many blocks as bytes, when it is new and when it has grown: none is left to take at a write."""
    file = SharedCounts(str(tmp_path / "counter_1.db"))
    for number in range(1000):
        status = (tmp_path / "counter_1.db").stat()
        assert status.st_blocks * 512 >= status.st_size >= 1 << 16
        file.write_value(mmap_key("requests", "requests_total", ["number"], [str(number)], "help"), 1.0, 0.0)
    assert status.st_size > 1 << 16
    file.close()  # type: ignore[no-untyped-call]


FORKING = """
import os
from prometheus_client import values
from tableside.serving import metrics
from tableside.serving.shared_counts import SharedCounts
assert values.MmapedDict is SharedCounts
metrics.IDS.labels("demo").inc()
if (child := os.fork()) == 0:
    metrics.IDS.labels("demo").inc(2)
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid(), child)
"""


def test_prometheus_client_counts_in_these_files_and_notices_a_fork(tmp_path: Path) -> None:
    """Importing the metrics puts our files in the place of its own. What a forked process counts is in that process's file."""
    process = python(FORKING, env={**os.environ, VARIABLE: str(tmp_path)})
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    found = {}
    for pid in map(int, out.split()):
        file = tmp_path / f"counter_{pid}.db"
        assert file.stat().st_size >= 1 << 16, "its bytes are not reserved"
        values = {key: value for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file))}  # type: ignore[no-untyped-call]
        found[pid] = [value for key, value in values.items() if "tableside_ids_total" in key]
    assert sorted(found.values()) == [[1.0], [2.0]]


TALLYING = """
import sys
from pathlib import Path
from prometheus_client import Counter
from tableside.serving import metrics, metrics_files
counts, request = metrics.ModelMetrics("first", "v2"), type("R", (), dict(ids=3, vectors=2, row_bytes=5, out_bytes=7))()
for turn in range(3):
    counts.answered(request, 11, metrics.Stages(0.0, 2e-5, 5e-5, 50.0))
    for model in range(700):
        metrics.IDS.labels(f"turn{turn}.{model}").inc()  # the file grows and is mapped again
found = metrics_files.totals(Path(sys.argv[1]))
for kind in found:
    for key, value in found[kind].items():
        if '"first"' in key:
            print(value, key)
"""


def test_tallies_count_where_metrics_are_read(tmp_path: Path) -> None:
    """Counts, sums and buckets that are added to in place are what is read, also after their files have grown."""
    process = python(TALLYING, tmp_path, env={**os.environ, VARIABLE: str(tmp_path)})
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    lines = out.splitlines()
    values = {
        name: [line for line in lines if f'"{name}"' in line] for name in ("tableside_ids_total", "tableside_requests_total")
    }
    assert [float(v[0].split()[0]) for v in values.values()] == [9.0, 3.0]
    encode = [line for line in lines if '"encode"' in line]
    assert sum(float(line.split()[0]) for line in encode if "_sum" in line) == pytest.approx(3 * (50.0 - 5e-5))
    assert [line.split()[0] for line in encode if '"+Inf"' in line] == ["3.0"]
    lookup = [line for line in lines if '"lookup"' in line and line.startswith("3.0")]
    assert len(lookup) == 1 and '"3e-05"' in lookup[0]

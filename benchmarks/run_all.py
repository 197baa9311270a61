"""Every benchmark that needs no GPU, one after another; says what each took and which result files it wrote.

    make bench              # some 35 minutes on two cores
    TRIAL=1 make bench      # the same, and nothing is written

Nothing starts where a result would be refused in the end, since the tree is no commit (common.report).
"""

import os
import subprocess
import sys
import time

from common import HERE, RESULTS, STARTED_FROM, ResultError, console, refuse_no_commit

BENCHMARKS = (
    "cpu_lookup.py",
    "cpu_sizes.py",
    "row_alignment.py",
    "cpu_formats.py",
    "row_formats.py",
    "load.py",
    "copied_load.py",
    "updates.py",
    "update_reads.py",
    "update_lag.py",
    "raw_ids.py",
    "raw_load.py",
    "torch_module.py",
    "torch_module_processes.py",
    "workers.py",
    "large_model.py",
    "shared_files.py",
    "http_lookup.py",
    "http_requests.py",
    "client.py",
    "live_ids.py",
    "client_shm.py",
    "eval_pool.py",
    "eval_pool.py --shape criteo",
    "disk_rows.py",
    "disk_stores.py",
    "disk_hot.py",
    "disk_memory.py",
    "disk_hang.py",
    "disk_beside.py",
    "redis_rows.py",
    "grpc_lookup.py",
    "hosts.py",
    "disk_ngram.py",
)


def written() -> dict[str, int]:
    """The result files, with the times at which they were written."""
    return {path.name: path.stat().st_mtime_ns for path in RESULTS.glob("*.json")}


def run(benchmark: str) -> tuple[float, list[str]]:
    """Runs one; returns its seconds and the names of the result files that it wrote. It ends this program
    where it fails."""
    console.rule(benchmark)
    before, started = written(), time.perf_counter()
    file, *options = benchmark.split()
    found = subprocess.run([sys.executable, str(HERE / file), *options], cwd=HERE.parent, check=False)
    if found.returncode:
        raise SystemExit(f"benchmarks/{benchmark} ended with {found.returncode}; its error stands above")
    return time.perf_counter() - started, sorted(
        name for name, at in written().items() if before.get(name) != at
    )


def main() -> None:
    if not os.environ.get("TRIAL"):
        try:
            refuse_no_commit("make bench", STARTED_FROM)
        except ResultError as error:
            raise SystemExit(str(error)) from None
    lines = []
    for benchmark in BENCHMARKS:
        seconds, names = run(benchmark)
        lines.append(f"{seconds:6.0f} s  {benchmark:30}{', '.join(names) or 'nothing written'}")
    console.rule("written")
    console.print(*lines, sep="\n")
    console.print("write the tables of the pages with: make figures; draw the plots with: make plots")


if __name__ == "__main__":
    main()

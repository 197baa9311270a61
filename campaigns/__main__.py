"""`python -m campaigns`: every campaign within a time, and a table in which each figure stands beside its
goal.

Exit code 1: a promise that holds in a run of any length was not kept. What a count lacks of its goal is
marked "short run".
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

from benchmarks.common import machine
from campaigns.common import Result, console, publish_on, show
from campaigns.goals import CAMPAIGNS


def main() -> int:
    """Runs the campaigns; returns the exit code."""
    given = _parser().parse_args()
    if given.disk is not None:
        publish_on(given.disk.resolve())
    names = given.only or list(CAMPAIGNS)
    share = given.seconds / sum(CAMPAIGNS[name].weight for name in names)
    results = [_run(name, share * CAMPAIGNS[name].weight, given.seed) for name in names]
    show(results)
    if given.out:
        found = {"machine": machine(), "results": [result.to_json() for result in results]}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"written to {given.out}")
    broken = [result.name for result in results if result.is_broken()]
    console.print(
        f"not kept: {', '.join(broken)}"
        if broken
        else "every promise that holds in a run of any length was kept"
    )
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns", description="Hostile campaigns against the real thing."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="time for all of them (default: %(default)s; all counts: 3600)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides every order and every case (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(CAMPAIGNS), metavar="NAME", help=f"some of: {', '.join(CAMPAIGNS)}"
    )
    parser.add_argument("--disk", type=Path, help="a folder on a disk, below which models are published")
    parser.add_argument("--out", type=Path, help="a JSON file for figures, hardware, versions and commit")
    return parser


def _run(name: str, seconds: float, seed: int) -> Result:
    """One campaign. Where it cannot run or ends in an error, its figures are missing, and so are its
    goals."""
    console.print(f"{name}: {seconds:.0f} s, seed {seed}")
    campaign, started = CAMPAIGNS[name], time.monotonic()
    try:
        measured = campaign.run(seconds, seed)
    except Exception:  # noqa: BLE001  (printed, and told in the table as figures that were not measured; the others still run)
        traceback.print_exc()
        measured = {}
    return Result(name, time.monotonic() - started, seed, measured, campaign.goals)


if __name__ == "__main__":
    sys.exit(main())

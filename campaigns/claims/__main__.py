"""`python -m campaigns.claims`: takes out the code behind each claim in turn and expects the claim's tests to fail.

Exit code 1: a test passes without the code behind its claim, fails with it, or could not be run.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from campaigns.claims.entries import Claim, problems, read_claims
from campaigns.claims.page import PAGE, render
from campaigns.claims.trial import Outcome, Tree, Verdict

console = Console(highlight=False, soft_wrap=True, width=150)
DESCRIPTION = "Takes out the code behind each claim in turn; the claim's tests should fail."
TOLD_LINES = 40  # of pytest's output, where a trial is not as it should be


def main() -> int:
    """Returns the exit code."""
    given = _parser().parse_args()
    claims = read_claims()
    if given.write:
        PAGE.write_text(render(claims))
        console.print(f"{PAGE}: {len(claims)} claims")
        return 0
    chosen = [c for c in claims if (not given.only or c.area in given.only) and given.match.lower() in c.claim.lower()]
    wrong = [f"{c.area}: {c.claim}\n  {line}" for c in chosen for line in problems(c)]
    if wrong or not chosen:
        console.print(escape("\n".join(wrong) or "no claim is chosen"))
        return 1
    runnable = [c for c in chosen if not c.gpu or given.device != "interpreter"]
    if len(runnable) < len(chosen):
        console.print(f"{len(chosen) - len(runnable)} claims need a GPU: --device cuda:0")
    with TemporaryDirectory(prefix="claims-") as folder:
        trees = [Tree(Path(folder) / str(i), given.device) for i in range(min(given.jobs, len(runnable)))]
        if not given.skip_whole and not _passes_whole(trees[0], runnable, given.jobs):
            return 1
        verdicts = _try_all(trees, runnable, given.deadline)
    _show(verdicts)
    return 0 if all(v.is_right for v in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m campaigns.claims", description=DESCRIPTION)
    parser.add_argument("--only", nargs="+", default=[], metavar="AREA", help="claims of these files in campaigns/claims")
    parser.add_argument("--match", default="", metavar="TEXT", help="claims that hold this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time (default: one a core)")
    parser.add_argument("--deadline", type=float, default=180, metavar="S", help="seconds for a claim (default: %(default)s)")
    parser.add_argument("--device", default="interpreter", help="what GPU kernels run on: cuda:0, or Triton's interpreter")
    parser.add_argument("--skip-whole", action="store_true", help="do not first check that the tests pass with all code in place")
    parser.add_argument("--write", action="store_true", help="write docs/claims.md and run nothing")
    return parser


def _passes_whole(tree: Tree, claims: Sequence[Claim], jobs: int) -> bool:
    """Whether all tests that are named pass with all code in place."""
    tests = sorted({test for claim in claims for test in claim.tests})
    console.print(f"{len(tests)} tests with all code in place")
    started = time.monotonic()
    code, told = tree.pytest(tests, 1800, "-p", "xdist.plugin", "-n", str(jobs), "--dist", "loadfile")
    console.print("\n".join(told.splitlines()[-1 if code == 0 else -TOLD_LINES :]), markup=False)
    console.print(f"{time.monotonic() - started:.0f} s")
    return code == 0


def _try_all(trees: Sequence[Tree], claims: Sequence[Claim], deadline_s: float) -> list[Verdict]:
    """Tries each claim on a tree that is free, and tells of each as it ends; verdicts in the order of the claims."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def try_one(claim: Claim) -> Verdict:
        tree = free.get()
        try:
            return tree.try_claim(claim, deadline_s)
        finally:
            free.put(tree)

    found: dict[Claim, Verdict] = {}
    with ThreadPoolExecutor(len(trees)) as pool:
        for done in as_completed([pool.submit(try_one, claim) for claim in claims]):
            verdict = done.result()
            found[verdict.claim] = verdict
            _tell(verdict, len(found), len(claims))
    return [found[claim] for claim in claims]


def _tell(verdict: Verdict, number: int, of: int) -> None:
    line = f"{number:4}/{of} {verdict.outcome.value:9}{verdict.seconds:5.0f} s  {verdict.claim.area}: {verdict.claim.claim}"
    console.print(line, style="" if verdict.is_right else "red", markup=False)
    if not verdict.is_right:
        console.print("\n".join(verdict.told.splitlines()[-TOLD_LINES:]), markup=False)


def _show(verdicts: Sequence[Verdict]) -> None:
    """A row for each area, and a line for each claim that is not as it should be."""
    table = Table("area", "claims", *(outcome.value for outcome in Outcome), "seconds", box=None)
    for area in sorted({v.claim.area for v in verdicts}):
        of_area = [v for v in verdicts if v.claim.area == area]
        counts = Counter(v.outcome for v in of_area)
        table.add_row(area, str(len(of_area)), *(str(counts[o] or "") for o in Outcome), f"{sum(v.seconds for v in of_area):.0f}")
    console.print(table)
    for verdict in verdicts:
        if not verdict.is_right:
            console.print(f"{verdict.outcome.value}: {verdict.claim.area}: {verdict.claim.claim}", style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())

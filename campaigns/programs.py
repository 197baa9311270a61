"""Campaign: scorers' programs that were tampered with. No signal, no byte that is not theirs, no error but a
refusal.

    python -m campaigns.programs --cases 20000 --seed 1

Each case (`program_cases`) is read, its shapes are propagated, and what both let through is run on three and
on five rows, in a child process, over guarded memory (`guarded`): with the weights and inputs beginning at,
then ending at, an untouchable page, each with two canaries. Children are forked from a process that has torch
imported, and one that dies is replaced. `checks=False` takes the checks of operators and the propagation
away: what the campaign sees without them.
"""

import argparse
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.guarded import Arena, Place, arena, poison_heap

_CANARIES = 0x55, 0xA3
_PLACES: tuple[Place, ...] = ("start", "end")
_ROWS = 3, 5
_MOST_BYTES, _MOST_WORK = 64 << 20, 1 << 28
_HANG_S = 60
_ROOT = Path(__file__).parent.parent
_CHILD_BYTES = 3 << 30
_REFUSED = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, AssertionError)
_BATCH = 250  # cases of one child


def run(seconds: float | None, seed: int, cases: int | None = None, *, checks: bool = True) -> dict[str, Any]:
    """`cases` cases, or as many as fit in `seconds`: counts by outcome, refusals by reason, and the numbers
    of bad cases.

    In a process of its own, whose heap can be poisoned.
    """
    options = {"seconds": seconds, "seed": seed, "cases": cases, "checks": checks}
    # Without tcache every piece of memory passes where mallopt's canaries are written.
    environment = {
        **os.environ,
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "COMPATIBLE",
    }
    command = [sys.executable, "-m", "campaigns.programs", "--inside", json.dumps(options)]
    done = subprocess.run(command, env=environment, cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the process that children are forked from ----


def _inside(seconds: float | None, seed: int, cases: int | None, checks: bool) -> dict[str, Any]:
    import torch

    import tableside.loader.program.run
    from campaigns.program_archives import bases

    torch.set_num_threads(1)
    if not checks:
        tableside.loader.program.run.CHECKS = {}  # type: ignore[attr-defined]
    bases()
    ends = None if seconds is None else time.monotonic() + seconds
    outcomes: Counter[str] = Counter()
    bad: dict[str, str] = {}
    number, last = 0, sys.maxsize if cases is None else cases
    while number < last and (ends is None or time.monotonic() < ends):
        number = _child(seed, range(number, min(number + _BATCH, last)), checks, outcomes, bad)
    return {**_totals(outcomes), "refused_by": _reasons(outcomes), "bad": bad}


def _totals(outcomes: Counter[str]) -> dict[str, int]:
    totals = {
        "cases": outcomes.total(),
        "refused": 0,
        "accepted": 0,
        "signals": 0,
        "foreign_bytes": 0,
        "hangs": 0,
        "errors": 0,
    }
    totals["refused_at_call"] = 0
    for outcome, count in outcomes.items():
        totals[outcome.partition(":")[0]] += count
    return totals


def _reasons(outcomes: Counter[str]) -> dict[str, int]:
    return {
        o.partition(":")[2]: n
        for o, n in outcomes.most_common()
        if o.startswith(("refused:", "refused_at_call:"))
    }


def _child(seed: int, numbers: range, checks: bool, outcomes: Counter[str], bad: dict[str, str]) -> int:
    """Runs cases in a child that tells of each; returns the number of the next case, after one that ended
    the child."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        os.close(reading)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (_CHILD_BYTES, _CHILD_BYTES))
            with os.fdopen(writing, "w", buffering=1) as out:
                for number in numbers:
                    out.write(json.dumps(_outcome(seed, number, checks)) + "\n")
        except BaseException:  # noqa: BLE001 - told by the traceback and the status
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    number, last = numbers.start, numbers.stop
    with os.fdopen(reading, "rb", buffering=0) as told:
        rest = b""
        while number < last:
            if not select.select([told], [], [], _HANG_S)[0]:
                os.kill(pid, signal.SIGKILL)
                break
            if not (data := told.read(1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _count(json.loads(line), number, outcomes, bad)
                number += 1
    _, status = os.waitpid(pid, 0)
    if number == last:
        return last
    if not os.WIFSIGNALED(status):
        raise RuntimeError(
            f"case {number} of seed {seed} ended its child with status {status}; its traceback is above"
        )
    died = signal.Signals(os.WTERMSIG(status))
    _count("hangs:" if died == signal.SIGKILL else f"signals:{died.name}", number, outcomes, bad)
    return number + 1


def _count(outcome: str, number: int, outcomes: Counter[str], bad: dict[str, str]) -> None:
    outcomes[outcome] += 1
    if not outcome.startswith(("refused", "accepted")):
        bad[str(number)] = outcome


# ---- one case, in a child ----


def _outcome(seed: int, number: int, checks: bool) -> str:
    from campaigns.program_cases import case
    from tableside.loader.errors import ProgramError
    from tableside.loader.program import read_program, write_program
    from tableside.loader.program.measure import check_shapes

    archive = case(seed, number)
    try:
        program = read_program(archive)
        if checks:
            check_shapes(program)
        if (written := write_program(program)) != write_program(read_program(written)):
            return "errors:written otherwise"
        return _run(program, seed, checks)
    except ProgramError as error:
        return f"refused:{_reason(str(error))}"
    except Exception as error:  # noqa: BLE001 - that nothing else is raised is what is looked at
        return f"errors:{error!r}"


def _reason(text: str) -> str:
    """A message without what is of its case."""
    text = text.partition("; export a module")[0].partition("; expected")[0]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|-?\d[\d,]*", "_", text)[:70]


def _run(program: Any, seed: int, checks: bool) -> str:
    """Runs a program over guarded memory: the same scores whatever the canaries are, and the same
    refusals."""
    from tableside.loader.program.measure import Meter

    meter, outcome = Meter(program, _MOST_BYTES) if checks else None, "accepted:"
    for rows in _ROWS:
        rng = np.random.default_rng(seed)
        inputs = [rng.standard_normal((rows, i.width)).astype(np.float32) for i in program.inputs]
        try:
            if meter is not None:
                meter.cost(rows, _MOST_BYTES, _MOST_WORK)
        except _REFUSED as error:
            return f"refused_at_call:{_reason(str(error))}"
        for place in _PLACES:
            one, other = (_scores(program, inputs, place, canary) for canary in _CANARIES)
            if one != other:
                return "foreign_bytes:"
            if isinstance(one, str):
                outcome = f"refused_at_call:{one}"
    return outcome


def _scores(program: Any, inputs: list[Any], place: Place, canary: int) -> bytes | str:
    """The scores' bytes, or why there are none."""
    import torch

    with arena(place, canary) as memory:
        poison_heap(canary)
        try:
            with torch.inference_mode():
                return _called(program, inputs, memory)
        except (*_REFUSED, MemoryError) as error:
            return _reason(str(error).partition("\n")[0])


def _called(program: Any, inputs: list[Any], memory: Arena) -> bytes:
    import torch

    from tableside.loader.program.run import Runner, over, weight_tensors

    cpu = torch.device("cpu")
    contents = {id(w.content): memory.put(w.content) for w in program.weights if w.content}
    empty = tuple(w for w in program.weights if not w.content)
    weights = {w.name: over(contents[id(w.content)], w, _dtype(w)) for w in program.weights if w.content}
    runner = Runner(program, {**weights, **weight_tensors(empty, cpu)}, cpu, _MOST_BYTES)
    given = [torch.frombuffer(memory.put(a.tobytes()), dtype=torch.float32).reshape(a.shape) for a in inputs]
    scores: bytes = runner(*given).to(torch.float32).contiguous().numpy().tobytes()
    return scores


def _dtype(weight: Any) -> Any:
    import torch

    from tableside.loader.program.graph import TYPES

    return getattr(torch, TYPES[weight.dtype][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float)
    parser.add_argument(
        "--unchecked", action="store_true", help="without the checks of operators: what would have been seen"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(_inside(**json.loads(arguments.inside))))
        return
    started = time.monotonic()
    found = run(arguments.seconds, arguments.seed, arguments.cases, checks=not arguments.unchecked)
    reasons, bad = found.pop("refused_by"), found.pop("bad")
    for name, count in found.items():
        print(f"{name:20}{count:10,}")
    print(f"{'seconds':20}{time.monotonic() - started:10,.0f}\n")
    for reason, count in list(reasons.items())[:40]:
        print(f"{count:10,}  {reason}")
    for number, outcome in bad.items():
        print(f"case {number}: {outcome}")


if __name__ == "__main__":
    main()

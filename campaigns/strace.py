"""strace over a process that waits for it: lists the system calls that it makes then, kills it at one of
them, or makes one fail.

strace counts the calls of each name in each thread on its own. So a call is named by its name and number: the
third `openat` is the third of the first thread that gets there.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from campaigns.common import until

CALLS = "%file,%desc,mmap,munmap,madvise,mprotect"  # all that a load does to files and mappings
FAILING = "%file,read,write,preadv,preadv2,pread64,ftruncate,fallocate,fchmod,flock,getdents64"


def ensure() -> None:
    """Installs strace where it is missing. RuntimeError: it cannot be had, or may not attach to a process
    here."""
    if shutil.which("strace") is None:
        for command in (
            ["apt-get", "update"],
            ["apt-get", "install", "-y", "--no-install-recommends", "strace"],
        ):
            done = (
                subprocess.run(command, capture_output=True, text=True, check=False)
                if shutil.which("apt-get")
                else None
            )
            if done is None or done.returncode:
                raise RuntimeError(
                    "the loads campaign needs strace, which is missing and was not installed; apt-get "
                    "install strace"
                )


def attach(pid: int, calls: str, log: Path, inject: str = "") -> "subprocess.Popen[str]":
    """strace over `pid` and its threads; returns once it is attached. inject: what happens at those calls,
    `signal=KILL:when=7`.

    RuntimeError: it cannot attach.
    """
    rules = ["-e", f"inject={calls}:{inject}"] if inject else []
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={calls}", *rules, "-p", str(pid)]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: is_traced(pid) or tracer.poll() is not None, what="strace to attach", pause_s=0.001)
    if tracer.poll() is not None and not is_traced(pid):
        raise RuntimeError(
            f"strace cannot attach: {tracer.communicate()[1].strip()}; run as root, or with CAP_SYS_PTRACE"
        )
    return tracer


def is_traced(pid: int) -> bool:
    """Whether every thread of a process has a tracer."""
    states = [p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/status")]
    return bool(states) and all(re.search(r"^TracerPid:\t[1-9]", state, re.M) for state in states)


def calls_of(log: Path) -> list[tuple[str, int]]:
    """Every call in a log that `attach` wrote, as (name, number), up to what the busiest thread made of
    each name."""
    lines = (re.match(r"(\d+) +(\w+)\(", line) for line in log.read_text().splitlines())
    most: dict[str, int] = {}
    for (_, name), times in Counter((line[1], line[2]) for line in lines if line).items():
        most[name] = max(most.get(name, 0), times)
    return [(name, number) for name, times in sorted(most.items()) for number in range(1, times + 1)]

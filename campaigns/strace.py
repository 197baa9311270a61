"""strace over a process that waits for it: counts the system calls of what the process does then, kills it at the n-th, or makes
the n-th fail. strace counts calls for each thread on its own, so "the n-th" is the n-th of the first thread to get there.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from campaigns.common import until

CALLS = "%file,%desc,mmap,munmap,madvise"  # all that a load does to files and mappings
THREAD_CALLS = "preadv,preadv2,pread64,madvise,munmap,mprotect,futex"  # what the threads that read and quantize do
FAILING = "%file,read,write,preadv,preadv2,pread64,ftruncate,fallocate,fchmod,flock,getdents64"


def ensure() -> None:
    """Installs strace where it is missing. RuntimeError: it cannot be had, or may not attach to a process here."""
    if shutil.which("strace") is None:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "strace"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("apt-get") else None
            if done is None or done.returncode:
                raise RuntimeError(
                    "the loads campaign needs strace, which is missing and was not installed; apt-get install strace"
                )


def attach(pid: int, calls: str, log: Path, inject: str = "") -> "subprocess.Popen[str]":
    """strace over `pid` and its threads; returns once it is attached. inject: what happens at a call, as `signal=KILL:when=7`.

    RuntimeError: it cannot attach.
    """
    rules = ["-e", f"inject={calls}:{inject}"] if inject else []
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={calls}", *rules, "-p", str(pid)]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: is_traced(pid) or tracer.poll() is not None, what="strace to attach", pause_s=0.001)
    if tracer.poll() is not None and not is_traced(pid):
        raise RuntimeError(f"strace cannot attach: {tracer.communicate()[1].strip()}; run as root, or with CAP_SYS_PTRACE")
    return tracer


def is_traced(pid: int) -> bool:
    """Whether every thread of a process has a tracer."""
    states = [p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/status")]
    return bool(states) and all(re.search(r"^TracerPid:\t[1-9]", state, re.M) for state in states)


def calls_of(log: Path) -> Counter[int]:
    """Calls of each thread in a log that `attach` wrote."""
    return Counter(int(line.split(None, 1)[0]) for line in log.read_text().splitlines() if "resumed>" not in line and "(" in line)

"""A process that ends itself, or whose file system is full, at its Nth step: a call that changes a file or a
name.

Bytes that are written to a mapped file between two such calls lie in a file that has no name of its own yet,
which the calls beside them stand for.
"""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal

What = Literal["kill", "full"]
CHANGES = ("rename", "link", "unlink", "ftruncate", "posix_fallocate", "pwrite", "fchmod")
TAKES_SPACE = ("rename", "link", "ftruncate", "posix_fallocate", "pwrite")  # what a full file system refuses
SURVIVED, REFUSED, FAILED = 0, 3, 4


def run_until(
    step: int, what: What, work: Callable[[], object], refused: tuple[type[Exception], ...]
) -> bool:
    """Runs `work` in a process forked from this one, which ends at its `step`, from 1 on; False: it has fewer
    of them.

    "kill": it gets SIGKILL before that step. "full": that step and all after it fail with ENOSPC, and one of
    `refused` must come.
    """
    if (pid := os.fork()) == 0:
        _child(step, what, work, refused)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL and what == "kill", (
            f"signal {os.WTERMSIG(status)} at step {step}"
        )
        return True
    code = os.waitstatus_to_exitcode(status)
    assert code in (SURVIVED, REFUSED), f"the process failed at step {step}, see above"
    return code == REFUSED


def _child(step: int, what: What, work: Callable[[], object], refused: tuple[type[Exception], ...]) -> None:
    code = FAILED
    try:
        steps = _Steps(step, what)
        steps.install()
        work()
        code = REFUSED if steps.is_full else SURVIVED
    except refused as error:
        code = REFUSED if what == "full" and steps.is_full else FAILED
        if code == FAILED:
            traceback.print_exception(error)
    except BaseException:  # noqa: BLE001  (told here, as the process ends below, whatever it was)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Steps:
    """Counts steps over all threads, and does what is due at one."""

    def __init__(self, last: int, what: What) -> None:
        self._left, self._what, self._lock, self.is_full = last, what, threading.Lock(), False

    def install(self) -> None:
        """Puts itself before every call that is a step."""
        for name in CHANGES if self._what == "kill" else TAKES_SPACE:
            setattr(os, name, self._before(getattr(os, name), lambda *_: True))
        new = os.O_CREAT if self._what == "kill" else os.O_EXCL  # a lock that is there can be opened
        os.open = self._before(os.open, lambda _, flags, *__: bool(flags & new))

    def _before(self, call: Callable[..., Any], is_step: Callable[..., bool]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if is_step(*arguments):
                self._count()
            return call(*arguments, **named)

        return counted

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            is_due = self._left <= 0
        if is_due and self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due:
            self.is_full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

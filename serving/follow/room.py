"""Waiting for room in shared memory, as a source waits for its server: said once, tried again less and
less often."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tableside.loader.errors import NoSpace
from tableside.serving.follow.source import IsStopping, pause

_AGAIN_S, _LONGEST_S = 0.1, 5.0  # between two attempts, doubled each time
_log = logging.getLogger("tableside.follow")
T = TypeVar("T")


def when_there_is_room(write: Callable[[], T], is_stopping: IsStopping) -> T | None:
    """What `write` returns, as soon as shared memory is not too full for it; None: the follower shall stop
    before."""
    since: float | None = None
    again_s = _AGAIN_S
    while True:
        try:
            found = write()
        except (NoSpace, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSPC:
                raise
            if since is None:
                since = time.monotonic()
                _log.warning("%s; nothing of the batch is visible, trying again", error)
        else:
            if since is not None:
                _log.warning("there was room again after %.1f s", time.monotonic() - since)
            return found
        pause(again_s, is_stopping)
        if is_stopping():
            return None
        again_s = min(2 * again_s, _LONGEST_S)

"""Compactions beside a follower: where the deltas over the live version have grown, they become the next
version."""

import logging
import subprocess
import sys

from tableside.loader.deltas.apply import ApplyResult
from tableside.loader.deltas.compact import delta_share
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

_log = logging.getLogger("tableside")


class Compactions:
    """Starts `tableside compact` for a model, in a process of its own, where its deltas have more than a
    share of the version's bytes. at: that share; 0: never. One runs at a time; changes are applied
    meanwhile."""

    def __init__(self, model: Model, at: float) -> None:
        self._model, self._at = model, at
        self._running: subprocess.Popen[str] | None = None

    def look(self, applied: ApplyResult) -> None:
        """After a batch: starts one where it is time, and tells how the last one ended."""
        if not self._at or not self._has_ended():
            return
        if delta_share(attach_state(self._model, None, "header")) <= self._at:
            return
        _log.info(
            "%s: changes take more than %g of version %d; compacting",
            self._model.name,
            self._at,
            applied.state.version,
        )
        command = [
            sys.executable,
            "-m",
            "tableside",
            "compact",
            self._model.name,
            "--root",
            str(self._model.root),
        ]
        command += [] if self._model.owner is None else ["--owner", self._model.owner]
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _has_ended(self) -> bool:
        if (process := self._running) is None:
            return True
        if process.poll() is None:
            return False
        text = process.communicate()[0].strip()
        _log.log(logging.ERROR if process.returncode else logging.INFO, "%s", text)
        self._running = None
        return True

    def finish(self) -> None:
        """Waits for the one that runs."""
        if self._running is not None:
            self._running.wait()
            self._has_ended()

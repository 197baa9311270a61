"""A file of the changes that a follower left out since the model refuses them: a line of JSON for each.

    {"source": "redis:ads-rows", "position": "1732300000000-0", "at": 1732300001.5, "error": "…", "table":
    "dXNlcg==", …}

What a source says of a change's content stands behind these. A follower that is killed between the line and
the next state writes the line again.
"""

import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType

from tableside.loader.errors import ChangeError
from tableside.serving.errors import ServingError
from tableside.serving.follow.source import ChangeSource

_log = logging.getLogger("tableside.follow")


class BadChangeFile:
    """Writes what is left out to a file, and counts it. ServingError: the file cannot be written."""

    def __init__(self, source: ChangeSource, path: Path) -> None:
        self.count = 0
        self._source, self._path = source, path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ServingError(
                f"--skip-bad {path}: {error.strerror}; name a file that can be written"
            ) from error

    def __call__(self, position: str, error: ChangeError) -> None:
        line = {
            "source": self._source.name,
            "position": position,
            "at": round(time.time(), 3),
            "error": str(error),
        }
        try:
            self._file.write(json.dumps({**line, **self._source.content(position)}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as failed:
            raise ServingError(
                f"--skip-bad {self._path}: {failed.strerror}; {position} was not left out"
            ) from failed
        self.count += 1
        _log.warning(
            "%s: left out what lies at %s, which was refused: %s", self._source.name, position, error
        )

    def __enter__(self) -> "BadChangeFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

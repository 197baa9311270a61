"""The log: lines of text for people, or a JSON object a line for programs."""

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

Format = Literal["text", "json"]
_KEPT_LINES = 256  # that `Once` remembers


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time (UTC), level, pid, logger, message, and error with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return orjson.dumps(said, default=str).decode()


class Once(logging.Filter):
    """Lets the same warning or error pass once a second, with the number of repeats since."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[
            tuple[str, str, str], list[float]
        ] = {}  # line -> [when it passed, how often it came since]

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        error = repr(record.exc_info[1]) if record.exc_info else ""
        known = self._passed.get(key := (record.name, message, error))
        if known is not None and record.created - known[0] < 1.0:
            known[1] += 1
            return False
        if known is not None and known[1]:
            record.msg, record.args = "%s (and %d times since it was said last)", (message, known[1])
        if len(self._passed) >= _KEPT_LINES:
            self._passed.clear()
        self._passed[key] = [record.created, 0]
        return True


def log_config(kind: Format) -> dict[str, Any]:
    """The configuration of the supervisor's and the workers' logging, which goes to stderr."""
    lines: dict[str, Any] = {"format": "%(asctime)s %(levelname)s [%(process)d] %(message)s"}
    if kind == "json":
        lines = {"()": "tableside.serving.logs.JsonFormatter"}
    handler = {"class": "logging.StreamHandler", "filters": ["once"], "formatter": "line"}
    handler["stream"] = "ext://sys.stderr"
    loggers = {
        name: {"handlers": ["stderr"], "level": level, "propagate": False}
        for name, level in (("tableside", "INFO"), ("uvicorn", "WARNING"))
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": lines},
        "filters": {"once": {"()": "tableside.serving.logs.Once"}},
        "handlers": {"stderr": handler},
        "loggers": loggers,
    }

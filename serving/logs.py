"""The log: lines of text for people, or a JSON object a line for programs."""

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

Format = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (UTC), level, pid, logger, message and, where there is one, error with its traceback."""

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


def log_config(kind: Format) -> dict[str, Any]:
    """The configuration of the supervisor's and the workers' logging, which goes to stderr."""
    lines: dict[str, Any] = {"format": "%(asctime)s %(levelname)s [%(process)d] %(message)s"}
    if kind == "json":
        lines = {"()": "tableside.serving.logs.JsonFormatter"}
    handler = {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
    loggers = {
        name: {"handlers": ["stderr"], "level": level, "propagate": False}
        for name, level in (("tableside", "INFO"), ("uvicorn", "WARNING"))
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": lines},
        "handlers": {"stderr": handler},
        "loggers": loggers,
    }

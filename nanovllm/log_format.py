"""How processes write their logs to standard error: as text, or as JSON for programs that collect logs."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    always: further fields of every line.
    """

    def __init__(self, **always: Any) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname, "logger": record.name, "message": record.getMessage(), **self._always,
        }  # fmt: skip
        if (request_id := getattr(record, "request_id", None)) is not None:
            found["request_id"] = request_id
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def log_to_stderr(level: int, as_json: bool, text: str = TEXT, **always: Any) -> None:
    """Set up the logs of a process.

    Args:
        text: the format of a line that is not JSON.
        always: further fields of every line of JSON.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(**always) if as_json else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler])
    if as_json:
        log_the_rest()


def logs_json() -> bool:
    """Whether this process logs JSON, so that the processes that it starts should, too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def log_the_rest() -> None:
    """Log what Python itself writes to standard error: warnings, and exceptions that nothing has caught."""
    logger = logging.getLogger("nanovllm")
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        logger.critical("an exception was not caught", exc_info=(kind, error, traceback))

    def uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
        error = found.exc_value or found.exc_type()
        logger.critical("an exception was not caught", exc_info=(found.exc_type, error, found.exc_traceback))

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def say_as_log(logger: logging.Logger, text: str) -> None:
    """Log as information what a person would be told at any level of the log."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))

"""Logs that do not hold up the event loop: a thread writes them, as text or as JSON."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def log_start_in_files(level: int) -> None:
    """Log the parts of the engine's start, with warnings too, if standard error is a file: it has no status line."""
    if level <= logging.WARNING and not sys.stderr.isatty():
        for name in ("model_setup", "fast.cuda_graphs"):
            logging.getLogger(f"nanovllm.engine.{name}").setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname, "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        if (request_id := getattr(record, "request_id", None)) is not None:
            found["request_id"] = request_id
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


class _KeepsException(logging.handlers.QueueHandler):
    """Formats in the listener's thread: `prepare` would drop the exception."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


@contextmanager
def logging_thread(level: int, as_json: bool, access: bool) -> Iterator[None]:
    """Within the block all logs are written to standard error by a thread.

    Args:
        access: log every answer.
    """
    stream = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    stream.setFormatter(JsonFormatter() if as_json else plain)
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    root, handler = logging.getLogger(), _KeepsException(records)  # type: ignore[arg-type]
    before, root.handlers = root.handlers, [handler]
    root.setLevel(level)
    logging.getLogger("nanovllm.serve.access").setLevel(logging.INFO if access else logging.WARNING)
    listener = logging.handlers.QueueListener(records, stream)  # type: ignore[arg-type]
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.handlers = before

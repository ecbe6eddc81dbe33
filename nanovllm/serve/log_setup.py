"""Logs that do not hold up the event loop: a thread writes them, as text or as JSON."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.log_format import TEXT, JsonFormatter, log_the_rest


def log_start_in_files(level: int) -> None:
    """Log the parts of the engine's start, with warnings too, if standard error is a file: it has no status line."""
    if level <= logging.WARNING and not sys.stderr.isatty():
        for name in ("model_setup", "fast.cuda_graphs"):
            logging.getLogger(f"nanovllm.engine.{name}").setLevel(logging.INFO)


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
    stream.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    root, handler = logging.getLogger(), _KeepsException(records)  # type: ignore[arg-type]
    handler.setFormatter(stream.formatter)  # the stream formats; here it says what this process logs (`logs_json`)
    before, root.handlers = root.handlers, [handler]
    root.setLevel(level)
    logging.getLogger("nanovllm.serve.stats").setLevel(logging.INFO if level <= logging.WARNING else level)
    logging.getLogger("nanovllm.serve.access").setLevel(logging.INFO if access else logging.WARNING)
    listener = logging.handlers.QueueListener(records, stream)  # type: ignore[arg-type]
    listener.start()
    hooks = sys.excepthook, threading.excepthook
    if as_json:
        log_the_rest()
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook = hooks
        if as_json:
            logging.captureWarnings(False)
        listener.stop()
        root.handlers = before

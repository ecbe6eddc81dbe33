"""Whether loading a plugin ends the process: found in a copy of the process, before this one loads it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from nanovllm.kernels.op.plugins import load_plugins
from nanovllm.kernels.testing.crash_report import describe

LIMIT = 120.0
"""Seconds that loading a plugin may take."""


def reject_crashing(plugins: Sequence[str], limit: float = LIMIT) -> None:
    """Load each plugin in a forked process first. What a plugin raises is not reported here: loading it says that.

    Call it before CUDA is used: a forked process cannot use it after that. Where processes cannot be forked, nothing
    is checked.

    Args:
        limit: seconds that one may take.

    Raises:
        ValueError: a plugin ends the process, by a signal or an exit code, or takes longer than `limit`.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    for plugin in plugins:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "stack")
            process = multiprocessing.get_context("fork").Process(
                target=_load, args=(plugin, str(log), limit), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
                process.start()
            process.join(limit + 10)  # the process ends itself at its limit, unless it cannot
            if process.is_alive():
                process.kill()
                process.join()
            if process.exitcode != _LOADED:
                stack = log.read_text(errors="replace") if log.exists() else ""
                end = describe(process.exitcode or 0, stack, limit)
                raise ValueError(f"kernel plugin {plugin}: loading it {end.text}")


_LOADED = 93
"""The exit code of a process that has loaded the plugin, or got an exception from it. A plugin may exit with 0."""


def _load(plugin: str, log: str, limit: float) -> None:
    torch.set_num_threads(1)  # threads that this process's original had are not there
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.stdout = sys.stderr = open(null, "w")  # where they are not the descriptors 1 and 2, as in notebooks
    with open(log, "w") as stack:
        # A handler of a library in this process may return, and the instruction would fault again until the limit.
        faulthandler.disable()
        for fatal in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
            signal.signal(fatal, signal.SIG_DFL)
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(limit, exit=True, file=stack)
        with suppress(ValueError):  # the process that asks loads it as well, and says why it fails
            load_plugins([plugin])
        os._exit(_LOADED)

"""Compiling Triton's kernels several at a time, before they are needed.

A kernel that is not on disk takes a second or more to compile, one after the other in the order of their first
launch. Triton can compile in threads what is launched in its asynchronous mode; its compiler leaves Python's lock
while it works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

_asked: ContextVar[set[tuple[int, str, int]] | None] = ContextVar("compiling_only", default=None)
"""What this thread has asked to be compiled, if it is within the block: launches of others run."""


class _Replaced:
    """Triton's launch and compilation, which are the process's: replaced while any thread is within the block, and
    put back by the last."""

    lock = Lock()
    threads = 0
    launch: Any = None
    compile: Any = None


@contextmanager
def compiling_only(threads: int | None = None) -> Iterator[None]:
    """Within the block a launch of a Triton kernel by this thread compiles it and runs nothing; at its end all are
    compiled.

    What kernels would have written is whatever was in that memory: run only what looks at no value. Other
    code in the block runs normally.

    Args:
        threads: that compile; by default as many as there are processors.

    Raises:
        ImportError: this Triton has no asynchronous mode.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    before = active_mode.get()
    try:
        with ThreadPoolExecutor(threads or os.cpu_count()) as executor, AsyncCompileMode(executor), _launch_replaced():
            token = _asked.set(set())
            try:
                yield
            finally:
                _asked.reset(token)
    finally:
        # Triton 3.6 does not leave the mode where a kernel failed to compile, and would compile none after that.
        if before is None:
            active_mode.set(None)


@contextmanager
def _launch_replaced() -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    with _Replaced.lock:
        if _Replaced.threads == 0:
            launch = _Replaced.launch = JITFunction.run
            compile = _Replaced.compile = JITFunction._do_compile

            def compile_only(self, *args, grid, warmup, **kwargs):
                if _asked.get() is None:
                    return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
                launch(self, *args, grid=grid, warmup=True, **kwargs)  # nothing is returned that could be launched

            def compile_once(self, key, signature, device, *rest, **kwargs):
                # Until a kernel is there, Triton works out anew at each launch where on disk it would be: half a
                # millisecond.
                asked = _asked.get()
                if asked is not None:
                    if (id(self), key, device) in asked:
                        return None
                    asked.add((id(self), key, device))
                return compile(self, key, signature, device, *rest, **kwargs)

            JITFunction.run, JITFunction._do_compile = compile_only, compile_once
        _Replaced.threads += 1
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.threads -= 1
            if _Replaced.threads == 0:
                JITFunction.run, JITFunction._do_compile = _Replaced.launch, _Replaced.compile
                _Replaced.launch = _Replaced.compile = None

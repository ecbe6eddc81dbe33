"""Compiling Triton's kernels several at a time, before they are needed.

A kernel that is not on disk takes a second or more to compile, one after the other in the order of their first launch. Triton
can compile in threads what is launched in its asynchronous mode; its compiler leaves Python's lock while it works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def compiling_only(threads: int | None = None) -> Iterator[None]:
    """Within the block a launch of a Triton kernel compiles it and runs nothing; at its end all are compiled.

    What kernels would have written is whatever was in that memory: run only what looks at no value. Everything else runs as ever.

    Args:
        threads: that compile; by default as many as there are processors.

    Raises:
        ImportError: this Triton has no asynchronous mode.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        launch(self, *args, grid=grid, warmup=True, **kwargs)  # nothing is returned that could be launched

    with ThreadPoolExecutor(threads or os.cpu_count()) as executor, AsyncCompileMode(executor):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch

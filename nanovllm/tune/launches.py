"""The launches that a call makes: recorded instead of run, or compiled together for the GPU that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecordedLaunch:
    """A kernel, its arguments by parameter name, and options such as num_warps."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@contextmanager
def recorded(compile: bool = False) -> Iterator[list[RecordedLaunch]]:
    """Within the block no kernel runs; launches are recorded instead. Results of calls are uninitialised memory.

    Args:
        compile: also compile each launch for the GPU that is here, as its first run would.
    """
    from triton.runtime.jit import JITFunction

    launches: list[RecordedLaunch] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [p.name for p in self.params]
        arguments = dict(zip(names, args))
        arguments |= {name: options[name] for name in names if name in options}
        rest = {k: v for k, v in options.items() if k not in arguments}
        launches.append(RecordedLaunch(self, arguments, rest))
        if compile:
            original(self, *args, grid=grid, warmup=True, **options)  # nothing is returned that could be launched

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def compile_together(calls: Sequence[Callable[[], Any]], workers: int) -> None:
    """Compile what the calls launch, several at a time. A failure shows again when the launch is made."""
    import concurrent.futures

    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or workers < 2:
        return  # each is compiled when it runs first
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, mode(pool, ignore_errors=True), recorded(compile=True):
        for call in calls:
            try:
                call()
            except Exception:  # noqa: BLE001 - whatever the compiler raises
                continue

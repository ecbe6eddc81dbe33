"""Whether the Triton kernels of providers compile for a GPU: the part of `verify` that Triton's interpreter leaves out.

A process that interprets cannot compile: Triton decides that at its import. So the check has a process of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanovllm.kernels.op.availability import is_triton_support
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.testing.crash_report import why_not_compiled
from nanovllm.kernels.testing.gpu_compile import Launch, compiled, recorded, specialised
from nanovllm.kernels.testing.verify import Case, Verdict, cases

_CAPABILITY = 90
"""The compute capability of the GPU that kernels are compiled for, times ten: an H100 or H200. A provider that says
that it needs a later one is compiled for that.
"""
_VARIABLE = "TRITON_INTERPRET"

Pair = tuple[str, str]
"""An op and a provider of it."""


def failures_to_compile(declared: Op, provider: Provider, chosen: Sequence[Case]) -> dict[int, str]:
    """Index of a case -> why a kernel that the provider launches in it cannot be compiled.

    The provider runs on the CPU, its kernels do not. Kernels are compiled once for each combination of types and
    constants. Triton must not be in its interpreter.
    """
    device = torch.device("cpu")
    needed = re.match(r"sm_(\d+)", provider.architectures or "")
    capability = max(_CAPABILITY, int(needed[1]) if needed else 0)
    found: dict[int, str] = {}
    known: dict[Any, str | None] = {}
    for index, case in enumerate(chosen):
        bound = declared.bind(case.arguments(declared, device))
        launches: list[Launch] = []
        try:
            if declared.refusal(provider, *bound.args, **bound.kwargs) is not None:
                continue
            with recorded(launches):
                provider.fn(*bound.args, **bound.kwargs)
        except Exception:  # perhaps since kernels have not run: what was launched before is known
            pass
        for launch in launches:
            if (why := _failure(launch, capability, known)) is not None:
                found.setdefault(index, f"cannot be compiled for a GPU{why}")
    return found


def may_launch_triton(provider: Provider) -> bool:
    """Whether a provider says that it runs Triton kernels, or its module has some, in Triton's interpreter."""
    with suppress(Exception):  # a provider that cannot be imported
        names = getattr(inspect.unwrap(provider.fn), "__globals__", {})
        if any(type(value).__name__ == "InterpretedFunction" for value in names.values()):
            return True
    return is_triton_support(provider.support)


@contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """Within the block, what this process writes to standard error, C++ included, goes to another file."""
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _failure(launch: Launch, capability: int, known: dict[Any, str | None]) -> str | None:
    """What the compiler says of a launch's kernel, and where; None: it compiles, or that cannot be found out here."""
    try:
        types, constants, _ = specialised(launch.kernel, launch.arguments)
    except (KeyError, TypeError, ValueError):  # a kind of argument that is not known here
        return None
    key = id(launch.kernel), tuple(types.items()), str(constants), str(launch.options)
    if key not in known:
        with tempfile.TemporaryFile() as printed:
            try:
                with _standard_error_to(printed.fileno()):
                    compiled(*launch, capability)
                known[key] = None
            except Exception as e:
                printed.seek(0)
                known[key] = why_not_compiled(e, launch.kernel, printed.read().decode(errors="replace"))
    return known[key]


@dataclass
class CompileCheck:
    """Compiles the kernels of plugins' providers in a process of its own, while their cases are verified.

    Nothing is checked unless Triton's interpreter is in use, nor where Triton cannot compile.

    Args:
        limit: the seconds to wait for the kernels of a provider.
    """

    limit: float
    _process: Any = None
    _connection: Connection | None = None
    _found: dict[Pair, dict[int, str]] | None = None

    def start(self, pairs: Sequence[Pair], plugins: Sequence[str], seed: int, quick: bool) -> None:
        """Begin with these providers. Seed and quick: as of `cases`."""
        if os.environ.get(_VARIABLE) != "1" or not pairs or importlib.util.find_spec("triton") is None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe(duplex=False)
        arguments = (theirs, tuple(pairs), tuple(plugins), seed, quick)
        process = context.Process(target=_work, args=arguments, daemon=True)
        interpret = os.environ.pop(_VARIABLE)
        try:
            process.start()
        finally:
            os.environ[_VARIABLE] = interpret
        theirs.close()
        self._process = process
        self._found = {}

    def completed(self, pair: Pair, verdicts: list[Verdict]) -> list[Verdict]:
        """The verdicts on a pair's cases, where those that passed have failed if a kernel cannot be compiled.

        Nothing changes if a case raised an exception, which says the same or comes before. Of a crash or a hang it is
        said as well that the kernel cannot be compiled.
        """
        end = time.monotonic() + self.limit
        while self._connection is not None and self._found is not None and pair not in self._found:
            try:
                if not self._connection.poll(max(0.0, end - time.monotonic())):
                    self.stop()
                    break
                done, failures = self._connection.recv()
                self._found[done] = failures
            except EOFError:  # all done, or the process has crashed: what is not known is not reported
                self.stop()
        failures = (self._found or {}).get(pair, {})
        if any(verdict.raised for verdict in verdicts):
            return verdicts
        return [_with_failure(verdict, failures.get(i)) for i, verdict in enumerate(verdicts)]

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


def _with_failure(verdict: Verdict, to_compile: str | None) -> Verdict:
    """The verdict on a case, given why its kernel cannot be compiled; None: it can."""
    if to_compile is None or verdict.skipped is not None:
        return verdict
    if verdict.failure is None:
        return replace(verdict, failure=to_compile, raised=True)
    ended = verdict.failure.startswith(("crashed", "hung"))
    return replace(verdict, failure=f"{verdict.failure}; it {to_compile}") if ended else verdict


def _work(connection: Connection, pairs: Sequence[Pair], plugins: Sequence[str], seed: int, quick: bool) -> None:
    """What the process does: it sends (pair, failures) for each pair."""
    from nanovllm.kernels import all_ops
    from nanovllm.kernels.op.plugins import load_plugins

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what a plugin prints: the processes that run cases print it too
    os.dup2(null, 2)
    torch.set_num_threads(1)
    load_plugins(plugins)
    ops = all_ops()
    for op, provider in pairs:
        made = list(cases(ops[op], False, seed, quick))  # those of a CPU
        connection.send(((op, provider), failures_to_compile(ops[op], ops[op].providers[provider], made)))
    os._exit(0)  # to unload PyTorch would take another half second

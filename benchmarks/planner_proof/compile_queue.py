"""Compiling ahead of the timing: each distinct kernel once, in other processes, while the first problems are timed.

Triton itself says which kernels a configuration needs: its launch is followed on tensors without memory, up to the key
under which Triton would look up the compiled kernel. Configurations recur from problem to problem, so there are far
fewer kernels than configurations.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.planner_proof.gpu_timer import first_line
from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import Plan

_DEVICES = ("followed", "compiled ahead")
"""Devices that do not exist: Triton keeps kernels by device, and must not take these for loaded ones."""


class _Driver:
    """Tells Triton what it compiles for; launches nothing, and touches no GPU."""

    def __init__(self, capability: int, compiles: bool) -> None:
        self.capability = capability
        self.device = _DEVICES[compiles]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def following(model: DeviceModel, needed: list[tuple[str, str]] | None) -> Iterator[None]:
    """Within the block no launch runs. Launches compile for the GPU of `model`; with `needed`, they only note their
    keys there.

    Raises (in the launch):
        ValueError: what was compiled takes more shared memory than a block may have.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.metadata.shared > model.shared_per_block:
            raise ValueError(f"{kernel.metadata.shared} bytes of shared memory, of {model.shared_per_block}")

    def note(*, key: str, fn: Any, **rest: Any) -> bool:
        assert needed is not None
        needed.append((f"{fn.module}.{fn.name}", key))
        return True  # and Triton compiles nothing

    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", _Driver(model.capability, needed is None)))
        stack.enter_context(patch.object(JITFunction, "run", run))
        if needed is not None:
            stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", note))
        yield


@functools.lru_cache(maxsize=4)
def _weightless(problem: Any, model: DeviceModel) -> Any:
    import torch

    from benchmarks.planner_proof.input_sets import prepare

    return prepare(problem, torch.device("meta"), model, sets=1)


def kernels_of(problem: Any, plans: Sequence[Plan], model: DeviceModel) -> list[tuple[tuple[str, str], ...]]:
    """For each plan the keys of the kernels that it launches. Nothing is compiled, and no GPU is needed.

    Raises:
        ValueError: nanovllm has no kernel for the problem.
    """
    inputs = _weightless(problem, model)
    found = []
    needed: list[tuple[str, str]] = []
    with following(model, needed):
        for p in plans:
            needed.clear()
            inputs.run(p, inputs.sets[0])
            found.append(tuple(needed))
    return found


def compile_plan(problem: Any, plan: Plan, model: DeviceModel) -> str | None:
    """Compile the kernels of a plan into Triton's cache; why this cannot be done, or None."""
    try:
        inputs = _weightless(problem, model)
        with following(model, None):
            inputs.run(plan, inputs.sets[0])
    except Exception as e:  # noqa: BLE001 - whatever a compiler raises: the plan is then counted as failed
        return first_line(e)
    return None


class CompileQueue:
    """Processes that compile plans, in the order of the calls to `ask`.

    Create it before the first use of the GPU: the processes are forked then, with Triton imported and without a CUDA
    context.
    """

    def __init__(self, workers: int) -> None:
        import torch  # noqa: F401 - imported once, for all processes
        import triton  # noqa: F401

        from benchmarks.planner_proof import input_sets  # noqa: F401

        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin)
        self._pool.submit(os.getpid).result()
        self._known: dict[tuple[str, str], Future] = {}
        self._plans: dict[Any, list[list[Future]]] = {}

    @property
    def num_kernels(self) -> int:
        """Distinct kernels asked for so far."""
        return len(self._known)

    def ask(self, problem: Any, plans: Sequence[Plan], model: DeviceModel) -> None:
        """Have the plans compiled, but for kernels that were asked for before."""
        mine = []
        for p, needed in zip(plans, kernels_of(problem, plans, model)):
            new = [key for key in needed if key not in self._known]
            if new:
                task = self._pool.submit(compile_plan, problem, p, model)
                self._known.update(dict.fromkeys(new, task))
            mine.append([self._known[key] for key in needed])
        self._plans[problem] = mine

    def ready(self, problem: Any) -> bool:
        """Whether all plans of a problem are compiled (or failed to)."""
        return all(task.done() for tasks in self._plans[problem] for task in tasks)

    def wait(self, problem: Any, deadline: float) -> bool:
        """Wait until they are, at most until `deadline` (of `time.monotonic`); whether they are."""
        tasks = {task for tasks in self._plans[problem] for task in tasks}
        return not wait(tasks, max(0.0, deadline - time.monotonic())).not_done

    def failure(self, problem: Any, index: int) -> str | None:
        """Why a plan did not compile, or None. Plans of a process that died are compiled when they are timed."""
        for task in self._plans[problem][index]:
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is not None:
                return task.result()
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    gc.freeze()  # what was imported stays: collections need not look at it again

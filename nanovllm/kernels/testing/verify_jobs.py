"""`verify` in processes of their own: a kernel that crashes or hangs ends its process, and its case has failed.

Several processes share the cases. Most of the time on a GPU is compiling kernels.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.op.availability import triton_support
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.provider import KernelError
from nanovllm.kernels.testing.compile_check import CompileCheck, may_launch_triton
from nanovllm.kernels.testing.crash_report import describe
from nanovllm.kernels.testing.verify import Case, Verdict, cases, lacks_memory, verify_case

Pair = tuple[str, str]
"""An op and a provider of it."""
Task = tuple[str, str, int]
"""An op, a provider, and the index of one of the op's cases."""

_MEMORY = 0.9
"""The share of a GPU's memory for the tensors of all processes together."""
_MOST_CRASHES = 2
"""After this many crashes of a provider, its other cases are not run."""
NOT_RUN = "not run: "
"""How the reason begins for which a case is skipped because others of its provider crashed or hung."""


@dataclass(frozen=True)
class Setting:
    """What a process needs besides its tasks.

    Attributes:
        plugins: what each process loads first.
        seed, quick: as in `cases`.
        jobs: the number of processes that share the cases.
        limit: the seconds that a case may take.
    """

    device: str
    plugins: tuple[str, ...] = ()
    seed: int = 0
    quick: bool = False
    jobs: int = 1
    limit: float = 120.0

    def cases(self, declared: Op) -> list[Case]:
        return list(cases(declared, torch.device(self.device).type == "cuda", self.seed, self.quick))


def verify_in_processes(
    ops: Sequence[Op],
    pairs: Sequence[Pair],
    setting: Setting,
    began: Callable[[Pair, Case], None] = lambda pair, case: None,
) -> Iterator[tuple[Pair, list[Verdict]]]:
    """Each pair with the verdicts on its op's cases, as soon as it has all of them. Ctrl-C ends the processes.

    If a process dies in a case, the case has failed, and a new process takes over the rest of the share. After a case
    that took longer than the limit, or after two crashes, the other cases of the provider are not run.

    Each process may use its part of the GPU's memory. A case that needs more is verified again at the end, alone.

    In Triton's interpreter, a case of a plugin's provider has failed too if its kernels cannot be compiled for a GPU.

    Args:
        ops: those of the pairs.
        began: called when a case begins.

    Raises:
        KernelError: a process ended before it began with its share.
    """
    of_op = {declared.name: setting.cases(declared) for declared in ops}
    providers = {(declared.name, name): provider for declared in ops for name, provider in declared.providers.items()}
    found: dict[Pair, dict[int, Verdict]] = {pair: {} for pair in pairs}
    again: list[Task] = []
    yielded = set()

    def complete() -> Iterator[tuple[Pair, list[Verdict]]]:
        for pair in pairs:
            if pair not in yielded and len(found[pair]) == len(of_op[pair[0]]):
                yielded.add(pair)
                yield pair, check.completed(pair, [verdict for _, verdict in sorted(found[pair].items())])

    check = CompileCheck(setting.limit)
    try:
        of_plugins = [pair for pair in pairs if providers[pair].origin and may_launch_triton(providers[pair])]
        check.start(of_plugins, setting.plugins, setting.seed, setting.quick)
        yield from complete()  # those without cases
        for task, verdict in _Processes(of_op, setting, began).run(shares(of_op, pairs, setting.jobs)):
            op, provider, index = task
            if lacks_memory(verdict) and setting.jobs > 1:
                again.append(task)
                continue
            found[op, provider][index] = verdict
            yield from complete()
        alone = Setting(setting.device, setting.plugins, setting.seed, setting.quick, 1, setting.limit)
        for (op, provider, index), verdict in _Processes(of_op, alone, began).run([again]):
            found[op, provider][index] = verdict
            yield from complete()
    finally:
        check.stop()


def shares(of_op: dict[str, list[Case]], pairs: Sequence[Pair], jobs: int) -> list[list[Task]]:
    """The tasks of each process. Cases of one op, shape and dtype need the same kernels, so they go to one process."""
    dealt: list[list[Task]] = [[] for _ in range(jobs)]
    for number, (op, provider) in enumerate(pairs):
        groups: dict[Any, int] = {}
        for index, case in enumerate(of_op[op]):
            group = groups.setdefault((case.shape, case.dtype), len(groups))
            dealt[(number + group) % jobs].append((op, provider, index))
    return dealt


@dataclass
class _Worker:
    """A process.

    Attributes:
        log: where its Python stack is written if it crashes or hangs.
        left: the tasks that it has not reported.
        current: the task that it began last; None: it has not begun, or has ended as it should.
        verdict: that of `current`. It stands when the process goes on after it.
    """

    process: BaseProcess
    log: Path
    left: list[Task]
    current: Task | None = None
    began: bool = False
    verdict: Verdict | None = None


@dataclass
class _Processes:
    """Runs tasks in processes and replaces those that die."""

    of_op: dict[str, list[Case]]
    setting: Setting
    began: Callable[[Pair, Case], None]
    _running: dict[Connection, _Worker] = field(default_factory=dict)
    _crashes: Counter[Pair] = field(default_factory=Counter)
    _given_up: dict[Pair, str] = field(default_factory=dict)

    def run(self, dealt: Sequence[list[Task]]) -> Iterator[tuple[Task, Verdict]]:
        """Verdicts as they come."""
        with ExitStack() as at_end:
            directory = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
            at_end.callback(self._kill)
            for tasks in dealt:
                self._start(tasks, directory)
            while self._running:
                ready = wait(list(self._running), timeout=1)  # Ctrl-C just before it begins is seen only when it ends
                for connection in [c for c in self._running if c in ready]:
                    worker = self._running[connection]
                    try:
                        task, *outcome = connection.recv()
                    except EOFError:
                        worker.process.join()
                        del self._running[connection]
                        yield from self._ended(worker)
                        yield from self._not_run(worker)
                        self._start(worker.left, directory)
                    else:
                        yield from self._said(worker, task, outcome)

    def _said(self, worker: _Worker, task: Task | None, outcome: Sequence[Any]) -> Iterator[tuple[Task, Verdict]]:
        """A process begins a task, has an outcome (what makes up a verdict), or (None) ends."""
        if task is not None and outcome:
            worker.verdict = Verdict(self.of_op[task[0]][task[2]], *outcome)
            return
        if worker.current is not None and worker.verdict is not None:
            yield worker.left.pop(0), worker.verdict
        worker.current, worker.verdict, worker.began = task, None, True
        if task is not None:
            self.began(task[:2], self.of_op[task[0]][task[2]])

    def _ended(self, worker: _Worker) -> Iterator[tuple[Task, Verdict]]:
        """The verdict on the case in which a process died, if it did."""
        code = worker.process.exitcode or 0
        if not worker.began:
            raise KernelError(f"a process of `verify` ended with code {code} before it began; does a plugin end it?")
        if worker.current is None:
            return
        op, provider, index = worker.left.pop(0)
        end = describe(code, worker.log.read_text(errors="replace"), self.setting.limit)
        pair = op, provider
        self._crashes[pair] += 1
        if end.hung:
            self._given_up[pair] = f"{NOT_RUN}a case took longer than {self.setting.limit:g} s"
        elif self._crashes[pair] == _MOST_CRASHES:
            self._given_up[pair] = f"{NOT_RUN}{_MOST_CRASHES} cases crashed"
        yield (op, provider, index), Verdict(self.of_op[op][index], failure=end.text)

    def _not_run(self, worker: _Worker) -> Iterator[tuple[Task, Verdict]]:
        """The verdicts on the remaining cases of providers that are given up."""
        for op, provider, index in [task for task in worker.left if task[:2] in self._given_up]:
            worker.left.remove((op, provider, index))
            skipped = self._given_up[op, provider]
            yield (op, provider, index), Verdict(self.of_op[op][index], skipped=skipped)

    def _start(self, tasks: list[Task], directory: Path) -> None:
        if not tasks:
            return
        # A process that was forked could not use the GPU.
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe(duplex=False)
        handle, log = tempfile.mkstemp(dir=directory)
        os.close(handle)
        arguments = (theirs, log, tuple(tasks), self.setting)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here
        self._running[mine] = _Worker(process, Path(log), list(tasks))

    def _kill(self) -> None:
        for worker in self._running.values():
            worker.process.kill()
            worker.process.join()


def _work(connection: Connection, log: str, tasks: Sequence[Task], setting: Setting) -> None:
    """What a process does.

    It sends (task,) when a case begins, (task, error, failure, skipped, raised) after it, and (None,) at its end.
    """
    from nanovllm.kernels import all_ops
    from nanovllm.kernels.op.plugins import load_plugins

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    os.dup2(2, 1)  # what a plugin prints is not mixed with the table, or with JSON
    torch.set_num_threads(max(1, torch.get_num_threads() // setting.jobs))
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(_MEMORY / setting.jobs, device)
    load_plugins(setting.plugins)
    triton_support(device)  # which also silences NumPy in Triton's interpreter
    ops = all_ops()
    of_op = {op: setting.cases(ops[op]) for op in {op for op, _, _ in tasks}}
    with open(log, "w") as stack:
        faulthandler.enable(stack)
        try:
            for op, provider, index in tasks:
                connection.send(((op, provider, index),))
                faulthandler.dump_traceback_later(setting.limit, exit=True, file=stack)
                verdict = verify_case(ops[op], ops[op].providers[provider], device, of_op[op][index])
                faulthandler.cancel_dump_traceback_later()
                outcome = verdict.error, verdict.failure, verdict.skipped, verdict.raised
                connection.send(((op, provider, index), *outcome))
                if verdict.failure and device.type == "cuda":
                    try:
                        torch.cuda.synchronize(device)
                    except RuntimeError:  # the error stays with this process: another goes on
                        break
            connection.send((None,))
        except BrokenPipeError:
            pass  # the reader has ended
    sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what a plugin's C++ has printed
    os._exit(0)  # to unload PyTorch would take another half second, in which the command shows nothing

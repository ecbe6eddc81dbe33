"""`verify` in several processes, each with a share of the cases. Most of its time on a GPU is compiling kernels."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.testing.verify import Case, Verdict, cases, lacks_memory, verify_case

Pair = tuple[str, str]
"""An op and a provider of it."""
Task = tuple[str, str, int]
"""An op, a provider, and the index of one of the op's cases."""

_MEMORY = 0.9
"""Of a GPU's memory, for the tensors of all processes together."""


@dataclass(frozen=True)
class Setting:
    """What a process needs besides its tasks. `plugins`, `seed` and `quick`: as in `verify_in_processes`."""

    device: str
    plugins: tuple[str, ...]
    seed: int
    quick: bool
    jobs: int

    def cases(self, declared: Op) -> list[Case]:
        return list(cases(declared, torch.device(self.device).type == "cuda", self.seed, self.quick))


def verify_in_processes(
    ops: Sequence[Op],
    pairs: Sequence[Pair],
    device: torch.device,
    plugins: Sequence[str],
    seed: int,
    quick: bool,
    jobs: int,
) -> dict[Pair, list[Verdict]]:
    """`verify_op` of each pair, by `jobs` processes. Ctrl-C ends them.

    If a process dies in a case, the case has failed, and a new process takes over the rest of the share. Each process
    may use its part of the GPU's memory. A case that needs more is verified again at the end, alone, in this process.

    Args:
        ops: those of the pairs.
        plugins: what each process loads first.
        seed, quick: as in `cases`.

    Raises:
        RuntimeError: a process ended before it began with its share.
    """
    by_name = {declared.name: declared for declared in ops}
    setting = Setting(str(device), tuple(plugins), seed, quick, jobs)
    of_op = {name: setting.cases(declared) for name, declared in by_name.items()}
    verdicts: dict[Task, Verdict] = {}
    for task, verdict in _run(shares(of_op, pairs, jobs), of_op, setting):
        verdicts[task] = verdict
    for (op, provider, index), verdict in verdicts.items():
        if lacks_memory(verdict):
            again = verify_case(by_name[op], by_name[op].providers[provider], device, verdict.case)
            verdicts[op, provider, index] = again
    return {pair: [verdicts[pair + (index,)] for index in range(len(of_op[pair[0]]))] for pair in pairs}


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
    """A process, the tasks that it has still to report, and the one that it began last."""

    process: BaseProcess
    left: list[Task]
    current: Task | None = None


def _run(dealt: list[list[Task]], of_op: dict[str, list[Case]], setting: Setting) -> Iterator[tuple[Task, Verdict]]:
    """Verdicts as they come. A process that died is replaced."""
    running: dict[Connection, _Worker] = {}
    try:
        running.update(_start(tasks, setting) for tasks in dealt if tasks)
        while running:
            ready = wait(list(running), timeout=1)  # a Ctrl-C just before it begins is seen only when it ends
            for connection, worker in [(c, w) for c, w in running.items() if c in ready]:
                try:
                    task, *outcome = connection.recv()
                except EOFError:
                    worker.process.join()
                    del running[connection]
                    if worker.left:
                        task, failure = _died(worker)
                        if task is not None:
                            yield task, Verdict(of_op[task[0]][task[2]], failure=failure)
                        if worker.left:
                            running.update([_start(worker.left, setting)])
                    continue
                worker.current = task
                if outcome:
                    worker.left.pop(0)
                    yield task, Verdict(of_op[task[0]][task[2]], *outcome)
    finally:
        for worker in running.values():
            worker.process.kill()
            worker.process.join()


def _died(worker: _Worker) -> tuple[Task | None, str]:
    """The task in which a process died, which is taken from those left (None: between two tasks), and how it ended."""
    code = worker.process.exitcode or 0
    if worker.current is None:
        raise RuntimeError(f"a process of `verify` ended with code {code} before it began")
    task = worker.left.pop(0) if worker.left[0] == worker.current else None
    return task, f"the process ended {f'by signal {-code}' if code < 0 else f'with code {code}'}"


def _start(tasks: list[Task], setting: Setting) -> tuple[Connection, _Worker]:
    # A process that was forked could not use the GPU.
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, tuple(tasks), setting), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen here
    return mine, _Worker(process, list(tasks))


def _work(connection: Connection, tasks: Sequence[Task], setting: Setting) -> None:
    """What a process does: for each task it sends that it begins, then (the task, and what makes up its verdict)."""
    from nanovllm.kernels import all_ops
    from nanovllm.kernels.op.plugins import load_plugins

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(max(1, torch.get_num_threads() // setting.jobs))
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(_MEMORY / setting.jobs, device)
    load_plugins(setting.plugins)
    ops = all_ops()
    of_op = {op: setting.cases(ops[op]) for op in {op for op, _, _ in tasks}}
    try:
        for task in tasks:
            op, provider, index = task
            connection.send((task,))
            verdict = verify_case(ops[op], ops[op].providers[provider], device, of_op[op][index])
            connection.send((task, verdict.error, verdict.failure, verdict.skipped))
            if verdict.failure and device.type == "cuda":
                torch.cuda.synchronize(device)  # an error that stays with the process ends it, and another goes on
    except BrokenPipeError:
        pass  # the reader has ended

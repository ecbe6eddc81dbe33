"""nanovllm beside vLLM on the same GPUs: both engines start at the same time and stay, then they are measured in turns.

`python -m benchmarks.tensor_parallel --vllm DIR` runs this. An engine is idle while another is measured. So a cold
start, of which most is compilation, is waited for once, and a slower clock of the GPUs meets all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nanovllm.bench.engines.common import Engine
from nanovllm.bench.job import Job, Row
from nanovllm.bench.worker import measure_workload
from nanovllm.bench.workloads import select

_BLOCKS = 400
"""Blocks of nanovllm's cache: 128 sequences have three each. The engines of several numbers of GPUs fit together."""
_VLLM_MEMORY = 0.3
"""Of a GPU's memory, which vLLM wants to be free when it starts."""
_VLLM_CACHE = 16 << 30
"""Bytes a GPU. vLLM would measure what is free, while the other engine's memory changes."""
_VLLM_GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128]
"""Batch sizes of vLLM's CUDA graphs: those of the workloads are among them, and a start takes less time."""


class Side:
    """One engine in a process of its own, which measures a workload when it is asked to.

    Args:
        log: the file for what the engine prints.
        path: a directory of packages that the process finds first.
        name: what tables call it; by default the engine.
    """

    def __init__(self, job: Job, log: str, path: str | None = None, name: str | None = None) -> None:
        self.name, self.rates = name or job.engine, dict[str, list[float]]()
        self.state = "starting"
        self._news: queue.Queue[list[Any]] = queue.Queue()
        found = [path, os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in found if part)}
        if environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
            environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # its sums there need multicast
        with open(log, "w") as file:
            command = [sys.executable, "-m", "benchmarks.tensor_parallel_peer"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._ask(job.to_json())
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, timeout: float) -> str:
        """Wait until the engine has started; returns the state: "starting", "ready" or "ended"."""
        if self.state == "starting" and (told := self._next(timeout))[0] != "late":
            self.state = told[0]
            print(self.name, *told[1:], told[0], flush=True)
        return self.state

    def measure(self, load: str, turn: int, timeout: float) -> None:
        """Print the row of a workload, and keep its rates. turn: decides the prompts, see `answers`."""
        if self.state != "ready" or timeout <= 0:
            return
        self._ask([load, turn])
        told = self._next(timeout)
        if told[0] != "row":
            self.state = "ended"
            print(f"| {load} | {self.name} | {' '.join(map(str, told))} |", flush=True)
            return
        rates, ttft, itl = told[1:]
        self.rates.setdefault(load, []).extend(rates)
        shown = ", ".join(f"{rate:,.0f}" for rate in rates)
        times = (f"{1e3 * seconds:.2f}" if seconds else "" for seconds in (ttft, itl))
        print(f"| {load} | {self.name} | {shown} | {' | '.join(times)} |", flush=True)

    def close(self) -> None:
        """End the process and all that it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _ask(self, what: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
        except BrokenPipeError:  # `_next` tells that it has ended
            pass

    def _next(self, timeout: float) -> list[Any]:
        try:
            return self._news.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return ["late"]

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._news.put(json.loads(line))
        self._news.put(["ended"])


def compare(pairs: Sequence[tuple[Side, Side]], loads: Sequence[str], rounds: int, end: float) -> None:
    """Measure the sides of all pairs in turns, and print the ratios of each pair. `end` is on `time.monotonic`."""
    sides = [side for pair in pairs for side in pair]
    reserve = min(20 * len(sides), (end - time.monotonic()) / 2)  # for measuring those that have started by then
    while any([side.wait(0.2) == "starting" for side in sides]) and time.monotonic() < end - reserve:
        pass
    print("| workload | engine | output tokens/s | TTFT, ms | ITL, ms |\n|---|---|---|---|---|", flush=True)
    for turn in range(rounds):
        for load in loads:
            for side in sides if turn % 2 == 0 else sides[::-1]:
                side.wait(0.0)
                side.measure(load, turn, end - time.monotonic())
    for side in sides:
        if not side.rates and side.wait(end - time.monotonic()) == "ready":
            for load in loads:
                side.measure(load, 0, end - time.monotonic())
    for load in loads:
        for pair in pairs:
            ours, theirs = (max(side.rates.get(load, [0.0])) for side in pair)
            if ours and theirs:
                print(f"{load}: {pair[0].name} {ours:,.0f} against {pair[1].name} {theirs:,.0f} tokens/s, ratio"
                      f" {ours / theirs:.2f}", flush=True)  # fmt: skip


def jobs(model: str, ranks: int, repeat: int, config: dict[str, Any] | None, **options: Any) -> tuple[Job, Job]:
    """The jobs of nanovllm and vLLM, both without a prefix cache. config: of a preset, for random weights."""
    both = dict(tensor_parallel_size=ranks, enable_prefix_caching=False)
    ours = both | dict(num_kvcache_blocks=_BLOCKS) | options
    theirs = both | dict(gpu_memory_utilization=_VLLM_MEMORY) | options
    return Job("nanovllm", "", model, (), config, ours, repeat), Job("vllm", "", model, (), config, theirs, repeat)


def answers(job: Job, engine: Engine, asked: Iterable[str]) -> Iterator[list[Any]]:
    """A row for each line that asks for one: `["row", rates, TTFT, ITL]`.

    Args:
        asked: JSON of [workload, turn]. The prompts of each turn are others, and the same for all engines.
    """
    for line in asked:
        name, turn = json.loads(line)
        (workload,) = select([name])
        drawn = dataclasses.replace(job, seed=job.seed + turn * max(job.repeat, job.warmup))
        row = Row(job.engine, "", job.model, workload.name, workload.description, about=engine.about())
        measure_workload(drawn, workload, engine, row)
        rates = [repeat.output_rate for repeat in row.repeats]
        yield ["row", rates, row.median("ttft_p50"), row.median("itl_p50")]


def serve() -> None:
    """The process of a side: reads a job, starts its engine, then answers. A line of JSON each."""
    told, asked = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(0))
    os.dup2(2, 1)  # what engines print
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from nanovllm import LLM
    from nanovllm.bench.engines import start
    from nanovllm.distributed.processes import exit_with_parent

    exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    job = Job.from_json(json.loads(asked.readline()))
    if job.engine == "vllm":
        import vllm

        fixed: dict[str, Any] = dict(compilation_config={"cudagraph_capture_sizes": _VLLM_GRAPHS})
        vllm.LLM = functools.partial(vllm.LLM, kv_cache_memory_bytes=_VLLM_CACHE, **fixed)
    since = time.perf_counter()
    engine = start(job, LLM)
    about = engine.about()
    seconds = f"{time.perf_counter() - since:.1f}"
    print(json.dumps(["ready", about["version"], f"on {about['device']}, after {seconds} s:"]), file=told)
    for answer in answers(job, engine, asked):
        print(json.dumps(answer), file=told)
    engine.close()


if __name__ == "__main__":
    serve()

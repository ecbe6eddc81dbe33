"""nanovllm beside vLLM on the same GPUs: both engines start at the same time and stay, then they are measured in turns.

`python -m benchmarks.tensor_parallel --engine-path vllm=DIR` runs this. An engine is idle while another is measured.
So a cold start, of which most is compilation, is waited for once, and a slower clock of the GPUs meets all.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import Peer, serve
from nanovllm.bench.engines.engine_interface import Engine
from nanovllm.bench.job import Job, ResultRow
from nanovllm.bench.measuring_process import measure_workload
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
        found = [path, os.environ.get("PYTHONPATH")]
        environment = {"PYTHONPATH": os.pathsep.join(part for part in found if part)}
        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
            environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # its sums there need multicast
        self._peer = Peer(self.name, ["-m", "benchmarks.tensor_parallel_peer"], environment, Path(log))
        self._peer.ask(job.to_json())

    def wait(self, timeout: float) -> str:
        """Wait until the engine has started; returns the state: "starting", "ready" or "ended"."""
        if self.state == "starting" and self._peer.has_reply(timeout):
            about = self._peer.reply(time.perf_counter())
            self.state = "ended" if about is None else "ready"
            print(self.name, *([] if about is None else [about]), self.state, flush=True)
        return self.state

    def measure(self, load: str, turn: int, timeout: float) -> None:
        """Print the row of a workload, and keep its rates. turn: decides the prompts, see `answer`."""
        if self.state != "ready" or timeout <= 0:
            return
        self._peer.ask([load, turn])
        reply = self._peer.reply(time.perf_counter() + timeout)
        if reply is None:
            self.state = "ended"
            print(f"| {load} | {self.name} | ended |", flush=True)
            return
        rates, ttft, itl = reply
        self.rates.setdefault(load, []).extend(rates)
        shown = ", ".join(f"{rate:,.0f}" for rate in rates)
        times = (f"{1e3 * seconds:.2f}" if seconds else "" for seconds in (ttft, itl))
        print(f"| {load} | {self.name} | {shown} | {' | '.join(times)} |", flush=True)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._peer.stop()


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


def answer(job: Job, engine: Engine, name: str, turn: int) -> list[Any]:
    """[rates, TTFT, ITL] of a workload. The prompts of each turn are others, and the same for all engines."""
    (workload,) = select([name])
    drawn = dataclasses.replace(job, seed=job.seed + turn * max(job.repeat, job.warmup))
    row = ResultRow(job.engine, "", job.model, workload.name, workload.description, about=engine.about())
    measure_workload(drawn, workload, engine, row)
    return [[repeat.output_rate for repeat in row.repeats], row.median("ttft_p50"), row.median("itl_p50")]


class Started:
    """In the process of a side: its engine, which the first request, a job, starts."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def answer(self, request: Any) -> Any:
        if self._engine is not None:
            return answer(self._job, self._engine, *request)
        self._job = Job.from_json(request)
        return self._start()

    def _start(self) -> str:
        """What the engine is, and how long it took to start."""
        from nanovllm import LLM
        from nanovllm.bench.engines import start

        if self._job.engine == "vllm":
            import vllm

            fixed: dict[str, Any] = dict(compilation_config={"cudagraph_capture_sizes": _VLLM_GRAPHS})
            vllm.LLM = functools.partial(vllm.LLM, kv_cache_memory_bytes=_VLLM_CACHE, **fixed)
        since = time.perf_counter()
        self._engine = start(self._job, LLM)
        about = self._engine.about()
        return f"{about['version']} on {about['device']}, after {time.perf_counter() - since:.1f} s:"


if __name__ == "__main__":
    from nanovllm.early_exit import exit_with_parent

    exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    serve(Started().answer)

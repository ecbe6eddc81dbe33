"""Timing plans on a CUDA device, and compiling them beforehand."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from nanovllm.perf.presets import DeviceModel
from nanovllm.perf.tiles.resources import Plan
from nanovllm.perf.tiles.shapes import ALL, plan

FIRST = 5
_FINALISTS = 8
_ROUNDS = 3
_TOLERANCE = {"float32": 1e-4, "tfloat32": 5e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest error over the largest value of the reference."""


def sample(plans: Sequence[Plan], most: int) -> list[int]:
    """Which plans to time: all, or `most` of them: the first half by rank, the others evenly spaced over the rest."""
    if not most or len(plans) <= most:
        return list(range(len(plans)))
    head = max(FIRST, most // 2)
    rest = max(0, most - head)
    step = (len(plans) - head) / max(1, rest)
    return [*range(head), *(head + int(i * step) for i in range(rest))]


class GpuTimer:
    """Times plans on the current CUDA device."""

    def __init__(self, model: DeviceModel) -> None:
        import torch

        self.model = model
        self.where = torch.device("cuda", torch.cuda.current_device())

    def __call__(self, problem: Any, plans: Sequence[Plan], deadline: float) -> dict[str, Any]:
        import torch

        from nanovllm.kernels.benchmark import time_in_graph
        from nanovllm.perf.tiles.launch import prepare

        inputs = prepare(problem, self.where, self.model)

        def seconds(call: Callable[[Any], Any], replays: int) -> float:
            return time_in_graph([partial(call, s) for s in inputs.sets], replays).median

        found, failed = {}, []
        for i, p in enumerate(plans):
            if time.monotonic() > deadline:
                return {"seconds": found, "cut": True}
            try:
                inputs.run(p, inputs.sets[0])
                torch.cuda.synchronize()
                found[i] = seconds(partial(inputs.run, p), max(3, min(15, int(2e-3 / (p.seconds * len(inputs.sets))))))
            except Exception as e:  # noqa: BLE001 - whatever a compiler or launcher raises; a broken context ends the run below
                failed.append(
                    {
                        "config": str(p.config),
                        "reason": f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}",
                    }
                )
                torch.cuda.synchronize()
        finalists = sorted({*sorted(found, key=lambda i: found[i])[:_FINALISTS], *sorted(found)[:FIRST]})
        again = {i: [] for i in finalists}
        for _ in range(_ROUNDS):
            for i in finalists:
                again[i].append(seconds(partial(inputs.run, plans[i]), 15))
        found |= {i: statistics.median(times) for i, times in again.items()}
        wrong = self._wrong(problem, inputs, [plans[i] for i in finalists])
        library = None if inputs.library is None else 1e6 * seconds(inputs.library, 15)
        return {"seconds": found, "failed": failed, "wrong": wrong, "library_us": library}

    def _wrong(self, problem: Any, inputs: Any, plans: Sequence[Plan]) -> list[dict[str, Any]]:
        arguments = inputs.sets[-1]
        expected = inputs.reference(arguments)
        scale = expected.abs().max().item()
        wrong = []
        for p in plans:
            error = (inputs.run(p, arguments).float() - expected).abs().max().item() / scale
            if not error <= _TOLERANCE[problem.dtype]:  # also if it is NaN
                wrong.append({"config": str(p.config), "error": error})
        return wrong


def compile_ahead(limit: float, most: int, workers: int, kinds: Sequence[str]) -> None:
    """Fill Triton's cache from several processes, each running its share of the configurations once."""
    command = [
        sys.executable,
        "-m",
        "nanovllm.perf.tiles.proof",
        "--limit",
        str(limit),
        "--most",
        str(most),
        "--kinds",
        *kinds,
    ]
    started = [subprocess.Popen([*command, "--share", str(i), str(workers)]) for i in range(workers)]
    for process in started:
        process.wait()


def compile_share(model: DeviceModel, kinds: Sequence[str], most: int, index: int, workers: int, limit: float) -> None:
    import torch

    from nanovllm.perf.tiles.launch import prepare

    deadline = time.monotonic() + limit
    where = torch.device("cuda", torch.cuda.current_device())
    for problem, plans in to_compile(model, kinds, most):
        inputs = None
        for p in plans[index::workers]:
            if time.monotonic() > deadline:
                return
            try:
                inputs = inputs or prepare(problem, where, model, sets=1)
                inputs.run(p, inputs.sets[0])
                torch.cuda.synchronize()
            except Exception as e:  # noqa: BLE001 - told when it is timed
                print(f"{p.config}: {type(e).__name__}", file=sys.stderr)


def to_compile(model: DeviceModel, kinds: Sequence[str], most: int) -> Iterator[tuple[Any, list[Plan]]]:
    """(problem, plans) with each compiled kernel once: what Triton compiles anew for are constants and divisibility by 16."""
    seen = set()
    for kind in kinds:
        for problem in ALL[kind]:
            sizes = tuple((v == 1, v % 16 == 0) for v in asdict(problem).values() if type(v) is int)
            plans = plan(problem, model)
            mine = []
            for i in sample(plans, most):
                c = plans[i].config
                blocks = tuple(
                    getattr(problem, s) % getattr(c, b) == 0
                    for s, b in (("n", "block_n"), ("k", "block_k"))
                    if hasattr(c, b)
                )
                key = (
                    type(problem),
                    problem.dtype,
                    getattr(problem, "kind", None),
                    getattr(problem, "inputs", None),
                    sizes,
                    blocks,
                    c,
                )
                if key not in seen:
                    seen.add(key)
                    mine.append(plans[i])
            yield problem, mine

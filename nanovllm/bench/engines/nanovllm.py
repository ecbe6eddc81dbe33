"""nanovllm, through its public interface."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.sampling_params import SamplingParams


class NanovllmEngine:
    """Requests that arrive at once go through `LLM.generate`; those that arrive over time through the engine's steps."""

    def __init__(self, job: Job, llm_class: Any) -> None:
        options = {"skip_tokenizer_init": True, "max_model_len": job.max_model_len, **job.options}
        if job.config is not None:
            options["load_format"] = "dummy"
        self.llm = llm_class(job.model, **options)
        self.config = self.llm.engine.model_config

    def about(self) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("nanovllm")
        except PackageNotFoundError:
            number = "source"
        name, _, dtype = self.llm.device_name.rpartition(", ")
        return {"version": number, "device": name, "dtype": dtype, "kernels": dict(self.llm.kernels.providers)}

    def run(self, items: Sequence[Item]) -> Run:
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=i.num_output) for i in items]
        if any(item.arrival for item in items):
            return self._run_open_loop(items, params)
        with _stamped_steps(self.llm.engine) as steps:
            started = time.perf_counter()
            outputs = self.llm.generate([item.prompt for item in items], params, use_tqdm=False)
            seconds = time.perf_counter() - started
        stamps: dict[int, list[float]] = {}
        for at, grown in steps:
            for request in grown:
                stamps.setdefault(request.request_id, []).append(at)
        times = [
            RequestTimes(
                o.metrics.time_to_first_token, o.metrics.total_time, len(o["token_ids"]), _gaps(stamps[o.request_id])
            )
            for o in outputs
        ]
        _check(items, times)
        return Run(seconds, times)

    def _run_open_loop(self, items: Sequence[Item], params: list[SamplingParams]) -> Run:
        engine = self.llm.engine
        stamps: dict[Any, list[float]] = {}
        arrivals: dict[Any, float] = {}
        todo = list(zip(items, params))[::-1]
        started = time.perf_counter()
        while todo or engine.has_unfinished:
            now = time.perf_counter() - started
            while todo and todo[-1][0].arrival <= now:
                item, own = todo.pop()
                request = engine.add_request(item.prompt, own)
                # From when it was due: a step that was running then is part of the wait.
                arrivals[request], stamps[request] = item.arrival, []
            if not engine.has_unfinished:
                time.sleep(max(0.0, todo[-1][0].arrival - (time.perf_counter() - started)))
                continue
            grown = engine.step()
            now = time.perf_counter() - started
            for request in grown:
                new = request.num_output_tokens - len(stamps[request])
                stamps[request] += [now] * new
        seconds = time.perf_counter() - started
        times = [RequestTimes(s[0] - arrivals[r], s[-1] - arrivals[r], len(s), _gaps(s)) for r, s in stamps.items()]
        _check(items, times)
        return Run(seconds, times)

    def close(self) -> None:
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def _stamped_steps(engine: Any) -> Iterator[list[tuple[float, list[Any]]]]:
    """When each step's tokens came, and whose they were: a reading of the clock and an append a step, however large the batch."""
    steps: list[tuple[float, list[Any]]] = []
    step = engine.step

    def stamped() -> list[Any]:
        grown = step()
        steps.append((time.perf_counter(), grown))
        return grown

    engine.step = stamped
    try:
        yield steps
    finally:
        del engine.step  # the class's own again


def _gaps(stamps: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(stamps, stamps[1:])]


def _check(items: Sequence[Item], times: Sequence[RequestTimes]) -> None:
    wrong = [(i.num_output, t.num_output) for i, t in zip(items, times) if i.num_output != t.num_output]
    if wrong or len(items) != len(times):
        raise RuntimeError(
            f"expected {wrong[0][0]} output tokens, got {wrong[0][1]}" if wrong else "requests were lost"
        )

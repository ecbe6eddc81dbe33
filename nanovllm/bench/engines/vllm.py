"""vLLM, through its offline interface."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm

from nanovllm.bench.engines.engine_interface import EngineError, model_directory, quantised_by_peer, run_open_loop
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.model_config import ModelConfig

_OPTIONS = (
    "kv_cache_dtype", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
    "tensor_parallel_size", "enable_prefix_caching",
)  # fmt: skip


class VllmEngine:
    def __init__(self, job: Job) -> None:
        self._plugin = job.options.get("vllm_plugin", "")
        os.environ["NANOVLLM_VLLM"] = self._plugin or "0"  # what `nanovllm.adapters.vllm` reads
        self._folder = tempfile.TemporaryDirectory()
        options = {name: job.options[name] for name in _OPTIONS if job.options.get(name) is not None}
        self.llm = vllm.LLM(
            model=model_directory(job, Path(self._folder.name)), skip_tokenizer_init=True,
            load_format="dummy" if job.config is not None else "auto", dtype=job.options.get("dtype") or "auto",
            max_model_len=job.max_model_len, seed=job.seed, disable_log_stats=False, **options,
        )  # fmt: skip
        if self._plugin:
            check_plugin(self.llm.llm_engine.vllm_config, self._plugin)
        config = self.llm.llm_engine.model_config
        self._dtype = str(config.dtype).removeprefix("torch.")
        self.config = ModelConfig.from_dict(config.hf_config.to_dict())
        self._num_requests = 0
        self.job = job

    def about(self) -> dict[str, Any]:
        about = {"version": vllm.__version__, "device": torch.cuda.get_device_name(), "dtype": self._dtype}
        return {**about, "plugin": served(self.llm.llm_engine.vllm_config)} if self._plugin else about

    def quantised_weights(self, num_tokens: int) -> int:
        return quantised_by_peer(self.job, self.config)

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items):
            return self._run_open_loop(items)
        params = [_sampling_params(self.job, item) for item in items]
        prompts = [{"prompt_token_ids": item.prompt} for item in items]
        with _kept_gaps(self.llm.llm_engine) as steps:
            started = time.perf_counter()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        # A release that keeps other statistics tells only each request's mean.
        each = [gap for step in steps for gap in step]
        complete = len(each) == sum(item.num_output - 1 for item in items)
        return Run(seconds, [_times(o) for o in outputs], each if complete else None)

    def _run_open_loop(self, items: Sequence[Item]) -> Run:
        engine = self.llm.llm_engine

        def add(item: Item) -> str:
            name = f"bench-{self._num_requests}"
            self._num_requests += 1
            engine.add_request(name, {"prompt_token_ids": item.prompt}, _sampling_params(self.job, item))
            return name

        def step() -> list[tuple[str, int]]:
            return [(output.request_id, len(output.outputs[0].token_ids)) for output in engine.step()]

        return run_open_loop(items, add, step, engine.has_unfinished_requests)

    def close(self) -> None:
        del self.llm
        self._folder.cleanup()


def served(config: Any) -> list[str]:
    """The ops that the plugin has entered into vLLM's configuration."""
    return config.additional_config.get("nanovllm", {}).get("ops", [])


def check_plugin(config: Any, wanted: str) -> None:
    """An EngineError unless the plugin serves the ops that are wanted; "1": any."""
    found = served(config)
    missing = [op for op in wanted.split(",") if op not in found] if wanted != "1" else [] if found else ["anything"]
    if missing:
        raise EngineError(
            f"the plugin does not serve {', '.join(missing)}; is nanovllm installed beside vLLM (pip install -e .)? "
            "--verbose shows its log"
        )


def _sampling_params(job: Job, item: Item) -> Any:
    return vllm.SamplingParams(
        temperature=job.temperature, top_p=job.top_p, ignore_eos=True, max_tokens=item.num_output, detokenize=False
    )  # fmt: skip


@contextmanager
def _kept_gaps(engine: Any) -> Iterator[list[list[float]]]:
    """The times between tokens, a list a step, from vLLM's own statistics; `generate` returns only whole requests."""
    gaps: list[list[float]] = []
    manager = getattr(engine, "logger_manager", None)
    if manager is None:
        yield gaps
        return
    record = manager.record

    def kept(*args: Any, **kwargs: Any) -> Any:
        statistics = kwargs.get("iteration_stats", args[1] if len(args) > 1 else None)
        gaps.append(getattr(statistics, "inter_token_latencies_iter", None) or [])
        return record(*args, **kwargs)

    manager.record = kept
    try:
        yield gaps
    finally:
        manager.record = record


def _times(output: Any) -> RequestTimes:
    """Where this release of vLLM tells a request's times, they are used."""
    count = len(output.outputs[0].token_ids)
    m: Any = getattr(output, "metrics", None)
    first = getattr(m, "first_token_latency", None) or None
    between = None
    if getattr(m, "last_token_ts", None) and getattr(m, "first_token_ts", None):
        between = m.last_token_ts - m.first_token_ts  # one clock, which is not the arrival's
    total = None if first is None or between is None else first + between
    return RequestTimes(first, total, count)


start = VllmEngine

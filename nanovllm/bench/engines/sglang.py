"""SGLang, through its offline interface. It ran with SGLang 0.5.15 and 0.5.23."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.engines.engine_interface import gaps, model_directory, quantised_by_peer
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.model_config import ModelConfig

# For a model whose positions end where the longest request does; see `_SPARE`.
os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
import sglang  # noqa: E402

_OPTIONS = {
    "gpu_memory_utilization": "mem_fraction_static", "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size", "enforce_eager": "disable_cuda_graph",
    "tensor_parallel_size": "tp_size", "kv_cache_dtype": "kv_cache_dtype",
}  # fmt: skip
"""Our option -> SGLang's."""
_SPARE = 2
"""Tokens of the context that SGLang never fills: it would end the longest requests early."""
_CACHE_DTYPES = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"}


class SglangEngine:
    def __init__(self, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory()
        given = {theirs: job.options[ours] for ours, theirs in _OPTIONS.items() if job.options.get(ours) is not None}
        if "kv_cache_dtype" in given:
            given["kv_cache_dtype"] = _CACHE_DTYPES.get(given["kv_cache_dtype"], given["kv_cache_dtype"])
        self.engine = sglang.Engine(
            model_path=model_directory(job, Path(self._folder.name)), skip_tokenizer_init=True,
            load_format="dummy" if job.config is not None else "auto", dtype=job.options.get("dtype") or "auto",
            context_length=job.max_model_len + _SPARE, random_seed=job.seed, **given,
        )  # fmt: skip
        config = self.engine.tokenizer_manager.model_config
        self._dtype = str(config.dtype).removeprefix("torch.")
        self.config = ModelConfig.from_dict(config.hf_config.to_dict())
        self._job = job

    def about(self) -> dict[str, Any]:
        return {"version": sglang.__version__, "device": torch.cuda.get_device_name(), "dtype": self._dtype}

    def quantised_weights(self, num_tokens: int) -> int:
        return quantised_by_peer(self._job, self.config)

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items):
            return self.engine.loop.run_until_complete(self._open_loop(items))
        started = time.perf_counter()
        outputs = self.engine.generate(
            input_ids=[list(item.prompt) for item in items], sampling_params=[self._params(item) for item in items]
        )
        seconds = time.perf_counter() - started
        return Run(seconds, [_times(output["meta_info"]) for output in outputs])

    def _params(self, item: Item) -> dict[str, Any]:
        return {
            "temperature": self._job.temperature, "top_p": self._job.top_p, "max_new_tokens": item.num_output,
            "ignore_eos": True,
        }  # fmt: skip

    async def _open_loop(self, items: Sequence[Item]) -> Run:
        """Requests as they arrive, each with the times at which its tokens came."""
        started = time.perf_counter()

        async def served(item: Item) -> RequestTimes:
            await asyncio.sleep(max(0.0, item.arrival - (time.perf_counter() - started)))
            chunks = await self.engine.async_generate(
                input_ids=list(item.prompt), sampling_params=self._params(item), stream=True
            )
            stamps: list[float] = []
            async for chunk in chunks:
                now = time.perf_counter() - started
                stamps += [now] * (chunk["meta_info"]["completion_tokens"] - len(stamps))
            # From when it was due, as the other engines are measured.
            return RequestTimes(stamps[0] - item.arrival, stamps[-1] - item.arrival, len(stamps), gaps(stamps))

        times = await asyncio.gather(*map(served, items))
        return Run(time.perf_counter() - started, list(times))

    def close(self) -> None:
        self.engine.shutdown()
        self._folder.cleanup()


def _times(told: dict[str, Any]) -> RequestTimes:
    """What `generate` tells of a request: its end; its first token only from the rate of those after it, if told."""
    count, total, rate = told["completion_tokens"], told.get("e2e_latency"), told.get("decode_throughput")
    first = None if not rate or total is None else total - (count - 1) / rate
    return RequestTimes(first, total, count)


start = SglangEngine

"""Hugging Face transformers: `generate` on one left-padded batch, which runs until its longest request is done."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.bench.engines.engine_interface import EngineError, gaps, model_directory
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.model_config import ModelConfig
from nanovllm.wording import counted

# More rows than this are run one batch after the other.
_MAX_BATCH = 256
_WARMUP_TOKENS = 8


class _Clock:
    """A streamer that notes when each step's tokens reach the host; `generate` first hands it the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersEngine:
    def __init__(self, job: Job) -> None:
        import transformers

        self._version = transformers.__version__
        self._device = torch.device(
            "cuda" if torch.cuda.is_available() and job.options.get("device", "auto") != "cpu" else "cpu"
        )
        self._sampling: dict[str, Any] = {"do_sample": job.temperature > 0}
        if job.temperature > 0:
            self._sampling |= {"temperature": job.temperature, "top_k": 0, "top_p": job.top_p}
        dtype = job.options.get("dtype") or "auto"
        if job.config is not None:
            with tempfile.TemporaryDirectory() as folder:
                config = transformers.AutoConfig.from_pretrained(
                    model_directory(job, Path(folder)), trust_remote_code=False
                )
            with self._device:
                torch.manual_seed(job.seed)
                self._model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, str(job.options.get("dtype") or job.config["dtype"]))
                )
        else:
            path = Path(job.model)
            gguf: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
            if gguf and dtype == "auto":
                dtype = "bfloat16" if self._device.type == "cuda" else "float32"
            if gguf and hasattr(transformers, "GgufConfig"):  # without it weights stay packed: another model than ours
                gguf["quantization_config"] = transformers.GgufConfig(dequantize=True)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent if gguf else job.model, dtype=dtype, trust_remote_code=False, **gguf
            )
        self._model = self._model.to(self._device).eval()

    def about(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu"
        return {
            "version": self._version,
            "device": name,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "attention": self._model.config._attn_implementation,
        }

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict({**self._model.config.to_dict(), "architectures": [type(self._model).__name__]})

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items):
            raise EngineError("generate serves fixed batches: it cannot take requests as they arrive")
        started = time.perf_counter()
        times = []
        for first in range(0, len(items), _MAX_BATCH):
            times += self._batch(items[first : first + _MAX_BATCH], started)
        return Run(time.perf_counter() - started, times)

    def warm_up(self, items: Sequence[Item]) -> Run:
        """The same prompts and a few tokens: a step is like the next, and a whole run may take minutes."""
        return self.run([replace(item, num_output=min(item.num_output, _WARMUP_TOKENS)) for item in items])

    @torch.inference_mode()
    def _batch(self, items: Sequence[Item], started: float) -> list[RequestTimes]:
        width = max(len(item.prompt) for item in items)
        steps = max(item.num_output for item in items)
        ids = torch.tensor([[0] * (width - len(i.prompt)) + i.prompt for i in items], device=self._device)
        mask = torch.tensor([[0] * (width - len(i.prompt)) + [1] * len(i.prompt) for i in items], device=self._device)
        clock = _Clock()
        self._model.generate(
            ids, attention_mask=mask, min_new_tokens=steps, max_new_tokens=steps, pad_token_id=0, eos_token_id=None,
            **self._sampling, streamer=clock,
        )  # fmt: skip
        if len(clock.times) != steps:
            raise RuntimeError(f"expected {counted(steps, 'output token')}, got {len(clock.times)}")
        at = [t - started for t in clock.times]
        return [RequestTimes(at[0], at[i.num_output - 1], i.num_output, gaps(at[: i.num_output])) for i in items]

    def close(self) -> None:
        del self._model


start = TransformersEngine

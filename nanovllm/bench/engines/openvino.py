"""OpenVINO GenAI, which reads GGUF files: one pipeline, prompts of one length in one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from nanovllm.bench.engines.engine_interface import EngineError, cpu_threads, gguf_config
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item


class OpenVinoEngine:
    def __init__(self, job: Job) -> None:
        self.config = gguf_config(job)
        self._job = job
        options = {"INFERENCE_NUM_THREADS": cpu_threads()}
        try:
            self._pipeline = openvino_genai.LLMPipeline(job.model, "CPU", **options)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO GenAI cannot load {job.model}: {error}") from error

    def about(self) -> dict[str, Any]:
        core = openvino.Core()
        return {
            "version": openvino_genai.__version__, "device": "cpu", "dtype": "float32", "threads": cpu_threads(),
            "flags": " ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }  # fmt: skip

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items) or len({(len(i.prompt), i.num_output) for i in items}) > 1:
            raise EngineError("OpenVINO GenAI is driven with batches of one length here")
        ids = np.array([item.prompt for item in items], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        started = time.perf_counter()
        result = self._pipeline.generate(inputs, self._generation(items[0].num_output))
        seconds = time.perf_counter() - started
        first = result.perf_metrics.get_ttft().mean / 1e3
        return Run(seconds, [RequestTimes(first, seconds, len(tokens)) for tokens in result.tokens])

    def _generation(self, num_output: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_output
        config.ignore_eos = True
        config.do_sample = self._job.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = self._job.temperature, self._job.top_p
            config.rng_seed = self._job.seed
        return config

    def close(self) -> None:
        del self._pipeline


start = OpenVinoEngine

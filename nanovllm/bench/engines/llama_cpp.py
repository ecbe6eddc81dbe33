"""llama.cpp, through the C interface that llama-cpp-python brings: all sequences in one batch, sampled by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as lib

from nanovllm.bench.engines.engine_interface import EngineError, cpu_threads, gaps, gguf_config
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.wording import counted

_BATCH = 512


class LlamaCppEngine:
    def __init__(self, job: Job) -> None:
        self.config = gguf_config(job)
        self._job = job
        lib.llama_log_set(_silent, None)
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(job.model.encode(), options)
        if not self._model:
            raise EngineError(f"llama.cpp cannot load {job.model}")
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)

    def about(self) -> dict[str, Any]:
        flags = lib.llama_print_system_info().decode().removeprefix("CPU :").replace(" = 1", "")
        return {
            "version": lib.__version__, "device": "cpu", "dtype": "float32", "threads": cpu_threads(),
            "flags": " ".join(flags.replace("|", " ").split()),
        }  # fmt: skip

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items):
            raise EngineError("llama.cpp is driven with fixed batches here: it cannot take requests as they arrive")
        options = lib.llama_context_default_params()
        options.n_ctx = sum(len(item.prompt) + item.num_output for item in items)
        options.n_batch = options.n_ubatch = _BATCH
        options.n_seq_max = len(items)
        options.kv_unified = True
        options.n_threads = options.n_threads_batch = cpu_threads()
        context = lib.llama_init_from_model(self._model, options)
        if not context:
            raise EngineError(f"llama.cpp cannot make a context of {options.n_ctx} tokens")
        try:
            return self._generate(context, items)
        finally:
            lib.llama_free(context)

    def _generate(self, context: Any, items: Sequence[Item]) -> Run:
        sampler = self._sampler()
        started = time.perf_counter()
        times: list[list[float]] = [[] for _ in items]
        last = [0] * len(items)
        prompts = [(token, i, seq) for seq, item in enumerate(items) for i, token in enumerate(item.prompt)]
        for first in range(0, len(prompts), _BATCH):
            batch = prompts[first : first + _BATCH]
            ends = [row for row, (_, i, seq) in enumerate(batch) if i == len(items[seq].prompt) - 1]
            self._decode(context, batch, ends)
            for row in ends:
                last[batch[row][2]] = lib.llama_sampler_sample(sampler, context, row)
            now = time.perf_counter() - started
            for row in ends:
                times[batch[row][2]].append(now)
        while running := [i for i, item in enumerate(items) if len(times[i]) < item.num_output]:
            batch = [(last[i], len(items[i].prompt) + len(times[i]) - 1, i) for i in running]
            self._decode(context, batch, range(len(batch)))
            for row, i in enumerate(running):
                last[i] = lib.llama_sampler_sample(sampler, context, row)
            now = time.perf_counter() - started
            for i in running:
                times[i].append(now)
        seconds = time.perf_counter() - started
        lib.llama_sampler_free(sampler)
        return Run(seconds, [RequestTimes(t[0], t[-1], len(t), gaps(t)) for t in times])

    def _decode(self, context: Any, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> None:
        """Compute (token, position, sequence). wanted: rows whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i in wanted
        if lib.llama_decode(context, batch):
            raise EngineError(f"llama.cpp cannot compute a batch of {counted(len(tokens), 'token')}")

    def _sampler(self) -> Any:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if self._job.temperature == 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
            return chain
        if self._job.top_p < 1:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(self._job.top_p, 1))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(self._job.temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(self._job.seed))
        return chain

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_model_free(self._model)


@lib.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


start = LlamaCppEngine

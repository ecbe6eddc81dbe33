"""Runs scheduled steps on a device: a step becomes a batch, the model computes logits, and these become tokens."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import current_group
from nanovllm.engine import kv_cache
from nanovllm.engine.batch import Batch, DeviceBatch, to_device
from nanovllm.engine.cache_size import CacheSize
from nanovllm.engine.fast.paths import FastPaths
from nanovllm.engine.logprobs import PROMPT_LOGPROBS_ROWS, LogprobsTensors, compute_logprobs
from nanovllm.engine.model_setup import (
    StartTimer,
    StepLimits,
    num_kvcache_blocks,
    report_op_by_op,
    select_dtype,
    warn_of_interpreter,
    within_blocks,
)
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow
from nanovllm.engine.step import ScheduledSequence, ScheduledStep
from nanovllm.engine.step_result import PromptLogprobs, StepResult
from nanovllm.engine.token_masks import ConstrainedRow
from nanovllm.garbage_collector import collector_off
from nanovllm.hardware.devices import on_device
from nanovllm.kernels import Kernels
from nanovllm.loading_line import loading_stage
from nanovllm.models.packed_decoder import why_not_packed
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.expanded_layers import expand_layers
from nanovllm.weights.loader import load_model
from nanovllm.weights.rounded_layers import round_layers

logger = logging.getLogger(__name__)

LogitsOf = Callable[[torch.Tensor | slice], torch.Tensor]
"""From some of the rows that a batch wants logits of, counted from 0, to their logits [num_rows, vocab_size]."""


class ModelRunner:
    """The model on its device.

    Attributes:
        max_model_len: the longest sequence served: what was asked for, bounded by the model and the KV cache.
        num_kvcache_blocks: blocks in the KV cache.
        fast: what makes steps faster.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, device: torch.device, kernels: Kernels) -> None:
        self.config = config
        self.device = device
        self.group = group = current_group()
        self.dtype = select_dtype(config.dtype, checkpoint, device)
        with on_device(device):
            limits = StepLimits.of(config, checkpoint.config, self.dtype, device)
        on_gpu = device.type == "cuda"
        why_op_by_op = why_not_packed(checkpoint.config, kernels, self.dtype, limits.cache_dtype, group.size)
        if why_op_by_op:
            report_op_by_op(why_op_by_op, config, checkpoint, device)
        warn_of_interpreter(kernels, checkpoint.config, device)
        forms = FastPaths.weight_forms(config)
        fp8_prompt_tokens = forms.least_fp8_tokens(config, kernels, self.dtype, device)
        timer = StartTimer()
        loading_stage("making random weights" if checkpoint.format == "dummy" else "reading weights", self.device_name)
        with torch.inference_mode(), on_device(device), collector_off(gc.collect) if on_gpu else nullcontext():
            self.model = load_model(
                checkpoint, kernels, self.dtype, device, limits.max_model_len, seed=config.seed or 0,
                packed=None if why_op_by_op else config.cpu_activations, keep_packed=forms.packed,
            )  # fmt: skip
            plan = forms.expansion_plan(config, kernels, self.dtype, device) if why_op_by_op else None
            if why_op_by_op and fp8_prompt_tokens is not None:
                round_layers(self.model, kernels, fp8_prompt_tokens, plan)
            if plan is not None:
                expand_layers(self.model, plan, partial(group.smallest, device=device))
            timer.end("weights", "loaded")
            group.barrier(f"the weights are loaded for {kernels.providers}")
            self.sampler = Sampler(
                config.max_num_seqs, checkpoint.config.vocab_size, device, kernels.sample, kernels.apply_token_bitmask
            )
            loading_stage("sizing the KV cache")
            # Before the KV cache is sized, so that it leaves memory for the static buffers.
            self.fast = FastPaths(config, kernels, self.model, device)
            num_blocks = num_kvcache_blocks(config, self.model, self.sampler, limits)
            self.num_kvcache_blocks = group.smallest(num_blocks, device)
            timer.end(*(("memory", "measured") if on_gpu else ("KV cache", "sized")))
            self.limits = within_blocks(limits, self.num_kvcache_blocks)
            caches = kv_cache.allocate(
                checkpoint.config, self.num_kvcache_blocks, limits.block_size, limits.cache_dtype, device,
                self.model.num_kv_heads,
            )  # fmt: skip
            logger.info("%s", self.cache_size)
            self.paged = PagedModel(self.model, caches, limits.max_num_seqs, self.limits.max_model_len)
            self.fast.start(self.paged, self.sampler, self.limits, timer)
        logger.info("started in %s", timer)

    @property
    def device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        name = name if self.group.size == 1 else f"{self.group.size} x {name}"
        return f"{name}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def cache_size(self) -> CacheSize:
        limits, heads = self.limits, self.model.num_kv_heads
        per_block = kv_cache.block_bytes(self.model.config, limits.block_size, limits.cache_dtype, heads)
        blocks = self.num_kvcache_blocks
        return CacheSize(blocks, limits.block_size, blocks * per_block, limits.max_model_len, self.group.size)

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def max_num_batched_tokens(self) -> int:
        return self.limits.max_num_batched_tokens

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Launch a step. On CUDA this returns before the step has run; `StepResult.token_ids` waits for it.

        It may be called in any thread, whatever GPU is current there.
        """
        with on_device(self.device):
            if not step.continues:
                self._set_up_admitted(step)
            result = self.fast.decode(step) or self._build_and_run(step)
            self.sampler.masks.step_launched(result)
            return result

    def _set_up_admitted(self, step: ScheduledStep) -> None:
        for part in step.parts:
            if part.admitted:
                seq = part.seq
                if seq.params.uses_penalties:
                    self.sampler.admit(part.seq_slot, seq.token_ids[: seq.prompt_len], seq.output_token_ids, seq.params)
                self.fast.forget(part.seq_slot)

    def _build_and_run(self, step: ScheduledStep) -> StepResult:
        """Launch a step whose inputs the host builds and sends."""
        self.sampler.masks.drain()  # many launches may have to wait for the device
        batch = Batch.build(step.parts, self.limits.block_size)
        logits = self.fast.logits(batch)
        prompt: list[PromptLogprobs] = []
        if batch.prompt_rows:
            prompt, logits = self._with_prompt_logprobs(batch, logits)
        elif logits is None:
            # `hidden` may pad `logits_rows` (`FastPaths.pad`), and the rows of the padding are cut off.
            logits = self.paged.logits(self.hidden(batch))[: len(batch.logits_rows)]
        sampling = step.sampling_parts
        if not sampling:
            return StepResult(step, torch.empty(0, dtype=torch.int64, device=self.device), None, prompt)
        rows = [SamplingRow.of(p.seq, p.start + p.num_tokens, p.seq_slot) for p in sampling]
        metadata = SamplingMetadata.build(rows, self.device)
        constrained = [
            ConstrainedRow(i, p.seq, p.start + p.num_tokens)
            for i, p in enumerate(sampling)
            if p.seq.constraint is not None
        ]
        masks = partial(self.sampler.masks.make, constrained) if constrained else None
        output = self.sampler(logits, metadata, self.paged.last_tokens, masks)
        self.paged.last_tokens[metadata.seq_slots] = output.token_ids
        return StepResult(step, output.token_ids, output.logprobs, prompt)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the rows whose logits a batch wants; rows of padding may follow."""
        every_row = len(batch.logits_rows) == batch.num_tokens
        batch = self.fast.pad(batch)
        rows = None if every_row else to_device(batch.logits_rows, self.device)
        return self.paged.hidden(DeviceBatch.from_host(batch, self.device), rows)

    def _with_prompt_logprobs(
        self, batch: Batch, logits: torch.Tensor | None
    ) -> tuple[list[PromptLogprobs], torch.Tensor]:
        """(log-probabilities of prompts, logits of the rows that sample).

        logits: the logits of all wanted rows, if they are there.
        """
        logits_of: LogitsOf
        if logits is None:
            hidden = self.hidden(batch)
            logits_of = lambda rows: self.paged.logits(hidden[rows])  # noqa: E731
        else:
            logits_of = logits.__getitem__
        prompt = [self._prompt_logprobs(*rows, logits_of) for rows in batch.prompt_rows if rows.num_rows > 0]
        return prompt, logits_of(to_device(batch.sample_rows, self.device))

    def _prompt_logprobs(
        self, part: ScheduledSequence, first: int, num_rows: int, logits_of: LogitsOf
    ) -> PromptLogprobs:
        """The log-probabilities of a part of the rows, from row `first` of the wanted ones on, a few rows at a time."""
        start, params = part.start + 1, part.seq.params
        assert params.prompt_logprobs is not None
        tokens = to_device(np.asarray(part.seq.token_ids[start : start + num_rows], np.int64), self.device)
        pieces = []
        for i in range(0, num_rows, PROMPT_LOGPROBS_ROWS):
            end = min(i + PROMPT_LOGPROBS_ROWS, num_rows)
            logits = logits_of(slice(first + i, first + end))
            pieces.append(compute_logprobs(logits, tokens[i:end], params.prompt_logprobs))
        return PromptLogprobs(part.seq, start, LogprobsTensors(*(torch.cat(columns) for columns in zip(*pieces))))

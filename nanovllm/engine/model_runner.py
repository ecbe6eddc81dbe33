"""Runs scheduled steps on a device: weights, KV cache, forward pass, sampling."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine import kv_cache
from nanovllm.engine.batch import Batch, DeviceBatch, resolve_tokens, to_device
from nanovllm.engine.cuda_graph import DecodeBuckets, DecodeGraphs
from nanovllm.engine.sampler import LogprobsTensors, Sampler, SamplingMetadata, SamplingRow, prompt_logprobs
from nanovllm.engine.scheduler import ScheduledSequence, ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels import Kernels
from nanovllm.models.loader import Checkpoint, load_model
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt tokens: row i belongs to token `start + i` of `seq`."""

    seq: Sequence
    start: int
    tensors: LogprobsTensors


class StepResult:
    """What a step computed, on its way to the host."""

    def __init__(
        self,
        step: ScheduledStep,
        token_ids: torch.Tensor,
        logprobs: LogprobsTensors | None,
        prompt: list[PromptLogprobs],
    ) -> None:
        self.step = step
        self._ready: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            token_ids = token_ids.to("cpu", non_blocking=True)
            logprobs = None if logprobs is None else logprobs.cpu(non_blocking=True)
            prompt = [PromptLogprobs(p.seq, p.start, p.tensors.cpu(non_blocking=True)) for p in prompt]
            self._ready = torch.cuda.Event()
            self._ready.record()
        self._token_ids = token_ids
        self.logprobs = logprobs
        """Of the parts that sample, in order; to be read after `token_ids()`."""
        self.prompt_logprobs = prompt

    def token_ids(self) -> list[int]:
        """The sampled tokens, one for each part that samples; waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._token_ids.tolist()


class ModelRunner:
    """The model on its device.

    Attributes:
        max_model_len: the longest sequence served: what was asked for, bounded by the model and the KV cache.
        num_kvcache_blocks: blocks in the KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        kernels: Kernels,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.config = config
        self.model_config: ModelConfig = checkpoint.config
        self.device = device
        self.dtype = select_dtype(config.dtype, checkpoint, self.device)
        self.block_size = config.kvcache_block_size
        self._eos_token_ids = eos_token_ids
        self.max_num_batched_tokens = config.max_num_batched_tokens or (16384 if self.device.type == "cuda" else 2048)
        self.max_model_len = self._bounded_len(
            config.max_model_len, self.model_config.max_position_embeddings, "the model's limit"
        )
        with torch.inference_mode():
            self.model = load_model(
                checkpoint, kernels, self.dtype, self.device, self.max_model_len, seed=config.seed or 0
            )
            self.sampler = Sampler(config.max_num_seqs, self.model_config.vocab_size, self.device, kernels.sample)
            self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
            self.num_kvcache_blocks = self._size_cache()
            self.max_model_len = self._bounded_len(
                self.max_model_len, self.num_kvcache_blocks * self.block_size, "the KV cache's size"
            )
            self._caches = kv_cache.allocate(
                self.model_config, self.num_kvcache_blocks, self.block_size, self.dtype, self.device
            )
            by_context = kernels.providers["attention_decode"] == "native"
            self.buckets = DecodeBuckets(config.max_num_seqs, self.max_model_len, by_context)
            self._graphs: DecodeGraphs | None = None
            if self.device.type == "cuda" and not config.enforce_eager:
                hidden = torch.zeros(
                    config.max_num_seqs, self.model_config.hidden_size, dtype=self.dtype, device=self.device
                )
                max_blocks = -(-self.max_model_len // self.block_size)
                self._graphs = DecodeGraphs(
                    self._forward, hidden, self.buckets, max_blocks, self.block_size, self.num_kvcache_blocks
                )
            if self.device.type == "cuda":
                self._warm_up()

    @property
    def device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{name}, {str(self.dtype).removeprefix('torch.')}"

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Launch a step. On CUDA this returns before the step has run; `StepResult.token_ids` waits for it."""
        for part in step.parts:
            if part.admitted:
                seq = part.seq
                self.sampler.admit(part.slot, seq.token_ids[: seq.prompt_len], seq.output_token_ids, seq.params)
        batch = Batch.build(step, self.block_size)
        hidden = self._run_decode(batch) if batch.decode_only else self._run_mixed(batch)
        if len(batch.logits_rows) < batch.num_tokens:
            hidden = hidden[to_device(batch.logits_rows, self.device)]
        logits = self.model.compute_logits(hidden)[: len(batch.logits_rows)]
        return self._sample(step, batch, logits)

    def _run_mixed(self, batch: Batch) -> torch.Tensor:
        """Hidden states of a batch with runs of tokens in it."""
        if not self.buckets.by_context:
            # The bound that captured steps have, so that no kernel is compiled for another one.
            batch = replace(batch, max_context_len=self.max_model_len)
        return self._forward(DeviceBatch.from_host(batch, self.device))

    def _run_decode(self, batch: Batch) -> torch.Tensor:
        """Hidden states of a decode-only batch; on CUDA of a padded one."""
        if self.device.type != "cuda":
            return self._forward(DeviceBatch.from_host(batch, self.device))
        # Eager steps are padded like captured ones, so that both give the same tokens.
        rows, context_len = self.buckets.fit(batch.num_tokens, batch.max_context_len)
        batch = batch.padded(rows, context_len, self.block_size, self.num_kvcache_blocks)
        if self._graphs is not None:
            return self._graphs.replay(batch)
        return self._forward(DeviceBatch.from_host(batch, self.device))

    def _forward(self, batch: DeviceBatch) -> torch.Tensor:
        token_ids = resolve_tokens(batch.token_ids, self._last_tokens)
        return self.model(token_ids, batch.positions, self._caches, batch.metadata)

    def _sample(self, step: ScheduledStep, batch: Batch, logits: torch.Tensor) -> StepResult:
        prompt = [
            self._prompt_logprobs(part, logits[first : first + n]) for part, first, n in batch.prompt_rows if n > 0
        ]
        sampling = [p for p in step.parts if p.samples]
        if not sampling:
            return StepResult(step, torch.empty(0, dtype=torch.int64), None, prompt)
        if len(batch.sample_rows) < len(logits):
            logits = logits[to_device(batch.sample_rows, self.device)]
        metadata = SamplingMetadata.build(
            [self._sampling_row(p) for p in sampling], self.device, pin=self.device.type == "cuda"
        )
        output = self.sampler(logits, metadata)
        self._last_tokens[metadata.slots] = output.token_ids
        return StepResult(step, output.token_ids, output.logprobs, prompt)

    def _sampling_row(self, part: ScheduledSequence) -> SamplingRow:
        params = part.seq.params
        position = part.start + part.num_tokens
        banned: tuple[int, ...] = ()
        if position - part.seq.prompt_len < params.min_tokens:
            banned = params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)
        return SamplingRow(params, part.seq.seed, position, part.slot, banned)

    def _prompt_logprobs(self, part: ScheduledSequence, logits: torch.Tensor) -> PromptLogprobs:
        start = part.start + 1
        tokens = to_device(np.asarray(part.seq.token_ids[start : start + len(logits)], np.int64), self.device)
        return PromptLogprobs(part.seq, start, prompt_logprobs(logits, tokens, part.seq.params.prompt_logprobs))

    def _bounded_len(self, wanted: int, limit: int, what: str) -> int:
        if wanted > limit:
            logger.warning("max_model_len=%d is lowered to %d, %s", wanted, limit, what)
        return min(wanted, limit)

    def _warm_up(self) -> None:
        """Run small batches of every kind, so that kernels are compiled now and not while serving."""
        padding_slot = self.num_kvcache_blocks * self.block_size
        # One-token and longer runs, alone and beside decodes, in numbers that kernels specialise on (1, 16) and others.
        for num_decodes, runs in ((0, (3,)), (0, (16, 16)), (1, (3,)), (5, (2, 9)), (16, (16,)), (0, (1024,))):
            num_tokens = num_decodes + sum(runs)
            if num_tokens > self.max_num_batched_tokens or max(runs) > self.max_model_len:
                continue
            tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=self.device)
            tokens[2] = padding_slot
            lens = torch.tensor((*(1 for _ in range(num_decodes)), *runs), dtype=torch.int32, device=self.device)
            num_blocks = -(-max(runs) // self.block_size)
            table = torch.full((len(lens), num_blocks), self.num_kvcache_blocks, dtype=torch.int32, device=self.device)
            starts = torch.tensor((0, *itertools.accumulate(runs)), dtype=torch.int32, device=self.device)
            bound = 1 if self.buckets.by_context else self.max_model_len
            self._forward(DeviceBatch.from_tensors(tokens, lens, table, bound, starts, max(runs)))
        hidden = torch.zeros(16, self.model_config.hidden_size, dtype=self.dtype, device=self.device)
        filters = SamplingParams(top_k=min(10, self.model_config.vocab_size), top_p=0.9, min_p=0.01)
        for params in (SamplingParams(temperature=0), SamplingParams(), filters):
            for num_rows in {min(n, self.config.max_num_seqs) for n in (1, 3, 16)}:
                rows = [SamplingRow(params, seed=0, position=0, slot=i) for i in range(num_rows)]
                logits = self.model.compute_logits(hidden[:num_rows])
                self.sampler(logits, SamplingMetadata.build(rows, self.device))
        torch.cuda.synchronize(self.device)

    def _size_cache(self) -> int:
        """How many blocks the KV cache gets."""
        config, model = self.config, self.model_config
        per_block = kv_cache.block_bytes(model, self.block_size, self.dtype)
        useful = config.max_num_seqs * -(-self.max_model_len // self.block_size)
        if self.device.type == "cuda":
            available = kv_cache.available_bytes_cuda(self.device, config.gpu_memory_utilization, self._profile_peak())
            remedy = "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or use a smaller kvcache_block_size"
        else:
            available = kv_cache.available_bytes_cpu(asked=config.num_kvcache_blocks is not None)
            remedy = "free memory, or set num_kvcache_blocks and kvcache_block_size lower"
        return kv_cache.num_blocks_that_fit(available, per_block, config.num_kvcache_blocks, useful, remedy)

    def _profile_peak(self) -> int:
        """PyTorch's peak memory in bytes over the largest prefill, decode and sampling, weights included."""
        torch.cuda.reset_peak_memory_stats(self.device)
        length = min(self.max_model_len, self.max_num_batched_tokens)
        num_seqs = max(1, min(self.max_num_batched_tokens // length, self.config.max_num_seqs))
        max_num_seqs = self.config.max_num_seqs
        num_blocks = -(-self.max_model_len // self.block_size)
        self._caches = kv_cache.allocate(self.model_config, num_blocks, self.block_size, self.dtype, self.device)
        # Every sequence uses the same blocks: only the memory matters here.
        blocks = torch.arange(num_blocks, dtype=torch.int32, device=self.device)
        positions = torch.arange(length, device=self.device).repeat(num_seqs)
        prefill = DeviceBatch.from_tensors(
            torch.stack((torch.zeros_like(positions), positions, positions)),
            torch.full((num_seqs,), length, dtype=torch.int32, device=self.device),
            blocks.expand(num_seqs, -1),
            0,
            torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * length,
            length,
        )
        decode = DeviceBatch.from_tensors(
            torch.zeros(3, max_num_seqs, dtype=torch.int64, device=self.device),
            torch.ones(max_num_seqs, dtype=torch.int32, device=self.device),
            blocks.expand(max_num_seqs, -1),
            self.max_model_len,
        )
        self._forward(prefill)
        logits = self.model.compute_logits(self._forward(decode))
        params = SamplingParams(top_k=10, top_p=0.5, logprobs=1)
        rows = [SamplingRow(params, seed=0, position=0, slot=i) for i in range(max_num_seqs)]
        self.sampler(logits, SamplingMetadata.build(rows, self.device))
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        own = kv_cache.block_bytes(self.model_config, self.block_size, self.dtype) * (num_blocks + 1)
        self._caches = []
        return peak - own


def select_device(name: str) -> torch.device:
    """The device that a `device` argument names; a ValueError if it is not there."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ValueError(f"device={name!r}: not a device; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from e
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device={name!r}: this machine has {count} CUDA device(s); use 'auto' or 'cpu'")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def select_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and cache."""
    if name == "auto":
        name = checkpoint.config.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return getattr(torch, name)

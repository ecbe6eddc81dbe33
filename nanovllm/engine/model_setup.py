"""Before the first step: the limits of steps, the memory that they need, and the size of the KV cache."""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from nanovllm.config import AUTO, EngineConfig
from nanovllm.console import warn
from nanovllm.distributed.group import current_group
from nanovllm.engine import kv_cache
from nanovllm.engine.batch import DeviceBatch
from nanovllm.engine.logprobs import PROMPT_LOGPROBS_ROWS, compute_logprobs
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.requests.prompts import RAISE_MAX_MODEL_LEN
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow
from nanovllm.kernels import Kernels
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.packed_decoder import NOT_SELECTED, missing_kernels
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class StartTimer:
    """Seconds that the parts of the start took on the host. The GPU may still work when a part ends."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str, done: str) -> None:
        """Log that a part has ended. done: what was done with it."""
        now = time.perf_counter()
        self._seconds[part], self._last = now - self._last, now
        logger.info("%s %s in %.2f s", part, done, self._seconds[part])  # at once: a start that hangs shows where

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self._seconds.items())


def select_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations."""
    if name == "auto":
        name = checkpoint.config.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return getattr(torch, name)


def custom_kernels_wanted(config: EngineConfig, model: ModelConfig) -> bool:
    """The argument wins over the model's config.json; the default is on."""
    choice = model.use_custom_kernels if config.use_custom_kernels is None else config.use_custom_kernels
    return True if choice is None else choice


def report_op_by_op(reason: str, config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> None:
    """Log why a model's layers do not run as one op. It is a warning if kernels that were wanted cannot run.

    Raises:
        ValueError: an argument needs that op.
    """
    missing = None
    if reason == NOT_SELECTED and custom_kernels_wanted(config, checkpoint.config):
        missing = missing_kernels(device)
    if config.cpu_activations != "float32":
        raise ValueError(f"cpu_activations={config.cpu_activations!r}: needs packed weights, but {missing or reason}")
    if missing:
        logger.warning("the layers run op by op in PyTorch, which is several times slower: %s", missing)
    elif device.type == "cpu":
        logger.info("the layers run op by op: %s", reason)


def warn_of_interpreter(kernels: Kernels, model: ModelConfig, device: torch.device) -> None:
    """Where Triton's interpreter runs kernels: say that steps are slow, if the model is not tiny, and let Python say at
    which line a kernel ends the process, such as one without a mask.
    """
    ops = kernels.interpreted() if device.type == "cpu" else []
    if ops and sys.__stderr__ is not None and not faulthandler.is_enabled():
        with suppress(OSError, ValueError):  # it may be closed
            faulthandler.enable(sys.__stderr__)
    if ops and model.hidden_size * model.num_hidden_layers > _MOST_INTERPRETED:
        text = f"{', '.join(ops)}: Triton's interpreter runs this in each of the {model.num_hidden_layers} layers"
        warn(logger, f"{text}, so a token may take many seconds; use a GPU, or a model with fewer and smaller layers")


_MOST_INTERPRETED = 20000
"""Hidden size times layers: more than those of a model of 135 million parameters."""


@dataclass(frozen=True)
class StepLimits:
    """The largest steps, and the KV cache that they use."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """The longest sequence, bounded by the model, and by the KV cache once its size is known."""
    is_auto: bool
    """Whether `max_model_len` is to be the most that is possible."""
    model_len: int
    """The longest sequence of the model."""
    block_size: int
    cache_dtype: torch.dtype
    is_cut_by_cache: bool = False
    """Whether the KV cache's size has lowered `max_model_len`."""

    @property
    def remedy(self) -> str:
        """What to do with a prompt that is too long. A larger `max_model_len` helps only if nothing else bounds it."""
        if self.max_model_len >= self.model_len:
            return "shorten the prompt: the model has no longer context"
        if self.is_cut_by_cache:
            return "shorten the prompt or give the KV cache more memory, which limits max_model_len"
        return RAISE_MAX_MODEL_LEN

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> StepLimits:
        """The limits that the arguments ask for, lowered to those of the model. dtype: of the model."""
        cache_dtype = kv_cache.cache_dtype(config.kv_cache_dtype, dtype)
        is_auto = config.max_model_len == AUTO
        if is_auto:
            longest = model.max_position_embeddings
            if model.rope.is_long(longest):  # longer sequences would change the frequencies of short ones, too
                logger.info(
                    "LongRoPE: max_model_len is the original training's; pass up to %d for long contexts", longest
                )
                longest = model.rope.original_length
            longest = min(longest, _most_cached(config, model, cache_dtype, device))
        else:
            longest = _bounded_len(int(config.max_model_len), model.max_position_embeddings, "the model's limit")
        if model.rope.is_long(longest):
            original = model.rope.original_length
            logger.info(
                "LongRoPE: max_model_len=%d is beyond the %d tokens of the original training, so all sequences have the"
                " frequencies for long contexts; max_model_len=%d has those for short ones",
                longest, original, original,
            )  # fmt: skip
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or (16384 if device.type == "cuda" else 512),
            max_model_len=longest,
            is_auto=is_auto,
            model_len=model.max_position_embeddings,
            block_size=config.kvcache_block_size,
            cache_dtype=cache_dtype,
        )


def _most_cached(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """An upper bound on the tokens of the KV cache, before anything is loaded.

    Some files name millions of positions, and the rotary table, which is made first, has a row for each.
    """
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks * config.kvcache_block_size
    group = current_group()
    per_token = kv_cache.block_bytes(model, 1, dtype, -(-model.num_kv_heads // group.size))
    free = kv_cache.available_bytes_cpu(whole=False)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    return max(config.kvcache_block_size, group.smallest(free // per_token, device))


def within_blocks(limits: StepLimits, num_blocks: int) -> StepLimits:
    """These limits with a KV cache of `num_blocks` blocks."""
    longest = num_blocks * limits.block_size
    if not limits.is_auto:
        bounded = _bounded_len(limits.max_model_len, longest, "the KV cache's size")
        return replace(limits, max_model_len=bounded, is_cut_by_cache=bounded < limits.max_model_len)
    bounded = min(longest, limits.max_model_len)
    why = "the model's limit"
    if bounded < limits.model_len:
        by = "the KV cache's size" if bounded == longest else "the original training's"
        why = f"{by}; the model's limit is {limits.model_len}"
    logger.info("max_model_len is %d, %s", bounded, why)
    return replace(limits, max_model_len=bounded, is_cut_by_cache=bounded == longest)


def _bounded_len(wanted: int, limit: int, what: str) -> int:
    if wanted > limit:
        logger.warning("max_model_len=%d is lowered to %d, %s", wanted, limit, what)
    return min(wanted, limit)


def num_kvcache_blocks(config: EngineConfig, model: DecoderForCausalLM, sampler: Sampler, limits: StepLimits) -> int:
    """The number of blocks of the KV cache. A GPU runs the largest steps once, to see how much memory they leave.

    Raises:
        OutOfCacheMemory: not even one block fits, or fewer than the config names.
    """
    per_block = kv_cache.block_bytes(model.config, limits.block_size, limits.cache_dtype, model.num_kv_heads)
    most_useful = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    device = sampler.device
    if device.type == "cuda":
        peak = profile_peak(model, sampler, limits)
        available = kv_cache.available_bytes_cuda(device, config.gpu_memory_utilization, peak)
    else:
        available = kv_cache.available_bytes_cpu(whole=config.num_kvcache_blocks is not None)
    remedy = kv_cache_remedy(config, on_gpu=device.type == "cuda")
    return kv_cache.num_blocks_that_fit(available, per_block, config.num_kvcache_blocks, most_useful, remedy)


def kv_cache_remedy(config: EngineConfig, on_gpu: bool) -> str:
    """What makes the KV cache fit."""
    fewer = "" if config.num_kvcache_blocks is None else "num_kvcache_blocks, "
    raised = "raise gpu_memory_utilization, " if on_gpu else ""
    return (
        f"lower {fewer}max_model_len, max_num_seqs, max_num_batched_tokens or kvcache_block_size, {raised}set"
        f' kv_cache_dtype="fp8", or end other programs {"on the GPU" if on_gpu else "that take memory"}'
    )


def profile_peak(model: DecoderForCausalLM, sampler: Sampler, limits: StepLimits) -> int:
    """PyTorch's peak memory in bytes over the largest steps, weights and penalty state included."""
    device = sampler.device
    # A cache for the model's longest sequence may be larger than the GPU's memory.
    free, _ = torch.cuda.mem_get_info(device)
    per_block = kv_cache.block_bytes(model.config, limits.block_size, limits.cache_dtype, model.num_kv_heads)
    most = max(limits.max_num_batched_tokens, free // 2 // per_block * limits.block_size)
    limits = replace(limits, max_model_len=min(limits.max_model_len, most))
    torch.cuda.reset_peak_memory_stats(device)
    num_blocks = -(-limits.max_model_len // limits.block_size)
    shape = limits.block_size, limits.cache_dtype
    caches = kv_cache.allocate(model.config, num_blocks, *shape, device, model.num_kv_heads)
    try:
        run_largest_steps(PagedModel(model, caches, limits.max_num_seqs, limits.max_model_len), sampler, limits)
    finally:
        sampler.release_penalty_state()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - per_block * (num_blocks + 1)


def run_largest_steps(paged: PagedModel, sampler: Sampler, limits: StepLimits) -> None:
    """Run the steps that take most memory: a prefill with prompt log-probabilities, and decodes with filters,
    penalties and log-probabilities. All sequences use the same blocks, since only the memory matters.
    """
    device, max_num_seqs = paged.device, limits.max_num_seqs
    length = min(limits.max_model_len, limits.max_num_batched_tokens)
    num_seqs = max(1, min(limits.max_num_batched_tokens // length, max_num_seqs))
    blocks = torch.arange(paged.max_blocks, dtype=torch.int32, device=device)
    params = SamplingParams(top_k=10, top_p=0.5, logprobs=1, repetition_penalty=1.1)
    sampler.admit(0, [0], [], params)
    positions = torch.arange(length, device=device).repeat(num_seqs)
    prefill = DeviceBatch.from_tensors(
        torch.stack((torch.zeros_like(positions), positions, positions)),
        torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        blocks.expand(num_seqs, -1),
        0,
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length,
        length,
    )
    hidden = paged.hidden(prefill)
    rows = min(PROMPT_LOGPROBS_ROWS, len(hidden))
    compute_logprobs(paged.logits(hidden[:rows]), prefill.token_ids[:rows], 1)
    del prefill, hidden
    decode = DeviceBatch.from_tensors(
        torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device),
        torch.ones(max_num_seqs, dtype=torch.int32, device=device),
        blocks.expand(max_num_seqs, -1),
        limits.max_model_len,
    )
    rows_of_all = [SamplingRow(params, seed=0, position=0, seq_slot=i) for i in range(max_num_seqs)]
    sampler(paged.logits(paged.hidden(decode)), SamplingMetadata.build(rows_of_all, device))

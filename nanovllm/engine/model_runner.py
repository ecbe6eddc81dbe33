"""Runs scheduled steps on a device: weights, KV cache, forward pass, sampling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine import kv_cache
from nanovllm.engine.batch import Batch, DeviceBatch, resolve_tokens, to_device
from nanovllm.engine.fast import piggyback
from nanovllm.engine.fast.cuda_graphs import DecodeBuckets
from nanovllm.engine.fast.decode_runner import DecodeRunner
from nanovllm.engine.fast.decode_state import DecodeState
from nanovllm.engine.fast.padding import PaddedRuns, RunsBucket
from nanovllm.engine.fast.prefill_graphs import PrefillRunner, prefill_buckets, slow_hosts_lag
from nanovllm.engine.fast.prefix_groups import PrefixGroups
from nanovllm.engine.fast.token_ring import TokenRing
from nanovllm.engine.fast.warm_up import compile_ahead, one_collection, profile_peak, two_layers, warm_up
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow, prompt_logprobs
from nanovllm.engine.step import ScheduledSequence, ScheduledStep
from nanovllm.engine.step_result import PromptLogprobs, StepResult
from nanovllm.kernels import Kernels
from nanovllm.kernels.ops.checks import values_checked
from nanovllm.model_config import ModelConfig
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.loader import load_model

logger = logging.getLogger(__name__)


class _Laps:
    """Seconds that the parts of the start took, on the host's clock: the GPU may still be at work when one ends."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self._seconds.items())


class ModelRunner:
    """The model on its device.

    Attributes:
        max_model_len: the longest sequence served: what was asked for, bounded by the model and the KV cache.
        num_kvcache_blocks: blocks in the KV cache.
        rides: whether prompts that nobody waits for ride on decode steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.model_config: ModelConfig = checkpoint.config
        self.device = device
        self.dtype = select_dtype(config.dtype, checkpoint, self.device)
        self.cache_dtype = kv_cache.cache_dtype(config.kv_cache_dtype, self.dtype)
        self.block_size = config.kvcache_block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens or (16384 if self.device.type == "cuda" else 2048)
        self.max_model_len = self._bounded_len(
            config.max_model_len, self.model_config.max_position_embeddings, "the model's limit"
        )
        laps = _Laps()
        with torch.inference_mode(), on_device(device), one_collection() if device.type == "cuda" else nullcontext():
            self.model = load_model(
                checkpoint, kernels, self.dtype, self.device, self.max_model_len, seed=config.seed or 0
            )
            laps.end("weights")
            self.sampler = Sampler(config.max_num_seqs, self.model_config.vocab_size, self.device, kernels.sample)
            on_gpu = self.device.type == "cuda"
            # NANOVLLM_CHECK=1 looks at values, which a captured graph cannot.
            captures = on_gpu and not config.enforce_eager and not values_checked(self.device) and can_capture(kernels)
            # Before the cache is sized, so that it leaves room for it.
            shape = (config.max_num_seqs, self.model_config.vocab_size)
            logits = torch.empty(shape, dtype=self.dtype, device=self.device) if captures else None
            self.num_kvcache_blocks = self._size_cache()
            laps.end("memory")
            self.max_model_len = self._bounded_len(
                self.max_model_len, self.num_kvcache_blocks * self.block_size, "the KV cache's size"
            )
            by_context = kernels.providers["attention_decode"] == "native"
            sharing = config.enable_prefix_caching and shares_prefixes(kernels)
            self.rides = self._rides(kernels, captures, by_context)
            self.buckets = DecodeBuckets(config.max_num_seqs, self.max_model_len, by_context, sharing, self.rides)
            self.caches = kv_cache.allocate(
                self.model_config, self.num_kvcache_blocks, self.block_size, self.cache_dtype, self.device
            )
            sampling_kernel = kernels.providers["sample"] == "triton"
            max_blocks = -(-self.max_model_len // self.block_size)
            token_bytes = (
                kv_cache.block_bytes(self.model_config, 1, self.cache_dtype) // self.model_config.num_hidden_layers
            )
            self.state = DecodeState(
                config.max_num_seqs,
                max_blocks,
                self.block_size,
                self.num_kvcache_blocks,
                self.device,
                _advance_kernel() if sampling_kernel else None,
                PrefixGroups(config.max_num_seqs, max_blocks, self.block_size, token_bytes, self.device)
                if sharing
                else None,
                # On a GPU it takes a kernel to store to the host's memory.
                TokenRing(config.max_num_seqs, self.device) if sampling_kernel or not on_gpu else None,
            )
            self.decoding = DecodeRunner(
                self.model, self.caches, self.sampler, self.state, self.buckets if on_gpu else None, sampling_kernel,
                self._static_riders() if self.rides else None,
            )  # fmt: skip
            pad = config.capture_prefill or (config.capture_prefill is None and logits is not None)
            self.prefill = self._padded_prefill(kernels, logits is not None) if pad else None
            if logits is not None:
                compile_ahead(self, logits)
                laps.end("kernels")
                self.decoding.capture(logits, two_layers(self))
                if self.prefill is not None:
                    self.prefill = self._captured(self.prefill, logits)
                laps.end("graphs")
            if on_gpu:
                warm_up(self)
                laps.end("first steps")
        logger.info("started in %s", laps)

    @property
    def device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return f"{name}, {str(self.dtype).removeprefix('torch.')}"

    @torch.inference_mode()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Launch a step. On CUDA this returns before the step has run; `StepResult.token_ids` waits for it.

        It may be called in any thread, whatever GPU is current there.
        """
        with on_device(self.device):
            return self._execute(step)

    def _execute(self, step: ScheduledStep) -> StepResult:
        if not step.continues:
            self._set_up_admitted(step)
        if step.decodes_only or self.decoding.carries(step):
            return self.decoding.launch(step)
        batch = Batch.build(step, self.block_size)
        logits = None if self.prefill is None else self.prefill.launch(batch)
        if logits is None:
            logits = self._run_mixed(batch)
        return self._sample(step, batch, logits)

    def _padded_prefill(self, kernels: Kernels, captures: bool) -> PrefillRunner | None:
        """What runs steps with pieces of prompts in them, padded; None where that would be work for nothing."""
        full = self.config.capture_full_steps
        if full is None:
            full = slow_hosts_lag(self.model.model.layers, self.max_num_batched_tokens)
        prefill = PrefillRunner(
            self.forward,
            self.model.lm_head,
            prefill_buckets(self.max_num_batched_tokens, self.config.max_num_seqs, full),
            self.max_model_len,
            self.block_size,
            self.num_kvcache_blocks,
            self.device,
        )
        if not captures:
            tested = self.device.type != "cuda" or self.config.enforce_eager or values_checked(self.device)
            return prefill if tested else None  # without graphs padding is but work
        asked = self.config.capture_prefill
        return (
            prefill if can_capture(kernels, "attention_prefill", logging.WARNING if asked else logging.INFO) else None
        )

    def _rides(self, kernels: Kernels, captures: bool, by_context: bool) -> bool:
        """Whether prompts that nobody waits for ride on decode steps. captures, by_context: of these, as for `DecodeBuckets`."""
        asked = self.config.ride_prompts
        if asked is False:
            return False
        # Their graphs are captured when first wanted: too late to find out that they cannot be.
        if captures and not can_capture(kernels, "attention_prefill", logging.DEBUG):
            if asked:
                logger.warning(
                    "no prompt rides on decodes: these are CUDA graphs, and the attention of prompts cannot be captured"
                )
            return False
        layer = sum(parameter.nbytes for parameter in self.model.model.layers[0].parameters())
        return bool(asked) or (captures and not by_context and layer >= piggyback.LEAST_LAYER_BYTES)

    def _static_riders(self) -> PaddedRuns:
        largest = RunsBucket(piggyback.TOTALS[-1], piggyback.MAX_RIDERS)
        return PaddedRuns(largest, self.max_model_len, self.block_size, self.num_kvcache_blocks, self.device)

    def _captured(self, prefill: PrefillRunner, logits: torch.Tensor) -> PrefillRunner | None:
        """Capture steps with prompts beside the decode steps; None if that fails. logits: what decode graphs write to."""
        graphs = self.decoding.graphs
        try:
            prefill.capture(logits, graphs.stream, graphs.memory, two_layers(self))
        except Exception as e:
            logger.warning("steps with prompts run without CUDA graphs, since their capture failed: %s", e)
            return None
        return prefill

    def _set_up_admitted(self, step: ScheduledStep) -> None:
        for part in step.parts:
            if part.admitted:
                seq = part.seq
                self.sampler.admit(part.slot, seq.token_ids[: seq.prompt_len], seq.output_token_ids, seq.params)
                self.state.forget(part.slot)

    def _run_mixed(self, batch: Batch) -> torch.Tensor:
        """The wanted logits of a batch with runs of tokens in it."""
        if not self.buckets.by_context:
            # The bound that captured steps have, so that no kernel is compiled for another one.
            batch = replace(batch, max_context_len=self.max_model_len)
        rows = self._padded_rows(batch)
        hidden = self.forward(
            DeviceBatch.from_host(batch, self.device), None if rows is None else to_device(rows, self.device)
        )
        return self.model.compute_logits(hidden)[: len(batch.logits_rows)]

    def _padded_rows(self, batch: Batch) -> np.ndarray | None:
        """The rows whose logits are wanted, and then row 0, in a number that steps of decodes have; None if all are wanted."""
        count = wanted = len(batch.logits_rows)
        if wanted == batch.num_tokens:
            return None
        if self.device.type == "cuda" and 0 < wanted <= self.config.max_num_seqs:
            count = self.buckets.fit(wanted, 1)[0]
        return np.pad(batch.logits_rows, (0, count - wanted))

    def forward(self, batch: DeviceBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a batch, or of some of its rows; a token that the host does not know yet is taken from its slot."""
        token_ids = resolve_tokens(batch.token_ids, self.state.last_tokens)
        return self.model(token_ids, batch.positions, self.caches, batch.metadata, rows)

    def _sample(self, step: ScheduledStep, batch: Batch, logits: torch.Tensor) -> StepResult:
        prompt = [
            self._prompt_logprobs(part, logits[first : first + n]) for part, first, n in batch.prompt_rows if n > 0
        ]
        sampling = [p for p in step.parts if p.samples]
        if not sampling:
            return StepResult(step, torch.empty(0, dtype=torch.int64, device=self.device), None, prompt)
        if len(batch.sample_rows) < len(logits):
            logits = logits[to_device(batch.sample_rows, self.device)]
        rows = [SamplingRow.of(p.seq, p.start + p.num_tokens, p.slot) for p in sampling]
        metadata = SamplingMetadata.build(rows, self.device, pin=self.device.type == "cuda")
        output = self.sampler(logits, metadata)
        self.state.last_tokens[metadata.slots] = output.token_ids
        return StepResult(step, output.token_ids, output.logprobs, prompt)

    def _prompt_logprobs(self, part: ScheduledSequence, logits: torch.Tensor) -> PromptLogprobs:
        start = part.start + 1
        tokens = to_device(np.asarray(part.seq.token_ids[start : start + len(logits)], np.int64), self.device)
        return PromptLogprobs(part.seq, start, prompt_logprobs(logits, tokens, part.seq.params.prompt_logprobs))

    def _bounded_len(self, wanted: int, limit: int, what: str) -> int:
        if wanted > limit:
            logger.warning("max_model_len=%d is lowered to %d, %s", wanted, limit, what)
        return min(wanted, limit)

    def _size_cache(self) -> int:
        """How many blocks the KV cache gets."""
        config, model = self.config, self.model_config
        per_block = kv_cache.block_bytes(model, self.block_size, self.cache_dtype)
        useful = config.max_num_seqs * -(-self.max_model_len // self.block_size)
        if self.device.type == "cuda":
            available = kv_cache.available_bytes_cuda(self.device, config.gpu_memory_utilization, profile_peak(self))
            remedy = "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or use a smaller kvcache_block_size"
        else:
            available = kv_cache.available_bytes_cpu(asked=config.num_kvcache_blocks is not None)
            remedy = "free memory, or set num_kvcache_blocks and kvcache_block_size lower"
        return kv_cache.num_blocks_that_fit(available, per_block, config.num_kvcache_blocks, useful, remedy)


def shares_prefixes(kernels: Kernels) -> bool:
    """Whether a kernel was chosen that attends to shared prefixes once; the references ignore who shares what."""
    return any(
        kernels.providers.get(name, "native") != "native"
        for name in ("attention_decode_shared", "qk_norm_rope_attention_shared")
    )


def can_capture(kernels: Kernels, name: str = "attention_decode", level: int = logging.WARNING) -> bool:
    """Whether a CUDA graph can hold a step with this attention: not if the host plans it anew for every step, which is logged."""
    provider = kernels.provider(name)
    if not provider.capturable:
        steps = "decode steps" if name == "attention_decode" else "steps with prompts"
        logger.log(level, "%s by %s cannot be captured: %s run without CUDA graphs", name, provider.name, steps)
    return provider.capturable


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Within it a GPU is the current one: kernels, graphs, events and pinned memory go to that, not to where their arguments are."""
    return torch.cuda.device(device.index) if device.type == "cuda" else nullcontext()


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
    """The dtype of weights and activations."""
    if name == "auto":
        name = checkpoint.config.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return getattr(torch, name)


def _advance_kernel() -> Callable[..., None]:
    from nanovllm.kernels.triton.sampling.advance import advance_rows

    return advance_rows

"""The fast paths of an engine. This is all that the rest of the engine knows of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import current_group
from nanovllm.engine.batch import Batch
from nanovllm.engine.fast.cuda_graphs import CudaGraphs, GraphBackend
from nanovllm.engine.fast.decode_runner import DecodeRunner
from nanovllm.engine.fast.decode_state import DecodeState
from nanovllm.engine.fast.mask_thread import ThreadedMaskBuilder
from nanovllm.engine.fast.piggyback import Piggyback
from nanovllm.engine.fast.policy import FastPolicy, attention_time_follows_bound, enabled_paths, samples_in_graphs
from nanovllm.engine.fast.prefill_graphs import PrefillRunner, prefill_buckets
from nanovllm.engine.fast.prefix_groups import PrefixGroups
from nanovllm.engine.fast.step_shape import DecodeBuckets, SamplingMode
from nanovllm.engine.fast.token_ring import TokenRing
from nanovllm.engine.fast.warm_up import WarmUp
from nanovllm.engine.model_setup import StartTimer, StepLimits
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import Sampler
from nanovllm.engine.step import ScheduledStep, StepKind
from nanovllm.engine.step_result import StepResult
from nanovllm.hardware.stream_gate import stream_gate
from nanovllm.kernels import Kernels
from nanovllm.loading_line import loading_stage
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.weight_forms import WeightForms

logger = logging.getLogger(__name__)


class FastPaths:
    """What makes the steps of a `ModelRunner` faster; any part of it may be missing.

    Made before the KV cache is sized, so that the cache leaves memory for the static logits; `start` makes the rest.

    Attributes:
        enabled: the paths that this engine has.
        piggyback: tells the scheduler how many tokens of prompts a step takes; None: as many as fit.
        reserve_tokens_ahead: for the scheduler.
        decoder: runs decode steps over device-resident state; None: every step is built by the host.
        prefill: runs padded steps; None: none is padded.
    """

    @staticmethod
    def weight_forms(config: EngineConfig) -> WeightForms:
        """How quantised weights are kept and multiplied."""
        return FastPolicy.of(config).weight_forms

    def __init__(self, config: EngineConfig, kernels: Kernels, model: DecoderForCausalLM, device: torch.device) -> None:
        self.policy = FastPolicy.of(config)
        self._num_layer_weights, layer_bytes = model.layer_sizes
        # One rank may hold packed weights and another whole ones: the ranks decide alike.
        layer_bytes = current_group().smallest(layer_bytes, device)
        self.enabled = enabled_paths(self.policy, kernels, device, layer_bytes, config.enable_prefix_caching)
        self.reserve_tokens_ahead = self.policy.reserve_tokens_ahead
        self.piggyback: Piggyback | None = None
        if self.enabled.piggyback_prefill:
            self.piggyback = Piggyback(config.max_num_seqs, self.policy.piggyback)
        self.decoder: DecodeRunner | None = None
        self.prefill: PrefillRunner | None = None
        self._kernels = kernels
        self._logits: torch.Tensor | None = None
        if self.enabled.decode_graphs or self.enabled.prefill_graphs:
            self._logits = torch.empty((config.max_num_seqs, model.config.vocab_size), dtype=model.dtype, device=device)

    def start(self, paged: PagedModel, sampler: Sampler, limits: StepLimits, timer: StartTimer) -> None:
        """Make the buffers, compile kernels and capture graphs."""
        enabled, policy = self.enabled, self.policy
        captures_sampling = policy.capture_sampling
        if captures_sampling is None:
            captures_sampling = samples_in_graphs(self._kernels)
        self.buckets = DecodeBuckets(
            paged.max_num_seqs,
            paged.max_model_len,
            by_context=attention_time_follows_bound(self._kernels),
            min_shared_rows=policy.min_shared_rows if enabled.prefix_groups else None,
            piggyback=self.piggyback,
            form_changes=paged.model.form_changes,
            modes=(SamplingMode.PLAIN, SamplingMode.FILTERED) if captures_sampling else (),
        )
        if enabled.device_state:
            masks = ThreadedMaskBuilder(paged.device, paged.max_num_seqs, policy.mask_gate or stream_gate)
            sampler.masks = masks
            self.decoder = DecodeRunner(
                paged,
                sampler,
                masks,
                self._decode_state(paged),
                self.buckets if enabled.decode_padding else None,
                captures_sampling,
                self.piggyback,
                mask_thread=enabled.mask_thread,
                capture_masks=self._kernels.provider("apply_token_bitmask").capturable,
            )
        if enabled.prefill_padding:
            flops = 2 * self._num_layer_weights * limits.max_num_batched_tokens
            padded = prefill_buckets(
                limits.max_num_batched_tokens,
                limits.max_num_seqs,
                policy.prefill_sizes,
                policy.prefill_seqs,
                full=flops <= policy.max_full_step_flops,
            )
            self.prefill = PrefillRunner(paged, padded, policy.prefill_sizes[-1])
        warm_up = WarmUp(paged, sampler, self.buckets, limits)
        sizes = self.buckets.batch_sizes, self.buckets.shared_sizes, self.buckets.piggybacked_sizes
        prefill = None if self.prefill is None else [tuple(bucket) for bucket in self.prefill.buckets]
        current_group().barrier(f"{enabled} with steps of {sizes} and {prefill}")  # the ranks sum over equal shapes
        if self._logits is not None:
            self._capture(self._logits, paged, warm_up, timer)
        if enabled.warm_up:
            loading_stage("making the first steps")
            warm_up.run()
            timer.end("first steps", "made")

    def _decode_state(self, paged: PagedModel) -> DecodeState:
        prefixes = None
        if self.enabled.prefix_groups:
            cache = paged.caches[0]
            token_bytes = 2 * cache.k[0, 0].nbytes
            prefixes = PrefixGroups(paged, token_bytes, self.policy.min_shared_rows, self.policy.min_saved_bytes)
        advance: Callable[..., None] | None = None
        if self._kernels.providers["sample"] == "triton":
            from nanovllm.kernels.triton.sampling.advance import advance_rows

            advance = advance_rows
        ring = None
        if advance is not None or paged.device.type != "cuda":  # a GPU needs a kernel to write to the host's memory
            ring = TokenRing(paged.max_num_seqs, paged.device)
        return DecodeState(paged, advance, prefixes, ring)

    def _capture(self, logits: torch.Tensor, paged: PagedModel, warm_up: WarmUp, timer: StartTimer) -> None:
        decoder = self.decoder if self.enabled.decode_graphs else None
        prefill = self.prefill if self.enabled.prefill_graphs else None
        if self.enabled.warm_up and paged.device.type == "cuda":
            loading_stage("compiling the Triton kernels")
            warm_up.compile_kernels([partial(r.run_every_shape, logits) for r in (decoder, prefill) if r is not None])
            timer.end("kernels", "compiled")
        loading_stage("capturing CUDA graphs")
        make = self.policy.graph_backend or CudaGraphs
        backend: GraphBackend = make(paged.device)
        if decoder is not None:
            decoder.capture(logits, backend)
        if prefill is not None:
            try:
                prefill.capture(logits, backend)
            except Exception as e:
                if current_group().size > 1:  # the other ranks would go on with padded steps, and sum over other shapes
                    raise
                logger.warning("steps with prompts run without CUDA graphs, since their capture failed: %s", e)
                self.prefill = None
        timer.end("graphs", "captured")

    # ------------------------------------------------------------------------------------------------ serving

    def forget(self, seq_slot: int) -> None:
        """The seq_slot has a new owner."""
        if self.decoder is not None:
            self.decoder.state.forget(seq_slot)

    def decode(self, step: ScheduledStep) -> StepResult | None:
        """Launch a step whose inputs are on the device; None: the step is not one of these."""
        if self.decoder is None or step.kind is StepKind.MIXED:
            return None
        return self.decoder.launch(step)

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Logits of the wanted rows of a batch as a padded step, valid until the next one; None: it is not padded."""
        return None if self.prefill is None else self.prefill.launch(batch)

    def pad(self, batch: Batch) -> Batch:
        """A batch for a step that runs kernel by kernel, with padded sizes: few sizes need few compiled kernels."""
        if not self.buckets.by_context:
            batch = replace(batch, max_context_len=self.buckets.longest)  # the bound that captured steps have
        wanted = len(batch.logits_rows)
        if not self.enabled.decode_padding or not 0 < wanted <= self.buckets.batch_sizes[-1]:
            return batch
        return replace(batch, logits_rows=np.pad(batch.logits_rows, (0, self.buckets.fit(wanted, 1)[0] - wanted)))

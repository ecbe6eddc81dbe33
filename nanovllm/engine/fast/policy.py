"""Which fast paths are on: what an engine's policy asks for, as far as the device and the kernels can do it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.fast.mask_thread import MakeGate
from nanovllm.kernels import Kernels
from nanovllm.kernels.ops.checks import values_checked
from nanovllm.weights.weight_forms import WeightForms
from nanovllm.wording import brief

logger = logging.getLogger(__name__)

_MIN_LAYER_BYTES = 256 * 2**20
"""Least bytes of a layer's weights for which piggybacking pays for a second kind of attention in each layer."""


@dataclass(frozen=True)
class PiggybackSizes:
    """The sizes of steps on which prompts are piggybacked."""

    totals: tuple[int, ...] = (256, 384)
    """Tokens of such a step, decodes included: it is padded to one of these. Multiples of the matrix products'
    tiles.
    """
    row_multiple: int = 16
    """Up to `totals[0]` decodes are padded to a multiple of this, more decodes to a multiple of twice this: sampling
    has graphs for these sizes (`batch_buckets`)."""
    min_tokens: int = 32
    """Least tokens of prompts in such a step."""
    max_pieces: int = 16
    """Sequences whose prompts are piggybacked on one step."""
    min_full_speed_tokens: int = 1024
    """Least tokens of prompts in a step that computes them at full speed: fewer would take nearly as long."""


@dataclass(frozen=True)
class FastPolicy:
    """One switch for each fast path. None: on where it can run and is faster.

    Some paths need others: without `device_state` there are no captured decode
    steps, prefix groups and piggybacked prompts; without `padding` there are no CUDA graphs.
    """

    device_state: bool = True
    """The inputs of decode steps stay on the device, and each step prepares those of the next."""
    cuda_graphs: bool = True
    """Steps are CUDA graphs, on a GPU whose kernels can be captured."""
    prefill_graphs: bool | None = None
    """Steps with pieces of prompts are CUDA graphs too. True: an engine without CUDA graphs pads them the same way.
    Profiles and tests compare such steps with graphs."""
    padding: bool | None = None
    """Steps are padded to a few sizes.

    None: decode steps on a GPU, steps with pieces of prompts where they are captured.
    """
    prefix_groups: bool = True
    """Attention reads the blocks that several sequences share once, if a kernel that does so was chosen."""
    piggyback_prefill: bool | None = None
    """Offline prompts are computed together with decodes, a few tokens a step. None: where decode steps are CUDA graphs
    and the model's layers are large."""
    mask_thread: bool | None = None
    """A thread makes the masks of constrained rows while the host reads the step before and launches the next one.
    None: on a GPU."""
    warm_up: bool | None = None
    """Kernels are compiled when the engine starts, not while it serves. None: on a GPU."""

    reserve_tokens_ahead: int = 32
    """When blocks are reserved for a decoding sequence, they suffice for this many tokens beyond the step; 0: no blocks
    are reserved."""
    prefill_sizes: tuple[int, ...] = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
    """Tokens of a padded step with pieces of prompts. An idle host launches larger steps faster than they run."""
    max_full_step_flops: float = 2**44
    """Full steps of prompts are captured if the model's layers compute at most this many FLOPs in one: 30 ms at an
    H100's 600 TFLOP/s. A busy host takes about 40 ms to launch such a step. With 16,384 tokens Qwen3-0.6B computes
    1.44e13 FLOPs, Qwen3-1.7B 4.6e13."""
    prefill_seqs: tuple[int, ...] = (64, 256)
    """Sequences of a padded step with pieces of prompts. It computes this many rows of logits, also for padding."""
    min_shared_rows: int = 16
    """Decode steps of fewer sequences do not attend to shared prefixes once."""
    min_saved_bytes: int = 32 * 2**20
    """Bytes of a layer's cache that prefix groups must save in a step. The pass over the shared part takes about 5 us
    more than reading its blocks once. In that time an H200 reads 32 MiB from its second-level cache, where repeated
    blocks are."""
    capture_sampling: bool | None = None
    """Decode graphs sample as well. None: where sampling is one kernel; the reference is thousands of launches."""
    piggyback: PiggybackSizes = field(default_factory=PiggybackSizes)
    weight_forms: WeightForms = WeightForms()
    """No fast path: what changes how products of quantised weights are rounded."""
    mask_gate: MakeGate | None = None
    """What captured steps wait at for their masks. None: `stream_gate`. Tests pass a stand-in."""
    graph_backend: Callable[[Any], Any] | None = None
    """(device) -> `GraphBackend`, what captures steps. None: CUDA graphs. Tests pass one that calls functions again."""

    @classmethod
    def off(cls, **switches: Any) -> FastPolicy:
        """Every fast path off but those that are named."""
        names = ("device_state", "cuda_graphs", "prefill_graphs", "padding", "prefix_groups")
        off: dict[str, Any] = dict.fromkeys((*names, "piggyback_prefill", "mask_thread", "warm_up"), False)
        return cls(**{**off, "reserve_tokens_ahead": 0, **switches})

    @classmethod
    def of(cls, config: EngineConfig) -> FastPolicy:
        """The policy that an engine's arguments ask for.

        Raises:
            TypeError: `fast_policy` is something else.
        """
        policy = cls() if config.fast_policy is None else config.fast_policy
        if not isinstance(policy, cls):
            raise TypeError(f"fast_policy={brief(policy)}: must be a nanovllm.engine.fast.policy.FastPolicy, or None")
        if config.enforce_eager:
            policy = replace(policy, cuda_graphs=False)
        if config.capture_prefill is not None:
            policy = replace(policy, prefill_graphs=config.capture_prefill)
        if config.piggyback_prefill is not None:
            policy = replace(policy, piggyback_prefill=config.piggyback_prefill)
        return policy


@dataclass(frozen=True)
class EnabledPaths:
    """The policy's switches, decided."""

    device_state: bool
    decode_graphs: bool
    prefill_graphs: bool
    decode_padding: bool
    prefill_padding: bool
    prefix_groups: bool
    piggyback_prefill: bool
    mask_thread: bool
    warm_up: bool


def enabled_paths(
    policy: FastPolicy, kernels: Kernels, device: torch.device, layer_bytes: int, prefix_caching: bool
) -> EnabledPaths:
    """Decide the switches that the policy leaves open, and turn off what cannot be done, with a warning if it was asked
    for.

    Args:
        layer_bytes: bytes of a layer's weights.
        prefix_caching: whether sequences may share blocks.
    """
    on_gpu = device.type == "cuda"
    has_backend = on_gpu or policy.graph_backend is not None
    # NANOVLLM_CHECK=1 looks at values, which a captured graph cannot.
    allowed = policy.cuda_graphs and not (on_gpu and values_checked(device))
    captures = allowed and has_backend and policy.padding is not False and can_capture(kernels)
    decode_graphs = captures and policy.device_state
    prefill_graphs = captures and policy.prefill_graphs is not False
    if prefill_graphs:
        level = logging.WARNING if policy.prefill_graphs else logging.INFO
        prefill_graphs = can_capture(kernels, "attention_prefill", level)
    decode_padding = prefill_padding = policy.padding
    if policy.padding is None:
        decode_padding = on_gpu
        # Padding without graphs only costs time, so `prefill_graphs=True` has to ask for it.
        graphs_were_possible = on_gpu and allowed
        prefill_padding = policy.prefill_graphs and not graphs_were_possible
    return EnabledPaths(
        device_state=policy.device_state,
        decode_graphs=decode_graphs,
        prefill_graphs=prefill_graphs,
        decode_padding=decode_graphs or bool(decode_padding),
        prefill_padding=prefill_graphs or bool(prefill_padding),
        prefix_groups=policy.prefix_groups and policy.device_state and prefix_caching and shares_prefixes(kernels),
        piggyback_prefill=_piggybacks(policy, kernels, decode_graphs, layer_bytes),
        mask_thread=on_gpu if policy.mask_thread is None else policy.mask_thread,
        warm_up=on_gpu if policy.warm_up is None else policy.warm_up,
    )


def _piggybacks(policy: FastPolicy, kernels: Kernels, decode_graphs: bool, layer_bytes: int) -> bool:
    wanted = policy.piggyback_prefill
    if wanted is False or not policy.device_state:
        return False
    # Steps with piggybacked prompts are captured when the first one comes: too late to find out that they cannot be.
    if decode_graphs and not can_capture(kernels, "attention_prefill", logging.DEBUG):
        if wanted:
            logger.warning(
                "prompts are not piggybacked on decodes: these are CUDA graphs, and the attention of prompts cannot"
                " be captured"
            )
        return False
    large_layers = layer_bytes >= _MIN_LAYER_BYTES
    return bool(wanted) or (decode_graphs and large_layers and not attention_time_follows_bound(kernels))


def attention_time_follows_bound(kernels: Kernels) -> bool:
    """Whether a decode step's attention takes longer with a larger bound on the context lengths. The reference's does;
    kernels read the lengths on the device.
    """
    return kernels.providers["attention_decode"] == "native"


def shares_prefixes(kernels: Kernels) -> bool:
    """Whether a kernel was chosen that attends to shared prefixes once; the references ignore shared blocks."""
    names = ("attention_decode_shared", "qk_norm_rope_attention_shared")
    return any(kernels.providers.get(name, "native") != "native" for name in names)


def can_capture(kernels: Kernels, name: str = "attention_decode", level: int = logging.WARNING) -> bool:
    """Whether a CUDA graph can hold a step with this attention. It logs if not: the host plans each such step."""
    provider = kernels.provider(name)
    if not provider.capturable:
        steps = "decode steps" if name == "attention_decode" else "steps with prompts"
        logger.log(level, "%s by %s cannot be captured: %s run without CUDA graphs", name, provider.name, steps)
    return provider.capturable


def samples_in_graphs(kernels: Kernels) -> bool:
    """Whether decode graphs sample as well: where sampling is a kernel, also faster than PyTorch's argmax, that a graph
    can hold.
    """
    provider = kernels.provider("sample")
    return provider.name != "native" and provider.capturable

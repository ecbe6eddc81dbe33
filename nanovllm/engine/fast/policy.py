"""Which fast paths are on, and the constants that they go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.config import EngineConfig


@dataclass(frozen=True)
class PiggybackSizes:
    """The sizes of steps on which prompts are piggybacked."""

    totals: tuple[int, ...] = (256, 384)
    """Tokens of such a step, decodes included: it is padded to one of these. Multiples of the matrix products'
    tiles.
    """
    row_multiple: int = 16
    """Decodes are padded to a multiple of this, and more than `totals[0]` of them to a multiple of twice this: so to
    sizes for which sampling has a graph (`batch_buckets`)."""
    min_tokens: int = 32
    """Tokens of prompts that there must be room for."""
    max_pieces: int = 16
    """Sequences whose prompts are piggybacked on one step."""
    min_tokens_at_once: int = 1024
    """Least tokens of prompts in a step that computes them at full speed: fewer would take nearly as long."""
    min_layer_bytes: int = 256 * 2**20
    """Least bytes of a layer's weights for which piggybacking pays for a second kind of attention in each layer."""


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
    """Steps with pieces of prompts are CUDA graphs too. True: where no graph can be captured, they are padded the same
    way, for tests."""
    padding: bool | None = None
    """Steps are padded to a few sizes.

    None: decode steps on a GPU, steps with pieces of prompts where they are captured.
    """
    prefix_groups: bool = True
    """Attention reads the blocks that several sequences share once, if a kernel that does so was chosen."""
    piggyback_prefill: bool | None = None
    """Offline prompts are computed together with decodes, a few tokens a step. None: where decode steps are CUDA graphs
    and the model's layers are large."""
    packed_weights: bool | None = None
    """Quantised weights stay packed where layers run op by op; if not, they are expanded when they are loaded. None: on
    a GPU."""
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
    min_full_share: float = 15 / 16
    """The share of its tokens that a full step must have: below, the padding costs the GPU more than the host saves."""
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
    graph_backend: Callable[[Any], Any] | None = None
    """(device) -> `GraphBackend`, what captures steps. None: CUDA graphs. Tests pass one that calls functions again."""

    @classmethod
    def off(cls, **switches: Any) -> FastPolicy:
        """Every fast path off but those that are named."""
        names = ("device_state", "cuda_graphs", "prefill_graphs", "padding", "prefix_groups")
        off: dict[str, Any] = dict.fromkeys((*names, "piggyback_prefill", "warm_up"), False)
        return cls(**{**off, "reserve_tokens_ahead": 0, **switches})

    @classmethod
    def of(cls, config: EngineConfig) -> FastPolicy:
        """The policy that an engine's arguments ask for.

        Raises:
            TypeError: `fast_policy` is something else.
        """
        policy = cls() if config.fast_policy is None else config.fast_policy
        if not isinstance(policy, cls):
            raise TypeError(f"fast_policy={policy!r:.80}: must be a nanovllm.engine.fast.policy.FastPolicy, or None")
        if config.enforce_eager:
            policy = replace(policy, cuda_graphs=False)
        if config.capture_prefill is not None:
            policy = replace(policy, prefill_graphs=config.capture_prefill)
        if config.piggyback_prefill is not None:
            policy = replace(policy, piggyback_prefill=config.piggyback_prefill)
        return policy

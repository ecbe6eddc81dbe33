"""A call of decode attention as its launches need it: arguments that were checked, and what follows from their
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV, SharedPrefixes
from nanovllm.kernels.triton.early_start import are_constant
from nanovllm.kernels.triton.launch_arguments import adjacent, next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales


@dataclass(frozen=True)
class DecodeCall:
    """The arguments of one of the four decode ops."""

    q: torch.Tensor
    """[num_seqs * queries, num_heads, head_dim]; the elements of a head are adjacent."""
    kv: PagedKV
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    new: NewTokens | None = None
    early: bool = False
    """Whether angles and weights of `new` may be read before the kernel in front has ended."""
    shared: SharedPrefixes | None = None
    queries: int = 1
    """Query tokens of each sequence; 1 with `new` or `shared`."""

    @staticmethod
    def of(
        q: torch.Tensor,
        kv: PagedKV,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        new: NewTokens | None = None,
        **rest: Any,
    ) -> DecodeCall:
        """Arguments as kernels address them: what is strided within a row is copied, and then not read early."""
        q, early = q if q.stride(2) == 1 else q.contiguous(), False
        if new is not None:
            angles, weights = adjacent(new.cos_sin_cache), (adjacent(new.q_weight), adjacent(new.k_weight))
            early = angles is new.cos_sin_cache and are_constant(*weights)
            new = NewTokens(adjacent(new.k), adjacent(new.v), angles, *weights, new.eps)
        return DecodeCall(q, kv, scale, window, soft_cap, new, early, **rest)

    @property
    def num_seqs(self) -> int:
        return self.q.shape[0] // self.queries

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def norm(self) -> bool:
        """Whether queries and new keys are normalised."""
        return self.new is not None and self.new.q_weight is not None

    @property
    def weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weights of the norms of q and k; without norms, a tensor that the kernel does not read."""
        return (self.new.q_weight, self.new.k_weight) if self.new is not None and self.norm else (self.q, self.q)

    @property
    def fp8(self) -> bool:
        return self.kv.k_cache.dtype == FP8

    @property
    def full_precision(self) -> bool:
        """Whether products are float32, which no tensor core computes."""
        return self.q.dtype == torch.float32 or not (self.fp8 or self.kv.k_cache.dtype == self.q.dtype)

    def constants(self, dependent: bool) -> dict[str, Any]:
        """What `decode_kernel` and `shared_kernel` are both compiled for."""
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "DIM_PAD": next_power_of_2(self.head_dim),
            "BLOCK_SIZE": self.kv.block_size,
            "SOFT_CAP": self.soft_cap or 0.0,
            "FP8": self.fp8,
            "K_SCALES": num_scales(self.kv.k_scale),
            "ROTATE": self.new is not None,
            "NORM": self.norm,
            "DEPENDENT": dependent,
        }

"""Linear layers, split over the tensor-parallel group, that several checkpoint tensors may be loaded into.

A layer's weight is made of named *shards*: QKV of "q", "k", "v"; gate-up of "gate", "up"; a plain layer of one shard,
"". `destination` gives the memory of a shard, and the part of a checkpoint tensor that belongs there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanovllm.kernels import Kernels
from nanovllm.layers.parallel import SINGLE, TensorParallel
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp

if TYPE_CHECKING:
    from nanovllm.layers.layernorm import RMSNorm


class ShardedParameters(nn.Module):
    """A module whose parameters are loaded shard by shard."""

    shards: tuple[str, ...] = ("",)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor for this parameter and shard must have."""
        return tuple(getattr(self, name).shape)

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of a checkpoint tensor of shape `source_shape` into place; a view of that place."""
        return getattr(self, name).data.copy_(tensor)


class ColumnParallelLinear(ShardedParameters):
    """y = x W^T + b with the output features split over the group, shard by shard.

    Args:
        in_features: size of x's last dimension.
        out_features: total output features of each shard, by shard name.
        kernels: None: PyTorch's product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        bias: bool = False,
        tp: TensorParallel = SINGLE,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self._linear = FusedOp("linear", kernels)
        self._add_rms_norm_linear = FusedOp("add_rms_norm_linear", kernels)
        self.shards = tuple(out_features)
        self.full_sizes = dict(out_features)
        self.sizes = {shard: self._local_size(shard, size) for shard, size in out_features.items()}
        self.weight = nn.Parameter(torch.empty(sum(self.sizes.values()), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.weight.shape[0]), requires_grad=False) if bias else None

    def _local_size(self, shard: str, size: int) -> int:
        return self.tp.divide(size, f"output features of {shard or 'the layer'}")

    def _local_start(self, shard: str) -> int:
        return self.tp.rank * self.sizes[shard]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = self._linear if self._linear.takes(x, self.weight) else F.linear
        return linear(x, self.weight, self.bias)

    def after_norm(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer of norm(x + residual), x + residual); one op where the batch is small."""
        x, residual, normed = stream
        if not normed and self._add_rms_norm_linear.takes(x, self.weight):
            return self._add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
        x, residual = norm.of(stream)
        return ColumnParallelLinear.forward(self, x), residual

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.full_sizes[shard], *getattr(self, name).shape[1:])

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        offset = 0
        for other in self.shards:
            if other == shard:
                break
            offset += self.sizes[other]
        size = self.sizes[shard]
        part = tensor.narrow(0, self._local_start(shard), size)
        return getattr(self, name).data.narrow(0, offset, size).copy_(part)


class QKVParallelLinear(ColumnParallelLinear):
    """The fused query, key and value projections, split by heads. Ranks beyond the number of KV heads share these."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        tp: TensorParallel = SINGLE,
        kernels: Kernels | None = None,
    ) -> None:
        self.kv_replicas = max(1, tp.size // num_kv_heads)
        self.head_dim = head_dim
        super().__init__(
            hidden_size,
            {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim},
            bias,
            tp,
            kernels,
        )
        self.num_heads = self.sizes["q"] // head_dim
        self.num_kv_heads = self.sizes["k"] // head_dim

    def _local_size(self, shard: str, size: int) -> int:
        replicas = 1 if shard == "q" else self.kv_replicas
        return self.tp.divide(size // self.head_dim * replicas, f"{shard} heads") * self.head_dim

    def _local_start(self, shard: str) -> int:
        return self.tp.rank // (1 if shard == "q" else self.kv_replicas) * self.sizes[shard]

    # Heads, not one tensor as the base class gives.
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [num_tokens, hidden_size] -> q, k, v as [num_tokens, heads, head_dim] views of one projection."""
        return self._heads(super().forward(x))

    def after_norm(  # type: ignore[override]
        self, stream: ResidualStream, norm: RMSNorm
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """((q, k, v) of norm(x + residual), x + residual); one op where the batch is small."""
        qkv, residual = super().after_norm(stream, norm)
        return self._heads(qkv), residual

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        return qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)


class RowParallelLinear(ShardedParameters):
    """y = x W^T + b with the input features split over the group and the results summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        tp: TensorParallel = SINGLE,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self._linear = FusedOp("linear", kernels)
        # A norm needs the sum over the group.
        self._linear_add_rms_norm = FusedOp("linear_add_rms_norm", kernels if tp.size == 1 else None)
        self.full_in = in_features
        self.weight = nn.Parameter(
            torch.empty(out_features, tp.divide(in_features, "input features")), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bias is added once, not once a rank.
        linear = self._linear if self._linear.takes(x, self.weight) else F.linear
        return self.tp.all_reduce(linear(x, self.weight, self.bias if self.tp.rank == 0 else None))

    def before_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> ResidualStream:
        """This layer of x, for a next block that begins with norm(this + residual); one op where the batch is small."""
        if self._linear_add_rms_norm.takes(x, self.weight):
            normed, total = self._linear_add_rms_norm(x, self.weight, residual, norm.weight, norm.eps, self.bias)
            return ResidualStream(normed, total, normed=True)
        return ResidualStream(self(x), residual)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.weight.shape[0], self.full_in) if name == "weight" else tuple(getattr(self, name).shape)

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        parameter = getattr(self, name).data
        if name == "weight":
            tensor = tensor.narrow(1, self.tp.rank * parameter.shape[1], parameter.shape[1])
        return parameter.copy_(tensor)

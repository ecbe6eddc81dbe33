"""Linear layers, split over the group of ranks, that several checkpoint tensors may be loaded into.

A layer's weight is made of named *shards*: QKV of "q", "k", "v"; gate-up of "gate", "up"; a plain layer of one shard,
"". `part` says which part of a checkpoint tensor this rank holds, and `load_shard` copies it into place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn as nn

from nanovllm.distributed.group import current_group
from nanovllm.kernels import Kernels
from nanovllm.layers.fused_product import FusedProduct
from nanovllm.layers.group_sum import GroupSum
from nanovllm.layers.packed_weight import PackedWeight, Weight, form_for, new_weight, product
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp
from nanovllm.layers.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from nanovllm.layers.layernorm import RMSNorm


class Part(NamedTuple):
    """Adjacent rows (dimension 0) or columns (dimension 1) of a tensor."""

    dim: int
    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(*self)


class ShardedParameters(nn.Module):
    """A module whose parameters are loaded shard by shard."""

    shards: tuple[str, ...] = ("",)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor for this parameter and shard must have."""
        return tuple(getattr(self, name).shape)

    def part(self, name: str, shard: str) -> Part | None:
        """What this rank holds of the checkpoint's tensor; None: all of it."""
        return None

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the `part` of a checkpoint tensor into place; a view of that place."""
        return getattr(self, name).data.copy_(tensor)

    def arranged(self, shard: str, matrix: StoredMatrix) -> StoredMatrix:
        """The `part` of a packed weight as it is in the layer, where `load_shard` would change it."""
        return matrix


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
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.group = current_group()
        self._linear = FusedOp("linear", kernels)
        self._add_rms_norm_linear = FusedOp("add_rms_norm_linear", kernels)
        self.shards = tuple(out_features)
        self.full_sizes = dict(out_features)
        self.sizes = {shard: self._local_size(shard, size) for shard, size in out_features.items()}
        self.weight: Weight = new_weight(sum(self.sizes.values()), in_features)
        self.bias = nn.Parameter(torch.empty(self.weight.shape[0]), requires_grad=False) if bias else None

    def _local_size(self, shard: str, size: int) -> int:
        return self.group.divide(size, f"output features of {shard or 'the layer'}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self._linear, x, form_for(self.weight, x), self.bias)

    def fuses_norm(self, stream: ResidualStream, norm: RMSNorm) -> bool:
        """Whether `after_norm` is one op with a packed weight."""
        x, residual, normed = stream
        weight = form_for(self.weight, x)
        if normed or residual is None or not isinstance(weight, PackedWeight):
            return False
        return weight.takes_sum(x, residual, norm.weight, norm.eps)

    def after_norm(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer of norm(x + residual), x + residual); one op where the batch is small, or x is quantised."""
        x, residual, normed = stream
        weight = form_for(self.weight, x)
        if not normed and self._add_rms_norm_linear.takes(x, weight):
            return self._add_rms_norm_linear(x, residual, norm.weight, norm.eps, weight, self.bias)
        if isinstance(weight, PackedWeight) and residual is not None and self.fuses_norm(stream, norm):
            return weight.product_after_norm(x, residual, norm.weight, norm.eps, self.bias)
        x, residual = norm.of(stream)
        return ColumnParallelLinear.forward(self, x), residual

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.full_sizes[shard], *getattr(self, name).shape[1:])

    def part(self, name: str, shard: str) -> Part | None:
        return Part(0, self.group.rank * self.sizes[shard], self.sizes[shard])

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        offset = sum(self.sizes[other] for other in self.shards[: self.shards.index(shard)])
        return getattr(self, name).data.narrow(0, offset, self.sizes[shard]).copy_(tensor)


class QKVParallelLinear(ColumnParallelLinear):
    """The fused query, key and value projections, split by heads.

    Where the KV heads do not divide by the number of ranks, each is repeated as often as needed: query heads of one KV
    head may be on several ranks, and each of these ranks has a copy of the KV head. All KV heads of a rank have equally
    many query heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self.head_dim = head_dim
        ranks = current_group().size
        queries = num_heads // num_kv_heads
        self.kv_copies = next(
            (n for n in range(1, queries + 1) if not queries % n and not num_kv_heads * n % ranks), queries
        )
        """Heads that each KV head stands for, over all ranks."""
        super().__init__(
            hidden_size,
            {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim},
            bias,
            kernels,
        )
        self.num_heads = self.sizes["q"] // head_dim
        self.num_kv_heads = self.sizes["k"] // head_dim

    def _local_size(self, shard: str, size: int) -> int:
        heads = self.group.divide(
            size // self.head_dim * self._copies(shard), "query heads" if shard == "q" else "KV heads"
        )
        return heads * self.head_dim

    def _copies(self, shard: str) -> int:
        return 1 if shard == "q" else self.kv_copies

    def _source_heads(self, shard: str) -> list[int]:
        """For each head of this rank, which of the checkpoint's it is."""
        count = self.sizes[shard] // self.head_dim
        first = self.group.rank * count
        return [head // self._copies(shard) for head in range(first, first + count)]

    def part(self, name: str, shard: str) -> Part | None:
        heads = self._source_heads(shard)
        return Part(0, heads[0] * self.head_dim, (heads[-1] + 1 - heads[0]) * self.head_dim)

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        rows = self._repeated_rows(shard, len(tensor))
        return super().load_shard(name, shard, tensor if rows is None else tensor[rows.to(tensor.device)])

    def arranged(self, shard: str, matrix: StoredMatrix) -> StoredMatrix:
        rows = self._repeated_rows(shard, matrix.shape[0])
        return matrix if rows is None else matrix.take_rows(rows)

    def _repeated_rows(self, shard: str, num_rows: int) -> torch.Tensor | None:
        """The row of a `part` of `num_rows` rows for each row of this rank: int64; None: they are the same."""
        heads = self._source_heads(shard)
        if num_rows == len(heads) * self.head_dim:
            return None
        first = torch.tensor([head - heads[0] for head in heads], device="cpu") * self.head_dim
        return (first[:, None] + torch.arange(self.head_dim, device="cpu")).flatten()

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

    def __init__(self, in_features: int, out_features: int, bias: bool = False, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.group = current_group()
        self._linear = FusedOp("linear", kernels)
        # A norm needs the sum over the group.
        self._linear_add_rms_norm = FusedProduct("add_rms_norm", kernels if self.group.size == 1 else None)
        self._sum = GroupSum(self.group, kernels)
        self.full_in = in_features
        self.weight: Weight = new_weight(out_features, self.group.divide(in_features, "input features"))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self._local(x))

    def takes_gate_up(self, gate_up: torch.Tensor) -> bool:
        """Whether this layer takes gate_up [num_tokens, 2 * columns] in place of x = silu(gate) * up."""
        weight = form_for(self.weight, gate_up)
        fused = self._linear_add_rms_norm.takes(gate_up, weight)
        return isinstance(weight, PackedWeight) and not fused and weight.takes_gate_up(gate_up)

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum. The bias is added once, not once a rank. x: see `takes_gate_up`."""
        weight, bias = form_for(self.weight, x), self.bias if self.group.rank == 0 else None
        if isinstance(weight, PackedWeight) and x.shape[-1] == 2 * weight.shape[1]:
            return weight.product_after_silu(x, bias)
        return product(self._linear, x, weight, bias)

    def before_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> ResidualStream:
        """This layer of x, for a next sublayer that begins with norm(this + residual).

        It is one op where the batch is small.
        """
        weight = form_for(self.weight, x)
        if self._linear_add_rms_norm.takes(x, weight):
            normed, total = self._linear_add_rms_norm(x, weight, residual, norm.weight, norm.eps, self.bias)
            return ResidualStream(normed, total, normed=True)
        return self._sum.before_norm(self._local(x), residual, norm)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.weight.shape[0], self.full_in) if name == "weight" else tuple(getattr(self, name).shape)

    def part(self, name: str, shard: str) -> Part | None:
        size = self.weight.shape[1]
        return Part(1, self.group.rank * size, size) if name == "weight" else None

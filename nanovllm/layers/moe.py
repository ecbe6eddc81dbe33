"""A mixture of experts: a router, and experts of which each token has some (Shazeer et al., 2017).

The experts' weights are two stacked parameters. A group splits every expert as it splits a dense MLP: a rank has some
of the rows of gate and up, and the same columns of down. All ranks route alike: each has the whole router.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from nanovllm.distributed.group import current_group
from nanovllm.kernels import Kernels
from nanovllm.layers.group_sum import GroupSum
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.layers.packed_weight import Weight, product
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp


class Router(ShardedParameters):
    """x [num_tokens, hidden_size] -> logits [num_tokens, num_experts], on every rank the whole."""

    def __init__(self, hidden_size: int, num_experts: int, kernels: Kernels) -> None:
        super().__init__()
        self._linear = FusedOp("linear", kernels)
        self.weight: Weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self._linear, x, self.weight)


class StackedGateUp(ShardedParameters):
    """The gate and up projections of all experts: weight [num_experts, 2 * intermediate_size / ranks, hidden_size].

    Shard "3.up" is the up projection of expert 3.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.group = current_group()
        self.shards = tuple(f"{expert}.{half}" for expert in range(num_experts) for half in ("gate", "up"))
        self._full = intermediate_size
        self._size = self.group.divide(intermediate_size, "intermediate features of an expert")
        self.weight = nn.Parameter(torch.empty(num_experts, 2 * self._size, hidden_size), requires_grad=False)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self._full, self.weight.shape[2])

    def part(self, name: str, shard: str) -> Part | None:
        return Part(0, self.group.rank * self._size, self._size)

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        expert, _, half = shard.partition(".")
        start = 0 if half == "gate" else self._size
        return self.weight.data[int(expert), start : start + self._size].copy_(tensor)


class StackedDown(ShardedParameters):
    """The down projections of all experts: weight [num_experts, hidden_size, intermediate_size / ranks].

    Shard "3" is that of expert 3.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.group = current_group()
        self.shards = tuple(map(str, range(num_experts)))
        self._full = intermediate_size
        size = self.group.divide(intermediate_size, "intermediate features of an expert")
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, size), requires_grad=False)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.weight.shape[1], self._full)

    def part(self, name: str, shard: str) -> Part | None:
        size = self.weight.shape[2]
        return Part(1, self.group.rank * size, size)

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.weight.data[int(shard)].copy_(tensor)


class Experts(nn.Module):
    """The stacked weights; see the op `moe_experts`."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up_proj = StackedGateUp(num_experts, hidden_size, intermediate_size)
        self.down_proj = StackedDown(num_experts, hidden_size, intermediate_size)
        self._moe_experts = kernels.moe_experts

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size], weights float32 and experts int32 [num_tokens, top_k] -> the shape of x.

        Of a group it is this rank's term of the sum.
        """
        return self._moe_experts(x, self.gate_up_proj.weight, self.down_proj.weight, weights, experts)


class SparseMLP(nn.Module):
    """The weighted sum of the experts that the router picks for each token, where a dense layer has its MLP.

    Args:
        intermediate_size: the intermediate size of an expert.
        top_k: experts of a token.
        renormalise: divide the weights of a token's experts by their sum.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, renormalise: bool,
        kernels: Kernels,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate = Router(hidden_size, num_experts, kernels)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, kernels)
        self.top_k, self.renormalise = top_k, renormalise
        self._moe_route = kernels.moe_route
        self._sum = GroupSum(current_group(), kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        return self._sum(self._local(x))

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the sum."""
        return self.experts(x, *self._moe_route(self.gate(x), self.top_k, self.renormalise))

    def between_norms(self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm) -> ResidualStream:
        """This block of norm(x + residual), for a next block that begins with `next_norm`."""
        x, residual = norm.of(stream)
        return self._sum.before_norm(self._local(x), residual, next_norm)

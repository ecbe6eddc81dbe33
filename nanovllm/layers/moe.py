"""A mixture of experts: a router, and experts of which each token has some (Shazeer et al., 2017).

The experts' weights are two stacked parameters. A group splits every expert as it splits a dense MLP: a rank has some
of the rows of gate and up, and the same columns of down. All ranks route alike: each has the whole router.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from nanovllm.distributed.group import current_group
from nanovllm.kernels import Kernels
from nanovllm.kernels.ops.linear_fp8 import BLOCK, dequantise_fp8
from nanovllm.layers.group_sum import GroupSum
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.layers.packed_weight import Weight, new_weight, product
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp
from nanovllm.layers.stored_matrices import Fp8Matrix
from nanovllm.layers.stored_matrix import StoredMatrix


class ExpertRouter(ShardedParameters):
    """x [num_tokens, hidden_size] -> logits [num_tokens, num_experts], on every rank the whole."""

    def __init__(self, hidden_size: int, num_experts: int, kernels: Kernels) -> None:
        super().__init__()
        self._linear = FusedOp("linear", kernels)
        self.weight: Weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self._linear, x, self.weight)


class StackedMatrices(ShardedParameters):
    """A matrix of each expert: weight [num_experts, rows, columns].

    Attributes:
        scale: None; or where the weight is stored in 8-bit floats, float32 [num_experts, rows / 128, columns / 128],
            rounded up: a scale for each block of 128 x 128.
    """

    weight: nn.Parameter

    def __init__(self, intermediate_size: int) -> None:
        super().__init__()
        self._full, group = intermediate_size, current_group()
        self._size = group.divide(intermediate_size, "intermediate features of an expert")
        self._start = group.rank * self._size
        self.scale: nn.Parameter | None = None

    def place(self, stacked: torch.Tensor, shard: str) -> torch.Tensor:
        """Where a shard belongs in the weight, or in its scales."""
        return stacked[int(shard)]

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            raise ValueError(f"expert {shard} is not stored in 8-bit floats, but others of its layer are")
        return self.place(self.weight.data, shard).copy_(tensor)

    def load_packed(self, shard: str, matrix: StoredMatrix) -> bool:
        """Keep a matrix in 8-bit floats, if it is stored in blocks that the op `moe_experts_fp8` takes."""
        num_experts, rows, columns = self.weight.shape
        if not isinstance(matrix, Fp8Matrix) or not self.takes_fp8:
            return False
        if tuple(matrix.scale.shape) != tuple(-(-n // BLOCK) for n in matrix.shape):
            return False
        if self.scale is None:
            device, shape = matrix.scale.device, (num_experts, -(-rows // BLOCK), -(-columns // BLOCK))
            weight = torch.empty(self.weight.shape, dtype=torch.float8_e4m3fn, device=device)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.scale = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)
        self.place(self.weight.data.view(torch.uint8), shard).copy_(matrix.weight.view(torch.uint8))
        self.place(self.scale.data, shard).copy_(matrix.scale)
        return True

    @property
    def takes_fp8(self) -> bool:
        """Whether blocks of 128 x 128 do not cross from the gate to the up projection, nor from rank to rank."""
        return self._size % BLOCK == 0

    def floats(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, dequantised."""
        if self.scale is None:
            return self.weight
        return torch.stack([dequantise_fp8(w, s) for w, s in zip(self.weight, self.scale)]).to(dtype)


class StackedGateUp(StackedMatrices):
    """The gate and up projections of all experts: weight [num_experts, 2 * intermediate_size / ranks, hidden_size].

    Shard "3.up" is the up projection of expert 3.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(intermediate_size)
        self.weight = new_weight(num_experts, 2 * self._size, hidden_size)
        self.shards = tuple(f"{expert}.{half}" for expert in range(num_experts) for half in ("gate", "up"))

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self._full, self.weight.shape[2])

    def part(self, name: str, shard: str) -> Part | None:
        return Part(0, self._start, self._size)

    def place(self, stacked: torch.Tensor, shard: str) -> torch.Tensor:
        expert, _, half = shard.partition(".")
        return stacked[int(expert)].chunk(2)[half == "up"]


class StackedDown(StackedMatrices):
    """The down projections of all experts: weight [num_experts, hidden_size, intermediate_size / ranks].

    Shard "3" is that of expert 3.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(intermediate_size)
        self.weight = new_weight(num_experts, hidden_size, self._size)
        self.shards = tuple(map(str, range(num_experts)))

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.weight.shape[1], self._full)

    def part(self, name: str, shard: str) -> Part | None:
        return Part(1, self._start, self._size)


class Experts(nn.Module):
    """The stacked weights; see the ops `moe_experts` and `moe_experts_fp8`."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up_proj = StackedGateUp(num_experts, hidden_size, intermediate_size)
        self.down_proj = StackedDown(num_experts, hidden_size, intermediate_size)
        self._moe_experts, self._moe_experts_fp8 = kernels.moe_experts, kernels.moe_experts_fp8

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size], weights float32 and experts int32 [num_tokens, top_k] -> the shape of x.

        Of a group it is this rank's term of the sum.
        """
        first, second = self.gate_up_proj, self.down_proj
        if first.scale is not None and second.scale is not None:
            return self._moe_experts_fp8(
                x, first.weight, first.scale, second.weight, second.scale, weights, experts
            )  # fmt: skip
        return self._moe_experts(x, first.floats(x.dtype), second.floats(x.dtype), weights, experts)


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
        self.gate = ExpertRouter(hidden_size, num_experts, kernels)
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
        """This MLP of norm(x + residual), for a next sublayer that begins with `next_norm`."""
        x, residual = norm.of(stream)
        return self._sum.before_norm(self._local(x), residual, next_norm)

"""The gated MLP of a decoder layer."""

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.parallel import SINGLE, TensorParallel


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up fused into one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        kernels: Kernels,
        bias: bool = False,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias, tp
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp)
        self._silu_and_mul = kernels.silu_and_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(x)))

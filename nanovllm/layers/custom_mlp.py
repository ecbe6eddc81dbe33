"""The gated MLP of a decoder layer.

`python -m nanovllm.layers.custom_mlp` compares it with custom kernels on and off: the same values, and in what time.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels, resolve_kernels
from nanovllm.layers.fused_op import FusedOp
from nanovllm.layers.layernorm import RMSNorm
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
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, tp, kernels)
        self._silu_and_mul = kernels.silu_and_mul
        self._add_rms_norm_gate_up = FusedOp("add_rms_norm_gate_up", kernels)
        self._gated_mlp = FusedOp("gated_mlp", None if bias or tp.size > 1 else kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if self._gated_mlp.takes(x, down.weight):
            return self._gated_mlp(x, gate_up.weight, down.weight)
        return down(self._silu_and_mul(gate_up(x)))

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this block of norm(x + residual), x + residual); the norm and the first half in one op for a small batch."""
        gate_up = self.gate_up_proj
        if gate_up.bias is None and self._add_rms_norm_gate_up.takes(x, gate_up.weight):
            x, residual = self._add_rms_norm_gate_up(x, residual, norm.weight, norm.eps, gate_up.weight)
            return self.down_proj(x), residual
        x, residual = norm.add(x, residual)
        return self(x), residual


class CustomGatedMLP(GatedMLP):
    """A `GatedMLP` by itself, outside an engine: it picks its own kernels.

    Args:
        use_custom_kernels: False: the PyTorch reference of every op.
        device, dtype: of the weights, which are drawn as nn.Linear's are.
        kernel_priority: as of `LLM`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        use_custom_kernels: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kernel_priority: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        device = torch.get_default_device() if device is None else torch.device(device)
        kernels = resolve_kernels(device, use_custom_kernels, kernel_priority)
        super().__init__(hidden_size, intermediate_size, kernels)
        self.to(device=device, dtype=dtype)
        self.providers = {name: kernels.providers[name] for name in ("gated_mlp", "silu_and_mul")}
        for projection in (self.gate_up_proj, self.down_proj):
            nn.init.kaiming_uniform_(projection.weight, a=5**0.5)

    def served_by(self, x: torch.Tensor) -> str:
        """The op, and its provider, that `forward` runs for x; "silu_and_mul: triton", say, between PyTorch's own products."""
        name = "gated_mlp" if self._gated_mlp.takes(x, self.down_proj.weight) else "silu_and_mul"
        return f"{name}: {self.providers[name]}"


if __name__ == "__main__":
    import typer

    from nanovllm.layers.compare_mlp import compare_mlp

    typer.run(compare_mlp)

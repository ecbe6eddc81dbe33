"""The gated MLP of a decoder layer.

`python -m nanovllm.layers.custom_mlp` compares its values and its time with custom kernels on and off.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels, resolve_kernels
from nanovllm.layers.fused_product import FusedProduct
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.packed_weight import form_for
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.selected_op import FusedOp
from nanovllm.wording import brief


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up fused into one projection.

    Args:
        activation: "silu", "gelu", or "gelu_tanh", the tanh approximation of GELU.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        kernels: Kernels,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias, kernels
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, kernels)
        self._activate_and_mul = _activation(activation, kernels)
        self._is_silu = activation == "silu"
        # The fused ops have no bias and no other activation.
        fused = None if bias or activation != "silu" else kernels
        self._linear_silu_and_mul = FusedProduct("silu_and_mul", fused)
        self._add_rms_norm_gate_up = FusedOp("add_rms_norm_gate_up", fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._gate_up(x))

    def _gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """activation(gate(x)) * up(x); or gate(x) and up(x) side by side, where the down projection takes these."""
        weight = form_for(self.gate_up_proj.weight, x)
        if self._linear_silu_and_mul.takes(x, weight):
            return self._linear_silu_and_mul(x, weight)
        return self._activated(self.gate_up_proj(x))

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """What the down projection takes."""
        if self._is_silu and self.down_proj.takes_gate_up(gate_up):
            return gate_up
        return self._activate_and_mul(gate_up)

    def after_norm(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(this MLP of norm(x + residual), x + residual)."""
        x, residual = self._gate_up_after(stream, norm)
        return self.down_proj(x), residual

    def between_norms(self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm) -> ResidualStream:
        """This MLP of norm(x + residual), for a next sublayer that begins with `next_norm`."""
        x, residual = self._gate_up_after(stream, norm)
        return self.down_proj.before_norm(x, residual, next_norm)

    def _gate_up_after(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        weight = form_for(self.gate_up_proj.weight, stream.x)
        if not stream.normed and self._add_rms_norm_gate_up.takes(stream.x, weight):
            return self._add_rms_norm_gate_up(stream.x, stream.residual, norm.weight, norm.eps, weight)
        if self.gate_up_proj.fuses_norm(stream, norm):
            gate_up, residual = self.gate_up_proj.after_norm(stream, norm)
            return self._activated(gate_up), residual
        x, residual = norm.of(stream)
        return self._gate_up(x), residual


def _activation(name: str, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    """[num_tokens, 2 * size] -> [num_tokens, size]; ValueError: an unknown name."""
    if name == "silu":
        return kernels.silu_and_mul
    if name not in ("gelu", "gelu_tanh"):
        raise ValueError(f"activation={name!r}: expected 'silu', 'gelu' or 'gelu_tanh'")
    return partial(kernels.gelu_and_mul, approximate="tanh" if name == "gelu_tanh" else "none")


class CustomGatedMLP(GatedMLP):
    """A `GatedMLP` outside an engine, which selects its own kernels.

    Args:
        use_custom_kernels: False: the PyTorch reference of every op.
        device, dtype: of the weights, which are drawn as nn.Linear's are.
        kernel_priority: as of `LLM`.

    Raises:
        ValueError: a size that is no positive integer, or kernels that cannot be had.
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
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r}: must be a positive integer")
        device = torch.get_default_device() if device is None else torch.device(device)
        kernels = resolve_kernels(device, use_custom_kernels, kernel_priority)
        super().__init__(hidden_size, intermediate_size, kernels)
        self.to(device=device, dtype=dtype)
        self._custom = set(kernels.providers.values()) != {"native"}
        self.providers = {name: kernels.providers[name] for name in ("linear_silu_and_mul", "silu_and_mul")}
        for projection in (self.gate_up_proj, self.down_proj):
            assert isinstance(projection.weight, nn.Parameter)
            nn.init.kaiming_uniform_(projection.weight, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size], of the weights' dtype and device -> the same shape.

        Raises:
            ValueError: x has another shape, dtype or device. With custom kernels, which have no backward pass: x or a
                weight requires grad, or is float64, which they do not compute in.
        """
        weight = self.gate_up_proj.weight
        like = isinstance(x, torch.Tensor) and x.dtype == weight.dtype and x.device == weight.device
        if not like or not x.dim() or x.shape[-1] != weight.shape[1]:
            got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else brief(x)
            raise ValueError(
                f"x: expected {weight.dtype} [..., {weight.shape[1]}] on {weight.device}, as the weights, not {got}"
            )
        if self._custom and x.dtype == torch.float64:
            raise ValueError("x: expected float16, bfloat16 or float32, not float64; or use_custom_kernels=False")
        if self._custom and torch.is_grad_enabled():
            tensors = {"x": x, "gate_up_proj.weight": weight, "down_proj.weight": self.down_proj.weight}
            if wanted := [name for name, tensor in tensors.items() if tensor.requires_grad]:
                remedy = "call it under torch.no_grad(), or use use_custom_kernels=False"
                raise ValueError(f"{', '.join(wanted)}: requires grad, and kernels have no backward pass; {remedy}")
        return super().forward(x)

    def served_by(self, x: torch.Tensor) -> str:
        """The op that computes silu(gate(x)) * up(x), and its provider, for example "silu_and_mul: triton"."""
        name = "linear_silu_and_mul" if self._linear_silu_and_mul.takes(x, self.gate_up_proj.weight) else "silu_and_mul"
        return f"{name}: {self.providers[name]}"


if __name__ == "__main__":
    import runpy

    runpy.run_module("nanovllm.layers.compare_mlp", run_name="__main__")

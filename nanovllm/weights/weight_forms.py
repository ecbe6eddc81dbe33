"""In which form quantised weights are kept where layers run op by op, and with which numbers they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.config import EngineConfig
from nanovllm.kernels import Kernels
from nanovllm.kernels.op.expansion_plan import ExpansionPlan
from nanovllm.kernels.op.provider import NATIVE
from nanovllm.kernels.triton.gemm.packed_plan import MAX_TOKENS


@dataclass(frozen=True)
class WeightForms:
    """What the engine's arguments leave open. None: it follows from the device and from what was measured on it."""

    packed: bool | None = None
    """Quantised weights stay packed; if not, they are expanded when they are loaded. None: on a GPU."""
    expansion: ExpansionPlan | None = None
    """Which packed weights of small layers get a dequantised copy where its products are faster. None: by what was
    measured on the GPU."""
    fp8_prompt_tokens: int | None = None
    """Least tokens of a step for `prompt_activations="fp8"`. None: more than those up to which kernels read packed
    weights, on a GPU with fp8 tensor cores. A number lets tests use it with other providers and devices."""

    def expansion_plan(
        self, config: EngineConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> ExpansionPlan | None:
        """Which packed weights get a dequantised copy of `dtype` for some steps; None: none does."""
        if config.expand_small_weights == "off":
            return None
        if self.expansion is not None or device.type != "cuda":
            return self.expansion
        gpu = torch.cuda.get_device_properties(device)
        return ExpansionPlan.measured((gpu.major, gpu.minor), gpu.total_memory, dtype, kernels)

    def least_fp8_tokens(
        self, config: EngineConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> int | None:
        """Least tokens of a step in which packed weights are multiplied in 8-bit floats; None: there is no such step.

        Raises:
            ValueError: `prompt_activations` asks for it, and it cannot be done.
        """
        if config.prompt_activations == "auto":
            return None
        if self.fp8_prompt_tokens is not None:
            return self.fp8_prompt_tokens
        if (reason := _why_no_fp8_products(kernels, dtype, device)) is not None:
            raise ValueError(f"prompt_activations='fp8': {reason}, or leave the argument out")
        return MAX_TOKENS + 1


def _why_no_fp8_products(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why products of 8-bit floats cannot run, and what to do; None: they can."""
    if device.type != "cuda":
        return "needs a GPU with fp8 tensor cores, not a CPU; use device='cuda' where there is one"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"needs fp8 tensor cores, of compute capability 8.9 or later, not {major}.{minor}; use another GPU"
    if dtype == torch.float32:
        return "needs activations of 16 bits, not float32; pass dtype='bfloat16'"
    if kernels.providers["linear_fp8_dynamic"] == NATIVE:
        return "needs a kernel for linear_fp8_dynamic, of which the reference was selected; use custom kernels"
    return None

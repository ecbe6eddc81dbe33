"""The providers that come with the package, beside each op's reference. Importing this module registers them.

They are named, not imported: a machine that cannot run a provider loads none of it.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from nanovllm.kernels import ops
from nanovllm.kernels.registry import Op, Provider


@cache
def triton_support(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton (Linux)"
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, this is {device}; use native"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton kernels need compute capability 8.0 or later, this GPU has {major}.{minor}; use native"
    return None


for _op in (
    ops.add_rms_norm,
    ops.element_wise_mul_add,
    ops.embedding,
    ops.fused_activation,
    ops.fused_add_gelu,
    ops.gelu_and_mul,
    ops.layer_norm,
    ops.layernorm_residual_dropout_gelu,
    ops.qk_norm_rope,
    ops.rms_norm,
    ops.rotary_embedding,
    ops.sample,
    ops.silu_and_mul,
    ops.softmax,
    ops.store_kvcache,
):
    assert isinstance(_op, Op)
    _op.add(Provider("triton", f"nanovllm.kernels.triton_ops:{_op.name}", triton_support))
for _op, _module in ((ops.attention_decode, "decode"), (ops.attention_prefill, "prefill")):
    _op.add(Provider("triton", f"nanovllm.kernels.triton_attention.{_module}:{_op.name}", triton_support))

"""The providers that come with the package, beside each op's reference. Importing this module registers them.

They are named, not imported: a machine that cannot run a provider loads none of it.
"""

from __future__ import annotations

from typing import Any

from nanovllm.kernels import extra, ops
from nanovllm.kernels.cuda.build import cuda_support
from nanovllm.kernels.external import flash_attn, flashinfer
from nanovllm.kernels.op.availability import interpretable_dot, triton_support
from nanovllm.kernels.op.registry import Op, Provider


def _triton(op: Op, module: str = "rows", accepts: Any = None) -> None:
    """Register nanovllm.kernels.triton.<module>:<op's name>."""
    target = f"nanovllm.kernels.triton.{module}:{op.name}"
    op.add(Provider("triton", target, triton_support, accepts, architectures="sm_80+"))


def _short_rows(x: Any, *args: Any, **kwargs: Any) -> str | None:
    """The chain holds a row in registers."""
    return None if x.shape[-1] <= 32768 else f"rows of {x.shape[-1]} elements; it takes at most 32768"


for _op in (
    ops.add_rms_norm,
    extra.element_wise_mul_add,
    ops.embedding,
    extra.fused_activation,
    extra.fused_add_gelu,
    extra.gelu_and_mul,
    extra.layer_norm,
    ops.qk_norm_rope,
    ops.qk_norm_rope_store,
    ops.rms_norm,
    ops.rotary_embedding,
    ops.silu_and_mul,
    extra.softmax,
    ops.store_kvcache,
):
    _triton(_op)
_triton(ops.sample, "sampling.sample")
_triton(extra.layernorm_residual_dropout_gelu, accepts=_short_rows)
# Chained by programmatic dependent launch where the GPU has it.
for _op in (
    ops.add_rms_norm_gate_up,
    ops.add_rms_norm_linear,
    ops.linear,
    ops.linear_add_rms_norm,
    ops.linear_silu_and_mul,
):
    # For small batches.
    _triton(_op, "gemm.decode_ops")
_triton(ops.qk_norm_rope_attention, "attention.decode", interpretable_dot)
for _op in (ops.attention_decode_shared, ops.qk_norm_rope_attention_shared):
    _triton(_op, "attention.shared", interpretable_dot)
_triton(extra.gated_mlp, "gemm.linear_ops", interpretable_dot)
_triton(extra.linear_bias_act, "gemm.linear_ops", interpretable_dot)
_triton(ops.attention_decode, "attention.decode", interpretable_dot)
_triton(ops.attention_prefill, "attention.prefill", interpretable_dot)
for _op in (extra.fused_activation, extra.fused_add_gelu, ops.silu_and_mul):
    _op.add(Provider("cuda", f"nanovllm.kernels.cuda:{_op.name}", cuda_support, architectures="sm_75+"))
for _library in (flash_attn, flashinfer):
    for _op in (ops.attention_decode, ops.attention_prefill):
        _name = _library.__name__.rpartition(".")[2]
        _accepts = getattr(_library, _op.name.replace("attention", "accepts"))
        _op.add(Provider(_name, f"{_library.__name__}:{_op.name}", _library.support, _accepts, architectures="sm_80+"))

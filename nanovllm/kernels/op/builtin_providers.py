"""The providers that come with the package, besides each op's reference. Importing this module registers them.

They are named, not imported: a machine that cannot run a provider loads none of it.
"""

from __future__ import annotations

from typing import Any

from nanovllm.kernels import extra, ops
from nanovllm.kernels.cpu import layer_op_limits
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.cuda.build import cuda_support
from nanovllm.kernels.cuda.packed.product_libraries import fp8_support, packed_support
from nanovllm.kernels.external import flash_attn, flashinfer, onednn, symm_mem
from nanovllm.kernels.op.availability import refused_by_interpreter, triton_support
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.provider import Provider
from nanovllm.kernels.ops.linear_fp8_dynamic import fp8_dynamic_refused


def _short_rows(x: Any, *args: Any, **kwargs: Any) -> str | None:
    """Accept rows that the kernel can hold in registers."""
    return None if x.shape[-1] <= 32768 else f"rows of {x.shape[-1]} elements; it takes at most 32768"


def _adjacent_logits(logits: Any, *args: Any, **kwargs: Any) -> str | None:
    """Accept logits that can be written in place."""
    return None if logits.stride(-1) == 1 else "the logits of a row are not side by side"


def _gated_fp8_refused(gate_up: Any, weight: Any, scale: Any, bias: Any = None) -> str | None:
    return fp8_dynamic_refused(gate_up, weight, scale, bias)


def _normed_fp8_refused(
    x: Any, residual: Any, norm_weight: Any, eps: float, weight: Any, scale: Any, bias: Any = None
) -> str | None:
    return fp8_dynamic_refused(x, weight, scale, bias)


def _triton(module: str, *declared: Op, accepts: Any = None, num_tokens: bool = False, **capabilities: Any) -> None:
    """Register nanovllm.kernels.triton.<module>:<op's name>; num_tokens: the module has num_tokens_<op's name>, too."""
    module = f"nanovllm.kernels.triton.{module}"
    for one in declared:
        few = f"{module}:num_tokens_{one.name}" if num_tokens else None
        one.add(
            Provider(
                "triton", f"{module}:{one.name}", triton_support, accepts, architectures="sm_80+", num_tokens=few,
                **capabilities,
            )
        )  # fmt: skip


_triton(
    "rows", ops.embedding, ops.gelu_and_mul, ops.qk_norm_rope, ops.qk_norm_rope_store, ops.rms_norm,
    ops.rotary_embedding, ops.silu_and_mul, ops.store_kvcache, extra.element_wise_mul_add, extra.fused_activation,
    extra.fused_add_gelu, extra.layer_norm, extra.softmax,
)  # fmt: skip
_triton("rows", ops.add_rms_norm, takes_fresh=True)
_triton("rows", extra.layernorm_residual_dropout_gelu, accepts=_short_rows)
_triton("sampling.sample", ops.sample)
_triton("collectives.all_gather_last", ops.all_gather_last)
_triton("collectives.all_reduce", ops.all_reduce, ops.all_reduce_add_rms_norm)
_triton("sampling.token_bitmask", ops.apply_token_bitmask, accepts=_adjacent_logits)
_triton(
    "gemm.small_products", ops.add_rms_norm_gate_up, ops.add_rms_norm_linear, ops.linear, ops.linear_add_rms_norm,
    ops.linear_silu_and_mul, num_tokens=True,
)  # fmt: skip
_triton("gemm.packed_embedding", ops.embedding_packed)
_triton("gemm.packed_to_fp8", ops.packed_to_fp8, takes_out=True)
_triton("gemm.packed_products", ops.linear_fp8, ops.linear_gguf, ops.linear_int4, ops.linear_int8)
_triton("gemm.packed_products", ops.linear_packed_add_rms_norm, num_tokens=True)
_triton("gemm.fp8_activations", ops.linear_fp8_dynamic, accepts=fp8_dynamic_refused, num_tokens=True)
_triton("gemm.fp8_activations", ops.silu_and_mul_linear_fp8_dynamic, accepts=_gated_fp8_refused, num_tokens=True)
_triton("gemm.fp8_activations", ops.add_rms_norm_linear_fp8_dynamic, accepts=_normed_fp8_refused, num_tokens=True)
_triton("gemm.tiled_products", extra.gated_mlp, extra.linear_bias_act, accepts=refused_by_interpreter)
_triton("moe.experts", ops.moe_experts, ops.moe_experts_fp8)
_triton("moe.route", ops.moe_route)
_triton(
    "attention.decode", ops.attention_decode_shared, ops.qk_norm_rope_attention_shared, accepts=refused_by_interpreter
)
_triton(
    "attention.decode", ops.attention_decode, ops.qk_norm_rope_attention, accepts=refused_by_interpreter, takes_out=True
)
_triton("attention.attention_dense", extra.attention_dense, accepts=refused_by_interpreter)
_triton(
    "attention.prefill", ops.attention_prefill, accepts=refused_by_interpreter, takes_out=True, takes_concurrent=True
)

for _op in (extra.fused_activation, extra.fused_add_gelu, ops.silu_and_mul):
    _op.add(Provider("cuda", f"nanovllm.kernels.cuda:{_op.name}", cuda_support, architectures="sm_75+"))

for _op in (
    ops.linear_gguf, ops.linear_int4, ops.linear_int8, ops.linear_packed_add_rms_norm, ops.linear_packed_silu_and_mul
):  # fmt: skip
    _target = f"nanovllm.kernels.cuda.packed.linear_packed:{_op.name}"
    _few = _target.replace(":", ":num_tokens_") if _op.name.startswith("linear_packed") else None
    _op.add(Provider("cuda", _target, packed_support, architectures="sm_90+", num_tokens=_few))

ops.packed_to_fp8.add(
    Provider(
        "cuda", "nanovllm.kernels.cuda.packed.packed_to_fp8:packed_to_fp8", packed_support, architectures="sm_90+",
        takes_out=True,
    )
)  # fmt: skip
ops.linear_fp8.add(
    Provider("cuda", "nanovllm.kernels.cuda.fp8.linear_fp8:linear_fp8", fp8_support, architectures="sm_90+")
)

ops.all_reduce.add(Provider("symm_mem", f"{symm_mem.__name__}:all_reduce", symm_mem.support))
ops.all_reduce.add(Provider("multimem", f"{symm_mem.__name__}:all_reduce_multimem", symm_mem.multimem_support))
ops.decoder_step.add(Provider("cpu", "nanovllm.kernels.cpu.library:decoder_step", cpu_support))
ops.linear.add(
    Provider(
        "onednn", f"{onednn.__name__}:linear", onednn.support, onednn.accepts,
        num_tokens=onednn.num_tokens_linear, prepack=onednn.prepack_linear,
    )
)  # fmt: skip
ops.sample.add(Provider("cpu", "nanovllm.kernels.cpu.library:sample", cpu_support, preferred="engines"))
for _op in (
    ops.add_rms_norm, ops.attention_decode, ops.attention_prefill, ops.qk_norm_rope, ops.rms_norm, ops.rotary_embedding,
    ops.silu_and_mul, ops.store_kvcache,
):  # fmt: skip
    # PyTorch's SiLU and product of few tokens take less time than a call of the library (docs/log/cpu.md).
    _in: Any = "nowhere" if _op is ops.silu_and_mul else "engines"
    _accepts = getattr(layer_op_limits, _op.name)
    _op.add(Provider("cpu", f"nanovllm.kernels.cpu.layer_ops:{_op.name}", cpu_support, _accepts, preferred=_in))

for _op in (ops.attention_decode, ops.attention_prefill):
    for _library in (flash_attn, flashinfer):
        _target = f"{_library.__name__}:{_op.name}"
        _accepts = getattr(_library, _op.name.replace("attention", "accepts"))
        # FlashInfer plans every batch on the host: a graph would hold the plan of the batch that was captured.
        _plans: dict[str, Any] = (
            {"capturable": False, "planned": f"{_target}_planned"} if _library is flashinfer else {}
        )
        _name = _library.__name__.rpartition(".")[2]
        _op.add(Provider(_name, _target, _library.support, _accepts, architectures="sm_80+", **_plans))

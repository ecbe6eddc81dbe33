"""Triton kernels of the ops that work row by row: plain functions with the signatures of the native ops.

Tensors must be on the current CUDA device. Sizes are not checked against each other: that is the op's business.
"""

from nanovllm.kernels.triton.rows.activation import fused_activation, gelu_and_mul, silu_and_mul
from nanovllm.kernels.triton.rows.elementwise import element_wise_mul_add, fused_add_gelu
from nanovllm.kernels.triton.rows.layernorm_chain import layernorm_residual_dropout_gelu
from nanovllm.kernels.triton.rows.move_rows import embedding, store_kvcache
from nanovllm.kernels.triton.rows.norm import add_rms_norm, layer_norm, rms_norm
from nanovllm.kernels.triton.rows.rotary import qk_norm_rope, qk_norm_rope_store, rotary_embedding
from nanovllm.kernels.triton.rows.softmax import softmax

__all__ = [
    "add_rms_norm", "element_wise_mul_add", "embedding", "fused_activation", "fused_add_gelu", "gelu_and_mul",
    "layer_norm", "layernorm_residual_dropout_gelu", "qk_norm_rope", "qk_norm_rope_store", "rms_norm",
    "rotary_embedding", "silu_and_mul", "softmax", "store_kvcache",
]  # fmt: skip

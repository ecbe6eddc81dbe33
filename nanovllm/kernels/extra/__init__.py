"""Ops that no layer calls: public kernels, and the kernel course. Importing this package declares them all."""

from nanovllm.kernels.extra.attention_dense import attention_dense
from nanovllm.kernels.extra.elementwise import element_wise_mul_add, fused_activation, fused_add_gelu
from nanovllm.kernels.extra.gated_mlp import gated_mlp
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import layernorm_residual_dropout_gelu
from nanovllm.kernels.extra.layernorm_softmax import layer_norm, softmax
from nanovllm.kernels.extra.linear_bias_act import linear_bias_act

__all__ = [
    "attention_dense", "element_wise_mul_add", "fused_activation", "fused_add_gelu", "gated_mlp", "layer_norm",
    "layernorm_residual_dropout_gelu", "linear_bias_act", "softmax",
]  # fmt: skip

"""Ops that no layer calls: public kernels, and the kernel course. Importing this package declares them all."""

from nanovllm.kernels.extra.attention_dense import attention_dense
from nanovllm.kernels.extra.element_wise_mul_add import element_wise_mul_add
from nanovllm.kernels.extra.fused_activation import fused_activation
from nanovllm.kernels.extra.fused_add_gelu import fused_add_gelu
from nanovllm.kernels.extra.gated_mlp import gated_mlp
from nanovllm.kernels.extra.layer_norm import layer_norm
from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import layernorm_residual_dropout_gelu
from nanovllm.kernels.extra.linear_bias_act import linear_bias_act
from nanovllm.kernels.extra.softmax import softmax

__all__ = [
    "attention_dense", "element_wise_mul_add", "fused_activation", "fused_add_gelu", "gated_mlp", "layer_norm",
    "layernorm_residual_dropout_gelu", "linear_bias_act", "softmax",
]  # fmt: skip

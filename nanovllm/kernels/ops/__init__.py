"""One file an op. Importing this package declares them all."""

from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.add_rms_norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.attention_shared import attention_decode_shared, qk_norm_rope_attention_shared
from nanovllm.kernels.ops.element_wise_mul_add import element_wise_mul_add
from nanovllm.kernels.ops.embedding import embedding
from nanovllm.kernels.ops.fused_activation import fused_activation
from nanovllm.kernels.ops.fused_add_gelu import fused_add_gelu
from nanovllm.kernels.ops.gated_mlp import gated_mlp
from nanovllm.kernels.ops.gelu_and_mul import gelu_and_mul
from nanovllm.kernels.ops.layer_norm import layer_norm
from nanovllm.kernels.ops.layernorm_residual_dropout_gelu import layernorm_residual_dropout_gelu
from nanovllm.kernels.ops.linear import linear
from nanovllm.kernels.ops.linear_add_rms_norm import linear_add_rms_norm
from nanovllm.kernels.ops.linear_bias_act import linear_bias_act
from nanovllm.kernels.ops.linear_silu_and_mul import linear_silu_and_mul
from nanovllm.kernels.ops.norm import add_rms_norm, rms_norm
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope
from nanovllm.kernels.ops.qk_norm_rope_attention import qk_norm_rope_attention
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.sample import sample
from nanovllm.kernels.ops.softmax import softmax
from nanovllm.kernels.ops.store_kvcache import store_kvcache

__all__ = [
    "add_rms_norm",
    "add_rms_norm_gate_up",
    "add_rms_norm_linear",
    "attention_decode",
    "attention_decode_shared",
    "attention_prefill",
    "element_wise_mul_add",
    "embedding",
    "fused_activation",
    "fused_add_gelu",
    "gated_mlp",
    "gelu_and_mul",
    "layer_norm",
    "layernorm_residual_dropout_gelu",
    "linear",
    "linear_add_rms_norm",
    "linear_bias_act",
    "linear_silu_and_mul",
    "qk_norm_rope",
    "qk_norm_rope_store",
    "qk_norm_rope_attention",
    "qk_norm_rope_attention_shared",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "softmax",
    "store_kvcache",
]

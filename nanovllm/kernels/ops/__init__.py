"""The ops that the layers call: one file an op. Importing this package declares them all."""

from nanovllm.kernels.ops.activation import gelu_and_mul, silu_and_mul
from nanovllm.kernels.ops.add_rms_norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from nanovllm.kernels.ops.all_gather_last import all_gather_last
from nanovllm.kernels.ops.all_reduce import all_reduce, all_reduce_add_rms_norm
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.attention_shared import attention_decode_shared, qk_norm_rope_attention_shared
from nanovllm.kernels.ops.decoder_step import decoder_step
from nanovllm.kernels.ops.embedding import embedding
from nanovllm.kernels.ops.embedding_packed import embedding_packed
from nanovllm.kernels.ops.linear import linear, linear_add_rms_norm, linear_silu_and_mul
from nanovllm.kernels.ops.linear_fp8 import linear_fp8
from nanovllm.kernels.ops.linear_fp8_dynamic import (
    add_rms_norm_linear_fp8_dynamic,
    linear_fp8_dynamic,
    silu_and_mul_linear_fp8_dynamic,
)
from nanovllm.kernels.ops.linear_gguf import linear_gguf
from nanovllm.kernels.ops.linear_int4 import linear_int4, linear_int8
from nanovllm.kernels.ops.linear_packed import linear_packed_add_rms_norm, linear_packed_silu_and_mul
from nanovllm.kernels.ops.moe_experts import moe_experts
from nanovllm.kernels.ops.moe_experts_fp8 import moe_experts_fp8
from nanovllm.kernels.ops.moe_route import moe_route
from nanovllm.kernels.ops.norm import add_rms_norm, rms_norm
from nanovllm.kernels.ops.packed_to_fp8 import packed_to_fp8
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV, SharedPrefixes
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope
from nanovllm.kernels.ops.qk_norm_rope_attention import qk_norm_rope_attention
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.sample import sample
from nanovllm.kernels.ops.store_kvcache import store_kvcache
from nanovllm.kernels.ops.token_bitmask import apply_token_bitmask

__all__ = [
    "NewTokens", "PagedKV", "SharedPrefixes", "add_rms_norm", "add_rms_norm_gate_up", "add_rms_norm_linear",
    "add_rms_norm_linear_fp8_dynamic", "all_gather_last", "all_reduce", "all_reduce_add_rms_norm",
    "apply_token_bitmask", "attention_decode", "attention_decode_shared", "attention_prefill", "decoder_step",
    "embedding", "embedding_packed", "gelu_and_mul", "linear", "linear_add_rms_norm", "linear_fp8",
    "linear_fp8_dynamic", "linear_gguf", "linear_int4", "linear_int8", "linear_packed_add_rms_norm",
    "linear_packed_silu_and_mul", "linear_silu_and_mul", "moe_experts", "moe_experts_fp8", "moe_route",
    "packed_to_fp8", "qk_norm_rope", "qk_norm_rope_attention", "qk_norm_rope_attention_shared", "qk_norm_rope_store",
    "rms_norm", "rotary_embedding", "sample", "silu_and_mul", "silu_and_mul_linear_fp8_dynamic", "store_kvcache",
]  # fmt: skip

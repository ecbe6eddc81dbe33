"""One file an op. Importing this package declares them all."""

from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.embedding import embedding
from nanovllm.kernels.ops.norm import add_rms_norm, rms_norm
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.sample import sample
from nanovllm.kernels.ops.store_kvcache import store_kvcache

__all__ = [
    "add_rms_norm",
    "attention_decode",
    "attention_prefill",
    "embedding",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "store_kvcache",
]

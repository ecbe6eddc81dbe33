"""vLLM's FlashAttention backend, of which decode steps run this package's kernel for Hopper.

vLLM imports `Backend` by its name, in each of its processes (`nanovllm.adapters.vllm` registers it). The cache, its
layout, prompts and mixed steps are FlashAttention's own. The kernel is put into CUDA graphs of steps with one token a
request: it costs the GPU less than FlashAttention, and the host more, which a graph saves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from nanovllm.kernels.ops import PagedKV
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode import attention_decode
from nanovllm.kernels.triton.attention.decode_hopper import takes, unsuited
from nanovllm.kernels.triton.counters import arrival_counters

_MARK = "nanovllm_decodes"
"""Of a step's metadata: whether its layers may call the kernel."""
_BLOCK = 64
"""The kernel takes blocks of a multiple of it."""


class Builder(FlashAttentionMetadataBuilder):
    """The metadata of a step."""

    # A graph of one token a request is not replayed for other steps then, as it would be with FlashAttention 3.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        size = common_attn_metadata.num_actual_tokens
        in_graph = self.use_full_cuda_graph and size <= (self.max_cudagraph_size or 0)
        group = self.num_heads_q // self.num_heads_kv
        shape = size, group, self.headdim, self.kv_cache_dtype, self.kv_cache_dtype, self.block_size
        decodes = in_graph and common_attn_metadata.max_query_len == 1 and unsuited(*shape) is None
        # The kernel needs no schedule for FlashAttention.
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or decodes)
        setattr(metadata, _MARK, decodes)
        return metadata


class Impl(FlashAttentionImpl):
    """The attention of a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and self.sinks is None
            and self.sliding_window == (-1, -1)
            and not self.batch_invariant_enabled
        )

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any:  # fmt: skip
        call = None
        if output_scale is None and output_block_scale is None and self.may_decode(attn_metadata):
            call = self.call(query, kv_cache, attn_metadata)
        if call is None or not takes(call):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if query.is_cuda and not torch.cuda.is_current_stream_capturing():
            make_counters(query.device)
        attention_decode(call.q, call.kv, call.scale, None, call.soft_cap, out=output[: call.num_seqs])
        return output

    def may_decode(self, metadata: Any) -> bool:
        """Whether each request of the step has one token, which sees all tokens up to it."""
        return (
            getattr(metadata, _MARK, False)
            and self._plain
            and self.dcp_world_size == 1
            and metadata.causal is True
            and not metadata.use_cascade
            and metadata.num_actual_tokens == metadata.seq_lens.shape[0]
            and getattr(metadata, "mm_prefix_range_tensor", None) is None
            and getattr(metadata, "rswa_prefix_lens", None) is None
        )

    def call(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> DecodeCall | None:
        """The step's call of the op; None: the cache is another one than the kernel reads."""
        if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * self.head_size or kv_cache.dtype != query.dtype:
            return None
        # [num_blocks, num_kv_heads, block_size, 2 * head_size]: keys and values of a token are side by side.
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        table, num_seqs = metadata.block_table, metadata.num_actual_tokens
        # Not the longest sequence of this step: a graph is replayed when they are longer.
        room = table.shape[1] * keys.shape[1]
        kv = PagedKV(keys, values, table, metadata.seq_lens, room)
        return DecodeCall.of(query[:num_seqs], kv, self.scale, None, self.logits_soft_cap or None)


class Backend(FlashAttentionBackend):
    """What vLLM finds as `AttentionBackendEnum.FLASH_ATTN`."""

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        preferred = super().get_preferred_block_size(default_block_size)
        return preferred if preferred % _BLOCK == 0 or _BLOCK % preferred else _BLOCK

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


@functools.cache
def make_counters(device: torch.device) -> None:
    """Before a capture, make the counters of the stream on which `torch.cuda.graph` captures by default. Within it they
    would be cleared by every launch.
    """
    torch.cuda.graph(torch.cuda.CUDAGraph())  # makes that stream, if it is the first
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        arrival_counters(device, 1)

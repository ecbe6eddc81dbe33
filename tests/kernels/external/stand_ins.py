"""Functions named as those of the packages that check what they are called with and compute the reference."""

import sys
import types

import torch

from nanovllm.kernels.external import flash_attn
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.paged_kv import PagedKV


def stand_in(monkeypatch, name, **functions):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:i]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)


def window_of(sides):
    left, right = (-1 if s is None else s for s in sides)
    assert (left, right) == (-1, -1) or right == 0
    return None if left < 0 else left + 1


def attend(q, k, v, table, starts, lens, longest, *, softmax_scale, causal, window_size, softcap):
    assert causal and starts.dtype == lens.dtype == torch.int32
    if (0 < lens).logical_and(lens < starts.diff()).any():  # which the reference refuses of runs
        n = int(starts[1])
        assert starts.tolist() == list(range(0, len(q) + 1, n))
        most = int(lens.max())
        kv = PagedKV(k, v, table, lens, most)
        return attention_decode.native(q, kv, softmax_scale, window_of(window_size), softcap or None)
    kv = PagedKV(k, v, table, lens, table.shape[1] * k.shape[1])
    return attention_prefill.native(q, kv, starts, longest, softmax_scale, window_of(window_size), softcap or None)


def fa3(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, **options):
    return attend(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, **options)


def vllm(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, block_table, fa_version, **options
):  # fmt: skip
    assert fa_version in (2, 3) and max_seqlen_k >= seqused_k.max()
    return attend(q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, **options)


def fa4(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, **options):
    assert max_seqlen_k >= seqused_k.max()
    return attend(q, k, v, page_table, cu_seqlens_q, seqused_k, max_seqlen_q, **options), None


def fa2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, block_table, **options):
    assert cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
    # Else the other one splits contexts.
    assert max_seqlen_q > flash_attn.FEW_QUERIES or len(q) < max_seqlen_q * (len(cu_seqlens_q) - 1)
    return attend(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, **options)


def fa2_decode(q, k, v, *, cache_seqlens, block_table, **options):
    num_seqs, n = q.shape[:2]
    assert 1 <= n <= flash_attn.FEW_QUERIES and len(cache_seqlens) == num_seqs
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * n
    o = attend(q.flatten(0, 1), k, v, block_table, starts, cache_seqlens, n, **options)
    return o.unflatten(0, (num_seqs, n))


class Wrapper:
    """Of FlashInfer: what it does from what it is planned with. A wrapper holds the last plan."""

    plans = 0  # of all wrappers

    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def _plan(
        self, runs, starts, blocks, last, num_heads, num_kv_heads, dim, block_size, *, window_left, logits_soft_cap,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        Wrapper.plans += 1
        assert starts.device.type == runs.device.type == last.device.type == "cpu"
        counts = starts.diff()
        lens = ((counts - 1).clamp_min(0) * block_size + last).int()
        table = torch.zeros(len(lens), int(counts.max()), dtype=torch.int32)
        for i, n in enumerate(counts.tolist()):
            table[i, :n] = blocks[starts[i] : starts[i + 1]]
        window = None if window_left < 0 else window_left + 1
        self.heads = num_heads, num_kv_heads, dim, block_size
        self.table = table, lens, table.shape[1] * block_size
        self.arguments = (runs, int(runs.diff().max()), sm_scale, window, logits_soft_cap)

    def run(self, q, cache, *, out):
        k, v = cache
        assert self.heads == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        assert q.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype)
        o = attention_prefill.native(q, PagedKV(k, v, *self.table), *self.arguments)
        return out.copy_(torch.where(o == 0, float("nan"), o))  # what a sequence without tokens gets is not promised


class PrefillWrapper(Wrapper):
    def plan(self, *arguments, causal, **options):
        assert causal
        self._plan(*arguments, **options)


class DecodeWrapper(Wrapper):
    def plan(self, starts, *arguments, **options):
        self._plan(torch.arange(len(starts), dtype=torch.int32), starts, *arguments, **options)


STAND_INS = {
    "flash_attn_interface": ("flash_attn_interface", {"flash_attn_with_kvcache": fa3}),
    "vllm3": ("vllm.vllm_flash_attn.flash_attn_interface", {"flash_attn_varlen_func": vllm}),
    "vllm2": ("vllm.vllm_flash_attn.flash_attn_interface", {"flash_attn_varlen_func": vllm}),
    "flash_attn.cute": ("flash_attn.cute", {"flash_attn_varlen_func": fa4}),
    "flash_attn": ("flash_attn", {"flash_attn_varlen_func": fa2, "flash_attn_with_kvcache": fa2_decode}),
    "flashinfer": (
        "flashinfer",
        {"BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper},
    ),
}

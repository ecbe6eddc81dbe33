"""Attention by FlashAttention 2, 3 or 4, whichever is installed and runs on the GPU.

Packages, and where they are preferred: FlashAttention 3 (`flash_attn_interface`, or the copy in vLLM) on Hopper;
FlashAttention 4 (`flash_attn.cute`) on datacentre Blackwell; FlashAttention 2 (`flash_attn`, or vLLM's copy) elsewhere.
One that is installed and cannot be imported, as one built for another torch, is passed over, and is a reason. They read
the lengths on the device, so a CUDA graph replays with other lengths and block tables.
https://github.com/Dao-AILab/flash-attention
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nanovllm.kernels.external.packages import find, folder, import_error, raise_if, refuse_common, version_of
from nanovllm.kernels.ops.checks import check_prefill, check_query_tokens
from nanovllm.kernels.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class FlashAttentionBuild:
    """One way to have FlashAttention."""

    name: str
    package: str
    """Its key in `_CALLS`."""
    module: str
    functions: tuple[str, ...]
    """What is called, of that module."""
    distribution: str
    """The installed package whose version it has."""
    capabilities: tuple[int, ...]
    """Major compute capabilities that it runs on."""
    block_multiple: int
    """The block size must be a multiple of this."""
    max_head_dim: int = 256

    def broken(self) -> str | None:
        """Why it cannot be used though it is installed, or None. Imports it."""
        who = f"{self.name}, {self.distribution} {version_of(self.distribution)},"
        if (error := import_error(self.module, self.functions)) is not None:
            return f"{who} is installed but cannot be imported ({error})"
        # vLLM's module can be imported without its libraries, and says which of them it could not load.
        unsupported = getattr(importlib.import_module(self.module), "fa_version_unsupported_reason", None)
        reason = unsupported(int(self.package[-1])) if unsupported and self.distribution == "vllm" else None
        return None if reason is None else f"{who} is installed but cannot run ({reason})"


FEW_QUERIES = 16
"""Query tokens a sequence for which FlashAttention 2 is asked to split contexts."""

_VLLM = "vllm.vllm_flash_attn.flash_attn_interface", ("flash_attn_varlen_func",), "vllm"

# In the order in which they are tried.
VARIANTS = (
    FlashAttentionBuild(
        "FlashAttention 3 (flash_attn_interface)", "flash_attn_interface", "flash_attn_interface",
        ("flash_attn_with_kvcache",), "flash-attn-3", (9,), 1,
    ),
    FlashAttentionBuild("FlashAttention 3 (vLLM)", "vllm3", *_VLLM, (9,), 16),
    FlashAttentionBuild(
        "FlashAttention 4 (flash_attn.cute)", "flash_attn.cute", "flash_attn.cute", ("flash_attn_varlen_func",),
        "flash-attn-4", (10, 11), 128, max_head_dim=128,
    ),
    FlashAttentionBuild(
        "FlashAttention 2 (flash_attn)", "flash_attn", "flash_attn",
        ("flash_attn_varlen_func", "flash_attn_with_kvcache"), "flash-attn", (8, 9, 10, 11, 12), 256,
    ),
    FlashAttentionBuild("FlashAttention 2 (vLLM)", "vllm2", *_VLLM, (8, 9, 10, 11, 12), 16),
)  # fmt: skip


@cache
def installed() -> tuple[str, ...]:
    """Packages of `VARIANTS` that are installed, found without importing any."""
    found = []
    if find("flash_attn_interface") is not None:
        found.append("flash_attn_interface")
    flash_attn, vllm = folder("flash_attn"), folder("vllm")
    if flash_attn is not None:
        if (flash_attn / "cute" / "interface.py").exists():
            found.append("flash_attn.cute")
        # Version 4 alone installs a folder `flash_attn` too; the extension tells version 2.
        if find("flash_attn_2_cuda") is not None:
            found.append("flash_attn")
    if vllm is not None:
        for number in (2, 3):
            if any((vllm / "vllm_flash_attn").glob(f"_vllm_fa{number}_C*.so")):
                found.append(f"vllm{number}")
    return tuple(found)


@cache
def variant(device: torch.device) -> FlashAttentionBuild | None:
    """The variant that runs on a device, or None. Imports it, and those before it that turn out to be broken."""
    return next((v for v in _made_for(device) if v.broken() is None), None)


def _made_for(device: torch.device) -> list[FlashAttentionBuild]:
    """The variants that are installed and made for a device."""
    if device.type != "cuda":
        return []
    major = torch.cuda.get_device_capability(device)[0]
    return [v for v in VARIANTS if v.package in installed() and major in v.capabilities]


def support(device: torch.device) -> str | None:
    """Why no FlashAttention can run on a device, or None."""
    if not installed():
        return "FlashAttention is not installed; pip install flash-attn (or vllm, which brings a copy)"
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {device}"
    if variant(device) is None:
        if broken := [v.broken() for v in _made_for(device)]:
            return f"{'; '.join(filter(None, broken))}; install one built for torch {torch.__version__}"
        major, minor = torch.cuda.get_device_capability(device)
        names = "; ".join(
            f"{v.name} runs on compute capability {', '.join(f'{c}.x' for c in v.capabilities)}"
            for v in VARIANTS
            if v.package in installed()
        )
        return f"this GPU has compute capability {major}.{minor}: {names}"
    return None


def accepts_decode(q: torch.Tensor, kv: PagedKV, *args: Any, **kwargs: Any) -> str | None:
    """Why FlashAttention cannot take these arguments of `attention_decode`, or None."""
    chosen = variant(q.device)
    if chosen is None:
        return support(q.device)
    reason = refuse_common(chosen.name, q, kv)
    if reason is not None:
        return reason
    head_dim = q.shape[2]
    if head_dim > chosen.max_head_dim or head_dim % 8:
        return (
            f"{chosen.name} takes a head_dim of at most {chosen.max_head_dim} that is a multiple of 8, got {head_dim}"
        )
    if kv.block_size % chosen.block_multiple:
        return f"{chosen.name} needs a block size that is a multiple of {chosen.block_multiple}, got {kv.block_size}"
    return None


accepts_prefill = accepts_decode


def attention_decode(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> torch.Tensor:
    """See `ops.attention.attention_decode`. ValueError for what `accepts_decode` refuses."""
    raise_if(accepts_decode(q, kv))
    queries = check_query_tokens(q, kv, scale, window, soft_cap)
    starts = torch.arange(0, q.shape[0] + 1, queries, dtype=torch.int32, device=q.device)
    return _attend(q, kv, starts, queries, scale, window, soft_cap)


def attention_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """See `ops.attention.attention_prefill`. ValueError for what `accepts_prefill` refuses."""
    raise_if(accepts_decode(q, kv))
    check_prefill(q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)
    return _attend(q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)


def _attend(q, kv, starts, max_query_len, scale, window, soft_cap) -> torch.Tensor:
    """Behind the wrappers, which have checked the arguments."""
    if q.shape[0] == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A query at the end of a run sees itself and `window - 1` tokens to its left.
    sides = (-1, -1) if window is None else (window - 1, 0)
    chosen = variant(q.device)
    assert chosen is not None  # or it would have been refused
    return _CALLS[chosen.package](q, kv, starts, max_query_len, scale, sides, soft_cap or 0.0)


def _call_flash_attn_3(q, kv, starts, max_query_len, scale, sides, soft_cap):
    return _function("flash_attn_interface", "flash_attn_with_kvcache")(
        q, kv.k_cache, kv.v_cache, cache_seqlens=kv.context_lens, page_table=kv.block_table, cu_seqlens_q=starts,
        max_seqlen_q=max_query_len, softmax_scale=scale,
        causal=True, window_size=sides, softcap=soft_cap,
    )  # fmt: skip


def _call_vllm(number: int) -> Callable[..., torch.Tensor]:
    def call(q, kv, starts, max_query_len, scale, sides, soft_cap):
        return _function("vllm.vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func")(
            q, kv.k_cache, kv.v_cache, max_query_len, starts, kv.max_context_len, seqused_k=kv.context_lens,
            softmax_scale=scale, causal=True,
            window_size=list(sides), softcap=soft_cap, block_table=kv.block_table, fa_version=number,
        )  # fmt: skip

    return call


def _call_flash_attn_4(q, kv, starts, max_query_len, scale, sides, soft_cap):
    left, right = (None if s < 0 else s for s in sides)
    result = _function("flash_attn.cute", "flash_attn_varlen_func")(
        q, kv.k_cache, kv.v_cache, cu_seqlens_q=starts, seqused_k=kv.context_lens, max_seqlen_q=max_query_len,
        max_seqlen_k=kv.max_context_len, page_table=kv.block_table,
        softmax_scale=scale, causal=True, window_size=(left, right), softcap=soft_cap,
    )  # fmt: skip
    return result[0] if isinstance(result, tuple) else result


def _call_flash_attn_2(q, kv, starts, max_query_len, scale, sides, soft_cap):
    if max_query_len <= FEW_QUERIES and kv.num_seqs * max_query_len == q.shape[0]:
        # No run is longer, so all are as long: this function splits long contexts over the GPU.
        o = _function("flash_attn", "flash_attn_with_kvcache")(
            q.unflatten(0, (kv.num_seqs, max_query_len)), kv.k_cache, kv.v_cache, cache_seqlens=kv.context_lens,
            block_table=kv.block_table, softmax_scale=scale,
            causal=True, window_size=sides, softcap=soft_cap,
        )  # fmt: skip
        return o.flatten(0, 1)
    ends = torch.zeros(kv.num_seqs + 1, dtype=torch.int32, device=q.device)
    torch.cumsum(kv.context_lens, 0, dtype=torch.int32, out=ends[1:])
    return _function("flash_attn", "flash_attn_varlen_func")(
        q, kv.k_cache, kv.v_cache, starts, ends, max_query_len, kv.max_context_len, softmax_scale=scale, causal=True,
        window_size=sides,
        softcap=soft_cap, block_table=kv.block_table,
    )  # fmt: skip


@cache
def _function(module: str, name: str) -> Callable[..., torch.Tensor]:
    return getattr(importlib.import_module(module), name)


_CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "flash_attn_interface": _call_flash_attn_3,
    "vllm3": _call_vllm(3),
    "flash_attn.cute": _call_flash_attn_4,
    "flash_attn": _call_flash_attn_2,
    "vllm2": _call_vllm(2),
}

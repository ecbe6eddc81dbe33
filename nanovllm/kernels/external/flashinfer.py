"""Attention by FlashInfer: its wrappers for a paged cache, planned and run in one call.

FlashInfer plans a batch on the host, from the lengths, before it runs on the device. The ops have the lengths on the
device alone, so every call here copies them to the host and waits: right for any lengths, but a stall a layer, and
impossible while a CUDA graph is being captured (a plan that was made at capture would be wrong for the lengths of a
replay). So a call during a capture is refused. https://docs.flashinfer.ai

For the benchmark alone each function has `planned`: the plan is made once, and what it returns runs any number of
times, in a graph too, on those lengths and that block table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from nanovllm.kernels.external.packages import find, folder, import_error, raise_if, refuse_common, version_of
from nanovllm.kernels.ops.checks import check_prefill, check_query_tokens
from nanovllm.kernels.ops.paged_kv import PagedKV

NAME = "FlashInfer"
HEAD_DIMS = (64, 128, 256)
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
_WORKSPACE_BYTES = 256 * 2**20


def support(device: torch.device) -> str | None:
    """Why FlashInfer cannot run on a device, or None."""
    if folder("flashinfer") is None:
        return "FlashInfer is not installed; pip install flashinfer-python"
    if find("tvm_ffi") is None:
        return f"flashinfer {version_of('flashinfer-python')} needs apache-tvm-ffi; pip install apache-tvm-ffi"
    if device.type != "cuda":
        return f"FlashInfer needs a CUDA device, this is {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"FlashInfer needs compute capability 8.0 or later, this GPU has {major}.{minor}"
    if (error := import_error("flashinfer", _WRAPPERS)) is not None:
        version = version_of("flashinfer-python")
        remedy = f"install one built for torch {torch.__version__}"
        return f"flashinfer {version} is installed but cannot be imported ({error}); {remedy}"
    return None


def accepts_decode(q: torch.Tensor, kv: PagedKV, *args: Any, **kwargs: Any) -> str | None:
    """Why FlashInfer cannot take these arguments of `attention_decode`, or None."""
    reason = accepts_prefill(q, kv)
    # Queries that are no multiple of the sequences are an error, whatever the provider.
    if reason is None and len(q) > kv.num_seqs > 0 and len(q) % kv.num_seqs == 0:
        return f"{NAME}'s decode takes one query token a sequence, got {len(q) // kv.num_seqs}"
    return reason


def accepts_prefill(q: torch.Tensor, kv: PagedKV, *args: Any, **kwargs: Any) -> str | None:
    """Why FlashInfer cannot take these arguments of `attention_prefill`, or None."""
    reason = refuse_common(NAME, q, kv)
    if reason is not None:
        return reason
    if q.shape[2] not in HEAD_DIMS:
        return f"{NAME} takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, got {q.shape[2]}"
    if not kv.k_cache.is_contiguous():
        return f"{NAME} needs a contiguous cache, got strides {kv.k_cache.stride()}"
    if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return f"{NAME} plans a batch on the host from its lengths, which a CUDA graph cannot record"
    return None


def attention_decode(
    q: torch.Tensor, kv: PagedKV, scale: float, window: int | None = None, soft_cap: float | None = None
) -> torch.Tensor:
    """See `ops.attention.attention_decode`. ValueError for what `accepts_decode` refuses. Waits for the device."""
    return _plan_decode(_wrapper_of_stream, q, kv, scale, window, soft_cap)()


def _plan_decode(
    wrapper_for: Callable[..., Any],
    q: torch.Tensor,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Callable[[], torch.Tensor]:
    """What computes `attention_decode` of these lengths and blocks, from the queries and the cache as they are when it
    is called.

    wrapper_for: (kind, device, whether with tensor cores) -> the wrapper to plan with.
    """
    raise_if(accepts_decode(q, kv))
    check_query_tokens(q, kv, scale, window, soft_cap)
    if len(q) == 0:
        return partial(torch.empty_like, q, memory_format=torch.contiguous_format)
    lens, starts, blocks, last = _pages(kv)
    num_heads = q.shape[1]
    # The kernel without tensor cores reads the cache as fast, but is made for few query heads a KV head.
    wrapper = wrapper_for("decode", q.device, num_heads // kv.num_kv_heads not in (1, 2))
    wrapper.plan(
        starts, blocks, last, num_heads, kv.num_kv_heads, q.shape[2], kv.block_size, **_options(q, scale, window,
        soft_cap)
    )  # fmt: skip
    return partial(_run, wrapper, q, kv, _rows(lens == 0, q.device))


def attention_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """See `ops.attention.attention_prefill`. ValueError for what `accepts_prefill` refuses. Waits for the device."""
    return _plan_prefill(_wrapper_of_stream, q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)()


def _plan_prefill(
    wrapper_for: Callable[..., Any],
    q: torch.Tensor,
    kv: PagedKV,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Callable[[], torch.Tensor]:
    """As `_plan_decode`, of `attention_prefill`."""
    raise_if(accepts_prefill(q, kv))
    check_prefill(q, kv, cu_seqlens_q, max_query_len, scale, window, soft_cap)
    if len(q) == 0:
        return partial(torch.empty_like, q, memory_format=torch.contiguous_format)
    lens, starts, blocks, last = _pages(kv)
    runs = cu_seqlens_q.cpu()
    wrapper = wrapper_for("prefill", q.device, True)
    wrapper.plan(
        runs, starts, blocks, last, q.shape[1], kv.num_kv_heads, q.shape[2], kv.block_size, causal=True,
        **_options(q, scale, window, soft_cap),
    )  # fmt: skip
    empty = (lens == 0).repeat_interleave(runs.diff())
    return partial(_run, wrapper, q, kv, _rows(empty, q.device))


def _options(q: torch.Tensor, scale: float, window: int | None, soft_cap: float | None) -> dict[str, Any]:
    """What both wrappers are told of a call, whose cache has the dtype of its queries."""
    return {
        "sm_scale": scale,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": soft_cap,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }


def _pages(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lengths, where each sequence's blocks start, all blocks, tokens in each last block); all but the blocks on
    the host.
    """
    lens, block_size, block_table = kv.context_lens.cpu(), kv.block_size, kv.block_table
    counts = (lens + block_size - 1) // block_size
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    flat = used.flatten().nonzero().flatten()
    blocks = block_table.flatten()[flat.to(block_table.device)]
    last = torch.where(lens > 0, (lens - 1) % block_size + 1, 0).int()
    return lens, starts, blocks, last


def _rows(empty: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """On the device, which rows of the result are of sequences without tokens; None: none are. `empty` is on the
    host.
    """
    return empty.nonzero().flatten().to(device) if empty.any() else None


def _run(wrapper: Any, q: torch.Tensor, kv: PagedKV, empty: torch.Tensor | None) -> torch.Tensor:
    """Launches only, so that a graph can hold it.

    Without `out` the prefill wrapper would fill its result with zeros first.
    """
    q = q.contiguous()
    out = wrapper.run(q, (kv.k_cache, kv.v_cache), out=torch.empty_like(q))
    return out if empty is None else out.index_fill_(0, empty, 0)


def _wrapper_of_stream(kind: str, device: torch.device, tensor_cores: bool) -> Any:
    return _wrapper(
        kind, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, tensor_cores
    )


@cache
def _wrapper(kind: str, device: torch.device, stream: int, tensor_cores: bool) -> Any:
    """One a stream: launches on a stream do not overlap, so they may share a workspace."""
    return _new_wrapper(kind, tensor_cores, torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device))


def _wrapper_of_its_own(kind: str, device: torch.device, tensor_cores: bool) -> Any:
    """A wrapper holds one plan.

    Those of several share the memory of parts to be combined: they are not to run at the same time.
    """
    return _new_wrapper(kind, tensor_cores, _shared_workspace(device))


@cache
def _shared_workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _new_wrapper(kind: str, tensor_cores: bool, workspace: torch.Tensor) -> Any:
    import flashinfer

    if kind == "decode":
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


# Asked by `kernels bench`: called as the functions themselves, each gives what runs without planning again.
attention_decode_planned = partial(_plan_decode, _wrapper_of_its_own)
attention_prefill_planned = partial(_plan_prefill, _wrapper_of_its_own)

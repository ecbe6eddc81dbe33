"""A plain copy: what a kernel that is bound by memory is measured against.

Not `Tensor.copy_`, which in a CUDA graph is a node of the driver's own: its time jumps by half with size and alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.launch import cdiv


@dataclass(frozen=True)
class CopyPlan:
    """How to launch a copy.

    Attributes:
        loads: of 16 bytes that a thread has under way.
        warps: of a program.
        early: launched before its predecessor has ended, and lets its successor start, as small elementwise kernels are.
        stream: neither source nor target is to stay in the cache.
    """

    loads: int
    warps: int
    early: bool
    stream: bool = False


@triton.jit
def _copy_kernel(
    source, target, num_bytes, BLOCK: tl.constexpr, TAIL: tl.constexpr, DEPENDENT: tl.constexpr, STREAM: tl.constexpr
):
    """BLOCK: 4-byte words of a program. TAIL: 16 does not divide num_bytes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)
    # A multiple of 4 in the compiler's eyes too, so that masked loads keep their 16 bytes.
    mask = col < num_bytes // 16 * 4 - start
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words = source.to(tl.pointer_type(tl.int32)) + start + col
    loaded = tl.load(words, mask, eviction_policy="evict_first" if STREAM else "")
    words = target.to(tl.pointer_type(tl.int32)) + start + col
    tl.store(words, loaded, mask, cache_modifier=".cs" if STREAM else "")
    if TAIL:
        if tl.program_id(0) == 0:
            place = num_bytes // 16 * 16 + tl.arange(0, 16)
            last = tl.load(source.to(tl.pointer_type(tl.int8)) + place, place < num_bytes)
            tl.store(target.to(tl.pointer_type(tl.int8)) + place, last, place < num_bytes)


def copy(target: torch.Tensor, source: torch.Tensor, plan: CopyPlan) -> None:
    """target = source, both contiguous, aligned to 16 bytes and of as many bytes.

    Raises:
        ValueError: they are not.
    """
    for name, t in (("target", target), ("source", source)):
        if not t.is_contiguous() or t.data_ptr() % 16 or t.nbytes != source.nbytes:
            raise ValueError(f"{name}: expected {source.nbytes} contiguous bytes, aligned to 16")
    block = 4 * 32 * plan.loads * plan.warps
    if source.nbytes:
        _copy_kernel[(cdiv(source.nbytes, 4 * block),)](
            source, target, source.nbytes, block, source.nbytes % 16 != 0, plan.early, plan.stream,
            num_warps=plan.warps, launch_pdl=plan.early,
        )  # fmt: skip


def copy_plans(device: torch.device) -> list[CopyPlan]:
    """The plans of which the fastest is the yardstick: grids and items a thread as those of our elementwise kernels."""
    launches = (False, True) if has_dependent_launch(device) else (False,)
    return [CopyPlan(loads, 4, early) for loads in (1, 2, 4) for early in launches]

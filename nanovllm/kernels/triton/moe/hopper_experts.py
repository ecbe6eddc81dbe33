"""Products of experts with many pairs on Hopper: which calls they take, how they are cut, and their launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.triton.early_start import has_dependent_launch
from nanovllm.kernels.triton.gemm.hopper_product import is_hopper
from nanovllm.kernels.triton.launch_arguments import cdiv, num_sms
from nanovllm.kernels.triton.moe.sort import SortedPairs

_COLUMNS = 64  # of a step: a swizzled line of 128 bytes
_DTYPES = (torch.bfloat16, torch.float16)
LEAST_PAIRS = 64
"""Of an expert on average, for `hopper_experts`.

On an H200 both products of a layer of Qwen3-30B-A3B took 397 us with 64 pairs, and 453 by `block_kernel`. With 32 they
took 411 and 308.
"""
_MANY_PAIRS = 256
"""With more, three slots were as fast as four, or faster (docs/log/kernels.md)."""
_REGISTERS = 224  # of a thread that multiplies: 128 are sums
_LOADERS, _LOAD_REGISTERS = {True: 4, False: 1}, {True: 56, False: 40}
"""Warps that load, and registers of their threads; for gate and up, where threads copy the rows of tokens, and down."""


@dataclass(frozen=True)
class HopperExpertPlan:
    """For `hopper_experts_kernel`.

    Attributes:
        tokens: pairs of a block. rows: of the weight, of a tile. slots: of the ring in shared memory.
    """

    tokens: int = 128
    rows: int = 256
    slots: int = 4


def plan_hopper_experts(num_pairs: int, num_experts: int) -> HopperExpertPlan | None:
    """The faster of two plans that were timed on an H200; None: `block_kernel` is faster."""
    if num_pairs < LEAST_PAIRS * num_experts:
        return None
    return HopperExpertPlan(slots=3 if num_pairs > _MANY_PAIRS * num_experts else 4)


def fits(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether `hopper_experts` can multiply x [num_tokens, hidden], a matrix, by the weights of experts."""
    if x.dtype not in _DTYPES or x.dtype != gate_up.dtype or x.dtype != down.dtype:
        return False
    if gate_up.shape[2] % _COLUMNS or down.shape[2] % _COLUMNS:
        return False
    return all(t.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in t.stride()[:-1]) for t in (x, gate_up, down))


def plan_for(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, num_pairs: int) -> HopperExpertPlan | None:
    """The plan for a call that `hopper_experts` can and should compute; else None."""
    if not x.is_cuda or not is_hopper(x.device.index) or not fits(x, gate_up, down):
        return None
    return plan_hopper_experts(num_pairs, len(down))


@functools.cache
def _hopper() -> tuple[Any, Any]:
    """(the kernel, `descriptor`). Gluon is not in every Triton, so they are imported at the first use."""
    from nanovllm.kernels.triton.gluon_compat import descriptor
    from nanovllm.kernels.triton.moe.hopper_experts_kernel import hopper_experts_kernel

    return hopper_experts_kernel, descriptor


def hopper_experts(
    x: torch.Tensor, weight: torch.Tensor, pairs: SortedPairs, top_k: int, gated: bool, plan: HopperExpertPlan
) -> torch.Tensor:
    """The product of each pair with its expert's weight: [pairs, outputs].

    Args:
        x: gated: [num_tokens, size]; else [pairs, size] in the order of `pairs.order`. See `fits`.
        weight: [num_experts, outputs, size]; gated: [num_experts, 2 * outputs, size], the gate first.
        pairs: cut into blocks of `plan.tokens`.
        gated: return silu(gate) * up in the order of `pairs.order`; else the products by pair.
    """
    kernel, descriptor = _hopper()
    num_experts, outputs, size = weight.shape
    of_expert, of_row, _ = weight.stride()
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    if gated:
        outputs, units = outputs // 2, plan.rows // 2
        shape, strides = (num_experts, 2, outputs, size), (of_expert, outputs * of_row, of_row, 1)
        box = (1, 2, units, _COLUMNS)
        rows_of_x: Any = x
    else:
        units = plan.rows
        shape, strides, box = (num_experts, outputs, size), (of_expert, of_row, 1), (1, units, _COLUMNS)
        rows_of_x = descriptor(x.data_ptr(), x.dtype, (len(x), size), (x.stride(0), 1), (plan.tokens, _COLUMNS))
    y = torch.empty((len(pairs.order), outputs), dtype=x.dtype, device=x.device)
    pdl = has_dependent_launch(x.device)
    kernel[(num_sms(x),)](
        rows_of_x, descriptor(weight.data_ptr(), weight.dtype, shape, strides, box), pairs.order, pairs.blocks,
        pairs.blocks.shape[1], y, outputs, x.stride(0) // 8, TOP_K=top_k, GATED=gated, SIZE=size,
        PIECES=cdiv(outputs, units), TOKENS=plan.tokens, ROWS=plan.rows, SLOTS=plan.slots, LOADERS=_LOADERS[gated],
        REGISTERS=_REGISTERS, LOAD_REGISTERS=_LOAD_REGISTERS[gated], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return y

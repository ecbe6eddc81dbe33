"""Banning tokens by bit masks. Logits are not read: -inf is written where a bit is 0."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.token_bitmask import check_bitmask
from nanovllm.kernels.triton.launch_arguments import adjacent, cdiv

_BLOCK = 4096


@triton.jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=["bitmask", "rows"])
def _apply_token_bitmask_kernel(logits, bitmask, rows, vocab_size, stride, mask_stride, BLOCK: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    word = tl.load(bitmask + mask * mask_stride + column // 32, inside, other=-1)
    banned = ((word >> (column % 32)) & 1) == 0
    infinity = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + column, infinity, inside & banned)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """The op `apply_token_bitmask`. The elements of a row of logits must be side by side."""
    check_bitmask(logits, bitmask, rows)
    num_masks, vocab_size = len(rows), logits.shape[1]
    if not num_masks:
        return
    bitmask = adjacent(bitmask)
    _apply_token_bitmask_kernel[(num_masks, cdiv(vocab_size, _BLOCK))](
        logits, bitmask, rows.contiguous(), vocab_size, logits.stride(0), bitmask.stride(0), _BLOCK, num_warps=4
    )

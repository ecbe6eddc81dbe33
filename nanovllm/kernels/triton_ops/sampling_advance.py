"""After sampling: every row of the decode state moves on by one token, in one small launch of a captured step."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton_ops._launch import cdiv

_ROWS = 128


@triton.jit(do_not_specialize=["n", "stride", "table_stride", "columns"])
def _advance_kernel(
    tokens, ints, context_lens, block_table, last_tokens, n, stride, table_stride, columns,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    ints += row
    token = tl.load(tokens + row, inside)
    position = tl.load(ints + stride, inside, other=0)
    draw = tl.load(ints + 3 * stride, inside)
    slot = tl.load(ints + 5 * stride, inside)
    active = tl.load(ints + 6 * stride, inside, other=0)
    context_len = tl.load(context_lens + row, inside)
    position += active
    column = tl.minimum(position // BLOCK_SIZE, columns - 1)
    block = tl.load(block_table + row.to(tl.int64) * table_stride + column, inside, other=0).to(tl.int64)
    tl.store(last_tokens + slot, token, inside)
    tl.store(ints, token, inside)
    tl.store(ints + stride, position, inside)
    tl.store(ints + 2 * stride, block * BLOCK_SIZE + position % BLOCK_SIZE, inside)
    tl.store(ints + 3 * stride, draw + active, inside)
    tl.store(context_lens + row, context_len + active.to(tl.int32), inside)


def advance_rows(
    tokens: torch.Tensor,
    ints: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
) -> None:
    """As `engine.decode_state.advance_rows`; `tokens` may be the first row of `ints`."""
    n = len(tokens)
    assert tokens.is_contiguous() and ints.stride(1) == context_lens.stride(0) == block_table.stride(1) == 1
    _advance_kernel[(cdiv(n, _ROWS),)](
        tokens, ints, context_lens, block_table, last_tokens, n, ints.stride(0), block_table.stride(0), block_table.shape[1],
        block_size, _ROWS, num_warps=4,
    )  # fmt: skip

"""After sampling: every row of the decode state moves on by one token, in one small launch of a captured step."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.triton.early_start import launched_early

_ROWS = 512


@triton.jit(do_not_specialize=["n", "stride", "table_stride", "columns", "host_stride"])
def _advance_kernel(
    tokens, ints, context_lens, block_table, last_tokens, host_tokens, count,
    n, stride, table_stride, columns, host_stride,
    BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    # One program, since it counts the steps: another one might read the count after it was raised.
    step = tl.zeros([], tl.int64)
    if DEPTH:
        step = tl.load(count)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < n
        token = tl.load(tokens + row, inside)
        position = tl.load(ints + stride + row, inside, other=0)
        draw = tl.load(ints + 3 * stride + row, inside)
        slot = tl.load(ints + 5 * stride + row, inside)
        active = tl.load(ints + 6 * stride + row, inside, other=0)
        context_len = tl.load(context_lens + row, inside)
        position += active
        column = tl.minimum(position // BLOCK_SIZE, columns - 1)
        block = tl.load(block_table + row.to(tl.int64) * table_stride + column, inside, other=0).to(tl.int64)
        if DEPTH:
            tl.store(host_tokens + step % DEPTH * host_stride + row, token, inside)  # first: it has the longest way
        tl.store(last_tokens + slot, token, inside)
        tl.store(ints + row, token, inside)
        tl.store(ints + stride + row, position, inside)
        tl.store(ints + 2 * stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE, inside)
        tl.store(ints + 3 * stride + row, draw + active, inside)
        tl.store(context_lens + row, context_len + active.to(tl.int32), inside)
    if DEPTH:
        tl.debug_barrier()  # so might another warp
        tl.store(count, step + 1)


def advance_rows(
    tokens: torch.Tensor, ints: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor,
    last_tokens: torch.Tensor, block_size: int, host_tokens: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """As `engine.fast.decode_rows.advance_rows`; `tokens` may be the first row of `ints`, `host_tokens` pinned memory
    of the host."""
    assert tokens.is_contiguous() and ints.stride(1) == context_lens.stride(0) == block_table.stride(1) == 1
    depth = host_stride = 0
    if host_tokens is None:
        host_tokens = count = tokens
    else:
        depth, host_stride = len(host_tokens), host_tokens.stride(0)
    early = launched_early(ints, len(tokens))
    _advance_kernel[(1,)](
        tokens, ints, context_lens, block_table, last_tokens, host_tokens, count,
        len(tokens), ints.stride(0), block_table.stride(0), block_table.shape[1], host_stride,
        block_size, depth, _ROWS, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip

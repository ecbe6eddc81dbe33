"""The rows of the decode state: their fields, the layout of a row update, and the reference that advances rows.

A row update is a row's complete state in words of 64 bits, so that all updates of a step are one tensor [n, num_words]:

    word 0        the row's number
    words 1-7     the int64 fields
    words 8-10    the int32 fields, two a word
    from 11 on    the block table, two blocks a word
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanovllm.engine.kv_cache import kv_slot


class Int64:
    """The int64 fields, by index. `kernels/triton/sampling/advance.py` has these numbers too."""

    TOKEN, POSITION, KV_SLOT, DRAW, SEED, SEQ_SLOT, ACTIVE, COUNT = range(8)


class Int32:
    """The int32 fields, by index. The last three are float32."""

    CONTEXT_LEN, TOP_K, TEMPERATURE, TOP_P, MIN_P, COUNT = range(6)


_FIRST_INT32 = 1 + Int64.COUNT
_FIRST_BLOCK = _FIRST_INT32 + (Int32.COUNT + 1) // 2


def padding_row(padding_block: int, block_size: int, padding_seq_slot: int) -> tuple[np.ndarray, np.ndarray]:
    """The int64 and the int32 fields of a row without a sequence. Temperature 0 is the cheapest to sample with."""
    int64, int32 = np.zeros(Int64.COUNT, np.int64), np.zeros(Int32.COUNT, np.int32)
    int64[Int64.KV_SLOT] = kv_slot(padding_block, 0, block_size)
    int64[Int64.SEQ_SLOT] = padding_seq_slot
    int32[Int32.CONTEXT_LEN] = 1
    int32.view(np.float32)[Int32.TOP_P] = 1
    return int64, int32


def num_update_words(num_blocks: int) -> int:
    """Words of a row update with `num_blocks` blocks."""
    return _FIRST_BLOCK + (num_blocks + 1) // 2


def update_parts(updates: Any, int32: Any) -> tuple[Any, Any, Any, Any]:
    """Views of row updates [n, num_words]: numbers [n], int64 fields [n, 7], int32 fields [n, 6], blocks [n, even].

    updates: a tensor or an array. int32: the type of its library.
    """
    return (
        updates[:, 0],
        updates[:, 1:_FIRST_INT32],
        updates[:, _FIRST_INT32:_FIRST_BLOCK].view(int32),
        updates[:, _FIRST_BLOCK:].view(int32),
    )


def advance_rows(
    tokens: torch.Tensor, ints: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor,
    last_tokens: torch.Tensor, block_size: int, host_tokens: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Move rows on by one token, in place; the reference of `kernels.triton.sampling.advance`.

    Args:
        tokens: [n] int64, what was sampled.
        ints: [7, n] int64: each row's token, its position and its kv_slot; the position of the next draw; seed;
            seq_slot; and 1, or 0 for padding, whose position stays.
        context_lens: [n] int32.
        block_table: [n, max_blocks] int32. Where the next token needs a block that the table does not have yet, the
            kv_slot is wrong until the host has sent it.
        last_tokens: [max_num_seqs + 1] int64, by seq_slot.
        host_tokens, count: [depth, max_num_seqs] and [1] int64, both or none: row count % depth takes the tokens, and
            count grows by one. See `TokenRing`; the reference needs both on one device.
    """
    views: list[Any] = [tokens, ints, context_lens, block_table, last_tokens, host_tokens, count]
    on_host = ints.device.type == "cpu"
    if on_host:  # NumPy's small operations take a tenth of PyTorch's time
        views = [t if t is None else t.numpy() for t in views]
    new, fields, lens, table, last, ring, cell = views
    active = fields[Int64.ACTIVE]
    last[fields[Int64.SEQ_SLOT]] = new
    fields[Int64.TOKEN] = new
    fields[Int64.POSITION] += active
    fields[Int64.DRAW] += active
    lens += active
    position = fields[Int64.POSITION]
    column, last_column = position // block_size, table.shape[1] - 1
    column = np.minimum(column, last_column) if on_host else column.clip(max=last_column)
    block = table[np.arange(len(table)), column] if on_host else table.gather(1, column[:, None])[:, 0]
    fields[Int64.KV_SLOT] = kv_slot(block, position, block_size)
    if ring is not None and cell is not None:
        ring[cell % len(ring), : len(new)] = new
        cell += 1

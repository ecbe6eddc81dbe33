"""Inputs, cost and checks of the ops that take `SharedPrefixes`."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kernels.op.inputs import Cost, Tensors, nbytes
from nanovllm.kernels.ops.attention_inputs import cache_of
from nanovllm.kernels.ops.checks import check_attention_values, values_checked
from nanovllm.kernels.ops.paged_kv import PagedKV, SharedPrefixes

SHARED_ARGUMENTS = {
    "groups": "int32[num_groups, 3]",
    "group_rows": "int32[num_seqs]",
    "shared_lens": "int32[num_seqs]",
}


def shared_inputs(
    t: Tensors, num_seqs: int, num_groups: int, shared: int, least: int, most: int, num_heads: int, num_kv_heads: int,
    head_dim: int, block_size: int,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `attention_decode_shared`. Blocks are shuffled, and slots that no sequence uses are NaN.

    The first group shares `shared` blocks, the next one less, and so on. Every fifth sequence is in no group. Each
    sequence has `least` to `most` tokens of its own.
    """
    of_row = [-1 if i % 5 == 4 else i % max(1, num_groups) for i in range(num_seqs)] if num_groups else [-1] * num_seqs
    members = [[i for i, g in enumerate(of_row) if g == group] for group in range(num_groups)]
    blocks = [max(1, shared - group) if len(rows) > 1 else 0 for group, rows in enumerate(members)]
    shared_lens = torch.tensor([blocks[g] * block_size if g >= 0 else 0 for g in of_row], dtype=torch.int32)
    lens = shared_lens + t.integers(least, most + 1, num_seqs).cpu().int()
    longest = max(shared_lens.tolist(), default=0) + most  # whatever is drawn, so that shapes follow from arguments
    width = -(-longest // block_size)
    order = t.permutation(num_seqs * width + 1, torch.int32).cpu()
    table = order[: num_seqs * width].view(num_seqs, width).clone()
    groups, group_rows = torch.zeros(num_groups, 3, dtype=torch.int32), torch.full((num_seqs,), -1, dtype=torch.int32)
    place = 0
    for group, rows in enumerate(members):
        if blocks[group]:
            group_rows[place : place + len(rows)] = torch.tensor(rows)
            groups[group] = torch.tensor([place, len(rows), blocks[group] * block_size])
            table[rows, : blocks[group]] = table[rows[0], : blocks[group]]
            place += len(rows)
    cache = cache_of(t, table, lens, num_kv_heads, head_dim, block_size)
    given = {"groups": groups, "group_rows": group_rows, "shared_lens": shared_lens}
    return {
        "q": t.normal(num_seqs, num_heads, head_dim),
        **cache,
        **{name: x.to(t.device) for name, x in given.items()},
        "max_context_len": longest,
        "scale": head_dim**-0.5,
    }


def shared_cost(
    q, k_cache, v_cache, block_table, context_lens, max_context_len, groups, group_rows, shared_lens, scale,
    window=None, **_
) -> Cost:  # fmt: skip
    """What is shared is read once a group; with a window nothing counts as shared."""
    num_heads, head_dim = q.shape[1:]
    attended = context_lens if window is None else context_lens.clamp_max(window)
    tokens = int(attended.sum())
    read = tokens if window is not None else tokens - int(shared_lens.sum()) + int(groups[:, 2].sum())
    per_token = 2 * k_cache.shape[2] * head_dim * k_cache.element_size()
    return Cost(2 * nbytes(q) + read * per_token, 4 * tokens * num_heads * head_dim)


def check_shared(kv: PagedKV, shared: SharedPrefixes, positions: int | None = None) -> None:
    """ValueError, naming the argument, for groups of the wrong shape or dtype, or that do not fit the lengths and
    blocks.

    positions: as in `check_attention_values`, which this calls too.
    """
    groups = shared.groups
    if groups.dtype != torch.int32 or groups.dim() != 2 or groups.shape[1] != 3 or not groups.is_contiguous():
        raise ValueError(f"groups: expected contiguous int32 [num_groups, 3], got {groups.dtype} {list(groups.shape)}")
    for name, x in (("group_rows", shared.group_rows), ("shared_lens", shared.shared_lens)):
        if x.dtype != torch.int32 or x.shape != (kv.num_seqs,) or not x.is_contiguous():
            raise ValueError(f"{name}: expected contiguous int32 [{kv.num_seqs}], got {x.dtype} {list(x.shape)}")
    if values_checked(groups.device):
        check_attention_values(kv, positions=positions)
        _check_groups(kv, shared)


def _check_groups(kv: PagedKV, shared: SharedPrefixes) -> None:
    """ValueError where groups, lengths and blocks do not fit together. Waits for the device."""
    table, lens, rows = (x.tolist() for x in (kv.block_table, kv.context_lens, shared.group_rows))
    block_size = kv.block_size
    found: dict[int, int] = {}
    for group, (first, count, tokens) in enumerate(shared.groups.tolist()):
        if not tokens or not count:
            continue
        if tokens < 0 or tokens % block_size:
            raise ValueError(f"groups: group {group} shares {tokens} tokens, expected a multiple of {block_size}")
        if first < 0 or count < 0 or first + count > len(rows):
            raise ValueError(
                f"groups: group {group} has rows {first} to {first + count - 1} of {len(rows)} in group_rows"
            )
        blocks = tokens // block_size
        for row in rows[first : first + count]:
            if not 0 <= row < len(lens) or row in found:
                raise ValueError(
                    f"group_rows: expected each of 0 to {len(lens) - 1} once at most, got {row} in group {group}"
                )
            found[row] = tokens
            if tokens >= lens[row]:
                raise ValueError(f"groups: group {group} shares {tokens} tokens, but sequence {row} has {lens[row]}")
            if table[row][:blocks] != table[rows[first]][:blocks]:
                raise ValueError(f"groups: sequence {row} has other blocks than the first of group {group}")
    for row, tokens in enumerate(shared.shared_lens.tolist()):
        if tokens != found.get(row, 0):
            raise ValueError(
                f"shared_lens: sequence {row} shares {tokens} tokens, expected {found.get(row, 0)} as its group"
            )

"""Triton's attention into a tensor that the caller gives: the same bits, and nothing written beside it."""

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.triton.attention.cases import (
    attention_decode,
    attention_prefill,
    int32,
    qk_norm_rope_attention,
)
from tests.kernels.triton.common import DEVICE, GPU

pytestmark = pytest.mark.triton

DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter cannot multiply bfloat16 matrices
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16


def call(name, out=None):
    """The op's result for three sequences, one query of each, or for runs of 2, 1 and 5; caches anew each time."""
    g = torch.Generator().manual_seed(1)
    tokens = 8 if name == "prefill" else 3
    q, k, v = (torch.randn(tokens, h, DIM, generator=g).to(DEVICE, DTYPE) for h in (HEADS, KV_HEADS, KV_HEADS))
    caches = [torch.randn(9, BLOCK, KV_HEADS, DIM, generator=g).to(DEVICE, DTYPE) for _ in range(2)]
    paged = *caches, torch.randperm(9, generator=g).view(3, 3).int().to(DEVICE), int32([20, 1, 33]), 48
    if name == "prefill":
        return attention_prefill(q, *paged, int32([0, 2, 3, 8]), 5, 0.125, out=out)
    if name == "decode":
        return attention_decode(q, *paged, 0.125, out=out)
    return qk_norm_rope_attention(q, k, v, torch.randn(48, DIM, generator=g).to(DEVICE), *paged, 0.125, out=out)


@pytest.mark.parametrize("name", ["decode", "fused", "prefill"])
def test_it_takes_the_result_and_nothing_else_changes(name):
    expected = call(name)
    n = len(expected)
    around = torch.full((n + 5, HEADS, DIM), 7.0, dtype=DTYPE, device=DEVICE)
    got = call(name, around[3 : 3 + n])
    assert got.data_ptr() == around[3:].data_ptr() and torch.equal(got, expected)
    assert (around[:3] == 7).all() and (around[3 + n :] == 7).all()
    transposed = got.transpose(1, 2).contiguous().transpose(1, 2)
    for wrong in (got.float(), torch.cat((got, got[:1])), transposed):
        with pytest.raises(ValueError, match=r"^out: expected contiguous \[\d, 4, 64\] .*, as q, not \["):
            call(name, wrong)

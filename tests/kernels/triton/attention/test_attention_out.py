"""Triton's attention into a tensor that the caller gives: the same bits, nothing beside them, and what such a tensor
must be.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

from nanovllm.kernels.triton.attention import decode, prefill
from tests.interpreter import check_interpreted
from tests.kernels.flat import flat

attention_decode = flat("attention_decode", decode.attention_decode)
qk_norm_rope_attention = flat("qk_norm_rope_attention", decode.qk_norm_rope_attention)
attention_prefill = flat("attention_prefill", prefill.attention_prefill)

DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter cannot multiply bfloat16 matrices
LENS, HEADS, KV_HEADS, DIM, BLOCK = [20, 1, 33], 4, 2, 64, 16


def call(name, out=None):
    """The op's result for three sequences, one query of each, or for the runs of 2, 1 and 5; caches anew each time."""
    g = torch.Generator().manual_seed(1)
    tokens = 8 if name == "prefill" else 3
    q, k, v = (torch.randn(tokens, h, DIM, generator=g).to(DEVICE, DTYPE) for h in (HEADS, KV_HEADS, KV_HEADS))
    caches = [torch.randn(9, BLOCK, KV_HEADS, DIM, generator=g).to(DEVICE, DTYPE) for _ in range(2)]
    table = torch.randperm(9, generator=g).view(3, 3).int().to(DEVICE)
    lens = torch.tensor(LENS, dtype=torch.int32, device=DEVICE)
    if name == "prefill":
        starts = torch.tensor([0, 2, 3, 8], dtype=torch.int32, device=DEVICE)
        return attention_prefill(q, *caches, table, lens, 48, starts, 5, 0.125, out=out)
    if name == "decode":
        return attention_decode(q, *caches, table, lens, 48, 0.125, out=out)
    angles = torch.randn(48, DIM, generator=g).to(DEVICE)
    return qk_norm_rope_attention(q, k, v, angles, *caches, table, lens, 48, 0.125, out=out)


NAMES = ("decode", "fused", "prefill")


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_the_result_and_nothing_else_changes(name):
    expected = call(name)
    n = len(expected)
    around = torch.full((n + 5, HEADS, DIM), 7.0, dtype=DTYPE, device=DEVICE)
    got = call(name, around[3 : 3 + n])
    assert got.data_ptr() == around[3:].data_ptr() and torch.equal(got, expected)
    assert (around[:3] == 7).all() and (around[3 + n :] == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_it_must_be(name):
    shape = call(name).shape
    for wrong in (
        torch.empty(shape, dtype=torch.float32, device=DEVICE),
        torch.empty(len(call(name)) + 1, HEADS, DIM, dtype=DTYPE, device=DEVICE),
        torch.empty(shape[0], DIM, HEADS, dtype=DTYPE, device=DEVICE).transpose(1, 2),
    ):
        with pytest.raises(ValueError, match=r"^out: expected contiguous \[\d, 4, 64\] .*, as q, not \["):
            call(name, wrong)


def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
for _name in [name for name in globals() if name.startswith("test_")]:
    if (_name == "test_in_the_interpreter") is (GPU or INTERPRETED):
        del globals()[_name]

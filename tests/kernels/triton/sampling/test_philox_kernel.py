"""Triton draws the random numbers of the op `sample` to the bit."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from nanovllm.kernels.ops.sample import philox, uniform
from tests.kernels.triton.common import DEVICE

pytestmark = pytest.mark.triton


@triton.jit
def _draw(seeds, positions, words, uniforms, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.uint32)
    zero = columns.to(tl.uint32) * 0
    word, _, _, _ = tl.philox(tl.load(seeds + row), columns.to(tl.uint32), zero + position, zero, zero)
    u = tl.minimum(word.to(tl.float32) + 0.5, 4294967040.0) * 2.3283064365386963e-10
    tl.store(words + row * vocab + columns, word.to(tl.int64), mask=columns < vocab)
    tl.store(uniforms + row * vocab + columns, u, mask=columns < vocab)


def test_words_and_uniforms():
    vocab = 1000
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, 1 << 32, 42], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 40000, 2**31, 2**32 - 1, 7, 151935], device=DEVICE)
    words = torch.empty(len(seeds), vocab, dtype=torch.int64, device=DEVICE)
    uniforms = torch.empty(len(seeds), vocab, device=DEVICE)
    _draw[(len(seeds),)](seeds, positions, words, uniforms, vocab, BLOCK=1024)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    ours = philox(torch.arange(vocab, device=DEVICE)[None], positions[:, None], zero, zero, seeds[:, None])[0]
    assert torch.equal(words, ours)
    assert torch.equal(uniforms.view(torch.int32), uniform(ours).view(torch.int32))

"""The reference of `apply_token_bitmask` against bits unpacked by NumPy."""

import numpy as np
import pytest
import torch

from nanovllm.kernels import apply_token_bitmask


@pytest.mark.parametrize("vocab_size", [31, 32, 100])
def test_banned_tokens_become_minus_infinity_and_nothing_else_changes(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, vocab_size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (2, 4), generator=generator).int()
    expected = logits.clone()
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    for i, row in enumerate((4, 1)):
        expected[row][torch.from_numpy(bits[i] == 0)] = -torch.inf
    assert apply_token_bitmask(logits, bitmask, torch.tensor([4, 1])) is None
    assert torch.equal(logits, expected) and logits.isinf().any()


def test_masks_with_too_few_bits_are_refused():
    with pytest.raises(ValueError, match="1 words have 32 bits; expected one for each of the 33 columns"):
        apply_token_bitmask(torch.zeros(2, 33), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]))

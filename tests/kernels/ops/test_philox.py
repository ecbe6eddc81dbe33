"""The random numbers of the op `sample`: Philox, uniform and exponential variates."""

import math

import numpy as np
import pytest
import torch

from nanovllm.kernels.ops.sample import BLOCK, BLOCK_COUNTERS, exponentials, philox, uniform
from tests.devices import DEVICES


@pytest.mark.parametrize(
    "rounds, counter, key, words",
    [  # kat_vectors of Random123, "philox4x32 7" and "philox4x32 10"
        (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_philox_gives_the_published_words(rounds, counter, key, words, device):
    counter = [torch.tensor([int(w, 16)], device=device) for w in counter.split()]
    low, high = (int(w, 16) for w in key.split())
    signed = np.array([high << 32 | low], dtype=np.uint64).view(np.int64)
    got = philox(*counter, torch.from_numpy(signed).to(device), rounds)
    assert [f"{w.item():08x}" for w in got] == words.split()


def test_uniform_is_inside_the_open_interval_and_as_documented():
    words = torch.tensor([0, 1, 2, 3, 2**24 + 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1])
    words = torch.cat(
        [words, torch.arange(4096), torch.randint(2**32, (100_000,), generator=torch.Generator().manual_seed(0))]
    )
    u = uniform(words)
    assert u.dtype == torch.float32 and u.min() == 2.0**-33 and u.max() == 1 - 2.0**-24
    numpy = np.minimum(words.numpy().astype(np.uint32).astype(np.float32) + np.float32(0.5), np.float32(2**32 - 256))
    assert np.array_equal(u.numpy(), numpy * np.float32(2.0**-32))
    small = torch.arange(2**16)  # no bit is lost
    assert torch.equal(uniform(small).double() * 2.0**32, small + 0.5)


@pytest.mark.parametrize("first_counter", [0, BLOCK_COUNTERS])
def test_variates_are_exponential(first_counter):
    values = (
        exponentials(torch.arange(100), torch.arange(100) * 7, torch.arange(5000)[None], first_counter)
        .double()
        .flatten()
    )
    assert values.isfinite().all() and values.min() > 0
    cdf = -torch.expm1(-values.sort().values)
    ranks = (torch.arange(len(cdf)) + 0.5) / len(cdf)
    # Kolmogorov-Smirnov; sqrt(n) * distance exceeds 2.6 once in a million.
    assert (cdf - ranks).abs().max() * math.sqrt(len(cdf)) < 2.6


def test_the_extremes_of_random_words_are_finite():
    values = -torch.log1p(-uniform(torch.tensor([0, 2**32 - 1])))
    assert values.tolist() == pytest.approx([2.0**-33, 24 * math.log(2)]) and values.log().isfinite().all()


def test_which_word_an_index_gets():
    seeds, positions = torch.tensor([5, -7]), torch.tensor([3, 2**31])
    zero = torch.tensor(0)
    for first in (0, BLOCK_COUNTERS):
        values = exponentials(seeds, positions, torch.arange(3000)[None], first)
        some = exponentials(seeds, positions, torch.tensor([[700, 2, 2999], [1024, 0, 5]]), first)
        assert torch.equal(some, torch.stack([values[0, [700, 2, 2999]], values[1, [1024, 0, 5]]]))
        for row, index in ((0, 0), (0, 255), (1, 256), (1, 1023), (0, 1024), (1, 2999)):
            counter = torch.tensor(first + index // 1024 * 256 + index % 256)
            word = philox(counter, positions[row], zero, zero, seeds[row])[index % 1024 // 256]
            assert values[row, index] == -torch.log1p(-uniform(word))


def test_no_counter_serves_a_block_and_a_column():
    largest = 2**31 - 1  # more columns than a row may have
    assert largest // (4 * BLOCK) * BLOCK + BLOCK - 1 < BLOCK_COUNTERS
    assert BLOCK_COUNTERS + largest // BLOCK // 4 + BLOCK < 2**32

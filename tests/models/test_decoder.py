"""Rows: the tokens that need hidden states. Keys and values are stored for every token."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.engine.batch import DeviceBatch
from tests import tiny

LENGTHS = (5, 9, 1)
TOKENS = sum(LENGTHS)


def batch():
    """Three prompts, each in a block of its own."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    slots = torch.cat([16 * i + torch.arange(n) for i, n in enumerate(LENGTHS)])
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    tokens = torch.stack((torch.arange(TOKENS) * 7 % 50, positions, slots))
    return DeviceBatch.from_tensors(tokens, lens, torch.arange(3, dtype=torch.int32)[:, None], 0, starts, max(LENGTHS))


@pytest.mark.parametrize("architecture, layers", [("qwen3", 1), ("llama", 2), ("qwen3", 3)])
def test_rows_are_those_of_all(tmp_path, architecture, layers):
    tiny.save(tmp_path, architecture, seed=3, num_hidden_layers=layers)
    options = dict(num_kvcache_blocks=8, max_model_len=64, kvcache_block_size=16)
    runner = LLM(tmp_path, skip_tokenizer_init=True, device="cpu", **options).engine.runner
    with torch.inference_mode():
        every = runner.paged.hidden(batch())
        caches = [(c.k.clone(), c.v.clone()) for c in runner.paged.caches]
        assert every.shape == (TOKENS, 48)
        for rows in (slice(6), slice(0), [4, 13, 14], [14, 0, 0], []):
            rows = rows if isinstance(rows, slice) else torch.tensor(rows, dtype=torch.int64)
            for cache in runner.paged.caches:
                cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
            torch.testing.assert_close(runner.paged.hidden(batch(), rows), every[rows], rtol=1e-5, atol=1e-5)
            for (k, v), cache in zip(caches, runner.paged.caches):
                for i, n in enumerate(LENGTHS):
                    assert torch.equal(cache.k[i, :n], k[i, :n]) and torch.equal(cache.v[i, :n], v[i, :n])

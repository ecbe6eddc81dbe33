"""Engines of the tiny model in the fixture `directory`, and what they are asked for."""

import random
from unittest.mock import patch

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.sampler import Sampler
from tests import tiny
from tests.devices import DEVICE

BLOCK = 16
VOCAB = len(tiny.tokenizer())


def make(directory, **arguments) -> LLM:
    """A small cache and small steps; `arguments` come before these defaults."""
    defaults = dict(
        device=DEVICE, dtype="float32", kvcache_block_size=BLOCK, num_kvcache_blocks=100, max_model_len=128,
        max_num_seqs=11, max_num_batched_tokens=40, skip_tokenizer_init=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


def random_prompts(lengths, seed=0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def generate(llm, prompts, params) -> list[list[list[int]]]:
    """The tokens of every completion of every prompt; then no block is in use any more."""
    outputs = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    return outputs


def check_logits(llm, reference, prompts) -> None:
    """The logits of every token of the prompts are those of a model of transformers.

    They are noted where they are used, since a CUDA graph that computes them calls nothing.
    """
    seen = []

    def noted(fn, place):
        def call(*args):
            seen.append(args[place].clone())  # a graph's are valid until the next step
            return fn(*args)

        return call

    for prompt in prompts:
        with (
            patch.object(model_runner, "compute_logprobs", noted(model_runner.compute_logprobs, 0)),
            patch.object(Sampler, "__call__", noted(Sampler.__call__, 1)),
        ):
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        with torch.inference_mode():
            want = reference(torch.tensor([prompt], device=DEVICE)).logits[0]
        got = torch.cat(seen)  # those of the prompt's log-probabilities, and the one that is sampled from
        seen.clear()
        assert got.shape == want.shape
        assert (got - want).norm() / want.norm() < 1e-4

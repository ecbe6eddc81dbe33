"""Constrained sequences on every fast path, in a cache that is too small: the grammar holds, and tokens are equal."""

import re

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy
from tests.engine.fast.replayed import lengths_on_the_device
from tests.engine.fast.test_policy import CUDA, POLICIES

PROMPTS = ["hello " * 8, "x", "hello " * 8 + "y", "one two three " * 6, "z" * 30, "hello " * 5]
KINDS = [
    dict(structured_outputs={"regex": "[a-f]{90}"}), dict(), dict(structured_outputs={"regex": "[a-f]{3}"}, n=2),
    dict(allowed_token_ids=[70, 71, 72], top_k=2), dict(), dict(structured_outputs={"regex": "[a-f]{50}"}, logprobs=1),
]  # fmt: skip


def outputs(directory, policy, temperature, **arguments):
    params = [
        SamplingParams(**kind, seed=i, max_tokens=90, temperature=temperature * (i % 4)) for i, kind in enumerate(KINDS)
    ]
    llm = LLM(
        directory, dtype="float32", kvcache_block_size=16, num_kvcache_blocks=9, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=40, fast_policy=policy, **arguments,
    )  # fmt: skip
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.check()
    assert llm.engine.scheduler.num_preemptions
    for output, kind in zip(found, KINDS):
        pattern = kind.get("structured_outputs", {}).get("regex", "")
        for completion in output.outputs:
            assert not pattern or re.fullmatch(pattern, completion.text), completion
    return [[c.token_ids for c in output.outputs] for output in found]


@pytest.fixture(scope="module")
def expected(llama_directory):
    return outputs(llama_directory, FastPolicy.off(), 0.5, device="cpu", async_scheduling=False)


@pytest.mark.parametrize(
    "name", ["none", "device state", "piggybacked prefill", "decode graphs", "prefill graphs", "all"]
)
def test_the_same_tokens(llama_directory, expected, name):
    with lengths_on_the_device() as kernels:
        arguments = dict(device="cpu", kernel_priority=kernels, async_scheduling=True)
        assert outputs(llama_directory, POLICIES[name], 0.5, **arguments) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CUDA))
def test_cuda_graphs(llama_directory, name):
    outputs(llama_directory, CUDA[name], 0.5, device="cuda")

"""Every fast path by itself, all and none of them: the same tokens, whatever the requests ask for."""

import random
import re

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from tests.engine.fast.replayed import ReplayedFunctions, lengths_on_the_device

SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=3)
SMALL = dict(min_shared_rows=2, min_saved_bytes=1, piggyback=SIZES, prefill_sizes=(4, 8, 24, 40))
REPLAYED = dict(graph_backend=ReplayedFunctions, capture_sampling=True, padding=True, cuda_graphs=True)
POLICIES = {
    "none": FastPolicy.off(),
    "device state": FastPolicy.off(device_state=True),
    "padding": FastPolicy.off(padding=True, **SMALL),
    "prefix groups": FastPolicy.off(device_state=True, prefix_groups=True, **SMALL),
    "piggybacked prefill": FastPolicy.off(device_state=True, piggyback_prefill=True, **SMALL),
    "warm-up": FastPolicy.off(warm_up=True),
    "mask thread": FastPolicy.off(device_state=True, mask_thread=True),
    "blocks ahead": FastPolicy.off(reserve_tokens_ahead=32),
    "decode graphs": FastPolicy.off(device_state=True, **SMALL, **REPLAYED),
    "prefill graphs": FastPolicy.off(prefill_graphs=True, **SMALL, **REPLAYED),
    "all": FastPolicy(piggyback_prefill=True, prefill_graphs=True, mask_thread=True, warm_up=True, **SMALL, **REPLAYED),
}
CUDA = {
    "none": FastPolicy.off(),
    "decode graphs": FastPolicy.off(device_state=True, padding=True, cuda_graphs=True, **SMALL),
    "prefill graphs": FastPolicy.off(prefill_graphs=True, padding=True, cuda_graphs=True, **SMALL),
    "all": FastPolicy(piggyback_prefill=True, prefill_graphs=True, **SMALL),
}


TEXT = "[a-f]{%d}"
LOADS = [
    [dict(temperature=0), dict(temperature=0.9), dict(temperature=0.8, top_k=20), dict(temperature=0, n=2)],
    [
        dict(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2), dict(temperature=0.8, logprobs=1),
        dict(logit_bias={7: 4.0, 9: -100}, bad_words=["e", "th", "a b"], top_k=30, n=2), dict(temperature=0),
        dict(temperature=0, logit_bias={7: 3.0}, min_tokens=5, stop_token_ids=[7, 9]), dict(prompt_logprobs=1),
    ],
    [
        dict(structured_outputs={"regex": TEXT % 50}), dict(), dict(structured_outputs={"regex": TEXT % 3}, n=2),
        dict(allowed_token_ids=[70, 71, 72], top_k=2), dict(structured_outputs={"regex": TEXT % 90}, logprobs=1),
    ],
]  # fmt: skip
"""Parameters of batches: what the device samples by itself, what the host takes part in, and constraints."""


def tokens(directory, policy, **arguments):
    """Of each load with shared prefixes, in chunks, in a cache that is too small for it."""
    rng = random.Random(0)
    prompts = [[rng.randrange(331) for _ in range(n)] for n in (1, 5, 40, 70, 16, 33, 64)]
    prompts += [prompts[3][:50] + [7], prompts[3][:66]]
    llm = LLM(
        directory, dtype="float32", kvcache_block_size=16, num_kvcache_blocks=14, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=40, fast_policy=policy, **arguments,
    )  # fmt: skip
    found = []
    for kinds in LOADS:
        params = [
            SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=6 + 3 * i, ignore_eos=kinds is not LOADS[2])
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check()
        for output, given in zip(outputs, params):
            if given.structured_outputs is not None:
                whole = given.structured_outputs.regex
                assert all(
                    re.fullmatch(whole if c.finish_reason == "stop" else "[a-f]*", c.text) for c in output.outputs
                )
        prompt_rows = [[row and list(row) for row in o.prompt_logprobs or ()] for o in outputs]
        found.append(([[c.token_ids for c in o.outputs] for o in outputs], prompt_rows))
    assert llm.engine.scheduler.num_preemptions
    return found


@pytest.fixture(scope="module")
def expected(directory):
    return tokens(directory, POLICIES["none"], device="cpu", async_scheduling=False)


@pytest.mark.parametrize("name", POLICIES)
def test_each_path_alone_and_all_together_give_the_same_tokens(directory, expected, name):
    with lengths_on_the_device() as kernels:
        arguments = dict(device="cpu", kernel_priority=kernels, async_scheduling=True)
        assert tokens(directory, POLICIES[name], **arguments) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CUDA if name != "none"])
def test_cuda_graphs_give_the_same_tokens(directory, name):
    assert torch.cuda.is_available()
    got, plain = (tokens(directory, CUDA[policy], device="cuda") for policy in (name, "none"))
    assert got[:2] == plain[:2]


def test_a_policy_of_another_kind_is_refused(directory):
    with pytest.raises(
        TypeError, match="fast_policy={'padding': True}: must be a nanovllm.engine.fast.policy.FastPolicy"
    ):
        LLM(directory, device="cpu", skip_tokenizer_init=True, fast_policy={"padding": True})

"""Every fast path by itself, all and none of them: the same tokens."""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from tests.engine.fast.replayed import ReplayedFunctions, lengths_on_the_device

SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_tokens_at_once=4, max_pieces=3)
SMALL = dict(min_shared_rows=2, min_saved_bytes=1, piggyback=SIZES, prefill_sizes=(4, 8, 24, 40))
REPLAYED = dict(graph_backend=ReplayedFunctions, capture_sampling=True, padding=True, cuda_graphs=True)
POLICIES = {
    "none": FastPolicy.off(),
    "device state": FastPolicy.off(device_state=True),
    "padding": FastPolicy.off(padding=True, **SMALL),
    "prefix groups": FastPolicy.off(device_state=True, prefix_groups=True, **SMALL),
    "piggybacked prefill": FastPolicy.off(device_state=True, piggyback_prefill=True, **SMALL),
    "warm-up": FastPolicy.off(warm_up=True),
    "blocks ahead": FastPolicy.off(reserve_tokens_ahead=32),
    "decode graphs": FastPolicy.off(device_state=True, **SMALL, **REPLAYED),
    "prefill graphs": FastPolicy.off(prefill_graphs=True, **SMALL, **REPLAYED),
    "all": FastPolicy(piggyback_prefill=True, prefill_graphs=True, warm_up=True, **SMALL, **REPLAYED),
}
CUDA = {
    "none": FastPolicy.off(),
    "decode graphs": FastPolicy.off(device_state=True, padding=True, cuda_graphs=True, **SMALL),
    "prefill graphs": FastPolicy.off(prefill_graphs=True, padding=True, cuda_graphs=True, **SMALL),
    "all": FastPolicy(piggyback_prefill=True, prefill_graphs=True, **SMALL),
}


def tokens(directory, policy, **arguments):
    """Of greedy and seeded requests with shared prefixes, in chunks, in a cache that is too small for them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(331) for _ in range(n)] for n in (1, 5, 40, 70, 16, 33, 64)]
    prompts += [prompts[3][:50] + [7], prompts[3][:66]]
    kinds = [dict(temperature=0), dict(temperature=0.9), dict(temperature=0.8, top_k=20), dict(temperature=0, n=2)]
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=8 + 4 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm = LLM(
        directory, dtype="float32", kvcache_block_size=16, num_kvcache_blocks=14, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=40, skip_tokenizer_init=True, fast_policy=policy, **arguments,
    )  # fmt: skip
    outputs = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    assert llm.engine.scheduler.num_preemptions
    return outputs


@pytest.fixture(scope="module")
def expected(directory):
    return tokens(directory, POLICIES["none"], device="cpu")


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_each_path_alone_and_all_together_give_the_same_tokens(directory, expected, name):
    with lengths_on_the_device() as kernels:
        assert tokens(directory, POLICIES[name], device="cpu", kernel_priority=kernels) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CUDA if name != "none"])
def test_cuda_graphs_give_the_same_tokens(directory, name):
    assert torch.cuda.is_available()
    assert tokens(directory, CUDA[name], device="cuda") == tokens(directory, CUDA["none"], device="cuda")


def test_a_policy_of_another_kind_is_refused(directory):
    with pytest.raises(
        TypeError, match="fast_policy={'padding': True}: must be a nanovllm.engine.fast.policy.FastPolicy"
    ):
        LLM(directory, device="cpu", skip_tokenizer_init=True, fast_policy={"padding": True})

"""Decode buckets on any machine; captured against eager steps on a GPU."""

import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.cuda_graphs import DecodeBuckets, batch_buckets, context_buckets
from nanovllm.engine.fast.decode_runner import DecodeRunner
from nanovllm.engine.fast.warm_up import warm_up
from nanovllm.engine.model_runner import ModelRunner, can_capture
from nanovllm.kernels import Kernels, all_ops
from tests import tiny


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 16, 17, 100, 256, 511, 512, 513, 1000])
def test_every_batch_size_has_a_bucket(max_num_seqs):
    sizes = batch_buckets(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    buckets = DecodeBuckets(max_num_seqs, 4096)
    for n in range(1, max_num_seqs + 1):
        rows, _ = buckets.fit(n, 1)
        assert n <= rows <= max(n + 31, n * 9 // 8 + 8)


@pytest.mark.parametrize("max_model_len", [1, 100, 512, 513, 4096, 5000])
def test_every_context_length_has_a_bucket(max_model_len):
    lengths = context_buckets(max_model_len)
    assert lengths == sorted(set(lengths)) and lengths[-1] == max_model_len
    buckets = DecodeBuckets(4, max_model_len)
    for length in range(1, max_model_len + 1):
        assert length <= buckets.fit(1, length)[1] <= max(512, 2 * length)


def chosen(**providers):
    return Kernels({op: (all_ops()[op].providers[name], all_ops()[op].native) for op, name in providers.items()})


@pytest.mark.parametrize(
    "provider, captured", [("native", True), ("triton", True), ("flash_attn", True), ("flashinfer", False)]
)
def test_what_the_host_plans_is_not_captured(provider, captured):
    """A capture would record the reference instead, at the largest context length."""
    assert can_capture(chosen(attention_decode=provider)) is captured


@pytest.mark.parametrize(
    "asked, captures, by_context, prefill, width, rides",
    [
        (None, True, False, "triton", 2**14, True),
        (None, True, False, "triton", 2**13, False),  # too few weights
        (None, True, True, "triton", 2**14, False),
        (None, False, False, "triton", 2**14, False),
        (None, True, False, "native", 2**14, False),
        (True, True, False, "native", 2**12, False),  # a capture would fail, when the first prompt rides
        (True, True, False, "triton", 2**12, True),
        (True, False, False, "native", 2**12, True),
        (False, True, False, "triton", 2**14, False),
    ],
)
def test_prompts_ride_where_that_can_be_captured_and_is_worth_it(asked, captures, by_context, prefill, width, rides):
    layer = torch.nn.Linear(width, width, device="meta", dtype=torch.bfloat16)
    runner = SimpleNamespace(
        config=SimpleNamespace(ride_prompts=asked), model=SimpleNamespace(model=SimpleNamespace(layers=[layer]))
    )
    assert ModelRunner._rides(runner, chosen(attention_prefill=prefill), captures, by_context) is rides


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones():
    """All batch sizes from 40 sequences down to one, in bfloat16, as sequences of many lengths end."""
    rng = random.Random(3)
    prompts = [[rng.randrange(151936) for _ in range(rng.randint(1, 600))] for _ in range(40)]
    params = [
        SamplingParams(temperature=t, ignore_eos=True, max_tokens=rng.randint(1, 80), seed=i)
        for i, t in enumerate([0, 0.8] * 20)
    ]
    outputs = []
    for enforce_eager in (False, True):
        llm = LLM(
            "qwen3-0.6b",
            load_format="dummy",
            enforce_eager=enforce_eager,
            capture_prefill=True,  # padded alike without graphs
            max_num_seqs=40,
            max_model_len=1024,
            num_kvcache_blocks=200,
        )
        outputs.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_captured_steps_with_riders_equal_eager_ones(monkeypatch):
    """Two kinds of attention at the same time, in bfloat16, beside 1 to 60 decodes."""
    rng = random.Random(4)
    prompts = [[rng.randrange(151936) for _ in range(rng.randint(1, 600))] for _ in range(60)]
    params = [
        SamplingParams(temperature=0.8, ignore_eos=True, max_tokens=rng.randint(1, 300), seed=i) for i in range(60)
    ]
    rode = []
    launch = DecodeRunner.launch
    monkeypatch.setattr(
        DecodeRunner, "launch", lambda self, step: (rode.append(step.riding is not None), launch(self, step))[1]
    )
    outputs = []
    for enforce_eager in (False, True, False):
        llm = LLM(
            "qwen3-0.6b", load_format="dummy", enforce_eager=enforce_eager, capture_prefill=True, ride_prompts=True, max_num_seqs=64,
            max_model_len=1024, num_kvcache_blocks=300,
        )  # fmt: skip
        outputs.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
        assert sum(rode) > 50 * len(outputs)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("budget", [1, 2, 7, 2048])
def test_the_warm_up_fits_any_budget(budget, tmp_path, monkeypatch):
    """What a GPU engine runs when it starts, here on the CPU; it must leave the padding block's neighbours alone."""
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)  # what it names may need a GPU
    tiny.save(tmp_path)
    llm = LLM(
        tmp_path,
        device="cpu",
        skip_tokenizer_init=True,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
        num_kvcache_blocks=8,
    )
    runner = llm.engine.runner
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with torch.inference_mode():
        warm_up(runner)
    assert all(not cache.k[:-1].any() and not cache.v[:-1].any() for cache in runner.caches)
    assert (budget < 3) != bool(runner.caches[0].k[-1].any())

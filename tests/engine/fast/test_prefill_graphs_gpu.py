"""Captured steps with prompts of a real model against eager ones, on a GPU."""

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.prefill_graphs import PrefillRunner
from tests.engine.fast.test_prefill_graphs import generate

pytestmark = pytest.mark.gpu


def load(seed, count=40):
    """Prompts of 1 to 600 tokens and their parameters, half of them greedy, that end one after the other."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(151936) for _ in range(rng.randint(1, 600))] for _ in range(count)]
    params = [
        SamplingParams(temperature=(0, 0.8)[i % 2], ignore_eos=True, max_tokens=rng.randint(1, 60), seed=i)
        for i in range(count)
    ]
    return prompts, params


def qwen(**arguments):
    defaults = dict(load_format="dummy", max_num_seqs=40, max_model_len=1024, num_kvcache_blocks=120)
    return LLM("qwen3-0.6b", **defaults | arguments)


@pytest.mark.parametrize("budget", [300, 2048])
def test_captured_steps_equal_eager_ones(budget):
    """Mixed steps of every size in bfloat16; eager steps are padded alike, so that all tokens are equal."""
    prompts, params = load(3)
    outputs = []
    for enforce_eager in (False, True):
        llm = qwen(capture_prefill=True, enforce_eager=enforce_eager, max_num_batched_tokens=budget)
        prefill = llm.engine.runner.fast.prefill
        assert len(prefill) == (0 if enforce_eager else len(prefill.buckets))
        got, steps = generate(llm, prompts, params)
        assert any(decodes and runs and bucket for _, decodes, runs, bucket in steps)
        assert any(bucket and bucket.num_tokens == budget for *_, bucket in steps)
        outputs.append(got)
    assert outputs[0] == outputs[1]


def test_captured_logits_and_caches_are_those_of_unpadded_steps():
    """Each step twice, replayed and then unpadded, into the same places of the cache: they agree as bfloat16 does."""
    llm = qwen(capture_prefill=True, max_num_batched_tokens=2048)
    runner = llm.engine.runner
    launch, errors = runner.fast.prefill.launch, []

    def compared(batch):
        got = launch(batch)
        assert got is not None
        got = got.clone()
        caches = [t[:-1] for c in (runner.paged.caches[0], runner.paged.caches[-1]) for t in (c.k, c.v)]
        padded = [cache.clone() for cache in caches]
        want = runner.paged.logits(runner.hidden(batch))[: len(batch.logits_rows)]
        for a, b in [(got, want)] * bool(len(want)) + list(zip(padded, caches)):
            errors.append(float((a.float() - b.float()).norm() / b.float().norm()))
        return got

    runner.fast.prefill.launch = compared
    assert len(llm.generate(*load(4, count=24), use_tqdm=False)) == 24
    assert errors and max(errors) < 0.05


def test_a_captured_step_waits_for_nothing():
    llm = qwen(capture_prefill=True, max_num_batched_tokens=2048)
    runner = llm.engine.runner
    launch, launched = runner.fast.prefill.launch, []

    def watched(batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = launch(batch)
            launched.append(logits is not None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return logits

    runner.fast.prefill.launch = watched
    llm.generate(*load(5, count=8), use_tqdm=False)
    assert launched and all(launched)


def test_many_replays_give_the_same_bits():
    prompts, params = load(6)
    llm = qwen(capture_prefill=True, enable_prefix_caching=False, max_num_batched_tokens=600)
    assert generate(llm, prompts, params) == generate(llm, prompts, params)


def test_a_failed_capture_leaves_a_working_engine(monkeypatch, caplog):
    """A copy to the host in the middle of the model, which no graph can hold."""
    run = PrefillRunner.run_padded

    def waits(self, bucket, logits=None):
        result = run(self, bucket, logits)
        result.sum().item()
        return result

    prompts, params = load(7, count=12)
    want = generate(qwen(), prompts, params)[0]
    monkeypatch.setattr(PrefillRunner, "run_padded", waits)
    llm = qwen(capture_prefill=True)
    assert llm.engine.runner.fast.prefill is None
    assert sum("their capture failed" in record.getMessage() for record in caplog.records) == 1
    assert generate(llm, prompts, params)[0] == want

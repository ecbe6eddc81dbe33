"""Padded steps with prompts: the same tokens as unpadded ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.distributed.group import Group, split_over
from nanovllm.engine.fast.padding import RunsBucket
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.fast.prefill_graphs import PrefillRunner, prefill_buckets
from nanovllm.kernels.testing.memory_guard import MemoryGuard
from tests.engine import small_engine
from tests.engine.fast.replayed import BACKEND, ReplayedFunctions, lengths_on_the_device
from tests.engine.fast.test_decode_state import paged_model
from tests.engine.small_engine import DEVICE, VOCAB, random_prompts

pytestmark = pytest.mark.any_device

USUAL = FastPolicy()
SMALL = FastPolicy(prefill_sizes=(4, 8, 24, 40, 100))
LENGTHS = [1, 2, 15, 16, 17, 31, 48, 90, 3, 64, 5, 33]


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("budget, max_num_seqs", [(1, 1), (7, 5), (64, 64), (65, 512), (4096, 64), (16384, 512)])
def test_every_step_has_the_smallest_bucket_with_room(budget, max_num_seqs):
    buckets = prefill_buckets(budget, max_num_seqs, USUAL.prefill_sizes, USUAL.prefill_seqs)
    assert buckets == sorted(set(buckets)) and buckets[-1].num_tokens == min(budget, 4096)
    runner = PrefillRunner(paged_model(), buckets, USUAL.prefill_sizes[-1])
    for num_tokens in range(1, budget + 1, max(1, budget // 300)):
        for num_seqs in {n for n in (0, 1, 2, 64, 65, 256, 257, max_num_seqs) if n <= min(num_tokens, max_num_seqs)}:
            room = [b for b in buckets if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs]
            assert runner.fit(num_tokens, num_seqs) == (room[0] if room else None)
            assert bool(room) == (num_tokens <= 4096 and num_seqs <= 256)


@pytest.mark.parametrize("budget, largest", [(16384, 16384), (5000, 5000), (4096, 4096), (1000, 1000)])
def test_full_steps_have_a_bucket_if_asked_for_and_only_they(budget, largest):
    buckets = prefill_buckets(budget, 512, USUAL.prefill_sizes, USUAL.prefill_seqs, full=True)
    assert buckets[-2:] == [RunsBucket(largest, 64), RunsBucket(largest, 256)]
    usual = prefill_buckets(budget, 512, USUAL.prefill_sizes, USUAL.prefill_seqs)
    assert [bucket for bucket in buckets if bucket.num_tokens <= 4096] == usual
    runner = PrefillRunner(paged_model(), buckets, USUAL.prefill_sizes[-1])
    for num_tokens in {min(n, budget) for n in (100, 4096, 4097, 4687, 4688, 5000, 15359, 15360, 16000, 16384)}:
        found = runner.fit(num_tokens, 65)
        if num_tokens > 4096:
            assert found == (RunsBucket(largest, 256) if num_tokens >= 15 / 16 * largest else None)
        else:
            size = min(size for size in (*USUAL.prefill_sizes, largest) if size >= num_tokens)
            assert found == RunsBucket(size, min(size, 256))


# ------------------------------------------------------------------------------------------------ whole engines


make = partial(small_engine.make, fast_policy=SMALL, max_model_len=160, max_num_batched_tokens=100)


def prompts_of(lengths, seed=0):
    """Random prompts, and some that begin like the longest."""
    prompts = random_prompts(lengths, seed)
    longest = max(prompts, key=len)
    return [*prompts, longest[:33] + [1, 2, 3], longest[:48], longest[:20] + [5]]


def generate(llm, prompts, params):
    """Token ids of every completion; what each launched step had: (tokens, decodes, runs, bucket or None)."""
    steps = []
    prefill = llm.engine.runner.fast.prefill
    if prefill is not None:
        launch = prefill.launch

        def noted(batch):
            bucket = prefill.fit(batch.num_tokens, max(len(batch.block_table), len(batch.logits_rows)))
            steps.append((batch.num_tokens, batch.num_decodes, len(batch.prefill_query_lens), bucket))
            return launch(batch)

        prefill.launch = noted
    try:
        return small_engine.generate(llm, prompts, params), steps
    finally:
        if prefill is not None:
            del prefill.launch


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(directory):
    return generate(make(directory, async_scheduling=False, capture_prefill=False), prompts_of(LENGTHS), GREEDY)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(async_scheduling=True), id="mixed-async"),
        pytest.param(dict(max_num_batched_tokens=19, max_num_seqs=5, async_scheduling=True), id="chunked-async"),
        pytest.param(dict(num_kvcache_blocks=10), id="preempted"),
        pytest.param(dict(max_num_seqs=1), id="alone"),
    ],
)
def test_greedy_tokens_are_those_of_unpadded_steps(directory, expected, arguments):
    llm = make(directory, capture_prefill=True, **arguments)
    with torch.inference_mode():
        for cache in llm.engine.runner.paged.caches:  # what lies in the padding block must not matter
            cache.k[-1], cache.v[-1] = torch.nan, torch.nan
    got, steps = generate(llm, prompts_of(LENGTHS), GREEDY)
    assert got == expected
    assert any(bucket and bucket.num_tokens > tokens for tokens, _, _, bucket in steps)  # there was padding
    if "max_num_seqs" not in arguments:
        assert any(decodes and runs and bucket for _, decodes, runs, bucket in steps)  # and decodes beside prompts
    if "num_kvcache_blocks" in arguments:
        assert llm.engine.scheduler.num_preemptions > 0
    assert generate(llm, prompts_of(LENGTHS)[::-1], GREEDY)[0] == expected[::-1]  # now with a warm prefix cache


FULL = replace(SMALL, prefill_sizes=(4, 8), prefill_seqs=(5, 11))


def test_full_steps_give_the_same_tokens(directory, expected):
    """Steps of 64 tokens, where the usual sizes end at 8."""
    llm = make(directory, fast_policy=FULL, capture_prefill=True, max_num_batched_tokens=64)
    got, steps = generate(llm, prompts_of(LENGTHS), GREEDY)
    assert got == expected
    full = [step for step in steps if step[0] >= 60]
    assert all(bucket.num_tokens == 64 for *_, bucket in full)
    assert any(decodes and runs for _, decodes, runs, _ in full)
    assert all(bucket is None for tokens, _, _, bucket in steps if 8 < tokens < 60)


@pytest.mark.parametrize("small", [True, False])
def test_full_steps_have_a_bucket_where_the_layers_are_small(directory, small):
    """FLOPs of the layers that are just few enough, or one too many."""
    flops = 2 * 64 * make(directory).engine.runner.model.layer_sizes[0]
    policy = replace(FULL, max_full_step_flops=flops if small else flops - 1)
    prefill = make(
        directory, fast_policy=policy, capture_prefill=True, max_num_batched_tokens=64
    ).engine.runner.fast.prefill
    assert prefill.buckets[-1] == ((64, 11) if small else (8, 8))


def not_captured(directory):
    """Padded steps of an engine that has captured none, on a GPU too."""
    llm = make(directory, fast_policy=FULL, capture_prefill=True, enforce_eager=True, max_num_batched_tokens=64)
    return llm.engine.runner.fast.prefill


class NoMemory(ReplayedFunctions):
    """Has no memory for the first captures, those of the largest steps."""

    def __init__(self, device, failures):
        super().__init__(device)
        self.left = failures

    def capture(self, fn):
        self.left -= 1
        if self.left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().capture(fn)


@pytest.mark.parametrize("failures", [2, 3], ids=["full steps", "others"])
def test_full_steps_that_there_is_no_memory_for_run_eagerly(directory, caplog, failures):
    """One warning for each; for a smaller size it is an error, which the engine reports."""
    prefill = not_captured(directory)
    assert [tuple(bucket) for bucket in prefill.buckets] == [(4, 4), (8, 5), (8, 8), (64, 5), (64, 11)]
    assert len(prefill) == 0
    logits, backend = torch.empty(11, VOCAB, device=DEVICE), NoMemory(torch.device(DEVICE), failures)
    if failures > 2:
        with pytest.raises(torch.OutOfMemoryError), torch.inference_mode():
            prefill.capture(logits, backend)
        return
    with torch.inference_mode():
        prefill.capture(logits, backend)
    assert [tuple(bucket) for bucket in prefill.buckets] == [(4, 4), (8, 5), (8, 8)] and len(prefill) == 3
    assert prefill.fit(64, 1) is None
    assert [record.getMessage() for record in caplog.records if "of 64 tokens" in record.getMessage()]


class WithAnotherRank(Group):
    """Two ranks; `provider_state["other"]` is what the other rank has, in the order in which it is asked."""

    def smallest(self, number, device):
        return min(number, self.provider_state["other"].pop(0))


def test_a_step_is_padded_only_to_a_size_that_all_ranks_have_captured(directory):
    """A rank that lacked memory for a graph would run the step unpadded, and sum fewer rows than the others."""
    prefill = not_captured(directory)
    logits = torch.empty(11, VOCAB, device=DEVICE)
    with torch.inference_mode(), split_over(WithAnotherRank(0, 2, provider_state={"other": [1, 1, 1, 0, 0]})):
        prefill.capture(logits, ReplayedFunctions(torch.device(DEVICE)))
    assert [tuple(bucket) for bucket in prefill.buckets] == [(4, 4), (8, 5), (8, 8)] and len(prefill) == 3
    assert prefill.fit(64, 1) is None


def test_real_sizes(directory, expected):
    llm = make(directory, fast_policy=USUAL, capture_prefill=True, max_num_batched_tokens=None, max_num_seqs=30)
    got, steps = generate(llm, prompts_of(LENGTHS), GREEDY)
    assert got == expected and [bucket for *_, bucket in steps] == [(512, 30)]


def test_padding_writes_to_the_padding_block_alone_and_is_finite(directory, monkeypatch):
    """The cache after a load is that of unpadded steps, and every row of the hidden states, wanted or not, is a
    number.
    """
    caches, seen = [], []
    for capture_prefill in (False, True):
        # Eager, so that every step comes to `poisoned`, on a GPU too.
        llm = make(directory, capture_prefill=capture_prefill, async_scheduling=False, enforce_eager=True)
        paged = llm.engine.runner.paged
        hidden = paged.hidden

        def poisoned(batch, rows, hidden=hidden):
            with MemoryGuard():  # what is not initialised is NaN
                seen.append(hidden(batch))
                wanted = hidden(batch, rows)  # the same keys and values again
            torch.testing.assert_close(wanted, seen[-1][rows], rtol=1e-4, atol=1e-4)
            return wanted

        if capture_prefill:
            monkeypatch.setattr(paged, "hidden", poisoned)
        generate(llm, prompts_of(LENGTHS), GREEDY)
        caches.append(paged.caches)
    assert seen and all(hidden.isfinite().all() for hidden in seen)
    assert caches[1][0].k[-1].any() and not caches[1][0].k[-1, 1:].any()  # one token of it
    for plain, padded in zip(*caches):
        torch.testing.assert_close(padded.k[:-1], plain.k[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded.v[:-1], plain.v[:-1], rtol=1e-4, atol=1e-4)


def test_captured_steps_give_the_same_tokens(directory):
    """Static logits and inputs, with all kinds of sampling; steps that want more logits than a graph has run
    eagerly.
    """
    kinds = [
        dict(temperature=0),
        dict(temperature=0.9, top_k=20, min_p=0.01),
        dict(temperature=0.7, repetition_penalty=1.3),
        dict(temperature=0.8, logprobs=2),
        dict(temperature=0.8, n=2),
        dict(temperature=0.8, prompt_logprobs=1),
    ]
    prompts = prompts_of(LENGTHS)
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=8 + 2 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    want = generate(make(directory, async_scheduling=False, capture_prefill=False), prompts, params)[0]
    policy = replace(SMALL, graph_backend=BACKEND)
    with lengths_on_the_device() as kernels:
        llm = make(
            directory,
            fast_policy=policy,
            async_scheduling=True,
            kernel_priority=kernels if DEVICE == "cpu" else None,
        )
    prefill = llm.engine.runner.fast.prefill
    assert len(prefill) == len(prefill.buckets)
    got, steps = generate(llm, prompts, params)
    assert got == want
    assert {True, False} == {bucket is not None for *_, bucket in steps}
    assert len({bucket for *_, bucket in steps if bucket is not None}) > 2


def test_a_capture_that_fails_is_one_warning_and_steps_run_eagerly(directory, caplog, expected):
    class Failing(ReplayedFunctions):
        def capture(self, fn):
            raise RuntimeError("operation not permitted")

    policy = replace(SMALL, graph_backend=Failing, device_state=False)
    with lengths_on_the_device() as kernels:
        llm = make(directory, fast_policy=policy, device="cpu", kernel_priority=kernels)
    assert llm.engine.runner.fast.prefill is None
    (record,) = (r for r in caplog.records if r.levelname == "WARNING" and r.name == "nanovllm.engine.fast.paths")
    assert "steps with prompts run without CUDA graphs" in record.getMessage()
    assert "operation not permitted" in record.getMessage()
    if DEVICE == "cpu":
        assert generate(llm, prompts_of(LENGTHS), GREEDY)[0] == expected

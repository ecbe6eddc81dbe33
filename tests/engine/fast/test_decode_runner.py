"""Decode steps over the device state: padded and "captured" on any machine, the same tokens in any company, no
copies.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.engine.fast.step_shape import SamplingMode, StepShape
from nanovllm.engine.step import StepKind
from tests.engine import small_engine
from tests.engine.fast.replayed import BACKEND, lengths_on_the_device, watch_replays
from tests.engine.small_engine import DEVICE, generate, random_prompts

pytestmark = pytest.mark.any_device

make = partial(small_engine.make, num_kvcache_blocks=64)

CAPTURED = FastPolicy(graph_backend=BACKEND, capture_sampling=True, prefill_graphs=DEVICE == "cuda")
SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=3)
"""Of steps with piggybacked prompts, for models of a few tokens."""


@pytest.fixture
def by_length():
    """Where the reference would be used: attention that reads the lengths on the device, so that whole steps are
    captured.
    """
    with lengths_on_the_device() as priority:
        yield dict(kernel_priority=priority) if DEVICE == "cpu" else {}


LENGTHS = [1, 5, 16, 17, 40, 70, 33, 2, 15, 31, 9, 64]
KINDS = {
    "greedy": dict(temperature=0),
    "plain": dict(temperature=0.9),
    "filtered": dict(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": dict(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
    "late": dict(temperature=1.0, min_tokens=9, stop_token_ids=list(range(300))),
    "logprobs": dict(temperature=0.8, logprobs=2),
    "several": dict(temperature=0.8, n=3),
}


@pytest.mark.parametrize("asynchronous, by_context", [(False, True), (True, False)])
@pytest.mark.parametrize(
    "kinds",
    [["greedy"], ["filtered"], ["penalised"], ["logprobs"], ["late"], ["plain", "filtered"], list(KINDS)],
    ids=str,
)
def test_captured_steps_give_the_same_tokens(directory, by_length, kinds, asynchronous, by_context):
    """Padding, static logits or whole steps, sampling from the state, composition changes, with all that a batch may
    hold.
    """
    prompts = random_prompts(LENGTHS)
    params = [
        SamplingParams(**KINDS[kinds[i % len(kinds)]], seed=i, max_tokens=10 + 3 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = generate(make(directory, async_scheduling=False, enforce_eager=True), prompts, params)
    reference = dict(kernel_priority={"attention_decode": ["native"]}) if DEVICE == "cpu" else {}
    kernels = reference if by_context else by_length
    llm = make(directory, async_scheduling=asynchronous, fast_policy=CAPTURED, **kernels)
    replayed = watch_replays(llm)
    assert generate(llm, prompts, params) == expected
    if DEVICE == "cpu" and len(kinds) == 1:
        captured = {"filtered": {SamplingMode.FILTERED}, "penalised": set(), "logprobs": set()}
        drawn = {shape.mode for shape, drawn in replayed if drawn}
        assert drawn == captured.get(kinds[0], {SamplingMode.PLAIN})
        whole = {shape for shape in llm.engine.runner.fast.decoder.graphs.keys if shape.context and shape.mode}
        assert bool(whole) is not by_context
        assert any(shape in whole for shape, _ in replayed) is (bool(drawn) and not by_context)


@pytest.mark.parametrize(
    "asynchronous, captured, arguments",
    [
        (False, False, {}), (True, True, {}), (False, True, dict(max_num_seqs=4)),
        (True, False, dict(num_kvcache_blocks=12, max_num_seqs=30)),
        (True, True, dict(num_kvcache_blocks=12, max_num_seqs=30)),
    ],
    ids=str,
)  # fmt: skip
def test_piggybacked_prompts_change_no_token(directory, by_length, asynchronous, captured, arguments):
    prompts = random_prompts(LENGTHS)
    prompts += [prompts[4][:35], prompts[4][:34] + [7, 8]]  # prefix hits
    # After an early end nothing is piggybacked: one token bans as well as many, and hardly comes.
    kinds = list((KINDS | {"late": dict(temperature=1.0, min_tokens=9, stop_token_ids=[1])}).values())
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=3 + 7 * i % 41, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = generate(make(directory, async_scheduling=False, enforce_eager=True), prompts, params)
    policy = replace(CAPTURED if captured else FastPolicy(cuda_graphs=False), piggyback_prefill=True, piggyback=SIZES)
    llm = make(directory, async_scheduling=asynchronous, fast_policy=policy, **arguments, **by_length)
    runner = llm.engine.runner
    with torch.inference_mode():
        for cache in runner.paged.caches:  # what lies in the padding block must not matter
            cache.k[-1], cache.v[-1] = torch.nan, torch.nan
    replayed = watch_replays(llm) if captured else None
    piggybacked, others, decode = [], [], runner.fast.decode

    def watched(step):
        result = decode(step)
        if step.kind is StepKind.PIGGYBACKED:
            assert result is not None
            piggybacked.append((len(step.sampling_parts), sum(piece.num_tokens for piece in step.pieces)))
        else:
            others.append(step)
        return result

    runner.fast.decode = watched
    assert generate(llm, prompts, params) == expected
    assert len(piggybacked) > (0 if arguments else 3) and others
    if replayed is not None:
        sizes = runner.fast.piggyback
        expected_shapes = []
        for num_decodes, tokens in piggybacked:
            rows = sizes.padded_rows(num_decodes)
            expected_shapes.append((rows, min(n for n in sizes.token_counts(rows) if n >= tokens)))
        assert [(shape.rows, shape.piggybacked) for shape, _ in replayed if shape.piggybacked] == expected_shapes
    if "num_kvcache_blocks" in arguments:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("piggyback", [False, True])
def test_those_that_may_have_the_most_output_are_queued_first(directory, piggyback):
    """Where prompts are piggybacked. max_model_len bounds the output as max_tokens does."""
    engine = make(directory, piggyback_prefill=piggyback).engine
    lengths, most = [5, 120, 100, 6], [20, 100, 100, 21]
    requests = [
        engine.make_request(prompt, SamplingParams(max_tokens=n)) for prompt, n in zip(random_prompts(lengths), most)
    ]
    engine.queue(*requests, offline=True)
    engine.step()
    queued = [seq.prompt_len for seq in (*engine.scheduler.running, *engine.scheduler.waiting)]
    assert queued == ([100, 6, 5, 120] if piggyback else lengths)
    for request in requests:
        engine.abort(request)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_steady_step_sends_nothing(directory, monkeypatch, asynchronous):
    """Not even one with a new block: those of 32 tokens ahead go with what has to be sent, of all rows at once."""
    llm = make(directory, async_scheduling=asynchronous)
    state, sent, steps = llm.engine.runner.fast.decoder.state, [], []
    send, place = state.send, state.place
    monkeypatch.setattr(state, "send", lambda rows: (sent.append(len(rows)), send(rows)))
    monkeypatch.setattr(state, "place", lambda step: steps.append(step) or place(step))
    generate(llm, random_prompts([8, 8, 8]), SamplingParams(max_tokens=60, ignore_eos=True))
    # At the first decode they get blocks for 9 + 32 tokens, which hold 48; there, for all the 67 that are computed.
    assert len(steps) == 59 and sum(step.continues for step in steps) == 58
    assert sent == [3, 3]


def test_sequences_of_many_lengths_send_once_in_many_steps(directory, monkeypatch):
    """Their blocks end at all times; the first of them that needs one takes the others along."""
    llm = make(directory, async_scheduling=True, num_kvcache_blocks=120, max_num_batched_tokens=200)
    state, sent = llm.engine.runner.fast.decoder.state, []
    send, place = state.send, state.place
    monkeypatch.setattr(state, "send", lambda rows: (sent[-1].extend(rows), send(rows)))
    monkeypatch.setattr(state, "place", lambda step: sent.append([]) or place(step))
    prompts = random_prompts(range(8, 19))
    expected = generate(
        make(directory, async_scheduling=False, num_kvcache_blocks=22),
        prompts,
        SamplingParams(max_tokens=90, seed=1, ignore_eos=True),
    )
    assert generate(llm, prompts, SamplingParams(max_tokens=90, seed=1, ignore_eos=True)) == expected
    assert len(sent) == 89 and sum(map(bool, sent)) <= 3, [i for i, rows in enumerate(sent) if rows]


@pytest.mark.gpu
def test_a_decode_step_waits_for_nothing(directory):
    """Neither a steady step nor one with a new block, an end or another composition; only reading a result waits."""
    llm = make(directory, max_num_seqs=4)
    engine = llm.engine
    for i, prompt in enumerate(random_prompts([8, 9, 10, 11])):
        engine.add_request(prompt, SamplingParams(max_tokens=20 + 9 * i, ignore_eos=True, seed=i))
    engine.step()
    engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_unfinished:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_many_replays_give_the_same_bits(directory):
    """The same captured steps twice, sampled and filtered, as sequences come and go."""
    outputs = []
    for _ in range(2):
        llm = make(directory, max_num_seqs=16, max_model_len=512, num_kvcache_blocks=700)
        params = [
            SamplingParams(seed=i, max_tokens=100 + 20 * (i % 16), ignore_eos=True, top_k=(0, 30)[i % 2])
            for i in range(64)
        ]
        outputs.append(generate(llm, random_prompts([1 + i for i in range(64)]), params))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_captured_batch_size_up_to_512_equals_the_eager_steps(directory, dtype):
    """Sixteen of 512 sequences end at a time, and the last ones one by one."""
    num_seqs = 512
    rng = random.Random(2)
    prompts = random_prompts([rng.randint(1, 30) for _ in range(num_seqs)])
    params = [
        SamplingParams(
            temperature=(0, 0.8)[i % 2], seed=i, ignore_eos=True, max_tokens=5 + i // 16 + max(0, i - num_seqs + 16)
        )
        for i in range(num_seqs)
    ]
    outputs = []
    for enforce_eager in (True, False):
        llm = make(
            directory, dtype=dtype, enforce_eager=enforce_eager, max_num_seqs=num_seqs, num_kvcache_blocks=8 * num_seqs,
            max_num_batched_tokens=32 * num_seqs, capture_prefill=True,
        )  # fmt: skip
        if not enforce_eager:
            replayed = watch_replays(llm)
        outputs.append(generate(llm, prompts, params))
    assert outputs[0] == outputs[1]
    assert {shape.rows for shape, _ in replayed} == set(llm.engine.runner.fast.buckets.batch_sizes)


@pytest.mark.parametrize("num_seqs, dtype", [(5, "float32"), (27, "bfloat16")])
@pytest.mark.parametrize("replays", [3, pytest.param(10_000, marks=pytest.mark.gpu)])
def test_ten_thousand_replays_of_a_step_give_the_same_bits(directory, by_length, replays, num_seqs, dtype):
    """The same state before each; then the tokens, the state, keys, values and logits of each are compared. On a CPU
    they are functions."""
    llm = make(
        directory, dtype=dtype, max_num_seqs=32, num_kvcache_blocks=200, max_num_batched_tokens=2048,
        async_scheduling=False,
        fast_policy=CAPTURED, **by_length,
    )  # fmt: skip
    engine, runner = llm.engine, llm.engine.runner
    decoder, buckets = runner.fast.decoder, runner.fast.buckets
    state, graphs = decoder.state, decoder.graphs
    last_tokens = runner.paged.last_tokens
    for prompt in random_prompts([1 + 3 * i for i in range(num_seqs)]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    state.place(engine.scheduler.schedule())
    rows, longest = buckets.fit(num_seqs, runner.max_model_len)
    logits = decoder.logits
    whole_step = StepShape(rows, longest, mode=SamplingMode.PLAIN)
    parts = [StepShape(rows, longest), StepShape(rows, mode=SamplingMode.PLAIN)]
    assert {whole_step, *parts} <= graphs.keys
    with torch.inference_mode():
        before = [t.clone() for t in (state.int64_fields, state.int32_fields, last_tokens)]

        def watched():
            """What a step leaves for its sequences; padding rows are nobody's."""
            blocks = slice(runner.num_kvcache_blocks)
            tensors = [
                state.int64_fields[:, :num_seqs],
                state.int32_fields[:, :num_seqs],
                last_tokens[:-1],
                logits[:num_seqs],
            ]
            return tensors + [t[blocks] for cache in runner.paged.caches for t in (cache.k, cache.v)]

        def replay(whole):
            for tensor, value in zip((state.int64_fields, state.int32_fields, last_tokens), before):
                tensor.copy_(value)
            if whole:
                assert graphs.replay(whole_step)
            else:  # two graphs
                assert graphs.replay(whole_step.model) and graphs.replay(whole_step.sampling)

        def bits(tensor):
            return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])

        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for whole in (True, False):
            logits.zero_()
            replay(whole)
            first = [t.clone() for t in watched()]
            assert not torch.equal(first[0], before[0][:, :num_seqs]) and bool(logits[:num_seqs].any()) is not whole
            for _ in range(replays):
                replay(whole)
                for now, then in zip(watched(), first):
                    differ += (bits(now) != bits(then)).any()
            assert not differ.item()
        differ += (bits(logits[:num_seqs]) != bits(first[3] + 1)).any()  # it would have been seen
        assert differ.item() == 1


def test_a_new_owner_of_a_seq_slot_is_not_taken_for_the_old_one(directory):
    """Its first decode is at the very position where the row that the seq_slot had would go on."""
    llm = make(directory, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    old, new = random_prompts([10, 15])
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    (expected,) = generate(llm, [new], params)
    generate(llm, [old], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert llm.engine.runner.fast.decoder.state.positions()[0] == 15
    assert generate(llm, [new], params) == [expected]

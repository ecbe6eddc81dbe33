"""The engine's loop: under random load with failures on a simulated device, and on tiny real models."""

import random
from functools import partial

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.fast.policy import PiggybackSizes
from tests import tiny
from tests.engine import small_engine
from tests.engine.simulated_engine import Broken, assert_clean, drain, simulated_engine
from tests.engine.simulation import DOCUMENTS, expected_output
from tests.engine.small_engine import generate, random_prompts

pytestmark = pytest.mark.any_device

make = partial(small_engine.make, num_kvcache_blocks=24, max_num_seqs=6, enforce_eager=True)

# ------------------------------------------------------------------------------------------------ a simulated device


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_load(asynchronous, failures):
    """Whatever happens to the others, whoever is not aborted gets its own tokens, and all is given back."""
    sizes = PiggybackSizes(totals=(8, 12, 20), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=2)
    seen = set()
    for seed in range(40):
        rng, piggyback = random.Random(seed), sizes if seed % 2 == 1 else None
        engine = simulated_engine(
            num_blocks=rng.randint(4, 9), budget=rng.randint(1, 60), max_num_seqs=rng.randint(1, 5),
            asynchronous=asynchronous, caching=rng.random() < 0.8, piggyback=piggyback,
        )  # fmt: skip
        requests, lost = [], set()
        for _ in range(rng.randint(5, 40)):
            kind = rng.choice(("add", "add", "step", "step", "abort", "fail" if failures else "step"))
            if kind == "add":
                prompt = DOCUMENTS[rng.randrange(2)][: rng.randint(1, 62)]
                prompt[-1] = rng.randint(1, 3)
                max_tokens = rng.randint(1, 30)
                params = SamplingParams(
                    n=rng.randint(1, 3), seed=rng.randrange(3), max_tokens=max_tokens, min_tokens=rng.choice((0,
                    max_tokens)),
                )  # fmt: skip
                requests.append((engine.make_request(prompt, params), prompt))
                engine.queue(requests[-1][0], offline=piggyback is not None and rng.random() < 0.9)
            elif kind == "abort" and requests:
                request = rng.choice(requests)[0]
                if not request.finished:
                    lost.add(request)
                engine.abort(request)
            elif kind == "fail":
                engine.runner.fail_next = rng.choice(("launch", "read"))
            for _ in range(rng.randint(1, 8) if kind == "step" else 0):
                before = {r for r, _ in requests if not r.finished}
                try:
                    grown = engine.step()
                    assert set(grown) <= before and len(set(grown)) == len(grown)
                except Broken:
                    seen.add("failed")
                    aborted = {r for r in before if any(c.seq.finish_reason == "abort" for c in r.completions)}
                    seen.update("survived" for _ in before - aborted)
                    lost |= aborted
                engine.check()
        drain(engine)
        assert_clean(engine)
        for request, prompt in requests:
            output = request.output()
            assert output.finished and output.prompt_token_ids == prompt
            for completion in output.outputs:
                tokens, reason, stop_reason = expected_output(
                    prompt, request.params.seed + completion.index, request.params, engine.runner.max_model_len
                )
                if completion.finish_reason == "abort":
                    assert failures or request in lost
                    assert completion.token_ids == tokens[: len(completion.token_ids)]
                else:
                    assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
        seen.update(engine.runner.seen)
    assert seen == {"piggybacked"} | ({"failed", "survived"} if failures else set())


@pytest.mark.parametrize("asynchronous, launched_at_first_result", [(False, 1), (True, 2)])
def test_a_step_is_launched_before_the_one_before_it_is_read(asynchronous, launched_at_first_result):
    engine = simulated_engine(asynchronous=asynchronous)
    launched = engine.runner.launched
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while not request.num_output_tokens:
        engine.step()
    assert len(launched) == launched_at_first_result
    drain(engine)
    assert len(launched) == 5


def test_a_step_with_nothing_to_do():
    engine = simulated_engine()
    assert engine.step() == [] and not engine.has_unfinished


def test_a_failure_while_a_preempted_sequence_waits_for_its_token():
    """That token is lost: the sequence would wait for it for ever, and everybody behind it."""
    engine = simulated_engine(num_blocks=4, asynchronous=True, caching=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    requests = [engine.add_request(DOCUMENTS[0][:n], params) for n in (20, 21, 22)]
    engine.runner.refuses = lambda: any(seq.num_pending for seq in engine.scheduler.waiting)
    with pytest.raises(Broken):
        while engine.has_unfinished:
            engine.step()
    assert [r.finished for r in requests] == [True, True, False]
    drain(engine)
    assert requests[2].output()["token_ids"] == expected_output(DOCUMENTS[0][:22], 1, params, 64)[0]
    assert_clean(engine)


def test_abort_of_a_finished_request_changes_nothing():
    engine = simulated_engine()
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    drain(engine)
    engine.abort(request)
    assert request.output()["finish_reason"] == "length"


# ------------------------------------------------------------------------------------------------ tiny models


LENGTHS = [1, 5, 16, 17, 40, 70, 33, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        dict(async_scheduling=True),
        dict(async_scheduling=True, num_kvcache_blocks=8, max_num_seqs=3),  # preempts
        dict(num_kvcache_blocks=8, max_num_batched_tokens=7),
        dict(max_num_batched_tokens=1, max_num_seqs=2),
        dict(enable_prefix_caching=False, kvcache_block_size=64, num_kvcache_blocks=6),
        dict(enforce_eager=False, async_scheduling=True),
    ],
    ids=str,
)
def test_sampled_tokens_do_not_depend_on_scheduling(directory, llm, arguments):
    prompts = random_prompts(LENGTHS)
    params = [
        SamplingParams(
            temperature=t, seed=i, max_tokens=30, top_k=k, repetition_penalty=r, frequency_penalty=f, n=1 + i % 2
        )
        for i, (t, k, r, f) in enumerate([(0, 0, 1, 0), (1, 0, 1, 0), (0.8, 5, 1, 0), (1, 0, 1.3, 0.5)] * 2)
    ]
    other = make(directory, **arguments)
    assert generate(other, prompts, params) == generate(llm, prompts, params)
    if arguments.get("num_kvcache_blocks") == 8:
        assert other.engine.scheduler.num_preemptions
    assert_clean(other.engine)


def test_a_seeded_request_draws_the_same_alone_and_in_any_company(llm):
    prompts = random_prompts(LENGTHS)
    params = [SamplingParams(seed=7 + i, max_tokens=12) for i in range(len(prompts))]
    together = generate(llm, prompts, params)
    assert [generate(llm, [p], s)[0] for p, s in zip(prompts, params)] == together
    assert generate(llm, prompts[::-1], params[::-1]) == together[::-1]
    assert len({tuple(t) for (t,) in generate(llm, [prompts[1]] * 6, [SamplingParams(seed=s) for s in range(6)])}) == 6


def test_an_engine_with_a_seed_repeats_itself(directory):
    first, second, other = (
        generate(make(directory, seed=s), random_prompts([3, 3]), SamplingParams()) for s in (1, 1, 2)
    )
    assert first == second != other and first[0] != first[1]


def test_greedy_tokens_while_others_are_aborted(llm, reference):
    prompts = random_prompts(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [llm.engine.add_request(p, params) for p in prompts]
    for steps in range(1000):
        if not llm.engine.has_unfinished:
            break
        if steps in (1, 4, 9):
            llm.engine.abort(requests[steps % 8])
        llm.engine.step()
        llm.engine.scheduler.check()
    for i, (request, prompt) in enumerate(zip(requests, prompts)):
        expected = tiny.greedy(reference, prompt, 20)
        output = request.output()
        if i in (1, 4):
            assert (
                output["finish_reason"] == "abort"
                and output["token_ids"] == expected[: len(output["token_ids"])] != expected
            )
        else:
            assert output["token_ids"] == expected


def test_min_tokens_bans_end_tokens_until_then(llm, reference):
    (prompt,) = random_prompts([9])
    tokens = tiny.greedy(reference, prompt, 12)
    ends = sorted(set(tokens[:6]))
    for min_tokens in (0, 1, 4):
        params = SamplingParams(
            temperature=0, max_tokens=12, min_tokens=min_tokens, stop_token_ids=ends, ignore_eos=True
        )
        ((out,),) = generate(llm, [prompt], params)
        banned, expected = torch.zeros(len(tiny.tokenizer())), []
        banned[ends] = -torch.inf
        while len(expected) < 12 and not (expected and expected[-1] in ends):
            scores = tiny.logprobs(reference, prompt + expected)[-1]
            expected.append(int((scores + banned if len(expected) < min_tokens else scores).argmax()))
        assert out == expected and len(out) > min_tokens

"""The engine's loop: under random load with failures on a simulated device, and on tiny real models."""

import inspect
import random
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.engine.progress import ProgressBar
from tests import tiny
from tests.engine.simulated_engine import BLOCK, Broken, assert_clean, documents, drain, simulated_engine
from tests.engine.simulation import expected_output

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ------------------------------------------------------------------------------------------------ a simulated device


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_load(monkeypatch, asynchronous, failures):
    """Whatever happens to the others, whoever is not aborted gets its own tokens, and all is given back."""
    sizes = PiggybackSizes(totals=(8, 12, 20), row_multiple=2, min_tokens=2, min_tokens_at_once=4, max_pieces=2)
    seen = set()
    for seed in range(60):
        rng, piggyback = random.Random(seed), sizes if seed % 2 == 1 else None
        engine = simulated_engine(
            num_blocks=rng.randint(4, 9), budget=rng.randint(1, 60), max_num_seqs=rng.randint(1, 5),
            asynchronous=asynchronous, caching=rng.random() < 0.8, piggyback=piggyback,
        )  # fmt: skip
        requests, lost = [], set()
        for _ in range(rng.randint(5, 40)):
            kind = rng.choice(("add", "add", "step", "step", "abort", "fail" if failures else "step"))
            if kind == "add":
                prompt = documents()[rng.randrange(2)][: rng.randint(1, 62)]
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


@pytest.mark.parametrize("when", ["launch", "read"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_ends_what_ran_and_nothing_else(monkeypatch, when, asynchronous):
    engine = simulated_engine(max_num_seqs=1, asynchronous=asynchronous)
    prompt = documents()[0][:40]
    runs, waits = (engine.add_request(prompt, SamplingParams(max_tokens=20, ignore_eos=True, seed=1)) for _ in range(2))
    engine.step()
    engine.step()
    engine.runner.fail_next = when
    with pytest.raises(Broken):
        engine.step()
        engine.step()
    assert runs.finished and runs.output()["finish_reason"] == "abort" and not waits.finished
    drain(engine)
    assert waits.output()["token_ids"] == expected_output(prompt, 1, waits.params, 64)[0]
    # What the failed step should have written is not found by anyone: waits computed its whole prompt.
    assert waits.output().metrics.num_cached_tokens == 0
    assert_clean(engine)


@pytest.mark.parametrize("asynchronous, launched_at_first_result", [(False, 1), (True, 2)])
def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch, asynchronous, launched_at_first_result):
    engine = simulated_engine(asynchronous=asynchronous)
    launched = []
    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", lambda step: launched.append(step) or execute(step))
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    while not request.num_output_tokens:
        engine.step()
    assert len(launched) == launched_at_first_result
    drain(engine)
    assert len(launched) == 5


def test_a_step_with_nothing_to_do(monkeypatch):
    engine = simulated_engine()
    assert engine.step() == [] and not engine.has_unfinished


def test_a_failure_while_a_preempted_sequence_waits_for_its_token(monkeypatch):
    """That token is lost: the sequence would wait for it for ever, and everybody behind it."""
    engine = simulated_engine(num_blocks=4, asynchronous=True, caching=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    requests = [engine.add_request(documents()[0][:n], params) for n in (20, 21, 22)]
    execute = engine.runner.execute

    def failing(step):
        if any(seq.num_pending for seq in engine.scheduler.waiting):
            monkeypatch.setattr(engine.runner, "execute", execute)
            raise Broken
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", failing)
    with pytest.raises(Broken):
        while engine.has_unfinished:
            engine.step()
    assert [r.finished for r in requests] == [True, True, False]
    drain(engine)
    assert requests[2].output()["token_ids"] == expected_output(documents()[0][:22], 1, params, 64)[0]
    assert_clean(engine)


def test_abort_of_a_finished_request_changes_nothing(monkeypatch):
    engine = simulated_engine()
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    drain(engine)
    engine.abort(request)
    assert request.output()["finish_reason"] == "length"


# ------------------------------------------------------------------------------------------------ tiny models


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def reference():
    return tiny.model("qwen3", vocab_size=len(tiny.tokenizer()))


def make(directory, **arguments):
    defaults = dict(
        device=DEVICE, dtype="float32", kvcache_block_size=BLOCK, num_kvcache_blocks=24, max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=40, enforce_eager=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


@pytest.fixture(scope="module")
def shared(directory):
    return make(directory)


@pytest.fixture
def llm(shared):
    yield shared
    assert_clean(shared.engine)


def random_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(len(tiny.tokenizer())) for _ in range(n)] for n in lengths]


def generate(llm, prompts, params):
    return [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]


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
    outputs = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    other = make(directory, **arguments)
    assert [[c.token_ids for c in o.outputs] for o in other.generate(prompts, params, use_tqdm=False)] == outputs
    if arguments.get("num_kvcache_blocks") == 8:
        assert other.engine.scheduler.num_preemptions
    assert_clean(other.engine)


def test_a_seeded_request_draws_the_same_alone_and_in_any_company(llm):
    prompts = random_prompts(LENGTHS)
    params = [SamplingParams(seed=7 + i, max_tokens=12) for i in range(len(prompts))]
    together = generate(llm, prompts, params)
    assert [generate(llm, [p], s)[0] for p, s in zip(prompts, params)] == together
    assert generate(llm, prompts[::-1], params[::-1]) == together[::-1]
    assert len({tuple(t) for t in generate(llm, [prompts[1]] * 6, [SamplingParams(seed=s) for s in range(6)])}) == 6


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


def test_no_extra_token_of_a_finished_request_is_seen(directory, reference):
    """With asynchronous scheduling one token too many is computed; here its slot and blocks go to the next in line."""
    llm = make(directory, async_scheduling=True, max_num_seqs=2, num_kvcache_blocks=10)
    prompts = random_prompts([20, 18, 30, 25, 16])
    expected = [tiny.greedy(reference, p, 12) for p in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[tokens[i + 1]])
        for i, tokens in enumerate(expected)
    ]
    for tokens, out, p in zip(expected, llm.generate(prompts, params, use_tqdm=False), params):
        first = tokens.index(p.stop_token_ids[0])
        assert out["token_ids"] == tokens[: first + 1]
        assert (out["finish_reason"], out["stop_reason"]) == ("stop", p.stop_token_ids[0])
    drain(llm.engine)  # the last extra token is still in flight
    assert_clean(llm.engine)


def test_min_tokens_bans_end_tokens_until_then(llm, reference):
    (prompt,) = random_prompts([9])
    tokens = tiny.greedy(reference, prompt, 12)
    ends = sorted(set(tokens[:6]))
    for min_tokens in (0, 1, 4):
        params = SamplingParams(
            temperature=0, max_tokens=12, min_tokens=min_tokens, stop_token_ids=ends, ignore_eos=True
        )
        (out,) = generate(llm, [prompt], params)
        banned, expected = torch.zeros(len(tiny.tokenizer())), []
        banned[ends] = -torch.inf
        while len(expected) < 12 and not (expected and expected[-1] in ends):
            scores = tiny.logprobs(reference, prompt + expected)[-1]
            expected.append(int((scores + banned if len(expected) < min_tokens else scores).argmax()))
        assert out == expected and len(out) > min_tokens


# ------------------------------------------------------------------------------------------------ log-probabilities


def close(record, token, row, k):
    """One position's record: its token and the k best, as log_softmax says."""
    best = row.topk(k).indices.tolist()
    assert list(record)[0] == token and set(record) == {token, *best}
    for candidate, entry in record.items():
        assert entry.logprob == pytest.approx(float(row[candidate]), abs=1e-4)
        assert entry.rank == int((row > row[candidate]).sum()) + 1


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(llm, reference, k):
    prompts = random_prompts([7, 41, 90])
    params = SamplingParams(temperature=0.7, top_k=50, seed=3, max_tokens=8, logprobs=k, presence_penalty=1.0)
    for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        rows = tiny.logprobs(reference, prompt + out["token_ids"])
        assert len(out["logprobs"]) == len(out["token_ids"]) == 8 and out.prompt_logprobs is None
        for i, (token, record) in enumerate(zip(out["token_ids"], out["logprobs"])):
            close(record, token, rows[len(prompt) + i - 1], k)
            assert all(entry.decoded_token == llm.tokenizer.decode([t]) for t, entry in record.items())


def test_logprobs_of_different_widths_in_one_batch(llm):
    prompts = random_prompts([5, 5, 5])
    params = [SamplingParams(max_tokens=3, logprobs=k, ignore_eos=True) for k in (None, 0, 4)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert outs[0]["logprobs"] is None and all(len(out["token_ids"]) == 3 for out in outs)
    assert [len(r) for r in outs[1]["logprobs"]] == [1, 1, 1] and all(len(r) in (4, 5) for r in outs[2]["logprobs"])


@pytest.mark.parametrize("length", [1, 2, 16, 41, 90])
def test_prompt_logprobs_over_chunks_and_cached_prefixes(llm, reference, length):
    (prompt,) = random_prompts([length], seed=length)
    generate(llm, [prompt], SamplingParams(max_tokens=1))  # its prefix is in the cache now
    out = llm.generate(
        [*random_prompts([60]), prompt, prompt[: length // 2 + 1]],
        [
            SamplingParams(max_tokens=20),
            SamplingParams(max_tokens=5, prompt_logprobs=2, temperature=0),
            SamplingParams(max_tokens=20),
        ],
        use_tqdm=False,
    )[1]
    rows = tiny.logprobs(reference, prompt)
    assert len(out.prompt_logprobs) == length and out.prompt_logprobs[0] is None
    for i in range(1, length):
        close(out.prompt_logprobs[i], prompt[i], rows[i - 1], 2)
    assert out["token_ids"] == tiny.greedy(reference, prompt, 5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompt_logprobs_survive_preemption(directory, reference, asynchronous):
    llm = make(directory, num_kvcache_blocks=8, max_num_seqs=4, async_scheduling=asynchronous)
    prompts = random_prompts([30, 31, 32, 33])
    params = SamplingParams(max_tokens=40, prompt_logprobs=1, ignore_eos=True, temperature=0)
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions
    for prompt, out in zip(prompts, outs):
        rows = tiny.logprobs(reference, prompt)
        for i in range(1, len(prompt)):
            close(out.prompt_logprobs[i], prompt[i], rows[i - 1], 1)
        assert out["token_ids"] == tiny.greedy(reference, prompt, 40)


def test_prompt_logprobs_of_several_completions_are_computed_once(llm):
    (prompt,) = random_prompts([40])
    params = SamplingParams(n=3, prompt_logprobs=0, logprobs=0, max_tokens=4, ignore_eos=True)
    (out,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(out.prompt_logprobs) == 40 and all(r is not None for r in out.prompt_logprobs[1:])
    assert [len(c.logprobs) for c in out.outputs] == [4, 4, 4]
    request = llm.engine.make_request(prompt, SamplingParams(n=3, prompt_logprobs=0))
    assert [c.seq.params.prompt_logprobs for c in request.completions] == [0, None, None]


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_survives_a_forward_pass_that_raises(directory, reference, monkeypatch, asynchronous):
    llm = make(directory, async_scheduling=asynchronous)
    prompts = random_prompts(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    calls = []
    execute = llm.engine.runner.execute

    def failing(step):
        calls.append(step)
        if len(calls) == 4:
            with torch.inference_mode():
                llm.engine.runner.caches[0].k.fill_(torch.nan)  # a failed kernel may leave anything
            raise RuntimeError("out of memory")
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(prompts, params, use_tqdm=False)
    assert_clean(llm.engine)
    assert generate(llm, prompts, params) == [tiny.greedy(reference, p, 10) for p in prompts]
    assert_clean(llm.engine)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "where", ["execute", "state.place", "state.advanced", "scheduler.update", "scheduler.schedule"]
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_leaves_the_engine_clean(directory, reference, monkeypatch, where, call, asynchronous):
    llm = make(directory, async_scheduling=asynchronous)
    prompts = random_prompts(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    owners = {
        "execute": llm.engine.runner,
        "state": llm.engine.runner.fast.decoder.state,
        "scheduler": llm.engine.scheduler,
    }
    owner, name = owners[where.split(".")[0]], where.split(".")[-1]
    original, calls = getattr(owner, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, use_tqdm=False)
    assert_clean(llm.engine)
    assert generate(llm, prompts, params) == [tiny.greedy(reference, p, 10) for p in prompts]


def test_an_interrupt_between_steps(directory, monkeypatch):
    from nanovllm import llm as module

    llm = make(directory, async_scheduling=True)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.ProgressBar, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(random_prompts(LENGTHS), SamplingParams(max_tokens=10))
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_clean(llm.engine)


PACKAGE = Path(nanovllm.__file__).parent
TRACED = {str(file): file.name for file in (PACKAGE / "llm.py", *(PACKAGE / "engine").glob("*.py"))}


def generate_all(llm):
    """Preempts, and uses what is off the beaten track."""
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, stop=["never said"], n=2),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1),
    ]
    outputs = llm.generate(random_prompts([20, 18, 30, 2]), params, use_tqdm=False)
    return [[c.token_ids for c in out.outputs] for out in outputs]


def leave_streams(llm):
    streams = [
        llm.stream(p, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)) for p in ("hello", "world")
    ]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()


def at_lines(call, visit):
    """Call with `visit(file, line)` before every line of the engine and of `LLM`."""

    def at_line(frame, event, _):
        if event == "line":
            visit(frame.f_code.co_filename, frame.f_lineno)
        return at_line

    def at_call(frame, *_):
        return at_line if frame.f_code.co_filename in TRACED else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call, every", [(generate_all, 12), (leave_streams, 12)], ids=["generate", "streams"])
def test_an_interrupt_at_any_line_leaves_the_engine_clean(directory, call, every, asynchronous):
    """A sample of the lines, denser where the bookkeeping is; another one in every mode."""
    arguments = dict(num_kvcache_blocks=5, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=20)
    llm = make(directory, async_scheduling=asynchronous, **arguments)
    expected = generate_all(llm)
    assert llm.engine.scheduler.num_preemptions
    times, reached = Counter(), 0
    llm.engine.scheduler.reset()  # without cached prefixes every time, so that the same lines are reached
    at_lines(lambda: call(llm), lambda file, line: times.update([(file, line)]))
    drain(llm.engine)
    rng = random.Random(f"{call.__name__} {asynchronous}")
    shares = {
        "llm.py": 0.5,
        "step_loop.py": 1,
        "llm_engine.py": 2 / every,
        "scheduler.py": 2 / every,
        "block_manager.py": 2 / every,
    }
    chosen = [where for where in times if rng.random() < shares.get(TRACED[where[0]], 0.2 / every)]
    assert len(chosen) > 40
    for where in chosen:
        left = rng.randint(1, times[where])

        def interrupt(*here, where=where):
            nonlocal left
            left -= here == where
            if left == 0 and here == where:
                raise KeyboardInterrupt

        llm.engine.scheduler.reset()
        try:
            at_lines(lambda: call(llm), interrupt)
        except KeyboardInterrupt:
            reached += 1
        assert_clean(llm.engine)
        assert generate_all(llm) == expected, where
    assert reached > 0.9 * len(chosen)


def test_an_interrupt_takes_the_progress_bar_back(directory):
    def call():
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=True)

    llm = make(directory)
    call()
    others = set(threading.enumerate())
    lines = []
    at_lines(call, lambda file, line: lines.append((file, line)))
    code, first = inspect.getsourcelines(ProgressBar.__exit__)
    end = range(first, first + len(code))  # of the bar; an interrupt just there may leave it
    for where in sorted({where for where in lines if TRACED[where[0]] == "llm.py" and where[1] not in end}):

        def interrupt(*here, where=where):
            if here == where:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            at_lines(call, interrupt)
        for thread in set(threading.enumerate()) - others:  # the bar has a thread that draws it
            thread.join(1)
            assert not thread.is_alive(), where
        assert_clean(llm.engine)


def test_streams_of_others_end_with_an_error_when_a_forward_pass_raises(directory, monkeypatch):
    llm = make(directory)
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    execute = llm.engine.runner.execute

    def failing(step):
        monkeypatch.setattr(llm.engine.runner, "execute", execute)
        raise RuntimeError("broken")

    monkeypatch.setattr(llm.engine.runner, "execute", failing)
    with pytest.raises(RuntimeError):
        llm.generate("other", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(RuntimeError, match="the output is incomplete"):
        list(stream)
    assert_clean(llm.engine)

"""Decode steps over the device state: padded and "captured" on any machine, the same tokens in any company, no copies."""

import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast import decode_runner, piggyback
from nanovllm.engine.fast.cuda_graphs import DecodeBuckets, DecodeGraphs
from nanovllm.engine.fast.decode_state import SamplingMode
from tests import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(path, "qwen3")
    return path


def make(directory, **arguments):
    defaults = dict(
        device=DEVICE, dtype="float32", kvcache_block_size=BLOCK, num_kvcache_blocks=64, max_model_len=128, max_num_seqs=11,
        max_num_batched_tokens=40, skip_tokenizer_init=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


class ReplayedFunctions(DecodeGraphs):
    """`DecodeGraphs` where there is no GPU: runs what would be captured, for the sizes that would be captured."""

    def __init__(self, *args):
        self.replayed = []
        super().__init__(*args)

    def _prepare(self, calls, device):
        pass  # it would advance rows that have sequences by then

    def _capture(self, fn, *args):
        return SimpleNamespace(replay=lambda: self.replayed.append(args) or fn(*args))


def pretend_to_capture(llm, monkeypatch, by_context=True):
    monkeypatch.setattr(decode_runner, "DecodeGraphs", ReplayedFunctions)
    runner = llm.engine.runner
    if not by_context:  # as with a kernel that reads the lengths on the device
        runner.buckets = DecodeBuckets(
            runner.config.max_num_seqs, runner.max_model_len, False, runner.state.prefixes is not None, runner.rides
        )
    runner.decoding._buckets, runner.decoding._sampling_kernel = runner.buckets, True
    # What an earlier batch left behind must not matter.
    runner.decoding.capture(
        torch.full(
            (runner.config.max_num_seqs, runner.model_config.vocab_size), torch.nan, dtype=runner.dtype, device=DEVICE
        )
    )
    return runner.decoding.graphs


def random_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(900) for _ in range(n)] for n in lengths]


def generate(llm, prompts, params):
    outputs = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    return outputs


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
    "kinds", [*([k] for k in KINDS), ["greedy", "plain"], ["plain", "filtered"], list(KINDS)], ids=str
)
def test_captured_steps_give_the_same_tokens(directory, monkeypatch, kinds, asynchronous, by_context):
    """Padding, static logits or whole steps, sampling from the state, composition changes, with all that a batch may hold."""
    prompts = random_prompts(LENGTHS)
    params = [
        SamplingParams(**KINDS[kinds[i % len(kinds)]], seed=i, max_tokens=10 + 3 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = generate(make(directory, async_scheduling=False, enforce_eager=True), prompts, params)
    llm = make(directory, async_scheduling=asynchronous)
    graphs = pretend_to_capture(llm, monkeypatch, by_context) if DEVICE == "cpu" else None
    assert generate(llm, prompts, params) == expected
    if DEVICE == "cpu" and len(kinds) == 1:
        captured = {"filtered": {SamplingMode.FILTERED}, "penalised": set(), "logprobs": set()}
        drawn = {args[-1] for args in graphs.replayed if isinstance(args[-1], SamplingMode)}
        assert drawn == captured.get(kinds[0], {SamplingMode.PLAIN})
        # (rows, context, shared, riding), (rows, mode), or a whole step: (rows, context, mode)
        assert any(len(args) == 3 and args[-1] in drawn for args in graphs.replayed) is (bool(drawn) and not by_context)


@pytest.mark.parametrize("asynchronous, captured", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "arguments", [{}, dict(num_kvcache_blocks=12, max_num_seqs=30), dict(max_num_seqs=4)], ids=["", "preempted", "few"]
)
def test_prompts_that_ride_change_no_token(directory, monkeypatch, asynchronous, captured, arguments):
    for name, value in dict(TOTALS=(8, 20, 40), ROWS=2, LEAST=2, LEAST_AT_ONCE=4, MAX_RIDERS=3).items():
        monkeypatch.setattr(piggyback, name, value)
    prompts = random_prompts(LENGTHS)
    prompts += [prompts[4][:35], prompts[4][:34] + [7, 8]]  # prefix hits
    # After an early end nobody rides: one token bans as well as many, and hardly comes.
    kinds = list((KINDS | {"late": dict(temperature=1.0, min_tokens=9, stop_token_ids=[1])}).values())
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=3 + 7 * i % 41, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = generate(make(directory, async_scheduling=False, enforce_eager=True), prompts, params)
    llm = make(directory, async_scheduling=asynchronous, ride_prompts=True, **arguments)
    graphs = pretend_to_capture(llm, monkeypatch, False) if captured and DEVICE == "cpu" else None
    with torch.inference_mode():
        for cache in llm.engine.runner.caches:  # what lies in the padding block must not matter
            cache.k[-1], cache.v[-1] = torch.nan, torch.nan
    decoding, rode = llm.engine.runner.decoding, []
    launch = decoding.launch
    monkeypatch.setattr(
        decoding, "launch", lambda step: (rode.append(step.riding and step.riding.num_tokens), launch(step))[1]
    )
    run, shapes = decoding._run_model, set()
    monkeypatch.setattr(
        decoding, "_run_model", lambda rows, *a: (logits := run(rows, *a), shapes.add((rows, len(logits))))[0]
    )
    assert generate(llm, prompts, params) == expected
    assert shapes and all(rows == given for rows, given in shapes)  # of what rides there are no logits
    assert sum(map(bool, rode)) > (0 if arguments else 3) and not all(rode)
    if graphs is not None:
        sizes = [(args[0], args[3]) for args in graphs.replayed if len(args) == 4 and args[3]]
        least = [
            min(n for n in piggyback.riding_sizes(rows) if n >= tokens)
            for (rows, _), tokens in zip(sizes, filter(None, rode))
        ]
        assert [tokens for _, tokens in sizes] == least and len(sizes) == sum(map(bool, rode))
    if "num_kvcache_blocks" in arguments:
        assert llm.engine.scheduler.num_preemptions > 0


def test_a_piece_whose_log_probabilities_are_wanted_does_not_ride(directory, monkeypatch):
    """Riders only leave their keys and values. It is few tokens beside decodes, as if it did ride."""
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    ]
    prompts, outputs = random_prompts([3, 90]), []
    for rides in (False, True):
        llm = make(directory, max_num_batched_tokens=12, ride_prompts=rides)
        outputs.append(llm.generate(prompts, params, use_tqdm=False))
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    expected, got = (o[1].prompt_logprobs for o in outputs)
    assert len(got) == 90 and got[0] is None and [list(row) for row in got[1:]] == [list(row) for row in expected[1:]]


@pytest.mark.parametrize("rides", [False, True])
def test_those_that_may_have_the_most_output_are_queued_first(directory, rides):
    """Where prompts ride. max_model_len bounds the output as max_tokens does."""
    engine = make(directory, ride_prompts=rides).engine
    lengths, most = [5, 120, 100, 6], [20, 100, 100, 21]
    requests = [
        engine.make_request(prompt, SamplingParams(max_tokens=n)) for prompt, n in zip(random_prompts(lengths), most)
    ]
    engine.queue_batch(requests)
    queued = [seq.prompt_len for seq in engine.scheduler.waiting]
    assert queued == ([100, 6, 5, 120] if rides else lengths)
    for request in requests:
        engine.abort(request)


def test_a_seeded_request_draws_the_same_alone_and_among_256(directory):
    llm = make(directory, max_num_seqs=256, num_kvcache_blocks=600, max_num_batched_tokens=2048)
    rng = random.Random(5)
    prompts = random_prompts([rng.randint(1, 30) for _ in range(256)], seed=1)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randint(5, 12), ignore_eos=True) for i in range(256)
    ]
    together = generate(llm, prompts, params)
    for i in (0, 1, 100, 254, 255):
        assert generate(llm, [prompts[i]], [params[i]]) == [together[i]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_steady_step_sends_nothing(directory, monkeypatch, asynchronous):
    """Not even one with a new block: those of 32 tokens ahead go with what has to be sent, of all rows at once."""
    llm = make(directory, async_scheduling=asynchronous)
    state, sent, steps = llm.engine.runner.state, [], []
    send, place = state._send, state.place
    monkeypatch.setattr(state, "_send", lambda rows: (sent.append(len(rows)), send(rows)))
    monkeypatch.setattr(state, "place", lambda step: steps.append(step) or place(step))
    generate(llm, random_prompts([8, 8, 8]), SamplingParams(max_tokens=60, ignore_eos=True))
    # At the first decode they get blocks for 9 + 32 tokens, which hold 48; there, for all the 67 that are computed.
    assert len(steps) == 59 and sum(step.continues for step in steps) == 58
    assert sent == [3, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sequences_of_many_lengths_send_once_in_many_steps(directory, monkeypatch, asynchronous):
    """Their blocks end at all times; the first of them that needs one takes the others along."""
    llm = make(directory, async_scheduling=asynchronous, num_kvcache_blocks=120, max_num_batched_tokens=200)
    state, sent = llm.engine.runner.state, []
    send, place = state._send, state.place
    monkeypatch.setattr(state, "_send", lambda rows: (sent[-1].extend(rows), send(rows)))
    monkeypatch.setattr(state, "place", lambda step: sent.append([]) or place(step))
    prompts = random_prompts(range(8, 19))
    expected = generate(
        make(directory, async_scheduling=False, num_kvcache_blocks=22),
        prompts,
        SamplingParams(max_tokens=90, seed=1, ignore_eos=True),
    )
    assert generate(llm, prompts, SamplingParams(max_tokens=90, seed=1, ignore_eos=True)) == expected
    assert len(sent) == 89 and sum(map(bool, sent)) <= 3, [i for i, rows in enumerate(sent) if rows]


def test_results_survive_the_steps_after_them(directory):
    """The tokens of a step are read after the next step has overwritten the state they come from."""
    llm = make(directory, async_scheduling=True)
    engine = llm.engine
    request = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    results = []
    while (step := engine.scheduler.schedule()) is not None:
        results.append((step, engine.runner.execute(step)))
        if len(results) > 1:
            engine.scheduler.update(results[-2][0], results[-2][1].token_ids())
    early = [result.token_ids() for _, result in results]
    assert [t for (t,) in early][:11] == request.completions[0].seq.output_token_ids
    engine.abort(request)


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
def test_every_captured_batch_size_up_to_512_equals_the_eager_steps(directory, monkeypatch, dtype):
    """Sixteen of 512 sequences end at a time, and the last ones one by one."""
    captured_equal_eager(directory, monkeypatch, dtype, 512)


def captured_equal_eager(directory, monkeypatch, dtype, num_seqs):
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
            replayed = watch_replays(llm, monkeypatch)
        outputs.append(generate(llm, prompts, params))
    assert outputs[0] == outputs[1]
    assert replayed == set(llm.engine.runner.buckets.batch_sizes)


def watch_replays(llm, monkeypatch):
    """The batch sizes of the graphs that are replayed from now on."""
    graphs = (
        pretend_to_capture(llm, monkeypatch, by_context=False) if DEVICE == "cpu" else llm.engine.runner.decoding.graphs
    )
    replayed, run = set(), graphs.run
    monkeypatch.setattr(graphs, "run", lambda rows, *rest: replayed.add(rows) or run(rows, *rest))
    return replayed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_seqs", [5, 27])
@pytest.mark.parametrize("replays", [3, pytest.param(10_000, marks=pytest.mark.gpu)])
def test_ten_thousand_replays_of_a_step_give_the_same_bits(directory, monkeypatch, replays, num_seqs, dtype):
    """The same state before each; then the tokens, the state, keys, values and logits of each are compared. On a CPU they are functions."""
    llm = make(
        directory,
        dtype=dtype,
        max_num_seqs=32,
        num_kvcache_blocks=200,
        max_num_batched_tokens=2048,
        async_scheduling=False,
    )
    engine, runner = llm.engine, llm.engine.runner
    state = runner.state
    graphs = pretend_to_capture(llm, monkeypatch, by_context=False) if DEVICE == "cpu" else runner.decoding.graphs
    for prompt in random_prompts([1 + 3 * i for i in range(num_seqs)]):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(5):
        engine.step()
    state.place(engine.scheduler.schedule())
    rows, longest = runner.buckets.fit(num_seqs, runner.max_model_len)
    logits = runner.decoding._logits
    assert rows in runner.buckets.whole_sizes
    with torch.inference_mode():
        before = [t.clone() for t in (state._ints, state._small, state.last_tokens)]

        def watched():
            """What a step leaves for its sequences; padding rows are nobody's."""
            blocks = slice(runner.num_kvcache_blocks)
            tensors = [state._ints[:, :num_seqs], state._small[:, :num_seqs], state.last_tokens[:-1], logits[:num_seqs]]
            return tensors + [t[blocks] for cache in runner.caches for t in (cache.k, cache.v)]

        def replay(whole):
            for tensor, value in zip((state._ints, state._small, state.last_tokens), before):
                tensor.copy_(value)
            if whole:
                graphs._whole[rows, SamplingMode.PLAIN].replay()
            else:
                graphs._model[rows, longest, False, 0].replay()
                graphs._draw[rows, SamplingMode.PLAIN].replay()

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


def test_who_gets_the_slot_of_one_that_ended_is_not_taken_for_it(directory):
    """Its first decode is at the very position where the row that the slot had would go on."""
    llm = make(directory, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    old, new = random_prompts([10, 15])
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    (expected,) = generate(llm, [new], params)
    generate(llm, [old], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert llm.engine.runner.state._positions[0] == 15
    assert generate(llm, [new], params) == [expected]


def test_a_step_that_fails_leaves_no_row_behind(directory, monkeypatch):
    llm = make(directory, async_scheduling=False)
    state, prompts = llm.engine.runner.state, random_prompts([8, 9, 10])
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = generate(llm, prompts, params)
    send, calls = state._send, []

    def interrupted(rows):
        calls.append(rows)
        if len(calls) == 2:  # a block has to be sent in the middle of a run
            raise KeyboardInterrupt
        send(rows)

    monkeypatch.setattr(state, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    assert state.num_rows == llm.engine.config.max_num_seqs and (state._row_of_slot == -1).all()
    assert generate(llm, prompts[:1], params) == expected[:1]
    assert (state._slot_of_row[1:] == -1).all() and generate(llm, prompts, params) == expected

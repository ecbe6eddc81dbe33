"""`LLM` as its users meet it: what goes in, what comes out, how it ends, and what is said of bad input."""

import gc
import json
import random
import time

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.kv_cache import OutOfCacheMemory
from tests import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LEN = 128
TOKENIZER = tiny.tokenizer()
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["hello world", "one two three", "x"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(path, "llama", seed=3)
    return path


@pytest.fixture(scope="module")
def reference():
    return tiny.model("llama", seed=3, vocab_size=len(TOKENIZER))


def make(directory, **arguments):
    defaults = dict(
        device=DEVICE, kvcache_block_size=16, num_kvcache_blocks=40, max_model_len=MAX_LEN, max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def shared(request, directory):
    return make(directory, async_scheduling=request.param)


@pytest.fixture
def llm(shared):
    """An engine that every test must leave empty, and able to serve."""
    yield shared
    assert_clean(shared)
    assert shared.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def assert_clean(llm):
    engine = llm.engine
    while engine.has_unfinished:  # aborts that no step has applied yet, and a token too many in flight
        assert not engine.step()
    engine.check()


def greedy_text(reference, prompt, max_tokens=24):
    token_ids = tiny.greedy(reference, TOKENIZER.encode(prompt), max_tokens)
    return token_ids, TOKENIZER.decode(token_ids, skip_special_tokens=True)


# ------------------------------------------------------------------------------------------------ what goes in


def test_every_form_of_a_prompt(llm, reference):
    ids = [TOKENIZER.encode(p) for p in PROMPTS]
    prompts = [
        PROMPTS[0], ids[1], {"prompt": PROMPTS[2]}, {"prompt_token_ids": ids[0]}, {"prompt": "what was said",
        "prompt_token_ids": ids[1]},
        tuple(ids[2]), np.array(ids[0]), torch.tensor(ids[1]),
    ]  # fmt: skip
    outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outs] == [PROMPTS[0], None, PROMPTS[2], None, "what was said", None, None, None]
    order = [0, 1, 2, 0, 1, 2, 0, 1]
    assert [o.prompt_token_ids for o in outs] == [ids[i] for i in order]
    assert all(type(t) is int for o in outs for t in o.prompt_token_ids)
    expected = [greedy_text(reference, p)[0] for p in PROMPTS]
    assert [o["token_ids"] for o in outs] == [expected[i] for i in order]


@pytest.mark.parametrize("prompt", ["hello world", TOKENIZER.encode("hello world"), {"prompt": "hello world"}])
def test_a_lone_prompt_needs_no_list(llm, reference, prompt):
    (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert out["token_ids"] == greedy_text(reference, "hello world")[0]


def test_no_prompts(llm):
    assert llm.generate([], use_tqdm=False) == [] == llm.generate([])


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[i, i + 1] for i in range(20)]
    lengths = [random.Random(i).randint(1, 30) for i in range(20)]
    outs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths], use_tqdm=False)
    assert [o.prompt_token_ids for o in outs] == prompts and [len(o["token_ids"]) for o in outs] == lengths
    assert len({o.request_id for o in outs}) == 20


def test_default_parameters_and_one_for_each(llm):
    assert len(llm.generate("x", use_tqdm=False)[0]["token_ids"]) <= 64
    with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
        llm.generate(PROMPTS, [GREEDY] * 2, use_tqdm=False)


def test_outputs_have_the_keys_of_nano_vllm_and_the_attributes_of_vllm(llm, reference):
    out = llm.generate(PROMPTS, GREEDY, use_tqdm=False)[1]
    token_ids, text = greedy_text(reference, PROMPTS[1])
    assert out["text"] == out.outputs[0].text == text and out["token_ids"] == out.outputs[0].token_ids == token_ids
    assert out.outputs[0].finish_reason == "length" and out.outputs[0].stop_reason is None and out.outputs[0].index == 0
    assert out.prompt == PROMPTS[1] and out.prompt_token_ids == TOKENIZER.encode(PROMPTS[1]) and out.finished
    assert 0 < out.metrics.time_to_first_token <= out.metrics.total_time < 60


def test_cached_prompt_tokens_are_counted(llm):
    prompt = random.Random(11).choices(range(900), k=50)
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 48)
    assert first["token_ids"] == again["token_ids"]


def test_cached_prompts_are_shared_among_those_of_the_same_salt(llm):
    ids = random.Random(12).choices(range(900), k=50)
    prompts = [
        {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for salt in ("a", "b", None, "b", "a")
    ]
    outs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [out.metrics.num_cached_tokens for out in outs] == [0, 0, 0, 48, 48]
    assert all(out["token_ids"] == outs[0]["token_ids"] for out in outs)


def test_log_probabilities_have_a_limit(llm, directory):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError) as error:
            llm.generate("x", SamplingParams(**{name: 21}), use_tqdm=False)
        assert str(error.value) == (
            f"{name}=21: this engine reports at most 20 for a token; lower it, or pass max_logprobs=21 to LLM"
        )
    for most in (21, -1):
        (out,) = make(directory, max_logprobs=most).generate("x", SamplingParams(logprobs=21, max_tokens=1), False)
        assert len(out["logprobs"][0]) in (21, 22)


def test_a_text_that_cannot_fit_is_not_tokenised(llm):
    began = time.process_time()
    for call in (lambda text: llm.generate(text), lambda text: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(
            ValueError, match="the prompt has 200000.. characters, but max_model_len=128 allows 127 tok"
        ):
            call("ab " * 6_666_667)
    assert time.process_time() - began < 3  # 0.1 s; half a minute if it is tokenised


def test_cached_prompt_tokens_are_those_of_the_prompt_after_a_preemption(directory):
    llm = make(directory, num_kvcache_blocks=8, max_num_seqs=4)
    prompts = [[i] * 20 for i in range(4)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions
    assert max(o.metrics.num_cached_tokens for o in outs) <= 20


# ------------------------------------------------------------------------------------------------ n


def test_several_completions(llm, reference):
    (out,) = llm.generate("hello", SamplingParams(n=4, seed=5, max_tokens=10), use_tqdm=False)
    assert [c.index for c in out.outputs] == [0, 1, 2, 3] and len({tuple(c.token_ids) for c in out.outputs}) == 4
    assert all(c.text == TOKENIZER.decode(c.token_ids, skip_special_tokens=True) for c in out.outputs)
    (again,) = llm.generate("hello", SamplingParams(n=2, seed=5, max_tokens=10), use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in out.outputs[:2]]
    (greedy,) = llm.generate(
        "hello", SamplingParams(n=3, temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False
    )
    assert [c.token_ids for c in greedy.outputs] == [greedy_text(reference, "hello", 10)[0]] * 3


def test_more_completions_than_sequences_that_run(llm):
    (out,) = llm.generate("hello", SamplingParams(n=20, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [len(c.token_ids) for c in out.outputs] == [5] * 20


# ------------------------------------------------------------------------------------------------ how it ends


@pytest.fixture(scope="module")
def varied(reference):
    """A prompt, its greedy tokens, of which the first twelve differ and are whole characters, and their text."""
    for i in range(200):
        prompt = f"try {i}"
        token_ids, text = greedy_text(reference, prompt)
        if len(set(token_ids[:12])) == 12 and "\ufffd" not in TOKENIZER.decode(token_ids[:12]):
            return prompt, token_ids, text
    raise AssertionError


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokens", [(4, 5), (3, 6), (0, 1), (5, 8)])
def test_stop_strings(llm, varied, tokens, include):
    prompt, token_ids, text = varied
    start, end = (len(TOKENIZER.decode(token_ids[:n], skip_special_tokens=True)) for n in tokens)
    # From the middle of a token, where it has one, to the middle of another.
    stop = text[start + (tokens[1] - tokens[0] > 1) : end]
    at = text.index(stop)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, stop=["never said", stop], include_stop_str_in_output=include
    )
    (out,) = llm.generate(prompt, params, use_tqdm=False)
    assert out["text"] == text[: at + len(stop) if include else at]
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", stop)
    # The tokens are those that were generated, up to the one that completed the stop string.
    n = len(out["token_ids"])
    assert out["token_ids"] == token_ids[:n]
    assert stop in TOKENIZER.decode(token_ids[:n]) and stop not in TOKENIZER.decode(token_ids[: n - 1])
    assert "".join(llm.stream(prompt, params)) == out["text"]


def test_a_stop_string_completed_by_the_last_token_is_a_stop(llm, varied):
    prompt, token_ids, text = varied
    upto = [TOKENIZER.decode(token_ids[:n], skip_special_tokens=True) for n in (5, 6)]
    stop = upto[1][len(upto[0]) :]
    assert text.index(stop) == len(upto[0])
    (out,) = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=stop), use_tqdm=False
    )
    assert out["text"] == upto[0] and (out["finish_reason"], out["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [None, "never said"])
def test_stop_token_ids(llm, varied, stop, include):
    prompt, token_ids, _ = varied
    params = SamplingParams(
        temperature=0, max_tokens=24, stop_token_ids=[token_ids[7], 3], include_stop_str_in_output=include, stop=stop
    )
    (out,) = llm.generate(prompt, params, use_tqdm=False)
    assert out["token_ids"] == token_ids[:8]
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", token_ids[7])
    assert out["text"] == TOKENIZER.decode(token_ids[: 8 if include else 7], skip_special_tokens=True)
    assert "".join(llm.stream(prompt, params)) == out["text"]


@pytest.mark.parametrize("source", ["config.json", "generation_config.json", "several"])
def test_end_tokens_of_the_model(tmp_path, varied, source):
    prompt, token_ids, _ = varied
    end = token_ids[5]
    tiny.save_with_tokenizer(tmp_path, "llama", seed=3)
    path = tmp_path / ("config.json" if source == "several" else source)
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"eos_token_id": [3, end] if source == "several" else end})
    )
    llm = make(tmp_path)
    assert end in llm.engine.eos_token_ids and TOKENIZER.eos_token_id in llm.engine.eos_token_ids
    (out,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert out["token_ids"] == token_ids[:6] and (out["finish_reason"], out["stop_reason"]) == ("stop", None)
    assert out["text"] == TOKENIZER.decode(token_ids[:5])
    (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert out["token_ids"] == token_ids and out["finish_reason"] == "length"
    (out,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24, min_tokens=9), use_tqdm=False)
    assert out["token_ids"][:5] == token_ids[:5] and not set(out["token_ids"][:9]) & {end, TOKENIZER.eos_token_id}


@pytest.mark.parametrize("end", [5000, -1, [5000, 3]])
def test_an_end_token_outside_the_vocabulary_is_none(tmp_path, end):
    """min_tokens would ban a column of the logits that is not there, or with -1 the last one."""
    tiny.save_with_tokenizer(tmp_path, "llama", seed=3)
    plain = make(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    llm = make(tmp_path)
    assert set(llm.engine.eos_token_ids) == {TOKENIZER.eos_token_id} | ({3} if isinstance(end, list) else set())
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=9, stop_token_ids=[3])
    (ours,), (expected,) = (engine.generate("abc", params, use_tqdm=False) for engine in (llm, plain))
    assert ours["token_ids"] == expected["token_ids"] and len(ours["token_ids"]) == 9


@pytest.mark.parametrize("length", [MAX_LEN - 1, MAX_LEN - 2, MAX_LEN - 20])
def test_the_longest_sequence(llm, reference, length):
    prompt = random.Random(length).choices(range(900), k=length)
    (out,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True), use_tqdm=False)
    assert out["finish_reason"] == "length" and out["token_ids"] == tiny.greedy(reference, prompt, MAX_LEN - length)


def test_special_tokens_in_the_text(llm, monkeypatch):
    say(llm, monkeypatch, "a<|user|>b<|end|>c")
    params = dict(max_tokens=5, ignore_eos=True)
    assert llm.generate("x", SamplingParams(**params), use_tqdm=False)[0]["text"] == "abc"
    say(llm, monkeypatch, "a<|user|>b<|end|>c")
    out = llm.generate("x", SamplingParams(**params, skip_special_tokens=False), use_tqdm=False)[0]
    assert out["text"] == "a<|user|>b<|end|>c"


def say(llm, monkeypatch, text):
    """Let the model say `text`, and zeros after it, to a single request; returns its tokens."""
    token_ids = TOKENIZER.encode(text)
    rest = iter(token_ids)
    execute = type(llm.engine.runner).execute

    def scripted(step):
        result = execute(llm.engine.runner, step)
        said = [next(rest, 0) for part in step.parts if part.samples]
        result.token_ids = lambda: said
        return result

    monkeypatch.setattr(llm.engine.runner, "execute", scripted)
    return token_ids


# ------------------------------------------------------------------------------------------------ chat


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_goes_through_the_template(llm, reference):
    text = "<|user|>hi<|end|><|assistant|>"
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert out.prompt == text and out.prompt_token_ids == TOKENIZER.encode(text)
    assert out["token_ids"] == greedy_text(reference, text)[0]
    two = llm.chat([MESSAGES, [*MESSAGES, {"role": "user", "content": "more"}]], GREEDY, use_tqdm=False)
    assert (
        two[0]["token_ids"] == out["token_ids"] and two[1].prompt == "<|user|>hi<|end|><|user|>more<|end|><|assistant|>"
    )


def test_variables_of_the_chat_template(directory):
    llm = make(directory)
    llm.tokenizer.chat_template = "{{ messages[0]['content'] }}{% if shout %}!{% endif %}"
    assert llm.chat_prompt(MESSAGES, shout=True)["prompt"] == "hi!"
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs={"shout": True})
    assert out.prompt == "hi!"
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; use generate"):
        llm.chat(MESSAGES)
    TOKENIZER.chat_template = tiny.CHAT_TEMPLATE


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_text_in_whole_characters(llm, seed):
    params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, temperature=1.5)
    (out,) = llm.generate("hello", params, use_tqdm=False)
    pieces = list(llm.stream("hello", params))
    assert "".join(pieces) == out["text"] and len(pieces) > 10 and all(pieces)


def test_characters_are_never_cut(llm, monkeypatch):
    text = "naïve 日本 🤦 ok"
    token_ids = say(llm, monkeypatch, text)
    assert len(token_ids) > len(text)
    pieces = list(llm.stream("x", SamplingParams(max_tokens=len(token_ids), ignore_eos=True)))
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces) and len(pieces) == 10


def test_streams_share_the_batch_and_end_alone(llm, reference):
    streams = [llm.stream(p, GREEDY) for p in PROMPTS]
    texts = [next(s) for s in streams]
    streams[0].close()
    for i in (1, 2):
        texts[i] += "".join(streams[i])
        assert texts[i] == greedy_text(reference, PROMPTS[i])[1]


@pytest.mark.parametrize("pieces", [1, 3])
def test_closing_a_stream_aborts_the_request(llm, pieces):
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(pieces):
        next(stream)
    assert llm.engine.scheduler.has_unfinished
    stream.close()


def test_dropping_a_stream_aborts_the_request(llm):
    for piece in llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True)):
        assert piece
        break
    gc.collect()


def test_a_stream_that_was_never_read_leaves_nothing_behind(llm):
    llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True)).close()


def test_generating_while_a_stream_is_open(llm, reference):
    stream = llm.stream(PROMPTS[0], GREEDY)
    text = next(stream)
    (out,) = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert out["token_ids"] == greedy_text(reference, PROMPTS[1])[0]
    assert text + "".join(stream) == greedy_text(reference, PROMPTS[0])[1]


def test_a_stream_checks_its_prompt_at_once(llm):
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream([])
    with pytest.raises(ValueError, match="n=2: a stream has one completion"):
        llm.stream("x", SamplingParams(n=2))
    with pytest.raises(TypeError, match="must be SamplingParams, not dict"):
        llm.stream("x", {"temperature": 0})


# ------------------------------------------------------------------------------------------------ progress


def test_the_progress_bar_says_tokens_a_second(llm, capsys):
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    out, err = capsys.readouterr()
    assert "3/3" in out + err and "prompt" in out + err and "tok/s" in out + err
    llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_progress_does_not_mix_with_what_a_program_prints(llm, capsys):
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ bad input: prompts


@pytest.mark.parametrize(
    "prompt, error, words",
    [
        ("", ValueError, ["the prompt is empty"]),
        ([[]], ValueError, ["the prompt is empty"]),
        ({"prompt_token_ids": []}, ValueError, ["the prompt is empty"]),
        ([[1] * MAX_LEN], ValueError, [f"{MAX_LEN} tokens", f"max_model_len={MAX_LEN}", "raise max_model_len"]),
        ([[1] * 5000], ValueError, ["5000 tokens"]),
        ([[0, len(TOKENIZER)]], ValueError, [f"token id {len(TOKENIZER)}", f"vocabulary of {len(TOKENIZER)}"]),
        ([[3, -1]], ValueError, ["token id -1"]),
        ([[10**30]], ValueError, [f"token id {10**30}"]),
        ([[1.5]], TypeError, ["a prompt is a string, a list of token ids or a dict"]),
        ([["a", "b"]], TypeError, ["a prompt is a string"]),
        ([b"Hello"], TypeError, ["a prompt is a string", "b'Hello'"]),
        ([{1, 2}], TypeError, ["a prompt is a string", "{1, 2}"]),
        ([[True, False]], TypeError, ["a prompt is a string", "[True, False]"]),
        ([None], TypeError, ["prompts[", "a list of token ids", "not None"]),
        ([3.5], TypeError, ["not 3.5"]),
        ([{"text": "x"}], ValueError, ["prompts[", "={'text': 'x'}", '"prompt"']),
        ([{1: 2, "x": 3}], ValueError, ["={1: 2, 'x': 3}", '"prompt"']),
        ([{}], ValueError, ['"prompt"']),
        ([{"prompt": None}], TypeError, ["not None"]),
        ([{"prompt_token_ids": "abc"}], TypeError, ["not 'abc'"]),
        (["ab\ud800"], ValueError, ["prompts[", "]='ab\\ud800': half of a surrogate pair, at position 2"]),
    ],
    ids=lambda v: str(v)[:30],
)
@pytest.mark.parametrize("company", [False, True])
def test_a_bad_prompt_is_refused_and_nothing_was_started(llm, prompt, error, words, company):
    if company and isinstance(prompt, list):
        prompt = ["a good one", *prompt, "another"]
        words = [word.replace("prompts[", "prompts[1]") for word in words]
    with pytest.raises(error) as caught:
        llm.generate(prompt, use_tqdm=False)
    for word in words:
        assert word in str(caught.value)


def test_numbers_beyond_what_the_device_counts_with(llm):
    """No request ends another's step: these are as good as no limit."""
    params = [SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=0, top_k=2**63, max_tokens=3),
              SamplingParams(temperature=0, min_tokens=2**63, max_tokens=2**63, stop=["~"])]  # fmt: skip
    plain, huge, endless = llm.generate(["abc"] * 3, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == huge.outputs[0].token_ids == endless.outputs[0].token_ids[:3]


def test_a_stop_token_outside_the_vocabulary(llm):
    with pytest.raises(ValueError, match=f"stop_token_ids: {len(TOKENIZER)} is outside the vocabulary"):
        llm.generate("x", SamplingParams(stop_token_ids=[len(TOKENIZER)]))


@pytest.mark.parametrize("prompts", [None, 5, 3.5, True, torch.tensor(3), object], ids=str)
def test_what_is_no_list_of_prompts(llm, prompts):
    with pytest.raises(TypeError) as error:
        llm.generate(prompts, use_tqdm=False)
    assert str(error.value).startswith(f"prompts={prompts!r:.80}: must be a prompt or a list of prompts")


@pytest.mark.parametrize(
    "params, words",
    [
        ({"temperature": 0}, ["sampling_params={'temperature': 0}: must be SamplingParams, not dict"]),
        ([None, 3], ["sampling_params[1]=3: must be SamplingParams, not int", "None for the defaults"]),
        ("greedy", ["sampling_params='greedy': must be SamplingParams, not str; pass for example SamplingParams("]),
        ([GREEDY], ["2 prompts but 1 sampling_params; pass one for all, or one for each"]),
        ([GREEDY] * 3, ["2 prompts but 3 sampling_params; pass one for all, or one for each"]),
        ([], ["2 prompts but 0 sampling_params"]),
    ],
    ids=lambda v: str(v)[:30],
)
def test_parameters_of_the_wrong_type_or_number(llm, params, words):
    for call in (llm.generate, llm.chat):
        with pytest.raises((TypeError, ValueError)) as error:
            call(["x", "y"] if call == llm.generate else [MESSAGES] * 2, params, use_tqdm=False)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    "messages, said",
    [
        (None, "messages=None: "),
        ("x", "messages='x': "),
        (5, "messages=5: "),
        (MESSAGES[0], "messages={'role': 'user', 'content': 'hi'}: "),
        (["x"], "messages[0]='x': "),
        ([MESSAGES, None], "messages[1]=None: "),
        ([MESSAGES, []], "messages[1]=[]: "),
        ([*MESSAGES, "x"], "messages[1]='x': "),
        ([MESSAGES, [*MESSAGES, {"content": "hi"}]], "messages[1][1]={'content': 'hi'}: "),
        ([{"role": 3, "content": "hi"}], "messages[0]={'role': 3, 'content': 'hi'}: "),
    ],
    ids=str,
)
def test_what_is_no_conversation(llm, messages, said):
    with pytest.raises(TypeError) as error:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert str(error.value).startswith(
        said + 'a conversation is a list of dicts with "role" and "content"; pass for example'
    )
    with pytest.raises(TypeError, match="a conversation is a list of dicts"):
        llm.chat_prompt(messages)


def test_half_a_character_in_a_conversation(llm):
    with pytest.raises(ValueError, match="messages.*half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\ud83d"}], GREEDY, use_tqdm=False)


def test_variables_of_a_chat_template_are_a_dict(llm):
    with pytest.raises(TypeError, match="chat_template_kwargs='x': must be a dict"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs="x")
    assert llm.chat([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(temperature=-1), ["temperature=-1", "0 for greedy"]),
        (dict(top_p=0), ["top_p=0"]),
        (dict(max_tokens=0), ["max_tokens=0"]),
        (dict(stop_token_ids=[-1]), ["stop_token_ids=[-1]"]),
    ],
)
def test_bad_sampling_parameters_name_the_value(arguments, words):
    with pytest.raises(ValueError) as error:
        SamplingParams(**arguments)
    for word in words:
        assert word in str(error.value)


def test_others_are_served_while_one_is_refused(llm, reference):
    stream = llm.stream(PROMPTS[0], GREEDY)
    text = next(stream)
    for bad in ([], [-1], [1] * MAX_LEN):
        with pytest.raises(ValueError):
            llm.engine.add_request(bad)
    assert text + "".join(stream) == greedy_text(reference, PROMPTS[0])[1]


# ------------------------------------------------------------------------------------------------ bad input: the engine


def refused(error, directory, *words, **arguments):
    with pytest.raises(error) as caught:
        make(directory, **arguments)
    for word in words:
        assert word in str(caught.value)


def test_unknown_arguments_name_the_nearest(directory):
    refused(TypeError, directory, "'max_model_length'", "did you mean 'max_model_len'?", max_model_length=10)
    refused(
        TypeError, directory, "'tensor_paralel_size'", "did you mean 'tensor_parallel_size'?", tensor_paralel_size=1
    )
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'?"):
        SamplingParams(temprature=0)


def test_a_tokenizer_that_is_no_path(directory):
    refused(
        ValueError, directory, "tokenizer=5: must be a directory or a .gguf file that holds a tokenizer", tokenizer=5
    )


def test_tensor_parallelism_is_not_there_yet(directory):
    refused(ValueError, directory, "tensor_parallel_size=2", "only 1 is supported for now", tensor_parallel_size=2)


@pytest.mark.parametrize(
    "device, words", [("tpu", ["device='tpu'"]), ("cuda:77", ["device='cuda:77'", "CUDA device"]), ("", ["device=''"])]
)
def test_devices_that_are_not_there(directory, device, words):
    refused(ValueError, directory, *words, "'auto'", "'cpu'", device=device)


def test_kernels_that_are_not_there(directory):
    refused(ValueError, directory, "'rms_nrom'", "rms_norm", kernel_priority={"rms_nrom": ["triton"]})
    refused(ValueError, directory, "'no-such'", "native", kernel_priority={"rms_norm": ["no-such"]})


@pytest.mark.parametrize(
    "in_config, argument, custom", [(None, None, True), (False, None, False), (False, True, True), (None, False, False)]
)
def test_who_decides_about_custom_kernels(tmp_path, monkeypatch, in_config, argument, custom):
    from nanovllm.engine import llm_engine

    tiny.save(tmp_path)
    if in_config is not None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_custom_kernels": in_config}))
    asked = []
    resolve = llm_engine.resolve_kernels

    def recorded(*arguments):
        asked.extend(a for a in arguments if isinstance(a, bool))
        return resolve(*arguments)

    monkeypatch.setattr(llm_engine, "resolve_kernels", recorded)
    llm = make(tmp_path, skip_tokenizer_init=True, use_custom_kernels=argument)
    assert asked == [custom]
    if not custom:
        assert set(llm.engine.kernels.providers.values()) == {"native"}


def test_a_directory_without_a_tokenizer_serves_token_ids(tmp_path):
    model = tiny.save(tmp_path)
    refused(ValueError, tmp_path, str(tmp_path), "holds no tokenizer", "skip_tokenizer_init=True")
    llm = make(tmp_path, skip_tokenizer_init=True)
    assert llm.tokenizer is None and llm.get_tokenizer() is None
    (out,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert out["text"] == "" and out["token_ids"] == tiny.greedy(model, [1, 2, 3], 24)
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.generate([{"prompt": "text"}]),
        lambda: llm.generate([[1]], SamplingParams(stop="x")),
        lambda: llm.stream([1]),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(MESSAGES)
    assert_clean(llm)


def test_a_tokenizer_from_elsewhere(tmp_path, directory):
    tiny.save(tmp_path, vocab_size=len(TOKENIZER))
    llm = make(tmp_path, tokenizer=str(directory))
    assert llm.get_tokenizer() is llm.tokenizer and llm.generate("hello", GREEDY, use_tqdm=False)[0]["text"]
    refused(FileNotFoundError, tmp_path, "/no/such/place", tokenizer="/no/such/place")


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_a_directory_that_lacks_something(tmp_path, spoil):
    tiny.save_with_tokenizer(tmp_path)
    (tmp_path / spoil).unlink()
    refused((FileNotFoundError, ValueError), tmp_path, str(tmp_path), "holds no")


def test_a_failed_start_leaves_nothing_in_the_way(tmp_path, directory):
    tiny.save_with_tokenizer(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(ValueError, tmp_path, "model.safetensors", "truncated")
    assert make(directory).generate("x", GREEDY, use_tqdm=False)[0].finished


# ------------------------------------------------------------------------------------------------ memory and lengths


def test_a_cache_of_one_block(directory, reference, caplog):
    llm = make(directory, num_kvcache_blocks=1)
    assert llm.engine.runner.max_model_len == 16
    assert "max_model_len=128 is lowered to 16" in caplog.text
    (out,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert out["token_ids"] == tiny.greedy(reference, [1, 2, 3], 13) and out["finish_reason"] == "length"
    with pytest.raises(ValueError, match="16 tokens, but max_model_len=16 allows 15"):
        llm.generate([[1] * 16])
    outs = llm.generate([[1, 2, 3], [4], [5]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert [len(o["token_ids"]) for o in outs] == [13, 15, 15]
    assert_clean(llm)


def test_the_model_bounds_the_length(tmp_path, caplog):
    tiny.save_with_tokenizer(tmp_path, max_position_embeddings=48)
    llm = make(tmp_path)
    assert llm.engine.runner.max_model_len == 48 and "lowered to 48, the model's limit" in caplog.text


@pytest.mark.parametrize("num_blocks", [None, 40])
def test_too_little_memory_for_the_cache(directory, monkeypatch, num_blocks):
    from nanovllm.engine import kv_cache

    monkeypatch.setattr(kv_cache, "available_bytes_cpu", lambda asked: 10_000)
    refused(
        OutOfCacheMemory, directory, "MiB are missing", f"for {num_blocks or 1} block(s)", "kvcache_block_size",
        device="cpu", num_kvcache_blocks=num_blocks,
    )  # fmt: skip


def test_the_cache_is_no_larger_than_useful(directory):
    llm = make(directory, device="cpu", num_kvcache_blocks=None)
    assert llm.engine.runner.num_kvcache_blocks == 8 * MAX_LEN // 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "auto"])
def test_dtypes(directory, dtype):
    llm = make(directory, dtype=dtype)
    assert llm.device_name.endswith("float32" if dtype == "auto" else dtype)
    assert {p.dtype for p in llm.engine.runner.model.parameters()} == {
        getattr(torch, "float32" if dtype == "auto" else dtype)
    }
    (out,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert len(out["token_ids"]) == 24


def test_random_weights_for_a_directory_with_only_a_config(tmp_path):
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (make(tmp_path, load_format="dummy").generate([[1, 2]], GREEDY, use_tqdm=False) for _ in range(2))
    assert first[0]["token_ids"] == second[0]["token_ids"]

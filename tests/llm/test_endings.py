"""How a completion ends: stop strings, stop tokens, end tokens of the model, the longest sequence."""

import json
import random

import pytest

from nanovllm import SamplingParams
from tests import tiny
from tests.llm.small_llm import GREEDY, MAX_LEN, TOKENIZER, greedy_text, make, saying

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module")
def varied(reference):
    """A prompt, its greedy tokens and their text; the first twelve tokens differ and are whole characters."""
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


def test_special_tokens_in_the_text(directory):
    text = "a<|user|>b<|end|>c"
    for skip, expected in ((True, "abc"), (False, text)):
        llm = saying(directory, text)
        params = SamplingParams(max_tokens=5, ignore_eos=True, skip_special_tokens=skip)
        assert llm.generate("x", params, use_tqdm=False)[0]["text"] == expected

"""`LLM.chat` goes through the template; `LLM.stream` gives whole characters and may be left early."""

import gc

import pytest

from nanovllm import SamplingParams
from tests import tiny
from tests.llm.small_llm import GREEDY, MESSAGES, PROMPTS, TOKENIZER, greedy_text, make, saying

pytestmark = pytest.mark.any_device


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


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_is_the_text_in_whole_characters(llm, seed):
    params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, temperature=1.5)
    (out,) = llm.generate("hello", params, use_tqdm=False)
    pieces = list(llm.stream("hello", params))
    assert "".join(pieces) == out["text"] and len(pieces) > 10 and all(pieces)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_characters_are_never_cut(directory, asynchronous):
    text = "naïve 日本 🤦 ok"
    token_ids = TOKENIZER.encode(text)
    assert len(token_ids) > len(text)
    llm = saying(directory, text, async_scheduling=asynchronous)
    pieces = list(llm.stream("x", SamplingParams(max_tokens=len(token_ids), ignore_eos=True)))
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces) and len(pieces) == 10


def test_streams_share_the_batch_and_end_alone(llm, reference):
    streams = [llm.stream(p, GREEDY) for p in PROMPTS]
    texts = [next(s) for s in streams]
    streams[0].close()
    for i in (1, 2):
        texts[i] += "".join(streams[i])
        assert texts[i] == greedy_text(reference, PROMPTS[i])[1]


def test_a_stream_that_is_left_aborts_its_request(llm):
    """Closed, dropped or never read."""
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    stream = llm.stream("hello", params)
    next(stream)
    assert llm.engine.scheduler.has_unfinished
    stream.close()
    next(llm.stream("hello", params))
    gc.collect()
    llm.stream("hello", params).close()


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

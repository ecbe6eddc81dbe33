"""Bad prompts, parameters and conversations are refused with their name, and nothing is started."""

import asyncio

import pytest
import torch

from nanovllm import AsyncLLM, SamplingParams
from tests.llm.small_llm import GREEDY, MAX_LEN, MESSAGES, PROMPTS, TOKENIZER, greedy_text, make

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module")
def shared(directory):
    return make(directory)


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
def test_a_bad_prompt_is_refused_and_nothing_was_started(llm, prompt, error, words):
    for company in (False, True):
        if company and isinstance(prompt, list):
            prompt = ["a good one", *prompt, "another"]
            words = [word.replace("prompts[", "prompts[1]") for word in words]
        with pytest.raises(error) as caught:
            llm.generate(prompt, use_tqdm=False)
        assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"max_model_len": 512, "num_kvcache_blocks": 40}, "max_model_len=512 allows 511 and one of output; shorten the"
         " prompt: the model has no longer context"),
        ({"max_model_len": 128, "num_kvcache_blocks": 4}, "max_model_len=64 allows 63 and one of output; shorten the"
         " prompt or give the KV cache more memory, which limits max_model_len"),
        ({"max_model_len": "auto", "num_kvcache_blocks": 4}, "the KV cache more memory, which limits max_model_len"),
        ({"max_model_len": 64, "num_kvcache_blocks": 4}, "; shorten the prompt or raise max_model_len"),
    ],
    ids=["the model's limit", "lowered by the cache", "what the cache holds", "as asked"],
)  # fmt: skip
def test_what_to_do_with_a_prompt_that_is_too_long(directory, arguments, said):
    with make(directory, **arguments) as llm, pytest.raises(ValueError) as caught:
        llm.generate([[1] * 600], use_tqdm=False)
    assert str(caught.value).endswith(said)


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


def test_others_are_served_while_one_is_refused(llm, reference):
    stream = llm.stream(PROMPTS[0], GREEDY)
    text = next(stream)
    for bad in ([], [-1], [1] * MAX_LEN):
        with pytest.raises(ValueError):
            llm.engine.add_request(bad)
    assert text + "".join(stream) == greedy_text(reference, PROMPTS[0])[1]


def test_async_llm_refuses_a_prompt_that_is_too_long_with_a_remedy_that_helps(directory):
    engine = AsyncLLM(directory, max_model_len=128, num_kvcache_blocks=4, kvcache_block_size=16)

    async def ask():
        async for _ in engine.generate([1] * 100, SamplingParams(max_tokens=4)):
            raise AssertionError("it was answered")

    with pytest.raises(ValueError, match="max_model_len=64 allows 63 .* or give the KV cache more memory"):
        asyncio.run(ask())
    engine.close()

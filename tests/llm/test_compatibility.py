"""What users of vLLM, nano-vLLM and transformers type."""

import re
import time

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.chat.template import chat_text
from nanovllm.config import EngineConfig
from nanovllm.kernels.ops import sample
from tests.llm.small_llm import (
    GREEDY,
    MAX_LEN,
    MESSAGES,
    PROMPT,
    PROMPTS,
    TOKENIZER,
    assert_clean,
    complete,
    greedy_text,
    make,
)
from tests.providers import registered

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module")
def shared(directory):
    return make(directory)


# ------------------------------------------------------------------------------------------------ outputs


def test_outputs_say_when_and_how_likely(llm):
    before = time.time()
    out = complete(llm, "hello", max_tokens=5, ignore_eos=True, logprobs=1, n=2, seed=1)
    metrics = out.metrics
    assert before <= metrics.arrival_time < metrics.first_token_time <= metrics.finished_time <= time.time() + 1
    for completion in out.outputs:
        rows = zip(completion.logprobs, completion.token_ids)
        assert 0 > completion.cumulative_logprob == pytest.approx(sum(row[token].logprob for row, token in rows))
    assert complete(llm, "hello", max_tokens=5).outputs[0].cumulative_logprob is None


def test_max_tokens_none_goes_to_the_end_of_the_context(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for prompt in ("hello world", "x"):
        (out,) = llm.generate(prompt, params, use_tqdm=False)
        length = MAX_LEN - len(out.prompt_token_ids)
        assert out["token_ids"] == greedy_text(reference, prompt, length)[0] and out["finish_reason"] == "length"
        assert "".join(llm.stream(prompt, params)) == out["text"]


def test_the_prefix_cache_can_be_emptied(llm):
    prompt = [list(range(40))]
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached[1] == 32 and llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.reset_prefix_cache() is False  # blocks are in use
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    stream.close()


# ------------------------------------------------------------------------------------------------ chat


def test_contents_may_come_in_parts(llm):
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    prompt = llm.chat_prompt([{"role": "user", "content": parts}])["prompt"]
    assert prompt == "<|user|>a\nb\nc<|end|><|assistant|>"
    (out,) = llm.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], GREEDY, use_tqdm=False)
    assert out.prompt == PROMPT


@pytest.mark.parametrize(
    "part, error, words",
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, ValueError, "a part of type 'image_url' is not supported"),
        ({"type": "text"}, TypeError, "content[0]={'type': 'text'}: a part is"),
        (5, TypeError, "content[0]=5: a part is"),
    ],
    ids=str,
)
def test_parts_that_are_not_text(llm, part, error, words):
    with pytest.raises(error) as caught:
        llm.chat([MESSAGES, [*MESSAGES, {"role": "user", "content": [part]}]], GREEDY, use_tqdm=False)
    assert "messages[1][1]: " in str(caught.value) and words in str(caught.value)


def test_the_last_message_may_go_on(llm):
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, I"}]
    kind = dict(add_generation_prompt=False, continue_final_message=True)
    (out,) = llm.chat(begun, GREEDY, use_tqdm=False, **kind)
    assert out.prompt == "<|user|>hi<|end|><|assistant|>Well, I"
    assert llm.chat_prompt(begun, continue_final_message=True)["prompt"] == out.prompt
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert out.prompt == "<|user|>hi<|end|>"
    with pytest.raises(ValueError, match="messages: .*pass add_generation_prompt=False with continue_final_message"):
        llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True)


def test_tools_reach_the_template(llm, caplog):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    template = "{{ tools[0]['function']['name'] }}: {{ messages[0]['content'] }}"
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, tools=tools, chat_template=template)
    assert out.prompt == "weather: hi" and not caplog.records
    (out,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, tools=tools)
    llm.chat(MESSAGES, GREEDY, use_tqdm=False, tools=tools)
    (record,) = caplog.records  # once, however many requests have tools
    assert out.prompt == PROMPT and "does not show tools" in record.message and "system message" in record.message
    assert re.match(r"the chat template of llama\d+ ", record.message), "the directory's name"
    with pytest.raises(ValueError, match="tools=5: must be a list of descriptions"):
        llm.chat(MESSAGES, tools=5)


def test_a_model_of_the_hub_is_called_by_its_name(caplog):
    class Tokenizer:
        name_or_path = "/cache/hub/models--someone--small-model/snapshots/0123456789abcdef"
        chat_template = "{{ messages[0]['content'] }}"

        def apply_chat_template(self, messages, **_):
            return messages[0]["content"]

    assert chat_text(Tokenizer(), "messages", MESSAGES, {"tools": []}) == MESSAGES[0]["content"]
    assert caplog.records[-1].message.startswith("the chat template of someone/small-model does not show tools")


def test_what_a_template_says_of_a_conversation_is_told(llm):
    with pytest.raises(ValueError, match="messages: the chat template refuses the conversation: roles must alternate"):
        llm.chat(MESSAGES, chat_template="{{ raise_exception('roles must alternate') }}")


# ------------------------------------------------------------------------------------------------ step by step


def test_requests_step_by_step_as_in_nano_vllm(llm, reference):
    assert llm.is_finished() and llm.step() == ([], 0)
    ids = [llm.add_request(prompt, GREEDY) for prompt in (PROMPTS[0], TOKENIZER.encode(PROMPTS[1]))]
    ended, numbers = {}, []
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        ended |= dict(outputs)
        numbers.append(num_tokens)
    assert ended == {key: greedy_text(reference, prompt)[0] for key, prompt in zip(ids, PROMPTS)}
    prompt_tokens = sum(len(TOKENIZER.encode(prompt)) for prompt in PROMPTS[:2])
    assert sum(n for n in numbers if n > 0) == prompt_tokens and numbers[-1] == -2
    with pytest.raises(ValueError, match="n=2: add_request has one completion"):
        llm.add_request("x", SamplingParams(n=2))


def test_a_request_that_ends_during_generate_is_returned_by_the_next_step(llm, reference):
    key = llm.add_request(PROMPTS[0], GREEDY)
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert not llm.is_finished()
    assert llm.step() == ([(key, greedy_text(reference, PROMPTS[0])[0])], 0) and llm.is_finished()


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "dtype, name",
    [("half", "float16"), ("float", "float32"), (torch.float32, "float32"), (torch.bfloat16, "bfloat16")],
)
def test_dtypes_as_torch_writes_them(directory, dtype, name):
    config = EngineConfig("m", dtype=dtype, kv_cache_dtype=dtype)
    assert config.dtype == config.kv_cache_dtype == name
    assert make(directory, dtype=dtype, device="cpu").device_name.endswith(name)


def test_an_interrupt_brings_what_there_is(directory):
    steps, llm = 0, None

    def interrupted(*args):
        nonlocal steps
        steps += llm is not None  # on a GPU an engine samples when it starts, too
        if steps == 4:
            raise KeyboardInterrupt
        return sample.native(*args)

    with registered("sample", interrupted, capturable=False):
        llm = make(directory, kernel_priority={"sample": ["mine"]}, async_scheduling=False)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        llm.generate(PROMPTS[:2], SamplingParams(seed=1, max_tokens=50, ignore_eos=True), use_tqdm=False)
    outputs = interrupt.value.outputs
    assert [len(out["token_ids"]) for out in outputs] == [3, 3] and all(out["text"] for out in outputs)
    assert complete(llm, "hello", max_tokens=3)["token_ids"]
    assert_clean(llm)

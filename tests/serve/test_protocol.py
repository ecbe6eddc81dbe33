"""The fields of vLLM 0.26's requests: each is honoured, or refused by its name with a remedy."""

import pytest

from nanovllm.serve.errors import ApiError
from nanovllm.serve.info_routes import DetokenizeRequest, TokenizeRequest
from nanovllm.serve.messages import CountTokensRequest, MessagesRequest
from nanovllm.serve.protocol import ChatRequest, CompletionRequest, parse
from nanovllm.serve.responses import ResponsesRequest

_GENERATION = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens response_format structured_outputs priority request_id return_tokens_as_token_ids
    return_token_ids return_token_offsets cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget
"""
_OF_A_CHAT = """
    messages add_generation_prompt continue_final_message chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
"""
FIELDS = {
    ChatRequest: _GENERATION + _OF_A_CHAT + """
        top_logprobs max_completion_tokens tool_choice reasoning_effort include_reasoning parallel_tool_calls documents
        chat_template return_prompt_text return_assistant_tokens_mask best_of early_stopping guided_decoding_backend
    """,
    CompletionRequest: _GENERATION + "prompt suffix prompt_embeds",
    ResponsesRequest: """
        background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream
        temperature text tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
        include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key request_id media_io_kwargs
        mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages structured_outputs
        repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs
    """,
    MessagesRequest: """
        model messages max_tokens metadata output_config stop_sequences stream system temperature tool_choice tools
        top_k top_p kv_transfer_params ec_transfer_params chat_template_kwargs
    """,
    CountTokensRequest: "model messages system tool_choice tools chat_template_kwargs",
    TokenizeRequest: _OF_A_CHAT + "model prompt add_special_tokens return_token_strs chat_template",
    DetokenizeRequest: "model tokens",
}  # fmt: skip


class _Nothing:
    """A value that no field takes."""


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_no_field_of_vllm_is_unknown(kind):
    for name in FIELDS[kind].split():
        try:
            parse({name: _Nothing()}, kind)
        except ApiError as error:
            assert error.code != "unknown_parameter", error.message
            if error.code == "unsupported_parameter":
                assert error.param == name and error.message.startswith(f"{name}=") and ": " in error.message


@pytest.mark.parametrize(
    "kind, body, param, said",
    [
        (CompletionRequest, {}, "prompt", "prompt: it is required; pass it"),
        (MessagesRequest, {"messages": []}, "max_tokens", "max_tokens: it is required; pass it"),
        (ChatRequest, {"guided_json": {"type": "object"}}, "guided_json", 'pass structured_outputs={"json": ...}'),
        (ChatRequest, {"logprob_token_ids": [1]}, "logprob_token_ids", "pass logprobs"),
        (ChatRequest, {"return_prompt_text": True}, "return_prompt_text", "return_token_ids"),
        (ResponsesRequest, {"previous_input_messages": [1]}, "previous_input_messages", "conversation as input"),
        (CompletionRequest, {"messages": []}, "messages", "send a conversation to /v1/chat/completions"),
        (CompletionRequest, {"prompt": "x", "stopp": "x"}, "stopp", "did you mean 'stop'"),
    ],
)
def test_what_is_said_of_a_field(kind, body, param, said):
    with pytest.raises(ApiError) as raised:
        parse(body, kind)
    assert raised.value.status == 400 and raised.value.param == param and said in raised.value.message


def test_values_that_ask_for_nothing_are_taken():
    nothing = dict(media_io_kwargs={}, return_token_offsets=False, ec_transfer_params={}, truncation_side="left")
    assert parse({"prompt": "x", **nothing}, CompletionRequest).prompt == "x"


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("n_predict", 3, "use max_tokens"),
        ("json_schema", {}, 'pass structured_outputs={"json": ...}'),
        ("grammar", "root ::= x", 'pass structured_outputs={"grammar": ...}'),
        ("enable_thinking", False, 'pass chat_template_kwargs={"enable_thinking": ...}'),
        ("cache_prompt", False, "the prefix cache is always used; pass a cache_salt to keep prompts apart"),
        ("min_keep", 1, "this filter is not supported; use top_k, top_p or min_p"),
        ("lora_request", {}, "LoRA is not supported; merge the adapter into the weights"),
        ("prompt", "hi", "send the text as a message, or to /v1/completions"),
        (
            "options",
            {"num_ctx": 9},
            "pass its fields beside messages, in OpenAI's names: temperature, top_p, max_tokens",
        ),
        ("think", True, 'pass chat_template_kwargs={"enable_thinking": ...}'),
        ("repeat_penalty", 1.1, "use repetition_penalty"),
    ],
)
def test_fields_of_llama_cpp_and_ollama_say_what_to_send_here(name, value, remedy):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ApiError) as error:
        parse({"messages": messages, name: value}, ChatRequest)
    assert error.value.param == name and error.value.message.endswith(f": {remedy}")


def test_a_filter_of_llama_cpp_that_is_off_is_taken():
    parse({"messages": [{"role": "user", "content": "hi"}], "mirostat": 0, "typical_p": 1.0}, ChatRequest)

"""The requests of OpenAI's interface and vLLM's additions to them: what is read, and what is refused by its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import msgspec

from nanovllm.serve.errors import ApiError
from nanovllm.wording import brief

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. Names and defaults are OpenAI's, then vLLM's.

    The model's files may have a default for what is None here.
    """

    model: str | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    OF_MESSAGES: ClassVar = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    """Fields that a `prompt` has no use for."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


_NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    # None: any value is taken, since it asks nothing of the answer.
    "user": None, "metadata": None, "safety_identifier": None, "prompt_cache_key": None,
    "prompt_cache_retention": None, "prediction": None, "priority": (0,), "store": (False,),
    "service_tier": ("auto", "default", "standard_only"), "modalities": (["text"],), "verbosity": ("medium",),
    "echo": (False,),
    "top_logprobs": (0,), "stream_options": ({"include_obfuscation": False},),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "include_reasoning": (True,), "suffix": ("",),
    "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (-1,), "add_special_tokens": (False,),
    "function_call": (), "functions": ([],),
    "documents": ([],), "mm_processor_kwargs": ({},), "kv_transfer_params": ({},), "vllm_xargs": ({},),
    "guided_decoding_backend": None, "thinking_token_budget": (), "web_search_options": (), "audio": (),
    "prompt_cache_options": None, "moderation": (), "cache_control": None, "container": (), "diagnostics": (),
    "inference_geo": (), "output_config": (), "speed": ("standard",), "user_profile_id": None, "workspace_id": None,
    "context_management": (), "mcp_servers": ([],), "conversation": (), "max_tool_calls": None, "prompt": (),
    "truncation_side": None, "logprob_token_ids": (), "media_io_kwargs": ({},), "return_token_offsets": (False,),
    "return_prompt_text": (False,), "return_assistant_tokens_mask": (False,), "ec_transfer_params": ({},),
    "repetition_detection": ({},), "early_stopping": (False,), "enable_response_messages": (False,),
    "previous_input_messages": ([],), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structural_tag": (),
    "chat_template": (), "lora_request": (), "logits_processors": ([],), "prompt_embeds": (),
    # llama.cpp's
    "n_predict": (), "n_probs": (0,), "json_schema": (), "grammar": ("",), "content": (), "cache_prompt": (True,),
    "messages": (), "samplers": (), "min_keep": (0,), "mirostat": (0,), "typical_p": (1, 1.0), "top_a": (0, 0.0),
    "dry_multiplier": (0, 0.0), "xtc_probability": (0, 0.0), "enable_thinking": (),
    # Ollama's
    "options": ({},), "think": (), "keep_alive": None, "format": ("",), "num_predict": (), "num_ctx": (),
    "raw": (False,), "detokenize": (True,), "max_new_tokens": (), "repeat_penalty": (1, 1.0),
}  # fmt: skip
"""Fields of OpenAI, vLLM, llama.cpp and Ollama that this server lacks, with the values that are the same as none."""

_REMEDIES = {
    "use_beam_search": "beam search is not supported; use n for several completions",
    "length_penalty": "beam search is not supported",
    "suffix": "the models of this server do not fill gaps; put everything into the prompt",
    "modalities": "this server reads and writes text alone",
    "audio": "this server reads and writes text alone",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "the server's own template is used; pass chat_template_kwargs",
    "truncate_prompt_tokens": "a prompt is not cut; shorten it",
    "priority": "requests are served in the order of their arrival; leave it out",
    "early_stopping": "beam search is not supported",
    "logprob_token_ids": "pass logprobs for the most likely tokens",
    "return_token_offsets": "pass logprobs of a completion, which have text_offset",
    "return_prompt_text": "pass echo=true in a completion, or return_token_ids",
    "previous_input_messages": "send the whole conversation as input",
    "store": "this server keeps nothing; leave it out",
    "guided_json": 'pass structured_outputs={"json": ...}',
    "guided_regex": 'pass structured_outputs={"regex": ...}',
    "guided_choice": 'pass structured_outputs={"choice": ...}',
    "guided_grammar": 'pass structured_outputs={"grammar": ...}',
    "grammar": 'pass structured_outputs={"grammar": ...}',
    "json_schema": 'pass structured_outputs={"json": ...}',
    "enable_thinking": 'pass chat_template_kwargs={"enable_thinking": ...}',
    "lora_request": "LoRA is not supported; merge the adapter into the weights",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "content": "pass a text as prompt, or a conversation as messages",
    "messages": "send a conversation to /v1/chat/completions",
    "options": "pass its fields beside messages, in OpenAI's names: temperature, top_p, max_tokens",
    "think": 'pass chat_template_kwargs={"enable_thinking": ...}',
    "format": 'pass response_format={"type": "json_object"}, or one with a JSON schema',
    "num_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "num_ctx": "the server's --max-model-len sets the length of the context",
    "raw": "send the text to /v1/completions",
    "repeat_penalty": "use repetition_penalty",
    "detokenize": "pass return_token_ids for the tokens beside the text",
    "prompt": "send the text as a message, or to /v1/completions",
    "cache_prompt": "the prefix cache is always used; pass a cache_salt to keep prompts apart",
} | dict.fromkeys(
    ("samplers", "min_keep", "mirostat", "typical_p", "top_a", "dry_multiplier", "xtc_probability"),
    "this filter is not supported; use top_k, top_p or min_p",
)


def parse(data: dict[str, Any], kind: type[T]) -> T:
    """A decoded JSON object as a request. A null is the same as no value.

    Raises:
        ApiError: 400, which names the field.
    """
    given = {name: value for name, value in data.items() if value is not None}
    known = kind.__struct_fields__
    for name in list(given):
        if name in known:
            continue
        if name not in _NO_EFFECT:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "leave it out"
            raise ApiError(400, f"{name[:80]}: this field is not known; {remedy}", name[:80], "unknown_parameter")
        harmless = _NO_EFFECT[name]
        if harmless is not None and given[name] not in harmless:
            remedy = _REMEDIES.get(name, "it is not supported; leave it out")
            raise ApiError(400, f"{name}={brief(given[name])}: {remedy}", name, "unsupported_parameter")
        del given[name]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block an error names a field as another interface calls it. names: from a chat's fields."""
    try:
        yield
    except ApiError as error:
        other = names.get(error.param or "")
        if other is not None and error.param is not None:
            error.message = error.message.replace(error.param, other, 1)
            error.param = other
        for name, other in names.items():  # a value that is named beside that of the field
            error.message = re.sub(rf"\b{name}=", f"{other}=", error.message)
        raise


def _invalid(message: str) -> ApiError:
    """msgspec names the place as "... - at `$.field[0]`"."""
    said, _, place = message.partition(" - at `$.")
    name = re.match(r"\w+", place)
    missing = re.match(r"Object missing required field `(\w+)`", message)
    param = name[0] if name else missing[1] if missing else None
    if missing and not name:
        return ApiError(400, f"{param}: it is required; pass it", param)
    at = place.rstrip("`")
    return ApiError(400, f"{at}: {said}" if at else message, param)

"""/v1/messages: Anthropic's interface as a translation to a chat."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any, Literal

import msgspec

from nanovllm.chat.reasoning import START
from nanovllm.outputs import RequestOutput
from nanovllm.serve.answering import answer
from nanovllm.serve.blocks import Block, Blocks
from nanovllm.serve.chat import Conversation
from nanovllm.serve.errors import ApiError
from nanovllm.serve.event_stream import event
from nanovllm.serve.http import Exchange
from nanovllm.serve.protocol import ChatRequest, parse
from nanovllm.serve.service import Service
from nanovllm.wording import brief

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


_TOOL_FIELDS = ("name", "description", "input_schema", "strict", "type", "cache_control", "eager_input_streaming")
"""What a tool may have. The last two ask for nothing of the answer."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's"""


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    output_config: dict[str, Any] | None = None


async def messages(service: Service, exchange: Exchange, key: str) -> None:
    request = parse(await service.json(exchange), MessagesRequest)
    service.check_model(request.model)
    if request.max_tokens < 1:
        said = "must be at least 1, which fills the prompt cache too"
        raise ApiError(400, f"max_tokens={brief(request.max_tokens)}: {said}", "max_tokens")
    conversation = await service.offload(
        exchange.body_size, _conversation, service, request, max_tokens=request.max_tokens,
        stop=request.stop_sequences, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        response_format=_response_format(request.output_config),
    )  # fmt: skip
    with closing(await conversation.start(exchange, key)) as generation:
        num_prompt_tokens = len(generation.streams[0].request.prompt_token_ids)
        shape = MessageAnswer(conversation, exchange.request_id, num_prompt_tokens, _shows_thoughts(request))
        await answer(exchange, generation, shape, request.stream, service.options)


async def count_tokens(service: Service, exchange: Exchange, key: str) -> None:
    """/v1/messages/count_tokens"""
    request = parse(await service.json(exchange), CountTokensRequest)
    service.check_model(request.model)
    conversation = await service.offload(exchange.body_size, _conversation, service, request)
    token_ids = await service.encode(conversation.prompt, "messages", False)
    await exchange.answer_json({"input_tokens": len(token_ids)})


def _conversation(service: Service, request: CountTokensRequest, **others: Any) -> Conversation:
    chat: list[dict[str, Any]] = []
    if request.system is not None:
        chat.append({"role": "system", "content": _text(request.system, "system")})
    for i, message in enumerate(request.messages):
        chat += _chat_messages(message, f"messages[{i}]")
    last = chat[-1] if chat else {}
    goes_on = last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    choice, parallel = _tool_choice(request.tool_choice)
    translated = ChatRequest(
        messages=chat, tools=_tools(request.tools), tool_choice=choice, parallel_tool_calls=parallel,
        chat_template_kwargs=_thinking(request.thinking, service) | (request.chat_template_kwargs or {}),
        continue_final_message=goes_on, **others,
    )  # fmt: skip
    return Conversation(service, translated, {"stop": "stop_sequences", "response_format": "output_config"})


def _text(content: Any, name: str) -> str:
    """The text of a string or of blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{name}: must be a string or a list of blocks", name.split("[")[0])
    return "\n".join(_block_text(block, f"{name}[{i}]") for i, block in enumerate(content))


def _block_text(block: Any, name: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    text = block.get("text") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(text, str):
        said = (
            f"a block of type {brief(kind, 40)} is not supported here; pass texts"
            if kind != "text"
            else "it has no text"
        )
        raise ApiError(400, f"{name}: {said}", name.split("[")[0])
    return text


def _chat_messages(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Anthropic's message as chat messages: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{name}: role={brief(role, 40)}: must be user or assistant", "messages")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"{name}.content")}]
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text(block.get("content", ""), f"{name}.content[{i}].content")
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(_block_text(block, f"{name}.content[{i}]"))
    if texts or calls or not found:
        plain: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        found.append(plain | {"tool_calls": calls} if calls else plain)
    return found


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise ApiError(
                400, f"tools[{i}]: type={brief(tool['type'], 40)}: only functions of yours are supported", "tools"
            )
        if unknown := {name for name, value in tool.items() if value is not None} - set(_TOOL_FIELDS):
            known = ", ".join(_TOOL_FIELDS)
            raise ApiError(400, f"tools[{i}]: no field {min(unknown)[:80]!r} is supported; known are {known}", "tools")
    return [
        {"type": "function", "function": {"name": t.get("name"), "description": t.get("description", ""),
                                          "parameters": t.get("input_schema", {"type": "object"}),
                                          **({"strict": t["strict"]} if t.get("strict") is not None else {})}}
        for t in tools
    ]  # fmt: skip


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(OpenAI's tool_choice, parallel_tool_calls)"""
    if choice is None:
        return None, True
    parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    names = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in names:
        raise ApiError(400, f"tool_choice: type={brief(kind, 40)}: must be auto, any, tool or none", "tool_choice")
    return names[kind], parallel


def _response_format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's response_format for the JSON schema of an `output_config`."""
    if not config or config == {"format": None}:
        return None
    if set(config) != {"format"}:
        other = min(set(config) - {"format"})
        raise ApiError(400, f"output_config: {brief(other, 40)} is not supported; leave it out", "output_config")
    given = config["format"]
    fields = given if isinstance(given, dict) else {}
    if set(fields) != {"type", "schema"} or fields["type"] != "json_schema" or not isinstance(fields["schema"], dict):
        said = 'output_config: format must be {"type": "json_schema", "schema": {...}}'
        raise ApiError(400, said, "output_config")
    return {"type": "json_schema", "json_schema": {"schema": fields["schema"]}}


_THINKING_FIELDS = {"disabled": (), "adaptive": ("display",), "enabled": ("display", "budget_tokens")}
"""Types of `thinking`, and the fields that one may have beside its type."""


def _thinking(thinking: dict[str, Any] | None, service: Service) -> dict[str, Any]:
    """Variables of the template for a `thinking`."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING_FIELDS:
        said = f"type={brief(kind, 40)}" if "type" in thinking else "type is missing"
        raise ApiError(400, f"thinking: {said}: must be enabled, adaptive or disabled", "thinking")
    for name, value in thinking.items():
        if name == "type" or value is None:
            continue
        if name not in _THINKING_FIELDS[kind]:
            said = f"{brief(name, 40)} is not supported beside type={kind!r}; leave it out"
            raise ApiError(400, f"thinking: {said}", "thinking")
        if name == "display" and value not in ("summarized", "omitted"):
            raise ApiError(400, f"thinking: display={brief(value, 40)}: must be summarized or omitted", "thinking")
        if name == "budget_tokens" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ApiError(400, f"thinking: budget_tokens={brief(value, 40)}: must be at least 1", "thinking")
    template = service.chat_template or ""
    if "enable_thinking" in template:
        return {"enable_thinking": kind != "disabled"}
    if kind == "enabled" and START not in template:
        raise ApiError(400, "thinking: type='enabled': this model does not reason; leave it out", "thinking")
    return {}


def _shows_thoughts(request: MessagesRequest) -> bool:
    """Whether the model's thoughts have their text in the answer."""
    return (request.thinking or {}).get("display") != "omitted"


class MessageAnswer:
    """Anthropic's message, whole or as events.

    Args:
        thoughts: with their text.
    """

    def __init__(
        self, conversation: Conversation, request_id: str, num_prompt_tokens: int, thoughts: bool = True
    ) -> None:
        self._conversation = conversation
        self._blocks = Blocks(conversation.plan.parser())
        self._begun = False
        self._thoughts = thoughts
        self._num_prompt_tokens = num_prompt_tokens
        self._head = {
            "id": f"msg_{request_id}", "type": "message", "role": "assistant",
            "model": conversation.service.model_name,
        }  # fmt: skip

    def feed(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = [] if self._begun else [self._start(output)]
        self._begun = True
        for piece in output.outputs:
            for change, block, text in self._blocks.feed(piece):
                if self._thoughts or block.kind != "reasoning" or change != "more":
                    frames.append(_event(change, block, text))
        return b"".join(frames)

    def _start(self, output: RequestOutput) -> bytes:
        usage = {
            "input_tokens": self._num_prompt_tokens - output.num_cached_tokens, "output_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens, "cache_creation_input_tokens": 0,
        }  # fmt: skip
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _stop(self) -> dict[str, Any]:
        blocks = self._blocks
        stop_sequence = blocks.stop_reason if isinstance(blocks.stop_reason, str) else None
        reason = "tool_calls" if blocks.has_calls and blocks.finish_reason == "stop" else blocks.finish_reason or ""
        named = _STOP_REASONS.get(reason, "end_turn" if stop_sequence is None else "stop_sequence")
        return {"stop_reason": named, "stop_sequence": stop_sequence}

    def end(self, usage: dict[str, Any]) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": _usage(usage)}
        return event(delta, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def error(self, error: ApiError) -> bytes:
        return event(error_body(error), "error")

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        content = [_content(block, self._thoughts) for block in self._blocks.all]
        return {**self._head, "content": content, **self._stop(), "usage": _usage(usage)}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = {503: "overloaded_error", 500: "api_error", 413: "request_too_large"}.get(error.status, error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip


def _content(block: Block, thoughts: bool) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text if thoughts else "", "signature": ""}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # max_tokens has ended it, or the model wrote no JSON
        arguments = {"text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _event(change: str, block: Block, text: str) -> bytes:
    if change == "close":
        return event({"type": "content_block_stop", "index": block.index}, "content_block_stop")
    if change == "open":
        empty: dict[Literal["text", "reasoning", "call"], dict[str, Any]] = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}},
        }
        start = {"type": "content_block_start", "index": block.index, "content_block": empty[block.kind]}
        return event(start, "content_block_start")
    kinds: dict[str, tuple[str, str]] = {
        "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }  # fmt: skip
    kind, name = kinds[block.kind]
    delta = {"type": kind, name: text}
    return event({"type": "content_block_delta", "index": block.index, "delta": delta}, "content_block_delta")

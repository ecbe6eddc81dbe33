"""/v1/responses: OpenAI's newer interface as a translation to a chat. Nothing is kept between two requests."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import msgspec

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.answering import answer
from nanovllm.serve.blocks import Block, Blocks
from nanovllm.serve.chat import Conversation
from nanovllm.serve.errors import ApiError
from nanovllm.serve.event_stream import event
from nanovllm.serve.http import Exchange
from nanovllm.serve.protocol import ChatRequest, parse
from nanovllm.serve.service import Service
from nanovllm.serve.token_logprobs import chat_logprobs
from nanovllm.wording import brief

_RENAMED = {"max_tokens": "max_output_tokens", "response_format": "text", "reasoning_effort": "reasoning",
            "messages": "input"}  # fmt: skip
_SAME = (
    "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "logit_bias", "structured_outputs", "chat_template_kwargs", "cache_salt", "request_id",
)  # fmt: skip
"""Fields that a chat has as well."""


_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] = []
    top_logprobs: int | None = None
    truncation: str = "disabled"
    previous_response_id: str | None = None
    background: bool = False
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None


async def responses(service: Service, exchange: Exchange, key: str) -> None:
    request = parse(await service.json(exchange), ResponsesRequest)
    service.check_model(request.model)
    _refuse_state(request)
    chat = _chat_request(request)
    conversation = await service.offload(exchange.body_size, Conversation, service, chat, _RENAMED)
    with closing(await conversation.start(exchange, key)) as generation:
        shape = ResponseAnswer(request, conversation, exchange.request_id)
        await answer(exchange, generation, shape, request.stream, service.options)


def _refuse_state(request: ResponsesRequest) -> None:
    if request.previous_response_id is not None:
        raise ApiError(400, "previous_response_id: this server keeps nothing; send the whole conversation as input",
                       "previous_response_id")  # fmt: skip
    if request.background:
        raise ApiError(400, "background: it is not supported; use stream", "background")
    if request.truncation != "disabled":
        raise ApiError(
            400, f"truncation={brief(request.truncation, 40)}: an input is not cut; shorten it", "truncation"
        )
    _refuse_others("text", request.text, {"format": None, "verbosity": ("medium",)})
    _refuse_others(
        "reasoning", request.reasoning, {"effort": None, "summary": ("auto",), "generate_summary": ("auto",)}
    )
    for name in request.include:
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):  # of the latter there is none
            raise ApiError(400, f"include: {brief(name)} is not supported", "include")

    if request.top_logprobs and _LOGPROBS not in request.include:
        said = f"top_logprobs={request.top_logprobs}: needs include=[{_LOGPROBS!r}]; add it"
        raise ApiError(400, said, "top_logprobs")


def _refuse_others(name: str, given: dict[str, Any] | None, known: dict[str, tuple[str, ...] | None]) -> None:
    """Refuse what an object asks for beyond `known`. known: the values that change nothing; None: all are honoured."""
    for key, value in (given or {}).items():
        harmless = known.get(key, ())
        if value is not None and harmless is not None and value not in harmless:
            raise ApiError(400, f"{name}: {key[:40]}={brief(value)} is not supported; leave it out", name)


def _chat_request(request: ResponsesRequest) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for i, item in enumerate(request.input):
            _add_item(messages, item, f"input[{i}]")
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": _allowed_tools(choice)}
    return ChatRequest(
        messages=messages, max_tokens=request.max_output_tokens, temperature=request.temperature, top_p=request.top_p,
        **{name: getattr(request, name) for name in _SAME}, tools=_tools(request.tools),
        tool_choice=choice, parallel_tool_calls=request.parallel_tool_calls, response_format=_format(request.text),
        logprobs=_LOGPROBS in request.include, top_logprobs=request.top_logprobs,
        reasoning_effort=(request.reasoning or {}).get("effort"),
    )  # fmt: skip


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], name: str) -> None:
    """Add an item of the input to the chat."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        messages.append({"role": "system" if role == "developer" else role, "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":  # calls of one answer
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":  # thoughts of earlier answers are not shown to the model again
        raise ApiError(400, f"{name}: type={brief(kind)} is not supported", "input")


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise ApiError(
                400, f"tools[{i}]: type={brief(tool.get('type'), 40)}: only functions are supported", "tools"
            )
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}  # checked with those of a chat
        found.append({"type": "function", "function": function})
    return found


def _allowed_tools(choice: dict[str, Any]) -> dict[str, Any]:
    """The tools of a choice in the shape of a chat's."""
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [
            {"type": "function", "function": {"name": tool.get("name")}}
            if isinstance(tool, dict) and tool.get("type") == "function"
            else tool
            for tool in tools
        ]
    return {"mode": choice.get("mode"), "tools": tools}


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format in the shape of a chat's response_format."""
    form = (text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    return form


class ResponseAnswer:
    """OpenAI's response, whole or as events."""

    def __init__(self, request: ResponsesRequest, conversation: Conversation, request_id: str) -> None:
        self._conversation = conversation
        self._blocks = Blocks(conversation.plan.parser(), self._rows if _LOGPROBS in request.include else None)
        self._num_top = request.top_logprobs or 0
        self._number = 0
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
            "background": False, "error": None, "incomplete_details": None, "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens, "model": conversation.service.model_name, "output": [],
            "parallel_tool_calls": request.parallel_tool_calls, "previous_response_id": None,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None}, "store": False,
            "temperature": conversation.params.temperature, "top_p": conversation.params.top_p,
            "top_logprobs": request.top_logprobs or 0, "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto", "tools": request.tools or [],
            "truncation": "disabled", "usage": None, "metadata": request.metadata or {},
        }  # fmt: skip

    def _rows(self, piece: CompletionOutput) -> list[dict[str, Any]]:
        decoder = self._conversation.service.engine.maker.decoder
        assert decoder is not None, "a chat has a tokenizer"
        return chat_logprobs(piece.logprobs or (), self._num_top, decoder.token_bytes)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def feed(self, prompt_index: int, output: RequestOutput) -> bytes:
        frames = []
        if not self._number:
            frames.append(self._event("response.created", response=self._head))
            frames.append(self._event("response.in_progress", response=self._head))
        for piece in output.outputs:
            for change, block, text in self._blocks.feed(piece):
                frames.append(getattr(self, f"_{change}")(block, text))
        return b"".join(frames)

    def _open(self, block: Block, text: str) -> bytes:
        added = self._event(
            "response.output_item.added", output_index=block.index, item=_item(block, "in_progress", empty=True)
        )
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **_place(block), part=_part(block, ""))

    def _more(self, block: Block, text: str) -> bytes:
        if block.kind == "call":
            return self._event(
                "response.function_call_arguments.delta", item_id=_id(block), output_index=block.index, delta=text
            )
        kind = "response.output_text.delta" if block.kind == "text" else "response.reasoning_text.delta"
        logprobs = {"logprobs": block.logprobs[block.num_told :]} if block.kind == "text" else {}
        return self._event(kind, **_place(block), delta=text, **logprobs)

    def _close(self, block: Block, text: str) -> bytes:
        if block.kind == "call":
            done = self._event(
                "response.function_call_arguments.done", item_id=_id(block), output_index=block.index,
                name=block.name, arguments=block.text,
            )  # fmt: skip
        else:
            kind = "response.output_text.done" if block.kind == "text" else "response.reasoning_text.done"
            logprobs = {"logprobs": block.logprobs} if block.kind == "text" else {}
            done = self._event(kind, **_place(block), text=block.text, **logprobs)
            done += self._event("response.content_part.done", **_place(block), part=_part(block, block.text))
        item = _item(block, self._status(block))
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _status(self, block: Block) -> str:
        """Of an item that is closed: the end of the answer may have cut the last one off."""
        if self._blocks.finish_reason in (None, "stop") or block is not self._blocks.all[-1]:
            return "completed"
        # A call may be complete, and the next one cut off before its name.
        return "completed" if block.kind == "call" and _is_json(block.text) else "incomplete"

    def end(self, usage: dict[str, Any]) -> bytes:
        response = self.whole(usage)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        told = {"code": str(error.code or "server_error"), "message": error.message}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": told})

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        complete = self._blocks.finish_reason == "stop"
        usage = self._conversation.with_reasoning(usage, [b.text for b in self._blocks.all if b.kind == "reasoning"])
        reason = "max_output_tokens" if self._blocks.finish_reason == "length" else "content_filter"
        status = "completed" if complete else "incomplete"
        return {
            **self._head, "status": status, "incomplete_details": None if complete else {"reason": reason},
            "output": [_item(block, self._status(block)) for block in self._blocks.all],
            "usage": {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
        }  # fmt: skip


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _place(block: Block) -> dict[str, Any]:
    return {"item_id": _id(block), "output_index": block.index, "content_index": 0}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": block.logprobs if text else []}


def _item(block: Block, status: str, empty: bool = False) -> dict[str, Any]:
    """An item of the output. empty: as it begins."""
    text = "" if empty else block.text
    content = [] if empty else [_part(block, text)]
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": text}
        return {"type": "function_call", "id": _id(block), "status": status, **call}
    if block.kind == "reasoning":
        return {"type": "reasoning", "id": _id(block), "summary": [], "content": content, "status": status}
    return {"type": "message", "id": _id(block), "status": status, "role": "assistant", "content": content}

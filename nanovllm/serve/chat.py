"""/v1/chat/completions"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nanovllm.chat import (
    AnswerParser,
    AnswerPlan,
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolPlan,
    collect,
)
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.answer_format import constraint
from nanovllm.serve.answering import ChunkedAnswer, answer
from nanovllm.serve.errors import ApiError
from nanovllm.serve.generation import Generation
from nanovllm.serve.http import Exchange
from nanovllm.serve.protocol import ChatRequest, parse, renamed
from nanovllm.serve.request_params import bad_request, sampling_params
from nanovllm.serve.service import Service
from nanovllm.serve.token_logprobs import chat_logprobs, prompt_rows
from nanovllm.wording import brief


async def chat_completions(service: Service, exchange: Exchange, key: str) -> None:
    request = parse(await service.json(exchange), ChatRequest)
    service.check_model(request.model)
    conversation = await service.offload(exchange.body_size, Conversation, service, request)
    with closing(await conversation.start(exchange, key)) as generation:
        shape = ChatAnswer(conversation, exchange.request_id, generation.usage)
        await answer(exchange, generation, shape, request.stream, service.options)


class Conversation:
    """A chat request, checked, with the prompt that its template makes.

    Args:
        names: what another interface calls the fields of a chat, for error messages.

    Raises:
        ApiError: it cannot be served.
    """

    def __init__(self, service: Service, request: ChatRequest, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self.service = service
        self.request = request
        self._names = dict(names)
        if request.max_completion_tokens is not None:
            self._names["max_tokens"] = "max_completion_tokens"
        if request.top_logprobs and request.logprobs:
            self._names["logprobs"] = "top_logprobs"
        with renamed(self._names):
            self._read()

    def _read(self) -> None:
        service, request = self.service, self.request
        template = service.chat_template
        try:
            self.tools = ToolPlan.of(request.tools, request.tool_choice, template, request.parallel_tool_calls)
        except ValueError as error:
            raise bad_request(error) from None
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables |= _reasoning_effort(request.reasoning_effort, template or "")
        self.prompt = service.render(
            request.messages, variables, tools=self.tools.template_tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )  # fmt: skip
        self.plan = AnswerPlan.of(self.tools, self.prompt, template)
        if request.top_logprobs and not request.logprobs:
            said = f"top_logprobs={request.top_logprobs}: needs logprobs=true; add it"
            raise ApiError(400, said, "top_logprobs")
        both = request.max_completion_tokens, request.max_tokens
        self._max_tokens = both[1] if both[0] is None else both[0]
        params = sampling_params(
            request,
            service.sampling_defaults,
            max_tokens=self._max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            **constraint(request),
        )
        if self.tools.grammar is not None and request.structured_outputs is None:
            params = replace(params, structured_outputs=None)  # a response_format is of the text, which calls replace
        try:
            self.params = self.plan.params(params)
        except ValueError as error:
            raise bad_request(error) from None

    def with_reasoning(self, usage: dict[str, Any], thoughts: Sequence[str]) -> dict[str, Any]:
        """The usage with the number of reasoning tokens, as many as the tokenizer makes of the thoughts' texts."""
        encode = self.service.engine.tokenizer.encode
        count = sum(len(encode(text, add_special_tokens=False)) for text in thoughts)
        return usage | {"completion_tokens_details": {"reasoning_tokens": count}}

    async def start(self, exchange: Exchange, key: str) -> Generation:
        with renamed(self._names):
            return await self.service.start(
                exchange, key, [self.prompt], self.params, add_special_tokens=False,
                cache_salt=self.request.cache_salt, request_id=self.request.request_id, max_tokens=self._max_tokens,
                name="messages",
            )  # fmt: skip


def _reasoning_effort(effort: str, template: str) -> dict[str, Any]:
    """OpenAI's field as a variable that the template knows."""
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    if effort == "none":
        return {}
    raise ApiError(400, f"reasoning_effort={brief(effort)}: this model does not reason; leave it out",
                   "reasoning_effort")  # fmt: skip


class Choice:
    """A completion of a chat: its parser and what it gave out."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.deltas: list[Delta] = []
        self.thoughts = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.call_ids: list[str] = []
        self.has_calls = False
        self.begun = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def feed(self, piece: CompletionOutput) -> list[Delta]:
        """The deltas of what is new."""
        deltas = self._parser.feed(piece.text, last=piece.finish_reason is not None)
        for delta in deltas:
            if isinstance(delta, CallDelta):
                self.has_calls = True
                self.call_ids.append(f"call_{secrets.token_hex(12)}")
            elif isinstance(delta, ReasoningDelta):
                self.thoughts += delta.text
        return deltas


class ChatAnswer(ChunkedAnswer):
    """OpenAI's chat completion, whole or in chunks."""

    def __init__(self, conversation: Conversation, request_id: str, usage: Callable[[], dict[str, Any]]) -> None:
        request, service = conversation.request, conversation.service
        name = f"chatcmpl-{request_id}", "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(
            service, request, name, lambda: self._so_far(usage()),
            b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null'
        )  # fmt: skip
        self._conversation = conversation
        self._request = request
        decoder = service.engine.maker.decoder
        assert decoder is not None, "a chat has a tokenizer"
        self._token_bytes = decoder.token_bytes
        self._choices: dict[int, Choice] = {}
        self._first: RequestOutput | None = None
        self._num_told = 0  # tokens of the pieces that were fed

    def feed(self, prompt_index: int, output: RequestOutput) -> bytes:
        self._first = self._first or output
        frames = []
        for piece in output.outputs:
            choice = self._choices.get(piece.index)
            if choice is None:
                choice = self._choices[piece.index] = Choice(self._conversation.plan.parser())
            deltas = choice.feed(piece)
            if not self._request.include_reasoning:
                deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
            rows: list[dict[str, Any]] = []
            if self._request.logprobs:
                as_ids = self._request.return_tokens_as_token_ids
                rows = chat_logprobs(piece.logprobs or (), self._request.top_logprobs or 0, self._token_bytes, as_ids)
            if piece.finish_reason is not None:
                choice.finish_reason = self._conversation.tools.finish_reason(piece.finish_reason, choice.has_calls)
                choice.stop_reason = piece.stop_reason
            if self._request.stream:
                frames.append(self._frames(piece, choice, deltas, rows))
            else:
                choice.deltas += deltas
                choice.logprobs += rows
                choice.token_ids += piece.token_ids
        return b"".join(frames)

    def _frames(
        self, piece: CompletionOutput, choice: Choice, deltas: list[Delta], rows: list[dict[str, Any]]
    ) -> bytes:
        frames = []
        if not choice.begun:
            choice.begun = True
            frames.append(self._first_frame(piece.index))
        self._num_told += len(piece.token_ids)
        ended = choice.finish_reason is not None
        if self._plain and not ended:
            for delta in deltas:
                if isinstance(delta, ContentDelta):
                    frames.append(self._plain_chunk(piece.index, delta.text))
                else:
                    frames.append(self._frame({"index": piece.index, "delta": _delta(delta, choice)}))
            return b"".join(frames)
        told = [{"index": piece.index, "delta": _delta(delta, choice)} for delta in deltas]
        if not told and (ended or rows or (self._request.return_token_ids and piece.token_ids)):
            told = [{"index": piece.index, "delta": {}}]
        if told:
            # The log-probabilities of the tokens go with the first of the texts that they made, or with none.
            told[0]["logprobs"] = {"content": rows} if rows else None
            if self._request.return_token_ids:
                told[0]["token_ids"] = piece.token_ids
        if ended:
            told[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return b"".join([*frames, *map(self._frame, told)])

    def _first_frame(self, index: int) -> bytes:
        """The role of a choice, with the prompt's tokens if they are wanted."""
        prompt = {}
        if self._request.return_token_ids and self._first is not None:
            prompt = {"prompt_token_ids": self._first.prompt_token_ids}
        return self._frame({"index": index, "delta": {"role": "assistant", "content": ""}}, **prompt)

    def _frame(self, choice: dict[str, Any], **more: Any) -> bytes:
        return self._chunk({"logprobs": None, "finish_reason": None, **choice}, **more)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, choice in sorted(self._choices.items()):
            entry: dict[str, Any] = {
                "index": index, "message": _message(choice),
                "logprobs": {"content": choice.logprobs} if self._request.logprobs else None,
                "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids if self._request.return_token_ids else None,
            }  # fmt: skip
            choices.append(entry)
        found: dict[str, Any] = {**self._head, "choices": choices, "usage": self._counted(usage)}
        found["prompt_logprobs"] = None if self._first is None else prompt_rows(self._first.prompt_logprobs)
        told = self._first if self._request.return_token_ids else None
        found["prompt_token_ids"] = None if told is None else told.prompt_token_ids
        return found

    def _so_far(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage with the tokens that the stream has told: none before the first role, as vLLM has it."""
        num = self._num_told
        return usage | {"completion_tokens": num, "total_tokens": usage["prompt_tokens"] + num}

    def _counted(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._conversation.with_reasoning(usage, [choice.thoughts for choice in self._choices.values()])


def _delta(delta: Delta, choice: Choice) -> dict[str, Any]:
    """A chunk's delta."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text, "reasoning": delta.text}  # DeepSeek's name, and vLLM's
    if isinstance(delta, CallDelta):
        function = {"name": delta.name, "arguments": ""}
        call_id = choice.call_ids[delta.index]
        return {"tool_calls": [{"index": delta.index, "id": call_id, "type": "function", "function": function}]}
    assert isinstance(delta, ArgumentsDelta)
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _message(choice: Choice) -> dict[str, Any]:
    message = collect(choice.deltas)
    content = message.content
    if content is None and not message.tool_calls:
        content = ""
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if message.reasoning_content is not None:
        found["reasoning_content"] = found["reasoning"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(choice.call_ids, message.tool_calls)
        ]
    return found

"""/v1/completions"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.answer_format import constraint
from nanovllm.serve.answering import ChunkedAnswer, answer
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http import Exchange
from nanovllm.serve.protocol import CompletionRequest, parse
from nanovllm.serve.request_params import sampling_params
from nanovllm.serve.service import Service
from nanovllm.serve.token_logprobs import CompletionLogprobs, prompt_rows
from nanovllm.wording import brief

MAX_PROMPTS = 1024
_MAX_TOKENS = 16
"""OpenAI's default."""


async def completions(service: Service, exchange: Exchange, key: str) -> None:
    request = parse(await service.json(exchange), CompletionRequest)
    service.check_model(request.model)
    prompts, params = await service.offload(exchange.body_size, _read, request, service.sampling_defaults)
    generation = await service.start(
        exchange, key, prompts, params, add_special_tokens=request.add_special_tokens, cache_salt=request.cache_salt,
        request_id=request.request_id, max_tokens=request.max_tokens,
    )  # fmt: skip
    with closing(generation):
        shape = CompletionAnswer(service, request, exchange.request_id, generation.usage)
        await answer(exchange, generation, shape, request.stream, service.options)


def _read(request: CompletionRequest, defaults: Mapping[str, Any]) -> tuple[list[str | list[int]], SamplingParams]:
    """The prompts and the parameters of a request. defaults: the model's."""
    prompts = split_prompts(request.prompt)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(_MAX_TOKENS, defaults.get("max_tokens", _MAX_TOKENS))
    nothing = max_tokens == 0
    if nothing and not request.echo:
        raise ApiError(400, "max_tokens=0: nothing would be answered; pass echo=true, or a larger number", "max_tokens")
    if max_tokens < 0:
        said = f"must be at least 1 (0 with echo=true); without the field it is {_MAX_TOKENS}"
        raise ApiError(400, f"max_tokens={max_tokens}: {said}", "max_tokens")
    both = request.prompt_logprobs, request.logprobs if request.echo else None
    params = sampling_params(
        request,
        defaults,
        max_tokens=1 if nothing else max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=-1 if -1 in both else max((number for number in both if number is not None), default=None),
        **constraint(request),
    )
    return prompts, params


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(map(_is_id, prompt)):
        return [prompt]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompt)} prompts; pass 1 to {MAX_PROMPTS}", "prompt")
    for i, one in enumerate(prompt):
        if _is_id(prompt[0]) and not _is_id(one):
            raise ApiError(400, f"prompt[{i}]={brief(one)}: must be a token id, as prompt[0] is", "prompt")
        if not (_is_id(prompt[0]) or isinstance(one, str) or isinstance(one, list) and all(map(_is_id, one))):
            raise ApiError(400, f"prompt[{i}]={brief(one)}: must be a string or a list of token ids", "prompt")
    return prompt


def _is_id(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool)


class _Choice:
    """What was said of a completion."""

    def __init__(self, logprobs: CompletionLogprobs | None) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs = logprobs
        self.all_logprobs: dict[str, Any] | None = None
        self.begun = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class CompletionAnswer(ChunkedAnswer):
    """OpenAI's text completion, whole or in chunks."""

    def __init__(
        self, service: Service, request: CompletionRequest, request_id: str, usage: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(
            service, request, (f"cmpl-{request_id}", "text_completion"), lambda: self._counted(usage()), b'"text":',
            b',"logprobs":null,"finish_reason":null,"stop_reason":null',
        )  # fmt: skip
        self._request = request
        self._decoder = service.engine.maker.decoder
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, RequestOutput] = {}

    def feed(self, prompt_index: int, output: RequestOutput) -> bytes:
        first = self._prompts.setdefault(prompt_index, output)
        frames = []
        for piece in output.outputs:
            index = prompt_index * self._request.n + piece.index
            choice = self._choices.get(index)
            if choice is None:
                wanted, as_ids = self._request.logprobs, self._request.return_tokens_as_token_ids
                skip = self._request.skip_special_tokens
                logprobs = None if wanted is None else CompletionLogprobs(wanted, as_ids, self._decoder, skip)
                choice = self._choices[index] = _Choice(logprobs)
            frames.append(self._feed(index, choice, piece, first))
        return b"".join(frames)

    def _feed(self, index: int, choice: _Choice, piece: CompletionOutput, first: RequestOutput) -> bytes:
        request = self._request
        text, rows = piece.text, list(piece.logprobs or ())
        token_ids = piece.token_ids
        if request.max_tokens == 0:
            text, rows, token_ids = "", [], []
        begins = not choice.begun
        before: dict[str, Any] = {}
        if begins and request.echo:
            prompt = self._prompt_text(first)
            text = prompt + text
            if choice.logprobs is not None and first.prompt_logprobs is not None:
                before = choice.logprobs.of_prompt(first.prompt_logprobs, first.prompt_token_ids, prompt)
        choice.begun = True
        choice.texts.append(text)
        choice.token_ids += token_ids
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        logprobs = None
        if choice.logprobs is not None:
            told = choice.logprobs.of(rows, token_ids)
            logprobs = {name: before.get(name, []) + values for name, values in told.items()}
        if not request.stream:
            _extend(choice, logprobs)
            return b""
        if self._plain and piece.finish_reason is None:
            return self._plain_chunk(index, text) if text else b""
        entry = {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }  # fmt: skip
        if request.return_token_ids:
            entry["token_ids"] = token_ids
            if begins:
                entry["prompt_token_ids"] = first.prompt_token_ids
        return self._chunk(entry)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return "" if self._decoder is None else self._decoder.decode(output.prompt_token_ids, False)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        wants_prompt, wants_ids = self._request.prompt_logprobs is not None, self._request.return_token_ids
        for index, choice in sorted(self._choices.items()):
            first = self._prompts[index // self._request.n]
            entry: dict[str, Any] = {
                "index": index, "text": "".join(choice.texts), "logprobs": choice.all_logprobs,
                "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
                "prompt_logprobs": prompt_rows(first.prompt_logprobs) if wants_prompt else None,
                "token_ids": choice.token_ids if wants_ids else None,
                "prompt_token_ids": first.prompt_token_ids if wants_ids else None,
            }  # fmt: skip
            choices.append(entry)
        return {**self._head, "choices": choices, "usage": self._counted(usage)}

    def _counted(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage without the token that the engine makes for max_tokens=0."""
        none = {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage | none if self._request.max_tokens == 0 else usage


def _extend(choice: _Choice, logprobs: dict[str, Any] | None) -> None:
    if logprobs is None:
        return
    if choice.all_logprobs is None:
        choice.all_logprobs = logprobs
        return
    for name, values in logprobs.items():
        if values is not None:
            choice.all_logprobs[name] += values

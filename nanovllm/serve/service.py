"""What the handlers of requests share: the engine, the limits, the statistics, and how a generation starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.chat.template import chat_text, check_messages
from nanovllm.engine.requests.request import Request
from nanovllm.frontend.fair_thread import FairThread
from nanovllm.frontend.output_stream import OutputStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.admission import Admission
from nanovllm.serve.api_servers import Siblings
from nanovllm.serve.auth import ApiKeys
from nanovllm.serve.counts import Counts
from nanovllm.serve.errors import ApiError
from nanovllm.serve.generation import Generation
from nanovllm.serve.http import Exchange
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import TEMPLATE_VARIABLES_TAKEN, ServeOptions
from nanovllm.serve.request_params import as_api_error, bad_request
from nanovllm.structured_outputs import GrammarsBusyError
from nanovllm.wording import brief, counted

T = TypeVar("T")
logger = logging.getLogger(__name__)

_INLINE_COST = 8192
"""Characters that are tokenized or rendered at once; longer texts go to a thread."""
_CHARACTERS_A_TOKEN = 4
_GRAMMAR_SECONDS = 30.0
"""For which a new grammar may wait for others of its client, and for a turn of each other client."""


class Service:
    """A model, ready for requests.

    Args:
        engine: serves the requests.
        options: the limits.
        siblings: the server's other API processes; None: there are none.
    """

    def __init__(self, engine: AsyncLLM, options: ServeOptions, siblings: Siblings | None = None) -> None:
        self.engine = engine
        self.siblings = siblings
        self.options = options
        self.metrics = Metrics(engine, options.model_names[0], options.metrics_prefix)
        self.keys = ApiKeys(options.api_keys)
        self.admission = Admission(
            options.max_waiting, options.max_waiting_tokens, options.max_per_key, self.metrics.rejected
        )
        self._grammars = FairThread("grammar-checks")
        self.generated: Callable[[Generation], None] | None = None
        """Called with every generation that has ended; for traces."""
        self.leads = siblings is None or siblings.leads
        """Whether this API process counts the steps and logs their statistics."""
        if self.leads:  # every API process hears of every step; one counts them
            engine.on_outputs = self.metrics.stepped

    @property
    def model_name(self) -> str:
        return self.options.model_names[0]

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own defaults of what a request does not set."""
        return self.engine.info.sampling_defaults

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: with another one, a seed may give another answer."""
        return f"nanovllm-{__version__}"

    async def counts(self) -> Counts:
        """What all API processes of the server have counted."""
        return self.own_counts() if self.siblings is None else await self.siblings.gather()

    def own_counts(self) -> Counts:
        """What this process has counted."""
        return self.metrics.counts(self.admission.num_open)

    @property
    def stuck(self) -> str | None:
        """Why the engine computes nothing; None: it does, or has nothing to do."""
        return self.fault(self.own_counts())

    def fault(self, counts: Counts) -> str | None:
        """Why the server does not work, by what its API processes say; None: it works."""
        if not counts.engine_up:
            return self._no_engine
        if counts.heartbeat_age > self.options.stall_timeout:
            return f"the engine has had work and made no step for {counted(round(counts.heartbeat_age), 'second')}"
        return counts.missing[0] if counts.missing else None

    def check_model(self, name: str | None) -> None:
        """A 404 for a model that is not served. No name means the model of this server."""
        if name is not None and name not in self.options.model_names:
            known = " and ".join(self.options.model_names)
            raise ApiError(404, f"model={brief(name, 200)}: there is no such model; the server has {known}", "model",
                           "model_not_found")  # fmt: skip

    async def json(self, exchange: Exchange) -> dict[str, Any]:
        """The body of a request, within the limits."""
        return await exchange.json(self.options.max_body_bytes, self.options.receive_timeout)

    @cached_property
    def chat_template(self) -> str | None:
        template = self.options.chat_template or getattr(self.engine.tokenizer, "chat_template", None)
        return template if isinstance(template, str) or template is None else str(template)

    async def offload(self, cost: int, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What `call(...)` returns. It runs in a thread if it takes long, so that the event loop goes on.

        Args:
            cost: the characters, bytes or tokens that it looks at.
        """
        if cost <= _INLINE_COST:
            return call(*args, **kwargs)
        return await asyncio.to_thread(call, *args, **kwargs)

    async def encode(self, text: str, name: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. name: the field that holds it."""
        try:
            return await self.offload(len(text), self.engine.maker.prompts.encode, text, name, add_special_tokens)
        except (ValueError, TypeError) as error:
            raise bad_request(error) from None

    def warm_up(self) -> None:
        """Render a conversation: the first one imports transformers and compiles the template, for up to seconds."""
        with suppress(ApiError):
            self.render([{"role": "user", "content": "x"}], {})

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], **own: Any) -> str:
        """The text of a conversation. variables: the client's, for the template; own: the server's."""
        taken = TEMPLATE_VARIABLES_TAKEN & variables.keys()
        if taken:
            name = min(taken)
            raise ApiError(400, f"chat_template_kwargs: {name!r} is not for the template", "chat_template_kwargs")
        if self.chat_template is None:
            said = "messages: this model has no chat template; send a prompt to /v1/completions"
            raise ApiError(400, said, "messages")
        if not messages:
            said = 'messages: must have at least one message, such as {"role": "user", "content": "Hello!"}'
            raise ApiError(400, said, "messages")
        for i, message in enumerate(messages):
            if message.get("role") is None:
                raise ApiError(400, f"messages[{i}].role is missing; pass user, for example", "messages")
            if not isinstance(message["role"], str):
                said = f"messages[{i}].role={brief(message['role'])}: must be a string, such as user"
                raise ApiError(400, said, "messages")
        try:
            check_messages("messages", messages)
            given = {**self.options.chat_template_kwargs, **variables, **own}
            if self.options.chat_template is not None:
                given["chat_template"] = self.options.chat_template
            return chat_text(self.engine.tokenizer, "messages", messages, given)
        except (ValueError, TypeError) as error:
            raise bad_request(error) from None

    async def start(
        self,
        exchange: Exchange,
        key: str,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
        request_id: str | None = None,
        max_tokens: int | None = None,
        name: str = "prompt",
    ) -> Generation:
        """Admit the request, tokenize its prompts and start them.

        Args:
            key: the client's, from `ApiKeys.check`.
            prompts: texts or token ids.
            max_tokens: as the request has it; None: the request leaves it to the server.
            name: the field of the request that holds them.

        Raises:
            ApiError: it is refused.
        """
        completions = params.n * len(prompts)
        estimates = [len(p) // _CHARACTERS_A_TOKEN + 1 if isinstance(p, str) else len(p) for p in prompts]
        if request_id is not None:
            exchange.rename(request_id)
        if cache_salt == "":
            raise ApiError(400, "cache_salt='': must be a string that is not empty; or leave it out", "cache_salt")
        self.check_alive()
        ticket = self.admission.enter(key, completions, params.n * sum(estimates))
        streams: list[OutputStream] = []
        try:
            client = key or exchange.peer
            if self.engine.maker.has_unchecked_grammar(params):
                await self._check_grammar(client, params)
            requests: list[Request] = []
            for prompt in prompts:
                whole: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
                if cache_salt is not None:
                    whole["cache_salt"] = cache_salt
                cost = len(prompt) + sum(map(len, params.bad_words or ()))
                if params.structured_outputs is not None:  # a new grammar is compiled for milliseconds, at most seconds
                    cost = _INLINE_COST + 1
                requests.append(await self.offload(cost, self._make, whole, params, add_special_tokens))
            if max_tokens is not None and self.options.strict_max_tokens:
                self._check_length(requests, max_tokens)
            ticket.set_tokens(params.n * sum(len(request.prompt_token_ids) for request in requests))
            base = exchange.request_id
            for i, request in enumerate(requests):
                request.name, request.client = base, client
                streams.append(self.engine.start(request, self._unique(base if len(requests) == 1 else f"{base}-{i}")))
            return Generation(streams, ticket, exchange, self.metrics, self.options.queue_timeout, self.generated)
        except BaseException as error:
            for stream in streams:
                stream.close()
            ticket.close()
            if isinstance(error, Exception):
                told = as_api_error(error)
                if told.status == 400 and told.param is None:
                    told.param = name
                raise told from error
            raise

    async def _check_grammar(self, client: str, params: SamplingParams) -> None:
        """Find out, when it is this client's turn, whether a new grammar compiles within bounds.

        Raises:
            ValueError: it does not. GrammarsBusyError: its turn has not come in time.
        """
        checked = asyncio.wrap_future(self._grammars.submit(client, self.engine.maker.check, params))
        try:
            await asyncio.wait_for(checked, _GRAMMAR_SECONDS)
        except asyncio.TimeoutError:
            raise GrammarsBusyError("other new grammars are being compiled; try again later") from None

    def _make(self, prompt: dict[str, Any], params: SamplingParams, add_special_tokens: bool) -> Request:
        maker = self.engine.maker
        if "prompt" in prompt:
            prompt["prompt_token_ids"] = maker.prompts.encode(prompt["prompt"], "prompt", add_special_tokens)
        return maker.make(prompt, params, incremental=True)

    def check_alive(self) -> None:
        """A 503 while the engine is not there."""
        if not self.engine.alive:
            raise ApiError(503, self._no_engine, code="engine_dead", retry_after=10)

    @property
    def _no_engine(self) -> str:
        return f"the engine is not running{'; it is being started again' * self.options.engine_restarts}"

    def _check_length(self, requests: Sequence[Request], max_tokens: int) -> None:
        """A 400 if a prompt leaves fewer tokens of the context than its request asks for."""
        most, longest = self.engine.info.max_model_len, max(len(request.prompt_token_ids) for request in requests)
        if longest + max_tokens > most:
            raise ApiError(
                400,
                f"max_tokens={max_tokens}: the prompt has {counted(longest, 'token')}, and prompt and output together"
                f" have at most {most:,}; pass at most {most - longest:,}",
                "max_tokens",
                "context_length_exceeded",
            )

    def _unique(self, name: str) -> str | None:
        """The request's id in the engine; None, so that one is made, if another request has it."""
        return None if self.engine.runs(name) else name

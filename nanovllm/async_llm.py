"""`AsyncLLM`: the engine for programs with an event loop, such as servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.engine.requests.maker import RequestMaker
from nanovllm.engine.requests.prompts import Prompt
from nanovllm.engine.requests.request import Request
from nanovllm.environment import warn_of_misspelt
from nanovllm.frontend.core_messages import (
    AbortRequest,
    EngineInfo,
    EngineStats,
    StartRequest,
    StepOutputs,
    params_to_send,
    split_key,
)
from nanovllm.frontend.output_stream import EngineDeadError, OutputStream, RequestFailed
from nanovllm.loading_line import LoadingLine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.tokenizer import load_tokenizer
from nanovllm.wording import brief

if TYPE_CHECKING:
    from nanovllm.frontend.engine_client import EngineClient


__all__ = ["AsyncLLM", "EngineDeadError", "RequestFailed"]


class AsyncLLM:
    """A model whose requests are asynchronous iterators.

    One thread (or with another `client` one process) runs the engine's steps. Requests and aborts apply between two
    steps. Prompts are tokenized and texts are decoded here. Any thread and any event loop may start requests.

    Args:
        model: as `LLM` takes it. None: `client` has one.
        client: an engine that runs already; None: one in a thread of this process.
        **kwargs: see `nanovllm.config.EngineConfig`.

    Raises:
        ValueError, TypeError, FileNotFoundError: an argument or the model is wrong; the message says what.

    Example:
        engine = AsyncLLM("path/to/Qwen3-0.6B")
        async for output in engine.generate("Hello", SamplingParams(max_tokens=32), "request-1"):
            print(output.outputs[0].text, end="", flush=True)
    """

    def __init__(self, model: str | Path | None = None, client: EngineClient | None = None, **kwargs: Any) -> None:
        if (model is None) == (client is None):
            raise TypeError(f"AsyncLLM got model={model!r} and client={client!r}; pass exactly one of them")
        if client is None:
            warn_of_misspelt()
            config = EngineConfig(str(model), **kwargs)
            with LoadingLine(config.model):
                # With PyTorch, which a client of a process needs not.
                from nanovllm.frontend.engine_client import ThreadClient

                client = ThreadClient(config)
        self.client = client
        """The engine's side."""
        info = client.info
        self.tokenizer: Any = None if info.tokenizer_path is None else load_tokenizer(info.tokenizer_path)
        self.maker = RequestMaker(
            self.tokenizer, info.vocab_size, info.max_model_len, info.max_logprobs, info.seed, first_id=info.first_key,
            sampling_defaults=info.sampling_defaults, remedy=info.remedy,
        )  # fmt: skip
        self._streams: dict[int, OutputStream] = {}
        self._keys: dict[str, int] = {}
        self._lock = threading.Lock()
        self._over: Exception | None = None
        """Why no further request is started."""
        self.stats = EngineStats()
        self.last_step_time = time.monotonic()
        """When the engine last reported a step, or was given work after a pause."""
        self.on_outputs: Callable[[StepOutputs], None] | None = None
        """Called with the outputs of every step after the streams have them; for statistics."""
        client.listen(self._deliver, self._died)

    @property
    def info(self) -> EngineInfo:
        """The sizes and limits of what is served."""
        return self.client.info

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self.client.alive

    @property
    def num_unfinished(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._streams)

    @property
    def seconds_without_step(self) -> float:
        """For how long the engine has had work and has not reported a step; 0 without work."""
        if not self._streams and not self.stats.has_work:
            return 0.0
        return time.monotonic() - self.last_step_time

    def runs(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._keys

    def attach(self) -> None:
        """Let the running event loop read what the engine says, if the client needs one. A server calls it once."""
        self.client.attach(asyncio.get_running_loop())

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt. Leaving the iterator aborts the request.

        Args:
            prompt: as `LLM.generate` takes one.
            request_id: unique among the requests that run; None: one is made.

        Yields:
            What is new since the last output. `outputs` has an entry for each completion with news: the new text, the
            new token ids, their log-probabilities, and at its end the finish reason. Texts never end in half a
            character, nor with what a stop string may still take back. `prompt_logprobs` comes with the first output.
            The last output has `finished` set.

        Raises:
            ValueError, TypeError: the request cannot be served.
            EngineDeadError: the engine ended while it computed this request.
            RequestFailed: a step that computed this request failed.
        """
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            await asyncio.to_thread(self.maker.check, sampling_params)  # a new grammar takes milliseconds to seconds
        stream = self.add(prompt, sampling_params, request_id)
        try:
            while (output := await stream.next()) is not None:
                yield output
        finally:
            stream.close()

    def add(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> OutputStream:
        """Start a request, in a thread that runs an event loop. The caller closes the stream in every case.

        Raises:
            ValueError, TypeError, RuntimeError: as `generate`, here or in `OutputStream.next`.
        """
        return self.start(self.maker.make(prompt, sampling_params, incremental=True), request_id)

    def start(self, request: Request, request_id: str | None = None) -> OutputStream:
        """As `add`, of a request that `maker.make(..., incremental=True)` has made, maybe in another thread."""
        key = request.request_id
        name = f"request-{key}" if request_id is None else request_id
        stream = OutputStream(request, name, lambda index: self._abort(key, index))
        with self._lock:
            if name in self._keys:
                raise ValueError(f"request_id={brief(name)}: a request of this id runs; pass another one, or None")
            if self._over is not None:
                raise type(self._over)(*self._over.args)
            if not self.client.alive:
                raise EngineDeadError("the engine is not running")
            if not self._streams:
                self.last_step_time = time.monotonic()
            self._streams[key], self._keys[name] = stream, key
        message = StartRequest(
            key, request.prompt_token_ids, params_to_send(request.params), request.seed, request.cache_salt,
            request.name or request_id, request.client,
        )  # fmt: skip
        try:
            self.client.start(message)
        except BaseException:
            self._forget(key)
            raise
        if key not in self._streams:  # another thread has aborted it before the engine knew it
            self.client.abort(AbortRequest(key))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request of `generate`: its iterator ends with the finish reason "abort". Called from any thread.

        Does nothing if no request of this id runs.
        """
        key = self._keys.get(request_id)
        if key is None:
            return
        self.client.abort(AbortRequest(key))
        stream = self._streams.get(key)
        if stream is not None:
            for completion in stream.request.completions:
                stream.end(completion.seq.index, "abort", None)
            self._forget(key)
            _wake([stream])

    def fail_all(self, error: Exception, for_good: bool = False) -> None:
        """End every request with an error.

        for_good: also every request that is started later, for example since a server stops while it was tokenized.
        """
        with self._lock:
            if for_good:
                self._over = error
                self.maker.close()
            streams, self._streams, self._keys = list(self._streams.items()), {}, {}
        for key, stream in streams:
            stream.fail(error)
            if self.client.alive:
                self.client.abort(AbortRequest(key))
        _wake([stream for _, stream in streams])

    def close(self) -> None:
        """End the engine; requests that run end with an `EngineDeadError`."""
        self.fail_all(EngineDeadError("the engine was closed"))
        self.client.close()

    def _abort(self, key: int, index: int | None) -> None:
        self.client.abort(AbortRequest(key, index))
        if index is None:
            self._forget(key)

    def _forget(self, key: int) -> None:
        with self._lock:
            stream = self._streams.pop(key, None)
            if stream is not None:
                self._keys.pop(stream.request_id, None)

    def _died(self, reason: str) -> None:
        self.stats = EngineStats()
        self.fail_all(EngineDeadError(f"the engine ended: {reason}"))

    def _deliver(self, outputs: StepOutputs) -> None:
        self.stats, self.last_step_time = outputs.stats, time.monotonic()
        touched: dict[int, OutputStream] = {}
        over: list[int] = []  # requests of which a completion has ended
        streams = self._streams
        for first in outputs.first:
            if (stream := streams.get(first.key)) is not None:
                stream.begin(first)
        ends = {end.key: (end.reason, end.stop_reason) for end in outputs.ended}
        rows = dict(outputs.logprobs)
        for completion_key, token_id in zip(outputs.keys, outputs.token_ids):
            key, index = split_key(completion_key)
            if (stream := streams.get(key)) is not None:
                end = ends.pop(completion_key, None) if ends else None
                if stream.feed(index, token_id, rows.get(completion_key) if rows else None, end):
                    over.append(key)
                touched[key] = stream
        for completion_key, end in ends.items():
            key, index = split_key(completion_key)
            if (stream := streams.get(key)) is not None:
                stream.end(index, *end)
                over.append(key)
                touched[key] = stream
        for key, kind, message in outputs.failed:
            if (stream := streams.get(key)) is not None:
                stream.fail(ValueError(message) if kind == "refused" else RequestFailed(message))
                over.append(key)
                touched[key] = stream
        for key in over:
            if touched[key].finished:
                self._forget(key)
        if self.on_outputs is not None:
            self.on_outputs(outputs)
        _wake(touched.values())


def _wake(streams: Any) -> None:
    """Tell the consumers, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_here, group)
        except RuntimeError:  # the consumer's loop was closed
            pass


def _wake_here(streams: list[OutputStream]) -> None:
    for stream in streams:
        stream.wake()

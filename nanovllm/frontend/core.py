"""An engine behind messages: requests come in from any thread, one thread runs the steps, tokens go out."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.processes import RankError
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.request import Request
from nanovllm.frontend.core_messages import (
    KEYS_PER_FRONT_END,
    AbortRequest,
    CompletionEnd,
    EngineInfo,
    EngineStats,
    FirstToken,
    StartRequest,
    StepOutputs,
    TokenLogprobs,
    completion_key,
)
from nanovllm.frontend.fair_thread import FairThread
from nanovllm.frontend.step_loop import StepLoop, Waiter
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.weights.checkpoint import locate

logger = logging.getLogger(__name__)

STREAMED_STEP_TOKENS = 8192
"""The most tokens of a step on a GPU where tokens are streamed, if the configuration does not say. When many prompts
come at once, half of them have their first token a step earlier than in steps of 16,384, which `LLM` takes. That costs
Qwen3-8B 0.2 to 0.5 % of the tokens a second, and Qwen3-0.6B 4 % with 64 streams (docs/log/serving.md, 2026-12-01)."""


def for_streams(config: EngineConfig, on_gpu: bool) -> EngineConfig:
    """The configuration with the defaults of an engine whose tokens are streamed."""
    if config.max_num_batched_tokens is not None or not on_gpu:
        return config
    return dataclasses.replace(config, max_num_batched_tokens=STREAMED_STEP_TOKENS)


class _Entry:
    """A request of the core, and how many tokens of each completion were sent."""

    __slots__ = ("key", "request", "sent", "ended")

    def __init__(self, key: int, request: Request) -> None:
        self.key = key
        self.request = request
        self.sent = [0] * len(request.completions)
        self.ended = [False] * len(request.completions)


class EngineCore:
    """Serves `StartRequest` and `AbortRequest`. `run` is called by the one thread that owns the steps.

    Args:
        deliver: called by that thread after every step, and by a thread whose request is refused. It must not raise.

    Raises:
        Whatever `LLMEngine` raises.
    """

    def __init__(self, config: EngineConfig, deliver: Callable[[StepOutputs], None], engine: LLMEngine | None = None):
        on_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.engine = LLMEngine(for_streams(config, on_gpu)) if engine is None else engine
        self.engine.maker.prepare()
        self._deliver = deliver
        self._loop = StepLoop(self.engine)
        self._waiter = Waiter(())
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[Request, _Entry] = {}
        self._compiling: dict[int, list[int | None]] = {}
        """Requests whose grammar is being compiled, and the completions of them that were aborted meanwhile."""
        self._compiler = FairThread("grammars")
        self._over: dict[int, None] = {}
        """Keys of requests with completions that ended without a token in a step."""
        self._lock = threading.Lock()
        """Guards the fields above between the thread of the steps and those that add and abort."""
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        engine, config = self.engine, self.engine.config
        path = config.tokenizer or locate(config).path if engine.tokenizer is not None else None
        return EngineInfo(
            config.model, None if path is None else str(path), engine.model_config.vocab_size,
            engine.runner.max_model_len, config.max_num_seqs, config.max_logprobs, engine.runner.num_kvcache_blocks,
            config.kvcache_block_size, engine.runner.device_name, config.seed, engine.runner.limits.model_len,
            engine.runner.cache_size.num_bytes, engine.runner.cache_size.num_devices,
            engine.sampling_defaults.values, str(engine.sampling_defaults), remedy=engine.runner.limits.remedy,
        )  # fmt: skip

    def start(self, message: StartRequest) -> None:
        """Queue a request; called from any thread. A request that cannot be served is told to `deliver`.

        A grammar that is new takes up to seconds. A thread of its own compiles it, so that other requests and aborts
        do not wait.
        """
        try:
            params = SamplingParams(**message.params | {"seed": None})
            is_new = self.engine.maker.has_new_grammar(params)
        except Exception as error:  # of whatever kind: the thread that brings requests must go on
            self._refuse(message, error)
            return
        if is_new:
            with self._lock:
                self._compiling[message.key] = []
            try:
                self._compiler.submit(message.client, self._start, message, params)
            except RuntimeError:  # the engine was closed
                self._refuse(message, ValueError("the engine was closed"))
        else:
            self._start(message, params)

    def _start(self, message: StartRequest, params: SamplingParams) -> None:
        prompt = {"prompt_token_ids": message.token_ids}
        if message.cache_salt is not None:
            prompt["cache_salt"] = message.cache_salt  # type: ignore[assignment]
        try:
            request = self.engine.maker.make(prompt, params, seed=message.seed, with_text=False)
        except Exception as error:
            self._refuse(message, error)
            return
        entry = _Entry(message.key, request)
        request.listener, request.name = self._listen, message.name
        with self._lock:
            self._entries[message.key] = self._by_request[request] = entry
            aborted = self._compiling.pop(message.key, ())
        self.engine.queue(request)
        for completion in aborted:
            self.engine.abort(request, completion)
        self._waiter.news.set()

    def _refuse(self, message: StartRequest, error: Exception) -> None:
        """Tell `deliver` why there will be no such request."""
        key, name = message.key, message.name
        with self._lock:
            self._compiling.pop(key, None)
        refused = isinstance(error, (ValueError, TypeError))
        if not refused:
            logger.error("request %s cannot be made", name or key, exc_info=error, extra={"request_id": name})
        reason = str(error) if refused else "the engine failed when it took this request"
        self._deliver(StepOutputs(self.stats(0.0), failed=[(key, "refused" if refused else "lost", reason)]))

    def abort(self, message: AbortRequest) -> None:
        """Called from any thread."""
        with self._lock:
            entry = self._entries.get(message.key)
            if message.key in self._compiling:
                self._compiling[message.key].append(message.completion)
        if entry is not None:
            self.engine.abort(entry.request, message.completion)
            self._waiter.news.set()

    def abort_front_end(self, number: int) -> None:
        """End the requests of a front end that has gone. Called from any thread."""
        with self._lock:
            keys = [key for key in (*self._entries, *self._compiling) if key // KEYS_PER_FRONT_END == number]
        for key in keys:
            self.abort(AbortRequest(key))

    def run(self) -> None:
        """Run steps until `close`.

        Raises:
            RankError: another rank has failed.
        """
        ranks = self.engine.ranks
        ranks.when_failed(self._waiter.news.set)
        self._loop.serve(self._waiter, lambda: self._closed or ranks.failure is not None, self._stepped)
        if ranks.failure is not None and not self._closed:
            raise RankError(ranks.failure)

    def close(self) -> None:
        """Called from any thread: no further step is started."""
        self._closed = True
        self._waiter.news.set()

    def release(self) -> None:
        """Called after `run` has returned: break the cycles that would keep the engine and its memory."""
        self._compiler.close()
        self._deliver = lambda outputs: None
        with self._lock:
            for entry in self._entries.values():
                entry.request.listener = entry.request.failure = None
            self._entries, self._by_request = {}, {}

    def _listen(self, request: Request) -> None:
        """In the thread of the steps: a completion ended, with a token or without."""
        entry = self._by_request.get(request)
        if entry is not None:
            self._over[entry.key] = None

    def stats(self, step_seconds: float) -> EngineStats:
        scheduler = self.engine.scheduler
        blocks = scheduler.blocks
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting), 1 - blocks.num_free_blocks / blocks.num_blocks,
            scheduler.num_preemptions, step_seconds, self.engine.has_unfinished,
        )  # fmt: skip

    def _stepped(self, grown: list[Request], seconds: float) -> None:
        outputs = StepOutputs(self.stats(seconds), [], [], [], [], [], [])
        for over in [self._entries[key] for key in self._over if key in self._entries]:
            if (error := _grammar_error(over.request)) is not None:
                self._fail(over, error, outputs)
        by_request = self._by_request
        for request in grown:
            entry = by_request.get(request)
            if entry is not None:
                self._add_tokens(entry, outputs)
        if self._over:
            for key in self._over:
                entry = self._entries.get(key)
                if entry is not None:
                    self._add_ends(entry, outputs)
            self._over = {}
        self._deliver(outputs)

    def _add_tokens(self, entry: _Entry, outputs: StepOutputs) -> None:
        key, sent = entry.key, entry.sent
        for index, completion in enumerate(entry.request.completions):
            seq = completion.seq
            num_sent, num_output = sent[index], len(seq.token_ids) - seq.prompt_len
            if num_output == num_sent:
                continue
            completion_id = completion_key(key, index)
            if num_sent == 0 and not any(sent):
                outputs.first.append(_first(entry))
            if num_output == num_sent + 1:
                outputs.keys.append(completion_id)
                outputs.token_ids.append(seq.token_ids[-1])
            else:
                outputs.keys.extend([completion_id] * (num_output - num_sent))
                outputs.token_ids.extend(seq.token_ids[num_sent - num_output :])
            if completion.logprobs is not None:
                outputs.logprobs.extend((completion_id, _row(row)) for row in completion.logprobs[num_sent:])
            sent[index] = num_output

    def _add_ends(self, entry: _Entry, outputs: StepOutputs) -> None:
        request = entry.request
        if request.failure is not None:
            extra = {"request_id": request.name}
            logger.error("request %s was lost: %r", request.log_name, request.failure, extra=extra)
            outputs.failed.append((entry.key, "lost", "the engine failed while it computed this request"))
        else:
            for index, completion in enumerate(request.completions):
                seq = completion.seq
                if seq.finished and not entry.ended[index]:
                    entry.ended[index] = True
                    ended = CompletionEnd(completion_key(entry.key, index), seq.finish_reason or "", seq.stop_reason)
                    outputs.ended.append(ended)
            if not all(entry.ended):
                return
        self._forget(entry)

    def _fail(self, entry: _Entry, error: str, outputs: StepOutputs) -> None:
        """End a request with an error, before its tokens of this step are sent: no grammar allowed the last one."""
        outputs.failed.append((entry.key, "refused", error))
        self._forget(entry)
        self.engine.abort(entry.request)

    def _forget(self, entry: _Entry) -> None:
        entry.request.listener = entry.request.failure = None
        with self._lock:
            self._entries.pop(entry.key, None)
            self._by_request.pop(entry.request, None)


def _grammar_error(request: Request) -> str | None:
    """Why a completion's grammar has ended it; None: none has."""
    for seq in (completion.seq for completion in request.completions):
        if seq.finish_reason == "abort" and seq.constraint is not None and seq.constraint.error is not None:
            spec = request.params.structured_outputs
            called = spec.called if isinstance(spec, StructuredOutputs) else "allowed_token_ids"
            return f"{called}: {seq.constraint.error}"
    return None


def _first(entry: _Entry) -> FirstToken:
    request = entry.request
    seq = request.completions[0].seq
    prompt = None
    if request.prompt_logprobs is not None:
        prompt = [None if row is None else _row(row) for row in request.prompt_logprobs]
    queued = 0.0 if seq.admitted_time is None else seq.admitted_time - request.arrival_time
    return FirstToken(entry.key, seq.num_cached_tokens or 0, queued, prompt, len(request.prompt_token_ids))


def _row(row: dict[int, Logprob]) -> TokenLogprobs:
    return TokenLogprobs(list(row), [p.logprob for p in row.values()], [p.rank for p in row.values()])

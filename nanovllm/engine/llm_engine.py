"""The engine: requests come in, steps are scheduled, launched and read, tokens go to their requests."""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import TextDecoder
from nanovllm.engine.devices import select_device
from nanovllm.engine.logit_rules import LogitRules, bad_word_token_ids
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prompts import PromptReader
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_result import PromptLogprobs, StepResult
from nanovllm.kernels import Kernels, resolve_kernels
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one model.

    With asynchronous scheduling a step is launched before the one before it is read: the device never waits for the
    host, and a sequence that turns out to have ended had one token too many computed, which is dropped.

    Threads: `make_request`, `queue` and `abort` may be called by any thread. `queue` and `abort` may also be called
    inside of a step, by a signal handler or by the garbage collector: they only append to an inbox, which the next step
    applies in order before it does anything else. One step runs at a time, a second one is an error. `StepLoop` shares
    steps among threads that wait; a thread of its own may run them as well, and `Request.listener` tells others what
    came of it.

    Args:
        make_runner: for tests: what makes the ModelRunner.
    """

    def __init__(self, config: EngineConfig, make_runner: Callable[..., ModelRunner] = ModelRunner) -> None:
        self.config = config
        checkpoint = locate(config)
        self.model_config = checkpoint.config
        device = select_device(config.device)
        self.kernels = _resolve_kernels(config, device, checkpoint.config.use_custom_kernels)
        logger.info("kernels: %s", self.kernels.summary())
        self.tokenizer: Any = None
        source = config.tokenizer or checkpoint.path
        if not config.skip_tokenizer_init and source is not None:
            self.tokenizer = load_tokenizer(source)
            if self.tokenizer is None:
                if checkpoint.format != "dummy" or config.tokenizer:
                    raise ValueError(
                        f"{source} holds no tokenizer; pass tokenizer= a directory that does, or"
                        " skip_tokenizer_init=True to serve token ids"
                    )
        path = checkpoint.path
        has_files = path is not None and path.is_dir()
        ends = eos_token_ids(path if path and has_files else checkpoint.config.raw, self.tokenizer)
        # A tokenizer may know more tokens than the model has logits for, and some files say -1 for none.
        self.eos_token_ids = tuple(token for token in ends if 0 <= token < checkpoint.config.vocab_size)
        self.runner = make_runner(config, checkpoint, device, self.kernels)
        self.scheduler = Scheduler(
            BlockManager(self.runner.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            self.runner.max_num_batched_tokens,
            self.runner.max_model_len,
            self.eos_token_ids,
            self.runner.fast.piggyback,
            self.runner.fast.reserve_tokens_ahead,
        )
        on_gpu = self.runner.device.type == "cuda"
        asynchronous = on_gpu if config.async_scheduling is None else config.async_scheduling
        self._steps_ahead = 1 if asynchronous else 0
        self._decoder = None if self.tokenizer is None else TextDecoder(self.tokenizer)
        self._token_text = None if self._decoder is None else self._decoder.token_text
        self.prompts = PromptReader(self.tokenizer, self.model_config.vocab_size, self.runner.max_model_len)
        self._in_flight: deque[StepResult] = deque()
        self._completions: dict[Sequence, tuple[Request, Completion]] = {}
        self._inbox: deque[tuple[Request, bool]] = deque()
        """Requests to start (False) and to abort (True), in order. Appending to a deque is atomic."""
        self._turns: deque[object] = deque()
        """The step that runs, first. Not a lock: an interrupt on leaving `with lock:` would leave it locked."""
        self.num_lost = 0
        """Requests that were lost by steps that failed."""
        self._request_ids = itertools.count()
        self._seeds = random.Random(config.seed)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._inbox) or self.scheduler.has_unfinished or bool(self._in_flight)

    def add_request(self, prompt: Any, params: SamplingParams | None = None, incremental: bool = False) -> Request:
        """`make_request` and `queue`."""
        request = self.make_request(prompt, params, incremental)
        self.queue(request)
        return request

    def make_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        incremental: bool = False,
        names: tuple[str, str] = ("prompt", "sampling_params"),
    ) -> Request:
        """Check a prompt and its parameters, without queueing them yet.

        Args:
            prompt: a text, token ids, or a dict with "prompt" or "prompt_token_ids", and maybe "cache_salt".
            names: what the user calls the prompt and the parameters.

        Raises:
            ValueError, TypeError: the request cannot be served.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"{names[1]}={params!r:.80}: must be SamplingParams, not {type(params).__name__}; pass for example"
                " SamplingParams(temperature=0.6, max_tokens=64), or None for the defaults"
            )
        self._check(params)
        checked = self.prompts.read(prompt, names[0])
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        rules = None
        if params.changes_logits:
            words = bad_word_token_ids(params.bad_words or (), self.tokenizer, self.model_config.vocab_size)
            rules = LogitRules(params.logit_bias or {}, words)
        return Request(next(self._request_ids), checked, params, seed, self._decoder, incremental, rules)

    def queue(self, *requests: Request, offline: bool = False) -> None:
        """Start requests with the next step.

        offline: only the time when all of them have ended matters, not that of their first tokens. Their prompts may
            then be computed late (`engine/fast/piggyback.py`), and those with the longest outputs start first.
        """
        if offline and self.scheduler.pacer is not None:
            longest = self.runner.max_model_len
            requests = tuple(sorted(requests, key=lambda r: -r.most_output_tokens(longest)))
        for request in requests:
            request.offline = offline
            self._inbox.append((request, False))

    def abort(self, request: Request) -> None:
        """End a request with the next step; its outputs keep the tokens they have. Does nothing to a finished one."""
        if not request.finished:
            self._inbox.append((request, True))

    def step(self) -> list[Request]:
        """Launch the next step and read the oldest one that is due; returns the requests that got tokens.

        Raises:
            Whatever the forward pass raised. The requests that ran are ended with "abort" and have it as their
            `failure`; the engine goes on with the others.
        """
        turn = object()
        try:
            try:
                self._turns.append(turn)
                if self._turns[0] is not turn:
                    raise RuntimeError(
                        "a step was started inside of a step, by a signal handler, a finalizer or another thread;"
                        " only abort there, and let one thread run the steps"
                    )
                return self._step()
            finally:
                self._end_turn(turn)
        finally:  # again, since an interrupt may have come at the first time
            self._end_turn(turn)

    def _end_turn(self, turn: object) -> None:
        try:
            self._turns.remove(turn)
        except ValueError:
            pass

    def _step(self) -> list[Request]:
        try:
            self._apply_inbox()
            step = self.scheduler.schedule()
            if step is not None:
                self._in_flight.append(self.runner.execute(step))
            if self._in_flight and (step is None or len(self._in_flight) > self._steps_ahead):
                result = self._in_flight.popleft()
                return self._read(result, result.token_ids())
            return []
        except BaseException as error:
            self._abandon_running(error)
            raise

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, between steps. False, with nothing changed: requests are unfinished."""
        if self.has_unfinished:
            return False
        self.scheduler.blocks.reset()
        return True

    def check(self) -> None:
        """Assert the invariants; cheap enough to call after every operation in a test."""
        self.scheduler.check()
        sequences = {*self.scheduler.running, *self.scheduler.waiting}
        assert set(self._completions) == sequences, "requests and scheduler disagree about what is unfinished"
        if not sequences:
            blocks = self.scheduler.blocks
            assert blocks.num_free_blocks == blocks.num_blocks, "blocks are lost"

    def _apply_inbox(self) -> None:
        """An entry is removed after it was applied, and may be applied twice, since an interrupt can come at any
        line.
        """
        while self._inbox:
            request, aborted = self._inbox[0]
            for completion in request.completions:
                seq = completion.seq
                if aborted:
                    self.scheduler.finish(seq, "abort")
                    request.notify()
                    self._completions.pop(seq, None)
                elif not seq.finished and seq not in self._completions:
                    self._completions[seq] = request, completion
                    seq.offline = request.offline and request.params.prompt_logprobs is None
                    self.scheduler.add(seq)
            self._inbox.popleft()

    def _read(self, result: StepResult, token_ids: list[int]) -> list[Request]:
        for prompt in result.prompt_logprobs:
            self._read_prompt_logprobs(prompt)
        grown = self.scheduler.update(result.step, token_ids)
        logprobs, row_of = result.logprobs, {}
        if logprobs is not None:
            row_of = {seq: row for row, seq in enumerate(result.step.sampling)}
        requests: dict[Request, None] = {}
        ended = []
        completions = self._completions
        for seq in grown:
            request, completion = completions[seq]
            requests[request] = None
            # Most tokens are only counted: nothing needs the text of a sequence that goes on.
            if completion.is_watched:
                if completion.logprobs is not None and logprobs is not None:
                    completion.logprobs.append(logprobs.row(row_of[seq], seq.params.logprobs or 0, self._token_text))
                stop = completion.append(seq.token_ids[-1])
                if stop is not None:
                    self.scheduler.finish(seq, "stop", stop)
                    if seq.finish_reason == "length":  # the last token allowed completed the stop string
                        seq.finish_reason, seq.stop_reason = "stop", stop
                if request.incremental:
                    request.notify()
            if request.first_token_time is None or seq.finished:
                request.note_token()
                if seq.finished:
                    ended.append(seq)
        for seq in ended:  # after all that is said of the request: a listener may be in another thread
            completions[seq][0].notify()
            del completions[seq]
        return list(requests)

    def _read_prompt_logprobs(self, prompt: PromptLogprobs) -> None:
        found = self._completions.get(prompt.seq)
        if found is None or found[0].prompt_logprobs is None:
            return
        rows, count = prompt.tensors, prompt.seq.params.prompt_logprobs or 0
        for i in range(len(rows.ranks)):
            found[0].prompt_logprobs[prompt.start + i] = rows.row(i, count, self._token_text)

    def _abandon_running(self, failure: BaseException) -> None:
        """End every sequence that ran or had a step in flight: after a failure nothing that was computed can be
        trusted.

        An interrupt can come in the middle of anything, so the scheduler's list of running sequences is not used: the
        sequences that do not wait are ended.
        """
        self._in_flight.clear()
        self.scheduler.reset()
        waiting = self.scheduler.waiting
        for seq, (request, _) in list(self._completions.items()):
            if seq not in waiting:
                if not seq.finished:
                    seq.end("abort")
                self.num_lost += request.failure is None
                request.failure = failure
                request.notify()
                del self._completions[seq]

    def _check(self, params: SamplingParams) -> None:
        most = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and 0 <= most < count:
                raise ValueError(
                    f"{name}={count}: this engine reports at most {most} for a token; lower it, or pass"
                    f" max_logprobs={count} to LLM"
                )
        vocab_size = self.model_config.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name}: {token_id} is outside the vocabulary of {vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none; use logit_bias")


def _resolve_kernels(config: EngineConfig, device: torch.device, model_choice: bool | None) -> Kernels:
    """The argument wins over the model's config.json; the default is on."""
    choice = next((c for c in (config.use_custom_kernels, model_choice) if c is not None), True)
    return resolve_kernels(device, choice, config.kernel_priority, config.kernel_plugins)

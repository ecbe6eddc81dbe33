"""The engine: requests come in, steps are scheduled, launched and read, tokens go to their requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.logprobs import LogprobsTensors
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.model_setup import custom_kernels_wanted
from nanovllm.engine.ranks.interface import Ranks
from nanovllm.engine.ranks.leader import Leader
from nanovllm.engine.reentrancy_guard import ReentrancyGuard
from nanovllm.engine.requests.maker import RequestMaker
from nanovllm.engine.requests.request import Completion, InboxEntry, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_result import PromptLogprobs, StepResult
from nanovllm.hardware.devices import check_device, select_device
from nanovllm.kernels import resolve_kernels
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.constraint import TokenConstraint
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.weights.bare_tokenizer import whole_tokenizer
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.checkpoint_tokenizer import checkpoint_eos_token_ids, checkpoint_tokenizer
from nanovllm.weights.sampling_defaults import sampling_defaults

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one model.

    With asynchronous scheduling a step is launched before the one before it is read: the device never waits for the
    host, and a sequence that turns out to have ended had one token too many computed, which is dropped.

    Threads: `make_request`, `queue` and `abort` may be called by any thread. `queue` and `abort` may also be called
    inside of a step, by a signal handler or by the garbage collector: they only append to an inbox, which the next step
    applies in order before it does anything else. One step runs at a time, a second one is an error. `StepLoop` shares
    steps among threads that wait; a dedicated thread may run them as well, and `Request.listener` tells other
    threads about the results.

    With `tensor_parallel_size` above 1 each rank has such an engine (`ranks/`). An interrupt then takes effect after
    the step that it comes in, and a failure ends all ranks.

    Args:
        make_runner: for tests: what makes the ModelRunner.
        ranks: given to a rank above 0. None: this is rank 0, which starts the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_runner: Callable[..., ModelRunner] = ModelRunner,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        checkpoint = locate(config)
        self.model_config = checkpoint.config
        size = config.tensor_parallel_size
        device = select_device(config.device, 0 if ranks is None else ranks.rank, size)
        self.ranks = ranks or (Leader(config, checkpoint.config, device) if size > 1 else Ranks())
        custom = custom_kernels_wanted(config, checkpoint.config)
        self.kernels = resolve_kernels(device, custom, config.kernel_priority, config.kernel_plugins)
        logger.info("kernels: %s", self.kernels.summary())
        self.tokenizer = checkpoint_tokenizer(config, checkpoint)
        self.eos_token_ids = checkpoint_eos_token_ids(checkpoint, self.tokenizer)
        self.sampling_defaults = sampling_defaults(config, checkpoint)
        self.runner = self.ranks.make_on_all(lambda: make_runner(config, checkpoint, device, self.kernels))
        self.scheduler = Scheduler(
            BlockManager(self.runner.num_kvcache_blocks, config.kvcache_block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            self.runner.max_num_batched_tokens,
            self.runner.max_model_len,
            self.eos_token_ids,
            self.runner.fast.piggyback,
            self.runner.fast.reserve_tokens_ahead,
        )
        asynchronous = config.async_scheduling
        if asynchronous is None:
            asynchronous = self.runner.device.type == "cuda"
        self._steps_ahead = 1 if asynchronous else 0
        self.maker = RequestMaker(
            self.tokenizer, self.model_config.vocab_size, self.runner.max_model_len, config.max_logprobs, config.seed,
            ConstraintMaker(self.tokenizer, self.model_config.vocab_size, self.eos_token_ids),
            sampling_defaults=self.sampling_defaults.values, remedy=self.runner.limits.remedy,
        )  # fmt: skip
        self._in_flight: deque[StepResult] = deque()
        self._completions: dict[Sequence, tuple[Request, Completion]] = {}
        self._inbox: deque[InboxEntry] = deque()
        """In order. Appending to a deque is atomic."""
        self._one_step_at_a_time = ReentrancyGuard(
            "a step was started inside of a step, by a signal handler, a finalizer or another thread; only abort there,"
            " and let one thread run the steps"
        )
        self.num_lost = 0
        """Requests that were lost by steps that failed."""

    @staticmethod
    def check_device(config: EngineConfig) -> None:
        """A ValueError if this machine does not have the configured device. Nothing is loaded."""
        check_device(config.device)

    @property
    def transformers_tokenizer(self) -> Any:
        """`tokenizer` as one of transformers, with all that those can do; None without one."""
        return whole_tokenizer(self.tokenizer)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._inbox) or self.scheduler.has_unfinished or bool(self._in_flight)

    def add_request(self, prompt: Any, params: SamplingParams | None = None, incremental: bool = False) -> Request:
        """`make_request` and `queue`."""
        if isinstance(params, (str, list, dict)):
            raise TypeError("add_request takes a prompt and its SamplingParams; the engine numbers the requests itself")
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
        return self.maker.make(prompt, params, incremental, names)

    def queue(self, *requests: Request, offline: bool = False) -> None:
        """Start requests with the next step.

        offline: only the time when all of them have ended matters, not that of their first tokens. Their prompts may
            then be computed late (`engine/fast/piggyback.py`), and those with the longest outputs start first.
        """
        if offline and self.scheduler.piggyback is not None:
            requests = tuple(sorted(requests, key=self._longest_output, reverse=True))
        for request in requests:
            request.offline = offline
            self._inbox.append(InboxEntry(request))

    def _longest_output(self, request: Request) -> int:
        prompt_len = len(request.prompt_token_ids)
        return request.params.most_tokens(prompt_len, self.runner.max_model_len) - prompt_len

    def abort(self, request: Request, index: int | None = None) -> None:
        """End a request, or its completion `index` alone, with the next step; its outputs keep the tokens they have.

        Does nothing to what has finished.
        """
        if not request.finished:
            ended = request.completions if index is None else [request.completions[index]]
            self._inbox.append(InboxEntry(request, ended))

    def step(self) -> list[Request]:
        """Launch the next step and read the oldest one that is due; returns the requests that got tokens.

        Raises:
            Whatever the forward pass raised. The requests that ran are ended with "abort" and have it as their
            `failure`; the engine goes on with the others.
        """
        return self._one_step_at_a_time.run(lambda: self.ranks.run_step(self._step))

    def _step(self) -> list[Request]:
        try:
            self._apply_inbox()
            step = self.scheduler.schedule()
            self.ranks.compare_schedules(step)
            if step is not None:
                self._in_flight.append(self.runner.execute(step))
            # A step that is launched ahead lets the one before it be read while the device is busy.
            if self._in_flight and (step is None or len(self._in_flight) > self._steps_ahead):
                return self._update(self._in_flight.popleft())
            return []
        except BaseException as error:
            self._abandon_running(error)
            if isinstance(error, Exception):
                self.kernels.name_plugins(error)
            raise

    def _apply_inbox(self) -> None:
        """An interrupt can come at any line: an entry is removed after it was applied, and may be applied twice."""
        count = len(self._inbox)  # what other threads append now is for the next step
        self.ranks.send_inbox([self._inbox[i] for i in range(count)])
        for _ in range(count):
            request, aborted = self._inbox[0]
            if aborted is None:
                self._start(request)
            else:
                self._abort(request, aborted)
            self._inbox.popleft()

    def _start(self, request: Request) -> None:
        for completion in request.completions:
            seq = completion.seq
            if not seq.finished and seq not in self._completions:
                self._completions[seq] = request, completion
                seq.offline = request.offline and request.params.prompt_logprobs is None
                self.scheduler.add(seq)

    def _abort(self, request: Request, completions: list[Completion]) -> None:
        for completion in completions:
            self.scheduler.finish(completion.seq, "abort")
            request.notify()
            self._completions.pop(completion.seq, None)

    def _update(self, result: StepResult) -> list[Request]:
        """Read a step's tokens, once they are there, and give them to their requests, which are returned."""
        token_ids = result.token_ids()
        for prompt in result.prompt_logprobs:
            self._read_prompt_logprobs(prompt)
        grown = self.scheduler.update(result.step, token_ids)
        if result.logprobs is not None:
            self._read_logprobs(result.step.sampling, result.logprobs)
        requests: dict[Request, None] = {}
        ended = []
        completions = self._completions
        for seq in grown:
            request, completion = completions[seq]
            requests[request] = None
            if completion.needs_every_token:  # others are only counted until they end
                self._process_token(request, completion)
            if request.first_token_time is None or seq.finished:
                request.record_token_time()
                if seq.finished:
                    ended.append(seq)
        for seq in ended:  # after all that is said of the request: a listener may be in another thread
            completions[seq][0].notify()
            del completions[seq]
        return list(requests)

    def _process_token(self, request: Request, completion: Completion) -> None:
        """Let a completion's constraint, text and stream take its newest token. Its stop strings may end it.

        Finish reasons, the first that applies: "abort", if the token ended the sequence only because its constraint had
        failed; "stop" by an end or stop token, as the scheduler said; "stop" by a stop string; "length", as the
        scheduler said; "abort", if the constraint can make no further mask.
        """
        seq, constraint = completion.seq, completion.seq.constraint
        if seq.finished and constraint is not None and constraint.ended_by_force(seq.num_output_tokens):
            self._log_early_end(request, constraint.error)  # only an end token was allowed
            seq.finish_reason, seq.stop_reason = "abort", None
        stop = completion.append(seq.token_ids[-1])
        if stop is not None:
            self.scheduler.finish(seq, "stop", stop)
            if seq.finish_reason == "length":  # the last token allowed completed the stop string
                seq.finish_reason, seq.stop_reason = "stop", stop
        if request.incremental:
            request.notify()
        if constraint is not None and not seq.finished:
            self._end_if_broken(request, seq, constraint)

    def _end_if_broken(self, request: Request, seq: Sequence, constraint: TokenConstraint) -> None:
        """End a sequence whose constraint can make no more masks, or too slowly."""
        error = constraint.error_at(seq.num_output_tokens)
        if error is None:
            return
        self._log_early_end(request, error)
        if constraint.is_broken_at(seq.num_output_tokens):
            self.scheduler.finish(seq, "abort")
        elif self.ranks.rank == 0:  # time differs among ranks: this one tells the others
            self.abort(request, seq.index)

    def _log_early_end(self, request: Request, error: str | None) -> None:
        if self.ranks.rank == 0:  # which alone knows the request's name
            extra = {"request_id": request.name}
            logger.warning("request %s ends early: %s", request.log_name, error, extra=extra)

    def _read_logprobs(self, sampling: tuple[Sequence, ...], logprobs: LogprobsTensors) -> None:
        """Give completions the log-probabilities of their newest tokens. logprobs: a row for each sequence."""
        for row, seq in enumerate(sampling):
            if seq.params.logprobs is not None and seq in self._completions:  # not if it ended in an earlier step
                request, completion = self._completions[seq]
                assert completion.logprobs is not None
                completion.logprobs.append(logprobs.row(row, seq.params.logprobs, request.token_text))

    def _read_prompt_logprobs(self, prompt: PromptLogprobs) -> None:
        request, _ = self._completions.get(prompt.seq, (None, None))
        if request is None or request.prompt_logprobs is None:
            return
        rows, count = prompt.tensors, prompt.seq.params.prompt_logprobs or 0
        for i in range(len(rows.ranks)):
            request.prompt_logprobs[prompt.start + i] = rows.row(i, count, request.token_text)

    def _abandon_running(self, failure: BaseException) -> None:
        """End every sequence that ran or had a step in flight, since nothing that was computed can be trusted.

        These are the sequences that do not wait. The scheduler's list of running sequences may be wrong after an
        interrupt, which can come at any line.
        """
        self._in_flight.clear()
        self.scheduler.reset()
        waiting = self.scheduler.waiting
        for seq, (request, _) in list(self._completions.items()):
            if seq not in waiting:
                if not seq.finished:
                    seq.end("abort")
                if request.failure is None:
                    self.num_lost += 1
                request.failure = failure
                request.notify()
                del self._completions[seq]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, between steps. False, with nothing changed: requests are unfinished."""
        if self.has_unfinished:
            return False
        self.ranks.call_on_others("reset_prefix_cache")
        self.scheduler.blocks.reset()
        return True

    def check(self) -> None:
        """Assert the invariants; cheap enough to call after every operation in a test."""
        self.scheduler.check()
        sequences = {*self.scheduler.running, *self.scheduler.waiting}
        assert set(self._completions) == sequences, "requests and scheduler disagree about what is unfinished"
        blocks = self.scheduler.blocks
        assert sequences or blocks.num_free_blocks == blocks.num_blocks, "blocks are lost"

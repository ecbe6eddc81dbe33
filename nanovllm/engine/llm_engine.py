"""The engine: requests come in, steps are scheduled, launched and read, tokens go to their requests."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import decode
from nanovllm.engine.devices import select_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Completion, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_result import StepResult
from nanovllm.kernels import Kernels, resolve_kernels
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one model.

    `add_request` and `abort` may be called between any two `step`s. With asynchronous scheduling a step is launched
    before the one before it is read: the device never waits for the host, and a sequence that turns out to have ended
    had one token too many computed, which is dropped.
    """

    def __init__(self, config: EngineConfig) -> None:
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
                        f"{source} holds no tokenizer; pass tokenizer= a directory that does, or skip_tokenizer_init=True to serve token ids"
                    )
        ends = eos_token_ids(
            checkpoint.path
            if checkpoint.path is not None and checkpoint.path.is_dir()
            else dict(checkpoint.config.raw),
            self.tokenizer,
        )
        # A tokenizer may know more tokens than the model, whose logits have no column for them, and some files say -1 for none.
        self.eos_token_ids = tuple(token for token in ends if 0 <= token < checkpoint.config.vocab_size)
        self.runner = ModelRunner(config, checkpoint, device, self.kernels)
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
        self._in_flight: deque[StepResult] = deque()
        self._completions: dict[Sequence, tuple[Request, Completion]] = {}
        self._num_requests = 0
        self._seeds = random.Random(config.seed)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def add_request(self, prompt: Any, params: SamplingParams | None = None, incremental: bool = False) -> Request:
        """Queue a prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".

        Raises:
            ValueError, TypeError: the prompt cannot be served; nothing has changed.
        """
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
        """Check a prompt and its parameters, without queueing them yet. names: what the user calls the two."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"{names[1]}={params!r:.80}: must be SamplingParams, not {type(params).__name__}; pass for example"
                " SamplingParams(temperature=0.6, max_tokens=64), or None for the defaults"
            )
        text, token_ids = self._tokenize(prompt, names[0])
        self._check(token_ids, params)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        request = Request(self._num_requests, text, token_ids, params, seed, self.tokenizer, incremental)
        self._num_requests += 1
        return request

    def queue(self, request: Request, offline: bool = False) -> None:
        """offline: only the whole output is waited for, so that the prompt may be computed late (piggybacked prefill)."""
        for completion in request.completions:
            self._completions[completion.seq] = request, completion
            completion.seq.offline = offline and request.params.prompt_logprobs is None
            self.scheduler.add(completion.seq)

    def queue_batch(self, requests: list[Request]) -> None:
        """Queue requests of which none is of use before all have ended."""
        if self.scheduler.pacer is not None:  # the longest outputs first
            longest = self.runner.max_model_len
            requests = sorted(requests, key=lambda r: -min(r.params.max_tokens, longest - len(r.prompt_token_ids)))
        for request in requests:
            self.queue(request, offline=True)

    def abort(self, request: Request) -> None:
        """End a request wherever it is; its outputs keep the tokens they have. Does nothing to a finished one."""
        try:
            for completion in request.completions:
                self.scheduler.finish(completion.seq, "abort")
                self._drop(completion)
        except BaseException:  # an interrupt, maybe halfway through giving back blocks
            self._abandon_running()
            raise

    def step(self) -> list[Request]:
        """Launch the next step and read the oldest one that is due; returns the requests that got tokens.

        Raises:
            Whatever the forward pass raised. The requests that ran are ended with "abort"; the engine goes on.
        """
        try:
            step = self.scheduler.schedule()
            if step is not None:
                self._in_flight.append(self.runner.execute(step))
            if self._in_flight and (step is None or len(self._in_flight) > self._steps_ahead):
                result = self._in_flight.popleft()
                return self._read(result, result.token_ids())
            return []
        except BaseException:
            self._abandon_running()
            raise

    def _read(self, result: StepResult, token_ids: list[int]) -> list[Request]:
        for prompt in result.prompt_logprobs:
            self._read_prompt_logprobs(prompt)
        grown = self.scheduler.update(result.step, token_ids)
        row_of = None
        if result.logprobs is not None:
            row_of = {seq: row for row, seq in enumerate(result.step.sampling)}
        requests: dict[Request, None] = {}
        completions = self._completions
        for seq in grown:
            request, completion = completions[seq]
            requests[request] = None
            # Most tokens are only counted: nobody looks at the text of a sequence that goes on.
            if completion.is_watched:
                if completion.logprobs is not None:
                    row = result.logprobs.row(row_of[seq], seq.params.logprobs, self._decode_token)
                    completion.logprobs.append(row)
                stop = completion.append(seq.token_ids[-1])
                if stop is not None:
                    self.scheduler.finish(seq, "stop", stop)
                    if seq.finish_reason == "length":  # the last token allowed completed the stop string
                        seq.finish_reason, seq.stop_reason = "stop", stop
            if request.first_token_time is None or seq.finished:
                request.note_token()
                if seq.finished:
                    self._drop(completion)
        return list(requests)

    def _read_prompt_logprobs(self, prompt: Any) -> None:
        found = self._completions.get(prompt.seq)
        if found is None:
            return
        for i in range(len(prompt.tensors.ranks)):
            found[0].prompt_logprobs[prompt.start + i] = prompt.tensors.row(
                i, prompt.seq.params.prompt_logprobs, self._decode_token
            )

    def _decode_token(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else decode(self.tokenizer, [token_id], skip_special_tokens=False)

    def _drop(self, completion: Completion) -> None:
        self._completions.pop(completion.seq, None)

    def _abandon_running(self) -> None:
        """After a failure: nothing that ran, or was to run on what ran, can be trusted.

        An interrupt can come in the midst of anything, so who ran is not asked of the scheduler: it is whoever does not wait.
        """
        self._in_flight.clear()
        self.scheduler.reset()
        waiting = set(self.scheduler.waiting)
        for seq in [seq for seq in self._completions if seq not in waiting]:
            if not seq.finished:
                seq.end("abort")
            del self._completions[seq]

    def _tokenize(self, prompt: Any, name: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    f'{name}={prompt!r:.80}: a prompt dict has "prompt" or "prompt_token_ids", not {sorted(map(str, prompt))}'
                )
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text, self._token_ids(prompt["prompt_token_ids"], name)
            prompt = text
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "this engine has no tokenizer, so it serves token ids: pass a list of integers, or tokenizer= to LLM"
                )
            token_ids = self.encode(prompt, name)
            self._check_ids(token_ids, min, max)
            return prompt, token_ids
        return None, self._token_ids(prompt, name)

    def encode(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        """The tokenizer's ids of a text; a ValueError that calls it `name` if it holds half a character."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}={text!r:.80}: half of a surrogate pair, at position {error.start}, is no text; remove it"
            ) from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _token_ids(self, prompt: Any, name: str) -> list[int]:
        try:
            array = np.asarray(prompt)
        except (ValueError, TypeError, OverflowError, RuntimeError):  # ragged, or not an array at all
            array = np.empty(0)
        if array.ndim == 1 and array.dtype.kind in "iu":
            self._check_ids(array, np.min, np.max)  # sooner done than of a list
            return array.tolist()
        try:
            if isinstance(prompt, (bytes, bytearray, Set)) or array.dtype.kind == "b":
                raise TypeError
            token_ids = [int(t.__index__()) for t in prompt]
        except (TypeError, AttributeError):
            raise TypeError(
                f"{name}: a prompt is a string, a list of token ids or a dict with one of them, not {prompt!r:.80}"
            ) from None
        self._check_ids(token_ids, min, max)
        return token_ids

    def _check_ids(self, token_ids: Any, least: Callable[[Any], Any], most: Callable[[Any], Any]) -> None:
        vocab_size = self.model_config.vocab_size
        if len(token_ids) and ((low := least(token_ids)) < 0 or most(token_ids) >= vocab_size):
            raise ValueError(
                f"token id {low if low < 0 else most(token_ids)} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
            )

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        limit = self.runner.max_model_len
        if len(token_ids) >= limit:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len={limit} allows {limit - 1} and one of output;"
                " shorten the prompt or raise max_model_len"
            )
        vocab_size = self.model_config.vocab_size
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"stop_token_ids: {token_id} is outside the vocabulary of {vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")


def _resolve_kernels(config: EngineConfig, device: torch.device, model_choice: bool | None) -> Kernels:
    """The argument wins over the model's config.json; the default is on."""
    choice = next((c for c in (config.use_custom_kernels, model_choice) if c is not None), True)
    return resolve_kernels(device, choice, config.kernel_priority, config.kernel_plugins)

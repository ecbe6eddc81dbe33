"""From a user's prompt and parameters to a checked request. It needs the model's sizes and its tokenizer, no device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nanovllm.engine.logit_rules import LogitRules, bad_word_token_ids
from nanovllm.engine.requests.detokenizer import TextDecoder
from nanovllm.engine.requests.prompts import RAISE_MAX_MODEL_LEN, CheckedPrompt, PromptReader
from nanovllm.engine.requests.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.structured.grammar_check import GrammarChecker
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.wording import brief


class RequestMaker:
    """Makes requests. Any thread may use it.

    Args:
        tokenizer: a transformers tokenizer, or None: prompts are token ids and outputs have no text.
        vocab_size: the size of the model's vocabulary.
        max_model_len: most tokens of a prompt and its output.
        max_logprobs: most log-probabilities of a token; negative: any number.
        seed: the seed from which requests without a seed get theirs; None: from the system.
        constraints: makes the constraints of sequences. None: they are only checked, since another maker's requests
            are computed.
        first_id: the first request's id.
        sampling_defaults: what differs from the defaults of `SamplingParams` for requests that bring none.
        remedy: what to do with a prompt that is too long.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        seed: int | None,
        constraints: ConstraintMaker | None = None,
        first_id: int = 0,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        remedy: str = RAISE_MAX_MODEL_LEN,
    ) -> None:
        self.default_params = SamplingParams(**sampling_defaults)
        self.prompts = PromptReader(tokenizer, vocab_size, max_model_len, remedy)
        self.decoder = None if tokenizer is None else TextDecoder(tokenizer)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._request_ids = itertools.count(first_id)
        self._seeds = random.Random(seed)
        self._constraints = constraints
        self._checker = GrammarChecker()

    def make(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        incremental: bool = False,
        names: tuple[str, str] = ("prompt", "sampling_params"),
        *,
        seed: int | None = None,
        with_text: bool = True,
    ) -> Request:
        """As `LLMEngine.make_request`.

        Args:
            seed: 64 bits, in place of the parameters' seed.
            with_text: False: the request has token ids alone; its stop strings are another's task.
        """
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"{names[1]}={brief(params)}: must be SamplingParams, not {type(params).__name__}; pass for example"
                " SamplingParams(temperature=0.6, max_tokens=64), or None for the defaults"
            )
        self.check(params)
        params = self._with_counts(params)
        checked = self.prompts.read(prompt, names[0])
        if seed is None:
            seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        return self.from_checked(next(self._request_ids), checked, params, seed, incremental, with_text)

    def _with_counts(self, params: SamplingParams) -> SamplingParams:
        """-1 log-probabilities are those of all tokens."""
        if -1 not in (params.logprobs, params.prompt_logprobs):
            return params
        own, of_prompt = (self._vocab_size if n == -1 else n for n in (params.logprobs, params.prompt_logprobs))
        return replace(params, logprobs=own, prompt_logprobs=of_prompt)

    def from_checked(
        self,
        request_id: int,
        prompt: CheckedPrompt,
        params: SamplingParams,
        seed: int,
        incremental: bool = False,
        with_text: bool = True,
    ) -> Request:
        """A request of parts that `make` has checked. Equal parts give equal requests in every process."""
        rules = None
        if params.changes_logits:
            words = bad_word_token_ids(params.bad_words or (), self._tokenizer, self._vocab_size)
            rules = LogitRules(params.logit_bias or {}, words)
        decoder = self.decoder if with_text else None
        request = Request(request_id, prompt, params, seed, decoder, incremental, rules)
        if self._constraints is not None and params.constrained:
            for completion, constraint in zip(request.completions, self._constraints.make(params)):
                completion.constrain(constraint)
        return request

    def has_unchecked_grammar(self, params: SamplingParams) -> bool:
        """Whether `check` would have to compile a grammar."""
        spec = params.structured_outputs
        return isinstance(spec, StructuredOutputs) and not self._checker.has_passed(spec)

    def has_new_grammar(self, params: SamplingParams) -> bool:
        """Whether `make` would have to check or compile a grammar."""
        spec = params.structured_outputs
        if self._constraints is None or not isinstance(spec, StructuredOutputs):
            return False
        return not (self._checker.has_passed(spec) and self._constraints.is_compiled(params))

    def prepare(self) -> None:
        """Do ahead what the first request with a grammar would take long for."""
        if self._constraints is not None:
            self._constraints.prepare()

    def close(self) -> None:
        """New grammars are refused from now on."""
        self._checker.close()

    def check(self, params: SamplingParams) -> None:
        """Raise a ValueError if this model cannot serve the parameters.

        A grammar that is new may take seconds: call this in another thread first, where seconds count.
        """
        most = self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            number = self._vocab_size if count == -1 else count or 0
            if 0 <= most < number:
                other = f", or pass max_logprobs={count} to LLM" if count <= self._vocab_size else ""
                lower = f"ask for {most}" if count == -1 else "lower it"
                raise ValueError(
                    f"{name}={brief(count)}: this engine reports at most {most} for a token; {lower}{other}"
                )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < self._vocab_size:
                    raise ValueError(f"{name}: {token_id} is outside the vocabulary of {self._vocab_size}")
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        if params.bad_words and self._tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none; use logit_bias")
        if isinstance(params.structured_outputs, StructuredOutputs):
            self._checker.check(params.structured_outputs)

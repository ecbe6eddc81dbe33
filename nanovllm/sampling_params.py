"""How one request's tokens are chosen and when it stops: validated once, never mutated."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.arguments import rejects_unknown
from nanovllm.foreign_arguments import SAMPLING_ARGUMENTS
from nanovllm.foreign_names import refuse_name
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.wording import brief

MAX_N = 128
"""Most completions of a request: OpenAI's limit. Each is a sequence of its own from the start."""
MAX_STOP_STRINGS, MAX_STRING_LENGTH = 64, 1024
"""Most stop strings of a request, and the characters of one. Every new piece of text is searched for every stop string,
and a stream keeps back as much text as the longest one has. OpenAI allows 4 stop strings; 64 of 1,024 characters cost
about 0.1 ms a token on the host."""
MAX_BAD_WORDS = MAX_LOGIT_BIAS = 1024
"""Most bad words, and most tokens with a bias: the host sends them to the device with every step."""


@rejects_unknown(called="SamplingParams", foreign=SAMPLING_ARGUMENTS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings are vLLM's.

    The logits change in this order: bias, bad words and banned end tokens; penalties; temperature; top-k; top-p; min-p.
    Each filter applies to what the filter before it kept.

    Raises:
        ValueError: a value of the wrong type or out of range; the message names the argument, the value, the remedy.
        TypeError: an unknown keyword; the message names the nearest known one, or says why the keyword of another
            library is not supported.
    """

    n: int = 1
    """Completions to generate for the prompt."""
    temperature: float = 1.0
    """Divides the logits. 0 is greedy: always the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens, and any that tie with the k-th. 0 or -1: keep all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities add up to at least this (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL). 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output so far (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output so far (OpenAI)."""
    max_tokens: int | None = 64
    """Most tokens to generate. None: as many as `max_model_len` allows."""
    min_tokens: int = 0
    """Tokens to generate before an end token or a stop token may be sampled."""
    stop: tuple[str, ...] | list[str] | str | None = None
    """Strings that end the text where they appear. Kept as a tuple."""
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    """Token ids that end the text besides the model's own end tokens. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    seed: int | None = None
    """Makes the draws repeatable, whatever else runs in the batch. None or -1: the engine picks one."""
    logprobs: int | None = None
    """Report this many most likely tokens, and the sampled one, with their log-probabilities. -1: all tokens, if the
    engine's `max_logprobs` allows it. None: none at all."""
    prompt_logprobs: int | None = None
    """The same for every prompt token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the text's end."""
    bad_words: tuple[str, ...] | list[str] | None = None
    """Words that the output must not contain, at its beginning or after a space. The last token of a word is banned
    where the tokens before it are already in the output. Kept as a tuple."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Token id -> what is added to its logit, from -100 (never) to 100 (always). Kept as a dict."""
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    """Only these tokens may be sampled; end tokens too only if they are among them. None: all. Kept as a tuple."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """What the output must look like; or a dict of its fields. Bans and `min_tokens` give way where they would leave no
    token. Needs the extra `structured`."""

    def __post_init__(self) -> None:
        if _is_int(self.seed) and self.seed == -1:
            object.__setattr__(self, "seed", None)  # as in vLLM
        self._int("n", 1, MAX_N, remedy="; send several requests for more")
        self._float("temperature", 0, math.inf, "; pass 0 for greedy decoding")
        self._int("top_k", -1, remedy="; pass 0 to keep all tokens")
        self._float("top_p", 0, 1, "; pass 1 to keep all tokens", above=True)
        self._float("min_p", 0, 1, "; pass 0 to keep all tokens")
        self._float("repetition_penalty", 0, math.inf, "; pass 1 for none", above=True)
        self._float("presence_penalty", -2, 2, "; pass 0 for none")
        self._float("frequency_penalty", -2, 2, "; pass 0 for none")
        self._int("max_tokens", 1, none_is="as many as max_model_len allows")
        self._int("min_tokens", 0)
        self._int("seed", 0, 2**63 - 1, none_is="the engine to pick one")
        for name in ("logprobs", "prompt_logprobs"):
            self._int(name, -1, remedy=" (-1: all tokens)", none_is="no log-probabilities")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                self._fail(name, "must be True or False")
        self._strings("stop", "stop string", "would end every text at once", MAX_STOP_STRINGS, lone=True)
        self._strings("bad_words", "word", "cannot be banned", MAX_BAD_WORDS)
        self._token_ids("stop_token_ids")
        if isinstance(self.allowed_token_ids, (list, tuple)) and not self.allowed_token_ids:
            self._fail("allowed_token_ids", "no token could be sampled; leave it out, or pass None, to allow all")
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids")
        self._logit_bias()
        self._structured_outputs()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._fail("min_tokens", f"is above max_tokens={self.max_tokens}; lower the one or raise the other")

    @classmethod
    def from_optional(cls, **arguments: Any) -> SamplingParams:
        """As in vLLM: None stands for the default of an argument. `max_tokens=None` keeps its meaning."""
        return cls(**{name: value for name, value in arguments.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """As in vLLM: a copy that shares nothing with this one. `dataclasses.replace(params, ...)` changes fields."""
        return copy.deepcopy(self)

    def most_tokens(self, prompt_len: int, max_model_len: int) -> int:
        """The length at which a sequence ends, prompt included, in an engine of this `max_model_len`."""
        return max_model_len if self.max_tokens is None else min(prompt_len + self.max_tokens, max_model_len)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (after penalties); the filters are then irrelevant."""
        return self.temperature == 0

    @property
    def uses_penalties(self) -> bool:
        """Whether sampling needs to know which tokens the prompt and the output hold."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether the host must say at every step which logits of the row change."""
        return bool(self.logit_bias or self.bad_words)

    @property
    def constrained(self) -> bool:
        """Whether the host must say at every step which tokens may be sampled."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None

    @property
    def uses_filters(self) -> bool:
        """Whether top-k, top-p or min-p removes anything."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def _fail(self, name: str, remedy: str) -> None:
        raise ValueError(f"{name}={brief(getattr(self, name))}: {remedy}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # only here, from __post_init__: the record is frozen afterwards

    def _int(
        self, name: str, low: int, high: int | None = None, *, remedy: str = "", none_is: str | None = None
    ) -> None:
        value = getattr(self, name)
        if value is None and none_is is not None:
            return
        remedy += f", or None for {none_is}" if none_is else ""
        if not _is_int(value):
            self._fail(name, f"must be an integer, not {type(value).__name__}{remedy}")
        if value < low or (high is not None and value > high):
            self._fail(name, f"must be at least {low}{'' if high is None else f' and at most {high}'}{remedy}")
        self._set(name, int(value))  # numpy integers become plain ones

    def _float(self, name: str, low: float, high: float, remedy: str, *, above: bool = False) -> None:
        value = getattr(self, name)
        # bool is a number to Python, but `top_p=True` is a mistake.
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            self._fail(name, f"must be a number, not {type(value).__name__}{remedy}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self._fail(name, f"must be finite{remedy}")
        if number < low or number > high or (above and number == low):
            bounds = f"must be {'above' if above else 'at least'} {low}" + (
                f" and at most {high}" if high < math.inf else ""
            )
            self._fail(name, bounds + remedy)
        self._set(name, number)

    def _strings(self, name: str, kind: str, empty: str, most: int, *, lone: bool = False) -> None:
        """A list of at most `most` strings, kept as a tuple. lone: a single string may stand for a list."""
        value = getattr(self, name)
        given = () if value is None else (value,) if lone and isinstance(value, str) else value
        if not isinstance(given, (list, tuple)) or not all(isinstance(s, str) for s in given):
            self._fail(name, f"must be {'a string, ' if lone else ''}a list of strings, or None")
        if not all(s if lone else s.strip() for s in given):
            self._fail(name, f"an empty {kind} {empty}; leave it out")
        if len(given) > most:
            raise ValueError(f"{name}: {len(given)} strings, at most {most} are allowed; leave some out")
        if (longest := max(map(len, given), default=0)) > MAX_STRING_LENGTH:
            raise ValueError(
                f"{name}: a string of {longest} characters, at most {MAX_STRING_LENGTH} are allowed; shorten it"
            )
        self._set(name, tuple(given))

    def _token_ids(self, name: str) -> None:
        ids = () if getattr(self, name) is None else getattr(self, name)
        if not isinstance(ids, (list, tuple)) or not all(_is_int(i) for i in ids):
            self._fail(name, "must be a list of integers, or None")
        if any(i < 0 for i in ids):
            self._fail(name, "token ids must be at least 0; leave the negative ones out")
        self._set(name, tuple(int(i) for i in ids))

    def _structured_outputs(self) -> None:
        given = self.structured_outputs
        if given is None:
            return
        if isinstance(given, Mapping):
            given = StructuredOutputs(**given)
        if not isinstance(given, StructuredOutputs):
            self._fail("structured_outputs", 'must be a StructuredOutputs or a dict such as {"json": {...}}, or None')
        if self.ignore_eos:
            self._fail("ignore_eos", "structured outputs end with the end token; leave ignore_eos out")
        self._set("structured_outputs", given)

    def _logit_bias(self) -> None:
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping) or not all(_is_int(i) and i >= 0 for i in biases):
            self._fail("logit_bias", "must be a dict from token ids to numbers, or None")
        if len(biases) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias: {len(biases)} tokens, at most {MAX_LOGIT_BIAS} are allowed; leave some out")
        for token_id, bias in biases.items():
            if not isinstance(bias, numbers.Real) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias[{token_id}]={bias!r}: must be a number from -100 to 100; pass -100 to ban the token"
                )
        self._set("logit_bias", {int(i): float(bias) for i, bias in biases.items()})


def __getattr__(name: str) -> Any:
    if name == "StructuredOutputsParams":  # as vLLM calls it
        return StructuredOutputs
    refuse_name(__name__, name)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)

"""Compiles grammars, and makes the constraints of requests."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.constraint import TokenConstraint
from nanovllm.structured.grammar import grammar_text, is_installed, parser_limits, plain_error
from nanovllm.structured.string_ends import StringEnds, checked_string_masks, string_ends
from nanovllm.structured.string_masks import StringMasks
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.weights.bare_tokenizer import whole_tokenizer

_COMPILED = 128
"""Grammars that are kept compiled."""
_MATCHERS, _MATCHERS_SECONDS = 32, 0.1
"""Most matchers of a grammar that share nothing, and most seconds for compiling them. A copy
(`LLMatcher.deep_copy`) shares a lock with its original: threads fill the masks of copies one after the other."""
_MATCHERS_OF_ENGINE = 256
"""No grammar gets a further matcher once all grammars have this many. A matcher has one or two lexers of 0.1 MiB."""
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (
    (1, 4), (1, 2), (1, 1), (2, 2), (3, 4), (3, 3), (4, 4), (5, 8), (5, 6), (5, 5), (6, 6), (7, 8), (7, 7), (8, 8),
    (9, 16), (9, 12), (9, 10), (9, 9), (10, 10), (11, 12), (11, 11), (12, 12), (13, 16), (13, 14), (13, 13), (14, 14),
    (15, 16), (15, 15), (16, 16), (17, 32),
)  # fmt: skip
_SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{{low},{high}}}" for low, high in _LENGTHS), f"{_IN_STRING}+")
"""Sets of tokens that llguidance allows as a whole, if the grammar allows all texts of that form. Near the end of a
string with a `maxLength` some of these sets have tokens that are too long, and llguidance walks over each such set. The
lengths are halves of halves, so it walks over few sets, and once over a beginning that tokens of a set share."""


class _Matcher(NamedTuple):
    matcher: Any
    others: Any
    """One of `StringEnds`, if the grammar has such."""
    users: weakref.WeakSet[TokenConstraint]
    """The constraints with copies of these."""


class _Grammar:
    """A compiled grammar: one or several matchers at its beginning, which share nothing.

    It compiles a further one when sequences use all of them.

    Args:
        compile_: makes a matcher.
        has_room: whether the engine may have another matcher.
        ends: makes masks near the end of a string; None: the grammar has no such masks.
    """

    def __init__(
        self, compile_: Callable[[], Any], has_room: Callable[[], bool], ends: StringEnds | None = None
    ) -> None:
        self._compile, self._has_room, self._ends = compile_, has_room, ends
        self._lock = threading.Lock()
        self._seconds = 0.0
        """That compiling took."""
        self._matchers: list[_Matcher] = []
        self._add()

    def __len__(self) -> int:
        return len(self._matchers)

    def constraint(
        self, allowed: np.ndarray | None, num_words: int, end_token_ids: Sequence[int]
    ) -> TokenConstraint:  # fmt: skip
        """A constraint at the beginning, with a copy of the matcher that the fewest others use."""
        with self._lock:
            source = min(self._matchers, key=lambda one: len(one.users))
            if source.users and self._may_add():
                source = self._add()
            matcher = source.matcher.deep_copy()
            end = None if self._ends is None else self._ends.make(matcher, source.others)
            made = TokenConstraint(matcher, allowed, num_words, end_token_ids, id(source), end)
            source.users.add(made)
            return made

    def _may_add(self) -> bool:
        count = len(self._matchers)
        return count < _MATCHERS and self._seconds * (count + 1) / count <= _MATCHERS_SECONDS and self._has_room()

    def _add(self) -> _Matcher:
        start = time.perf_counter()
        others = None if self._ends is None else self._ends.compile()
        made = _Matcher(self._compile(), others, weakref.WeakSet())
        self._seconds += time.perf_counter() - start
        self._matchers.append(made)  # last: an interrupt may come at any line
        return made


class ConstraintMaker:
    """Compiles grammars, outside of the engine's steps. Any thread may use it.

    Args:
        tokenizer: a fast tokenizer of transformers; None: there are no grammars.
        vocab_size: the size of the model's vocabulary.
        end_token_ids: the model's end tokens, which a grammar allows where the output may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A model may have more logits than its tokenizer has tokens, or fewer.
        num_tokens = 0 if tokenizer is None else len(tokenizer)
        self._size = max(vocab_size, num_tokens)
        self._end_token_ids = [token for token in end_token_ids if token < num_tokens]
        self._lock = threading.Lock()
        """Guards `_compiled`; never held for long."""
        self._compiling = threading.Lock()
        """One grammar at a time is compiled, and the vocabulary once."""
        self._vocabulary: Any = None
        self._strings: list[StringMasks | None] = []
        """One, when it was looked for."""
        self._compiled: OrderedDict[StructuredOutputs, _Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Index the vocabulary now, if grammars can be used: it takes a second or more, and other threads wait."""
        if self._tokenizer is not None and self._end_token_ids and is_installed():
            try:
                with self._compiling:
                    self._strings_of_model()
            except ValueError:  # a request with a grammar is told
                pass

    def is_compiled(self, params: SamplingParams) -> bool:
        """Whether `make` has its grammar already, or there is none."""
        return params.structured_outputs is None or params.structured_outputs in self._compiled

    def make(self, params: SamplingParams) -> list[TokenConstraint]:
        """A constraint for each completion of a request.

        Its grammar has passed `GrammarChecker.check`: nothing here bounds what compiling takes.

        Raises:
            ValueError: the grammar is wrong, or cannot be used with this model.
        """
        grammar = allowed = None
        num_words = -(-self._size // 32)
        if params.allowed_token_ids is not None:
            bits = np.zeros(32 * num_words, bool)
            bits[list(params.allowed_token_ids)] = True
            allowed = np.packbits(bits, bitorder="little").view(np.int32)
        if isinstance(params.structured_outputs, StructuredOutputs):
            grammar = self._compile(params.structured_outputs)
        if grammar is None:
            return [TokenConstraint(None, allowed, num_words) for _ in range(params.n)]
        return [grammar.constraint(allowed, num_words, self._end_token_ids) for _ in range(params.n)]

    def _compile(self, spec: StructuredOutputs) -> _Grammar:
        if self._tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none; pass tokenizer= to LLM")
        if not self._end_token_ids:
            raise ValueError(
                "structured_outputs: the tokenizer has no end token of this model, with which such an output ends"
            )
        with self._lock:
            found = self._known(spec)
        if found is None:
            with self._compiling:
                with self._lock:
                    found = self._known(spec)  # another thread may have compiled it meanwhile
                found = found or self._new(spec)
        return found

    def _known(self, spec: StructuredOutputs) -> _Grammar | None:
        if spec in self._compiled:
            self._compiled.move_to_end(spec)
        return self._compiled.get(spec)

    def _new(self, spec: StructuredOutputs) -> _Grammar:
        vocabulary, text = self._vocabulary_of_model(), grammar_text(spec)
        ends = string_ends(self._strings_of_model, text)
        grammar = _Grammar(lambda: _matcher(vocabulary, text, spec.called), self._has_room, ends)
        with self._lock:
            self._compiled[spec] = grammar
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    @property
    def num_matchers(self) -> int:
        """Matchers of all compiled grammars."""
        with self._lock:
            return sum(map(len, self._compiled.values()))

    def _has_room(self) -> bool:
        return self.num_matchers < _MATCHERS_OF_ENGINE

    def _vocabulary_of_model(self) -> Any:
        if self._vocabulary is None:
            import llguidance.hf

            # No end tokens beyond the model's: the grammar would allow them, and they would not end the sequence.
            self._vocabulary = llguidance.hf.from_tokenizer(
                whole_tokenizer(self._tokenizer), n_vocab=self._size, eos_token=self._end_token_ids,
                slices=list(_SLICES),
            )  # fmt: skip
        return self._vocabulary

    def _strings_of_model(self) -> StringMasks | None:
        if not self._strings:
            self._strings.append(checked_string_masks(self._vocabulary_of_model(), self._end_token_ids))
        return self._strings[0]


def _matcher(vocabulary: Any, text: str, called: str) -> Any:
    """A matcher of a grammar, for which the first mask was made: copies have what that took to find out.

    Raises:
        ValueError: the grammar is wrong. called: what the message calls it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise ValueError(f"{called}: {plain_error(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"{called}: its first mask is too complex: {plain_error(matcher.get_error())}")
    return matcher

"""Which tokens a sequence may get next: those that its grammar and `allowed_token_ids` leave, as a bit mask."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.grammar import grammar_text, is_installed, parser_limits, plain_error
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.weights.bare_tokenizer import whole_tokenizer

_COMPILED = 128
"""Grammars that are kept compiled."""
_MATCHERS, _MATCHERS_SECONDS = 32, 0.1
"""A grammar gets so many matchers that share nothing, if compiling them takes at most so many seconds together. A copy
(`LLMatcher.deep_copy`) shares a lock with its original: threads fill the masks of copies one after the other."""
_MATCHERS_OF_ENGINE = 256
"""Matchers of all grammars, from which on a grammar gets no further one: each has a lexer of its own, about 0.1 MiB."""
SLOW_MASK_SECONDS, _SLOW_MASKS_SECONDS = 0.01, 0.5
"""Masks slower than the former may take a sequence the latter together; then it ends. All sequences wait for a mask."""
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


class TokenConstraint:
    """The state of one sequence's constraint. One thread at a time moves it on and makes masks; the engine looks at its
    errors.

    A mask is made by `take`, `fill` and `restrict`, in this order.

    Args:
        matcher: llguidance's state of the grammar, at its beginning; None: there is no grammar.
        allowed: [num_words] int32, the tokens that are allowed at all; None: all of them.
        num_words: the number of words of a mask.
        end_token_ids: what may be sampled when no mask can be made any more; none: any token.
        group: matchers of the same group cannot work at the same time.

    Attributes:
        matcher, num_words, group: as given.
        num_taken: output tokens that `take` was given.
        broken: no mask can be made any more.
    """

    def __init__(
        self, matcher: Any, allowed: np.ndarray | None, num_words: int, end_token_ids: Sequence[int] = (),
        group: int = 0,
    ) -> None:  # fmt: skip
        self.broken = False
        self._broken_error: str | None = None
        self._slow_error: str | None = None
        self._ends_at = 0
        self._end_token_ids = end_token_ids
        self._num_good = 0
        self.matcher = matcher
        self.num_words = num_words
        self.group = group
        self._allowed = allowed
        self.num_taken = 0
        self._slow_seconds = 0.0

    def take(self, new: Sequence[int]) -> None:
        """These tokens follow the first `num_taken` of the output: they move the grammar on."""
        self.num_taken += len(new)
        if self.matcher is not None and new and not self.broken and not self.matcher.consume_tokens(new):
            error = f"the grammar does not allow the tokens {new}: {plain_error(self.matcher.get_error())}"
            self._break(error, self.num_taken)

    def fill(self, mask: np.ndarray) -> None:
        """Write the grammar's mask of the next token: bit `t % 32` of word `t // 32` is 1 if token t may be sampled.

        mask: [num_words] int32, contiguous.
        """
        if self.matcher is None or self.broken:
            mask[:] = -1  # `restrict` writes that of a broken constraint
            return
        start = time.thread_time()  # not wall time, which a busy machine stretches
        # Unlike `unsafe_compute_mask_ptr`, this lets other threads run.
        mask[:] = np.frombuffer(self.matcher.compute_bitmask(), np.int32, self.num_words)  # it may have another word
        seconds = time.thread_time() - start
        if seconds > SLOW_MASK_SECONDS:
            self._slow_seconds += seconds
            if self._slow_seconds > _SLOW_MASKS_SECONDS:
                self._slow_error = "the grammar is too complex: its masks take too long"

    @property
    def is_plain(self) -> bool:
        """Whether the grammar's mask is right as it is, if nothing else bans tokens: `restrict` would not change it."""
        return self._allowed is None and not self.broken and not (self.matcher is not None and self.matcher.is_error())

    def restrict(self, banned: Iterable[int], mask: np.ndarray) -> None:
        """Apply what else bans tokens to the grammar's mask.

        banned: tokens that are taken out, unless none is left then.
        """
        if self.matcher is not None and not self.broken and self.matcher.is_error():
            self._break(f"the grammar is too complex: {plain_error(self.matcher.get_error())}", self.num_taken + 1)
        if self._allowed is not None and not self.broken:
            mask &= self._allowed
            if not mask.any():
                self._break("the grammar and allowed_token_ids have no token in common", self.num_taken + 1)
        if self.broken:
            mask[:] = 0 if self._end_token_ids else -1
            for token_id in self._end_token_ids:
                mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
            return
        _ban(mask, banned)

    @property
    def error(self) -> str | None:
        """Why the sequence must end; None: all is well."""
        return self._broken_error or self._slow_error

    def error_at(self, num_output: int) -> str | None:
        """`error`, as far as it follows from the first `num_output` tokens.

        A thread may have found out about the token after these by now, or not yet. The sequence ends at the same token
        in either case: the ranks of an engine must agree. They need not agree about slow masks.
        """
        return self._broken_error if self.is_broken_at(num_output) else self._slow_error

    def is_broken_at(self, num_output: int) -> bool:
        """Whether `broken` follows from the first `num_output` tokens: then it does on every rank."""
        return self.broken and num_output >= self._ends_at

    def ended_by_force(self, num_output: int) -> bool:
        """Whether the last of `num_output` tokens was sampled when no mask could be made any more."""
        return self.broken and num_output > self._num_good

    def _break(self, error: str, ends_at: int) -> None:
        """ends_at: the sequence ends when it has so many tokens."""
        if not self.broken:
            self._broken_error, self._num_good, self._ends_at = error, self.num_taken, ends_at
            self.broken = True  # last: another thread may look


class _Grammar:
    """A compiled grammar: one or several matchers at its beginning, which share nothing.

    It compiles a further one when sequences use all of them.

    Args:
        compile_: makes a matcher.
        has_room: whether the engine may have another matcher.
    """

    def __init__(self, compile_: Callable[[], Any], has_room: Callable[[], bool]) -> None:
        self._compile, self._has_room = compile_, has_room
        self._lock = threading.Lock()
        self._seconds = 0.0
        """That compiling took."""
        self._matchers: list[Any] = []
        self._users: list[weakref.WeakSet[TokenConstraint]] = []
        """By matcher: the constraints with a copy of it."""
        self._add()

    def __len__(self) -> int:
        return len(self._matchers)

    def constraint(
        self, allowed: np.ndarray | None, num_words: int, end_token_ids: Sequence[int]
    ) -> TokenConstraint:  # fmt: skip
        """A constraint at the beginning, with a copy of the matcher that the fewest others use."""
        with self._lock:
            index = min(range(len(self._users)), key=lambda i: len(self._users[i]))
            if self._users[index] and self._may_add():
                index = len(self._matchers)
                self._add()
            matcher = self._matchers[index]
            made = TokenConstraint(matcher.deep_copy(), allowed, num_words, end_token_ids, id(matcher))
            self._users[index].add(made)
            return made

    def _may_add(self) -> bool:
        count = len(self._matchers)
        return count < _MATCHERS and self._seconds * (count + 1) / count <= _MATCHERS_SECONDS and self._has_room()

    def _add(self) -> None:
        start = time.perf_counter()
        self._matchers.append(self._compile())
        self._users.append(weakref.WeakSet())
        self._seconds += time.perf_counter() - start


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
        self._compiled: OrderedDict[StructuredOutputs, _Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Index the vocabulary now, if grammars can be used: it takes a second or more, and other threads wait."""
        if self._tokenizer is not None and self._end_token_ids and is_installed():
            try:
                with self._compiling:
                    self._vocabulary_of_model()
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
        grammar = _Grammar(lambda: _matcher(vocabulary, text, spec.called), self._has_room)
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


def _ban(mask: np.ndarray, banned: Iterable[int]) -> None:
    """Take tokens out of a mask, unless none is left then."""
    before, words = None, mask.view(np.uint32)
    for token_id in banned:
        before = mask.copy() if before is None else before
        words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)
    if before is not None and not mask.any():
        mask[:] = before

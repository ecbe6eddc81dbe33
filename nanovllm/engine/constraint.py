"""Which tokens a sequence may get next: those that its grammar and `allowed_token_ids` leave, as a bit mask."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanovllm.engine.grammar import grammar_text, parser_limits
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)

_COMPILED = 128
"""Grammars that are kept compiled."""
_SLOW_MASK_SECONDS, _SLOW_MASKS_SECONDS = 0.01, 0.5
"""Masks slower than the former may take a sequence the latter together; then it ends. All sequences wait for a mask."""


class TokenConstraint:
    """The state of one sequence's constraint. It is used by the thread that runs the steps.

    Args:
        matcher: llguidance's state of the grammar, at its beginning; None: there is no grammar.
        allowed: [num_words] int32, the tokens that are allowed at all; None: all of them.

    Attributes:
        error: why the sequence must end; None: all is well.
        broken: no mask can be made any more. Then `error` is the same on every rank; a slow mask is not.
    """

    def __init__(self, matcher: Any, allowed: np.ndarray | None) -> None:
        self.error: str | None = None
        self.broken = False
        self._matcher = matcher
        self._allowed = allowed
        self._num_taken = 0
        self._slow_seconds = 0.0

    def fill(self, output_token_ids: Sequence[int], banned: Iterable[int], mask: np.ndarray) -> None:
        """Write the mask of the next token: bit `t % 32` of word `t // 32` is 1 if token t may be sampled.

        Args:
            output_token_ids: the tokens of the output so far.
            banned: tokens that are taken out as well, unless none is left then.
            mask: [num_words] int32, contiguous.
        """
        mask[:] = -1
        if self._matcher is not None and not self.broken:
            self._fill(output_token_ids, mask)
        if self.broken:
            mask[:] = -1
            return
        if self._allowed is not None:
            mask &= self._allowed
            if not mask.any():
                self._break("the grammar and allowed_token_ids have no token in common")
                mask[:] = -1
        _ban(mask, banned)

    def _fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        matcher = self._matcher
        start = time.perf_counter()
        new = output_token_ids[self._num_taken :]
        self._num_taken += len(new)
        if new and not matcher.consume_tokens(new):
            self._break(f"the grammar does not allow the tokens {new}: {matcher.get_error()}")
            return
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            self._break(f"the grammar is too complex: {matcher.get_error()}")
        seconds = time.perf_counter() - start
        if seconds > _SLOW_MASK_SECONDS:
            self._slow_seconds += seconds
            if self._slow_seconds > _SLOW_MASKS_SECONDS:
                self.error = self.error or "the grammar is too complex: its masks take too long"

    def _break(self, error: str) -> None:
        self.error, self.broken = error, True


class ConstraintMaker:
    """Compiles grammars, outside of the engine's steps. Any thread may use it.

    Args:
        tokenizer: a fast tokenizer of transformers; None: there are no grammars.
        vocab_size: of the model.
        end_token_ids: the model's end tokens, which a grammar allows where the output may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()

    def make(self, params: SamplingParams) -> list[TokenConstraint]:
        """A constraint for each completion of a request.

        Its grammar has passed `GrammarChecker.check`: nothing here bounds what compiling takes.

        Raises:
            ValueError: the grammar is wrong, or cannot be used with this model.
        """
        matcher = allowed = None
        if params.allowed_token_ids is not None:
            bits = np.zeros(32 * num_mask_words(self._vocab_size), bool)
            bits[list(params.allowed_token_ids)] = True
            allowed = np.packbits(bits, bitorder="little").view(np.int32)
        if isinstance(params.structured_outputs, StructuredOutputs):
            matcher = self._compile(params.structured_outputs)
        return [TokenConstraint(matcher and matcher.deep_copy(), allowed) for _ in range(params.n)]

    def _compile(self, spec: StructuredOutputs) -> Any:
        if self._tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none; pass tokenizer= to LLM")
        if not self._end_token_ids:
            raise ValueError("structured_outputs: this model has no end token, with which such an output ends")
        with self._lock:
            if spec not in self._compiled:
                from llguidance import LLMatcher

                matcher = LLMatcher(
                    self._vocabulary_of_model(), grammar_text(spec), log_level=0, limits=parser_limits()
                )
                if matcher.is_error():
                    raise ValueError(f"structured_outputs: {matcher.get_error()}")
                self._compiled[spec] = matcher
                if len(self._compiled) > _COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return self._compiled[spec]

    def _vocabulary_of_model(self) -> Any:
        """Takes a second or two the first time."""
        if self._vocabulary is None:
            import llguidance.hf

            # No end tokens beyond the model's: the grammar would allow them, and they would not end the sequence.
            self._vocabulary = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=max(self._vocab_size, len(self._tokenizer)), eos_token=self._end_token_ids
            )
        return self._vocabulary


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a mask."""
    return -(-vocab_size // 32)


def _ban(mask: np.ndarray, banned: Iterable[int]) -> None:
    """Take tokens out of a mask, unless none is left then."""
    before, words = None, mask.view(np.uint32)
    for token_id in banned:
        before = mask.copy() if before is None else before
        words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)
    if before is not None and not mask.any():
        mask[:] = before

"""Which tokens a sequence may get next: those that its grammar and `allowed_token_ids` leave, as a bit mask."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanovllm.structured.grammar import plain_error
from nanovllm.structured.string_ends import StringEnd

SLOW_MASK_SECONDS, _SLOW_MASKS_SECONDS = 0.01, 0.5
"""Masks slower than the former may take a sequence the latter together; then it ends. All sequences wait for a mask."""


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
        end: makes masks near the end of a string, if the grammar has such masks.

    Attributes:
        matcher, num_words, group: as given.
        num_taken: output tokens that `take` was given.
        broken: no mask can be made any more.
    """

    def __init__(
        self, matcher: Any, allowed: np.ndarray | None, num_words: int, end_token_ids: Sequence[int] = (),
        group: int = 0, end: StringEnd | None = None,
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
        self._end = end
        self._allowed = allowed
        self.num_taken = 0
        self._slow_seconds = 0.0

    def take(self, new: Sequence[int]) -> None:
        """These tokens follow the first `num_taken` of the output: they move the grammar on."""
        self.num_taken += len(new)
        if self.matcher is None or not new or self.broken:
            return
        if not self.matcher.consume_tokens(new):
            said = plain_error(self.matcher.get_error())
            # The mask allowed the tokens. A text that is refused is quoted, whatever it says.
            outgrown = "satisfy the grammar" not in said and ("too many" in said or "lexer error" in said)
            error = "the grammar is too complex" if outgrown else f"the grammar does not allow the tokens {new}"
            self._break(f"{error}: {said}", self.num_taken)
        elif self._end is not None:
            self._end.take(new)

    def prepare(self) -> None:
        """Called before `take`, while there is time: what `take` has to do then takes less."""
        if self._end is not None:
            self._end.prepare()

    @property
    def filler(self) -> Any:
        """The matcher whose mask `restrict` wants: `matcher`, or near the end of a string that of fewer tokens."""
        return self.matcher if self._end is None else self._end.filler

    @property
    def has_fillers(self) -> bool:
        """Whether `take` changes `filler`."""
        return self._end is not None

    def fill(self, mask: np.ndarray) -> None:
        """Write the grammar's mask of the next token: bit `t % 32` of word `t // 32` is 1 if token t may be sampled.

        mask: [num_words] int32, contiguous.
        """
        if self.matcher is None or self.broken:
            mask[:] = -1  # `restrict` writes that of a broken constraint
            return
        start = time.thread_time()  # not wall time, which a busy machine stretches
        # Unlike `unsafe_compute_mask_ptr`, this lets other threads run.
        mask[:] = np.frombuffer(self.filler.compute_bitmask(), np.int32, self.num_words)  # it may have another word
        seconds = time.thread_time() - start
        if seconds > SLOW_MASK_SECONDS:
            self._slow_seconds += seconds
            if self._slow_seconds > _SLOW_MASKS_SECONDS:
                self._slow_error = "the grammar is too complex: its masks take too long"

    @property
    def is_plain(self) -> bool:
        """Whether the mask is right as it is, if nothing else bans tokens: `restrict` would not change it."""
        if self._end is not None and self._end.left:
            return False
        return self._allowed is None and not self.broken and not (self.matcher is not None and self.matcher.is_error())

    def restrict(self, banned: Iterable[int], mask: np.ndarray) -> None:
        """Complete the grammar's mask, and apply what else bans tokens to it.

        banned: tokens that are taken out, unless none is left then.
        """
        if self._end is not None and not self.broken:
            self._end.complete(mask)
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
        """ends_at: the number of output tokens at which the sequence ends."""
        if not self.broken:
            self._broken_error, self._num_good, self._ends_at = error, self.num_taken, ends_at
            self.broken = True  # last: another thread may look


def _ban(mask: np.ndarray, banned: Iterable[int]) -> None:
    """Take tokens out of a mask, unless none is left then."""
    before, words = None, mask.view(np.uint32)
    for token_id in banned:
        before = mask.copy() if before is None else before
        words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)
    if before is not None and not mask.any():
        mask[:] = before

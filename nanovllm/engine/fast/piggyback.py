"""Piggybacked prefill: how many tokens of prompts a decode step takes, where latency to the first token does not
matter.

A step of a few hundred tokens takes little longer than reading the weights, and a decode step has fewer tokens. So
prompts that are piggybacked on decode steps cost less than in steps of their own. The price is a later first token.
This does not matter to `LLM.generate`, which returns when all requests are done.

All sequences should end at about the same time, so the sequences with the longest outputs start first. Prompts are
piggybacked on small steps if all sequences then end in time. Otherwise the steps are larger. If large steps are too
slow as well, the first prompts are computed at full speed, until piggybacking the rest is fast enough.

The end of a sequence is predicted from its `max_tokens`. If a sequence has ended earlier, at an end token or a stop
string, the predictions are wrong, and no more prompts are piggybacked.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step import StepBudget


class PromptTokens(NamedTuple):
    """Tokens of prompts for a step: either some that are piggybacked, or some at full speed, or none."""

    piggybacked: int = 0
    full_speed: int = 0


class PendingPrompt(NamedTuple):
    """A prompt of which some tokens are still to be computed.

    Attributes:
        tokens: the tokens of its prompt that are still to be computed.
        output: the most tokens that its output may have.
    """

    tokens: int
    output: int


class Piggyback:
    """Decides which steps take tokens of prompts, and how many; the scheduler asks it."""

    def __init__(self, max_num_seqs: int, sizes: PiggybackSizes | None = None) -> None:
        self.sizes = sizes or PiggybackSizes()
        self._max_num_seqs = max_num_seqs
        self._ended_early = False
        """Whether an offline sequence ended before it had all tokens that it might have, since the scheduler was
        idle.
        """

    # ------------------------------------------------------------------------------------------------ sizes of steps

    def padded_rows(self, num_decodes: int) -> int:
        """The padded number of decode rows in a step with piggybacked prompts."""
        sizes = self.sizes
        multiple = sizes.row_multiple if num_decodes <= sizes.totals[0] else 2 * sizes.row_multiple
        return min(-(-num_decodes // multiple) * multiple, self._max_num_seqs)

    def room(self, rows: int, total: int) -> int:
        """Tokens of prompts that fit into a step of `total` tokens with `rows` decode rows; 0 if they are too few."""
        return total - rows if total - rows >= self.sizes.min_tokens else 0

    def token_counts(self, rows: int) -> list[int]:
        """The padded numbers of prompt tokens that a step with `rows` decode rows may have, ascending."""
        return [tokens for tokens in (self.room(rows, total) for total in self.sizes.totals) if tokens]

    # ------------------------------------------------------------------------------------------------ for the scheduler

    def first_sequence_added(self) -> None:
        """The first sequence comes to an idle scheduler."""
        self._ended_early = False

    def sequence_ended(self, seq: TokenSequence, reason: str) -> None:
        """A sequence has ended."""
        self._ended_early |= seq.offline and reason == "stop"

    def budget(
        self, running: Collection[TokenSequence], waiting: Collection[TokenSequence], max_num_tokens: int
    ) -> StepBudget:
        """The budget of the next step. running, waiting: the sequences that it may compute, in order."""
        full_speed = StepBudget(max_num_tokens)
        decodes: list[TokenSequence] = []
        prompts: list[TokenSequence] = []
        for seq in running:
            (decodes if seq.num_tokens - seq.num_computed_tokens == 1 else prompts).append(seq)
        # More prompts than seq_slots: they wait for others to end. Nor would the host have time to look at them all.
        if len(prompts) + len(waiting) > self._max_num_seqs:
            return full_speed
        prompts.extend(waiting)
        if self._ended_early or not prompts or not all(seq.offline for seq in prompts):
            return full_speed
        prompt_tokens = self.prompt_tokens(
            [seq.max_len - seq.num_tokens for seq in decodes],
            max((seq.max_len - seq.num_tokens for seq in decodes if seq.offline), default=None),
            [PendingPrompt(seq.num_tokens - seq.num_computed_tokens, seq.max_len - seq.num_tokens) for seq in prompts],
            max_num_tokens - len(decodes),
        )
        num_tokens = min(len(decodes) + sum(prompt_tokens), max_num_tokens)
        at_full_speed = prompt_tokens.full_speed > 0
        return StepBudget(num_tokens, at_full_speed, prompt_tokens.piggybacked, self.sizes.max_pieces)

    # ------------------------------------------------------------------------------------------------ how many tokens

    def prompt_tokens(
        self, ends: Sequence[int], horizon: int | None, prompts: Iterable[tuple[int, int]], most: int
    ) -> PromptTokens:
        """How many tokens of prompts a step computes. There must be at least one prompt.

        Args:
            ends: for each sequence that decodes, the number of steps until it reaches its longest output.
            horizon: the number of steps until the last offline sequence that decodes has all its tokens; None if no
                offline sequence decodes: then the first prompt decides.
            prompts: as `PendingPrompt`, in the order in which they are computed.
            most: tokens of prompts at full speed.
        """
        left = [PendingPrompt(*prompt) for prompt in prompts]
        end = left[0].output if horizon is None else horizon
        totals = self.sizes.totals

        def rest_in_time(first: int, total: int = totals[-1]) -> bool:
            return self._rest_in_time(first, ends, end, left, total)

        for total in totals:
            if rest_in_time(0, total):
                return PromptTokens(piggybacked=self.room(self.padded_rows(len(ends)), total))
        # The more prompts are computed at full speed, the fewer are left to piggyback.
        first = bisect_left(range(len(left)), True, lo=1, key=rest_in_time)
        tokens = sum(prompt.tokens for prompt in left[:first])
        return PromptTokens(full_speed=min(max(tokens, self.sizes.min_full_speed_tokens), most))

    def _rest_in_time(
        self, first: int, ends: Sequence[int], horizon: int, prompts: Sequence[PendingPrompt], total: int
    ) -> bool:
        """Whether, with the first prompts computed at full speed, all others end in time if piggybacked on steps of
        `total` tokens.
        """
        outputs = [prompt.output for prompt in prompts[:first]]
        horizon = max([horizon, *outputs])
        running: list[float] = [*ends, *outputs]
        heapq.heapify(running)
        now = 0.0
        for tokens, output in prompts[first:]:
            left: float = tokens
            while left:
                if now >= horizon or now + output > horizon:
                    return False
                rate = 0  # without a seq_slot it does not begin
                if len(running) < self._max_num_seqs:
                    rate = min(self.room(self.padded_rows(len(running)), total), tokens * self.sizes.max_pieces)
                until = running[0] if running else horizon
                if rate * (until - now) >= left:
                    now, left = now + left / rate, 0
                else:
                    now, left = until, left - rate * (until - now)
                while running and running[0] <= now:
                    heapq.heappop(running)
            if now + output > horizon:
                return False
            heapq.heappush(running, now + output)
        return True

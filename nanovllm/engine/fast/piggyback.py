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
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step import StepBudget


class PromptTokens(NamedTuple):
    """Tokens of prompts for a step: either some that are piggybacked, or some at full speed, or none."""

    piggybacked: int = 0
    full_speed: int = 0


class PendingPrompt(NamedTuple):
    """A prompt of which some tokens are still to be computed."""

    tokens: int
    """The tokens that are still to be computed."""
    output: int
    """The most tokens that may follow the prompt."""


class Piggyback:
    """Decides which steps take tokens of prompts, and how many; the scheduler asks it."""

    def __init__(self, max_num_seqs: int, sizes: PiggybackSizes | None = None) -> None:
        self.sizes = sizes or PiggybackSizes()
        self._max_num_seqs = max_num_seqs
        self._ended_early = False
        """Whether an offline sequence has ended before it reached its longest output, since the scheduler was idle."""

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

    def padded_size(self, num_decodes: int, num_tokens: int) -> tuple[int, int] | None:
        """The padded (decode rows, prompt tokens) of a step; None: it has too many prompt tokens."""
        rows = self.padded_rows(num_decodes)
        return next(((rows, tokens) for tokens in self.token_counts(rows) if tokens >= num_tokens), None)

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
        """The budget of the next step.

        Args:
            running, waiting: the sequences that it may compute, in order.
        """
        full_speed = StepBudget(max_num_tokens)
        decodes: list[TokenSequence] = []
        prompts: list[TokenSequence] = []
        for seq in running:
            (decodes if seq.num_tokens - seq.num_computed_tokens == 1 else prompts).append(seq)
        # More prompts than seq_slots: some wait until others end, and the host has no time to look at all of them.
        if len(prompts) + len(waiting) > self._max_num_seqs:
            return full_speed
        prompts.extend(waiting)
        if self._ended_early or not prompts or not all(seq.offline for seq in prompts):
            return full_speed
        prompt_tokens = self.prompt_tokens(
            [_output_left(seq) for seq in decodes],
            max((_output_left(seq) for seq in decodes if seq.offline), default=None),
            [PendingPrompt(seq.num_tokens - seq.num_computed_tokens, _output_left(seq)) for seq in prompts],
            max_num_tokens - len(decodes),
        )
        num_tokens = min(len(decodes) + sum(prompt_tokens), max_num_tokens)
        at_full_speed = prompt_tokens.full_speed > 0
        return StepBudget(num_tokens, at_full_speed, prompt_tokens.piggybacked, self.sizes.max_pieces)

    # ------------------------------------------------------------------------------------------------ how many tokens

    def prompt_tokens(
        self, decode_ends: Sequence[int], deadline: int | None, prompts: Sequence[PendingPrompt], most: int
    ) -> PromptTokens:
        """How many tokens of prompts the next step computes.

        Example: 16 sequences decode and end in 100 steps. Beside them 240 prompt tokens fit into a step of 256 tokens,
        and 368 into one of 384. The prompt of a request with an output of 90 tokens must be computed within 10 steps.
        Up to 2,400 tokens, 240 a step are piggybacked; up to 3,680 tokens, 368. A longer prompt goes at full speed.

        Args:
            decode_ends: for each sequence that decodes, the number of steps until it reaches its longest output.
            deadline: the number of steps until the last offline sequence that decodes has all its tokens; None if no
                offline sequence decodes: then the output of the first prompt sets it.
            prompts: in the order in which they are computed; at least one.
            most: tokens of prompts at full speed.
        """
        last_end = prompts[0].output if deadline is None else deadline

        def rest_in_time(num_full_speed: int, total: int) -> bool:
            """Whether all others end in time, if the first prompts are computed at full speed and then decode."""
            outputs = [prompt.output for prompt in prompts[:num_full_speed]]
            rest = prompts[num_full_speed:]
            return self._end_in_time(rest, [*decode_ends, *outputs], max([last_end, *outputs]), total)

        for total in self.sizes.totals:
            if rest_in_time(0, total):
                return PromptTokens(piggybacked=self.room(self.padded_rows(len(decode_ends)), total))
        # The fewest prompts at full speed, at least one: a binary search, since with each more the others end sooner.
        largest = self.sizes.totals[-1]
        num_full_speed = bisect_left(range(len(prompts)), True, lo=1, key=lambda n: rest_in_time(n, largest))
        tokens = sum(prompt.tokens for prompt in prompts[:num_full_speed])
        return PromptTokens(full_speed=min(max(tokens, self.sizes.min_full_speed_tokens), most))

    def _end_in_time(self, prompts: Sequence[PendingPrompt], running: list[float], deadline: int, total: int) -> bool:
        """Whether all `prompts` and their outputs end by the deadline, if piggybacked on steps of `total` tokens.

        It simulates these steps, one prompt after the other. The room for prompts changes only when a sequence ends or
        a prompt becomes a decode, so `now`, in steps, jumps from one of these events to the next.

        Args:
            running: the step in which each decoding sequence ends. The simulation changes this list.
        """
        heapq.heapify(running)
        now = 0.0
        for tokens, output in prompts:
            left: float = tokens
            while left:
                if now >= deadline or now + output > deadline:
                    return False
                tokens_per_step = 0  # without a free seq_slot the prompt waits
                if len(running) < self._max_num_seqs:
                    room = self.room(self.padded_rows(len(running)), total)
                    # A step has at most `max_pieces` prompts, which are taken to be as long as this one.
                    tokens_per_step = min(room, tokens * self.sizes.max_pieces)
                next_end = running[0] if running else deadline
                tokens_until_end = tokens_per_step * (next_end - now)
                if tokens_until_end >= left:
                    now, left = now + left / tokens_per_step, 0
                else:
                    now, left = next_end, left - tokens_until_end
                while running and running[0] <= now:
                    heapq.heappop(running)
            if now + output > deadline:
                return False
            heapq.heappush(running, now + output)
        return True


def _output_left(seq: TokenSequence) -> int:
    """The most tokens that may follow those of the sequence."""
    return seq.max_len - seq.num_tokens

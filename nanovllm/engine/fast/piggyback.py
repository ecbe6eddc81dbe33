"""How many tokens of prompts a step takes, where nobody waits for a first token.

A step of some hundred tokens takes little longer than reading the weights does, and a decode step has fewer. So prompts that
*ride* on decode steps cost less than in steps of their own. What it costs is time to the first token, of which `LLM.generate`,
which returns when all is done, has no use.

Prompts must not ride for too long: sequences that begin late end alone. So those that may have the most output go first, and
each is to end with the last of those that run already. All that can ride on small steps does, since those that begin early end
early, and leave room for others. Where some would end too late, steps are larger; where these would not do, as many of the
first prompts are computed at once as lets the others ride.

All that is known of an end is the most output that was asked for. When a sequence ends earlier, at an end token or a stop string, the
others may too, and would wait for an end that does not come; then no more prompts ride.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOTALS = (256, 384)
"""Tokens of a step with riders, decodes included: it is padded to one of these. Multiples of the library's tiles for products."""
ROWS = 16
"""Decodes are padded to a multiple of this where prompts ride, and more than TOTALS[0] of them to a multiple of twice this: so to sizes
for which sampling has a graph (`cuda_graph.batch_buckets`)."""
LEAST = 32
"""Tokens of riders that there must be room for."""
MAX_RIDERS = 16
"""Sequences whose prompts ride on one step."""
LEAST_AT_ONCE = 1024
"""Tokens of prompts in a step on which they do not ride, if there are so many: fewer would take it nearly as long."""

LEAST_LAYER_BYTES = 256 * 2**20
"""Of a layer's weights, for riding to be worth a second kind of attention in each layer."""


class Pace(NamedTuple):
    """Tokens of prompts for a step: either some that ride, or some that do not, or none."""

    riding: int = 0
    at_once: int = 0


class Prompt(NamedTuple):
    """What is left of a sequence that waits for its first token.

    Attributes:
        tokens: of it that are still to be computed.
        output: tokens that it may have after them.
    """

    tokens: int
    output: int


def padded_rows(num_decodes: int, max_num_seqs: int) -> int:
    """Rows that this many decodes take beside riders."""
    multiple = ROWS if num_decodes <= TOTALS[0] else 2 * ROWS
    return min(-(-num_decodes // multiple) * multiple, max_num_seqs)


def riding_tokens(rows: int, total: int) -> int:
    """How many tokens ride beside so many rows on a step of one of TOTALS; 0: there is no room."""
    return total - rows if total - rows >= LEAST else 0


def riding_sizes(rows: int) -> list[int]:
    """For how many riding tokens a step may be padded beside so many rows, ascending."""
    return [tokens for tokens in (riding_tokens(rows, total) for total in TOTALS) if tokens]


def pace(
    ends: Sequence[int], horizon: int | None, prompts: Iterable[tuple[int, int]], max_num_seqs: int, most: int
) -> Pace:
    """What a step takes of prompts, of which there is at least one.

    Args:
        ends: of each sequence that decodes, the steps until it has all tokens that it may have.
        horizon: the most steps of those that are waited for together with the prompts; None if none of them decodes: then the
            first prompt counts.
        prompts: as `Prompt`, in the order in which they are computed.
        most: tokens of prompts, if none rides.
    """
    prompts = [Prompt(*prompt) for prompt in prompts]
    if horizon is None:
        horizon = prompts[0].output

    def rest_in_time(first: int, total: int = TOTALS[-1]) -> bool:
        return _rest_in_time(first, ends, horizon, prompts, max_num_seqs, total)

    for total in TOTALS:
        if rest_in_time(0, total):
            return Pace(riding=riding_tokens(padded_rows(len(ends), max_num_seqs), total))
    # The more go at once, the fewer have to ride: what these take from the others' room is less.
    first = bisect_left(range(len(prompts)), True, lo=1, key=rest_in_time)
    tokens = sum(prompt.tokens for prompt in prompts[:first])
    return Pace(at_once=min(max(tokens, LEAST_AT_ONCE), most))


def _rest_in_time(
    first: int, ends: Sequence[int], horizon: int, prompts: Sequence[Prompt], max_num_seqs: int, total: int
) -> bool:
    """Whether all other prompts can ride, on steps of so many tokens, and end in time, if the first ones are computed at once."""
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
            rate = 0  # without a slot it does not begin
            if len(running) < max_num_seqs:
                rate = min(riding_tokens(padded_rows(len(running), max_num_seqs), total), tokens * MAX_RIDERS)
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

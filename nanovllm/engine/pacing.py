"""How many tokens of prompts a step takes, where nobody waits for a first token.

A step of some hundred tokens takes little longer than reading the weights does, and a decode step has fewer. So prompts that
*ride* on decode steps cost less than in steps of their own. What it costs is time to the first token, of which `LLM.generate`,
which returns when all is done, has no use.

Prompts must not ride for too long: sequences that begin late end alone. So those that may have the most output go first, and
each is to begin early enough to end with the last of those that run already. Where that takes more tokens a step than
can ride, so many are computed at once that the others can.

All that is known of an end is the most output that was asked for. When a sequence ends earlier, at an end token or a stop string, the
others may too, and would wait for an end that does not come; then no more prompts ride.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TOTALS = (256, 320, 384)
"""Tokens of a step with riders, decodes included: it is padded to one of these."""
ROWS = 16
"""Decodes are padded to a multiple of this where prompts ride, and more than TOTALS[0] of them to a multiple of twice this: so to sizes
for which sampling has a graph (`cuda_graph.batch_buckets`)."""
LEAST = 32
"""Tokens of riders that there must be room for."""
MAX_RIDERS = 16
"""Sequences whose prompts ride on one step."""
LEAST_AT_ONCE = 1024
"""Tokens of prompts in a step on which they do not ride, if there are so many: fewer would take it nearly as long."""

LEAST_LAYER_BYTES = 128 * 2**20
"""Of a layer's weights, for riding to be worth a second kind of attention in each layer."""


class Pace(NamedTuple):
    """Tokens of prompts for a step: either some that ride, or some that do not, or none."""

    riding: int = 0
    at_once: int = 0


def padded_rows(num_decodes: int, max_num_seqs: int) -> int:
    """Rows that this many decodes take beside riders."""
    multiple = ROWS if num_decodes <= TOTALS[0] else 2 * ROWS
    return min(-(-num_decodes // multiple) * multiple, max_num_seqs)


def riding_tokens(rows: int) -> list[int]:
    """For how many riding tokens a step may be padded beside so many rows, ascending."""
    return [total - rows for total in TOTALS if total - rows >= LEAST]


def pace(rows: int, steps_left: int | None, prompts: Iterable[tuple[int, int]], most: int) -> Pace:
    """What a step with this many rows of decodes takes of prompts, of which there is at least one.

    Args:
        steps_left: until the last that decodes has all tokens that it may have, of those that are waited for together with the prompts;
            None if none of them decodes: then the first prompt counts.
        prompts: (tokens to compute, tokens that it may have after them) of each, in the order in which they are computed.
        most: tokens of prompts, if none rides.
    """
    rates = riding_tokens(rows)
    fastest = rates[-1] if rates else 0
    tokens, at_once, rate = 0, 0, 0.0
    for prompt_tokens, output_tokens in prompts:
        if steps_left is None:
            steps_left = output_tokens
        tokens += prompt_tokens
        steps = max(0, steps_left - output_tokens)
        at_once = max(at_once, tokens - fastest * steps)
        if at_once >= most:
            return Pace(at_once=most)
        if steps:
            rate = max(rate, tokens / steps)
    if at_once:
        return Pace(at_once=min(max(at_once, LEAST_AT_ONCE), most))
    return Pace(riding=next(n for n in rates if n >= rate))

"""Sampling one token per row: temperature, top-k, top-p, min-p, then Gumbel-max with counter-based random numbers.

The draw has two levels, since random numbers are what it costs. The vocabulary is cut into blocks of 256 columns. First
a block is drawn, with the probability of all its tokens together, then a token within it: softmax(token) is the product
of the two. A row over 151,936 columns takes 594 + 256 random numbers instead of 151,936, and a rare token keeps its
share however many of them there are: a block's share adds up before 32 bits of randomness decide on it.

A row's token is a function of that row alone, to the bit: its logits, its parameters, its seed and its position. What
else is in the batch, how the batch is cut into chunks and where a row lies in memory must not matter, or a seeded
request would not repeat. Hence the random numbers come from a counter (seed, position, column) instead of a shared
stream, and every sum over columns is in a fixed order. How a float sum rounds depends on the order of its additions,
which GPU reductions and scans choose by batch size, dtype and alignment. So the floats of a block are added in a tree
of pairs that is part of the definition, and what top-p adds up are integers. Maxima have no such freedom.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.checks import check_sampling, values_checked

# Philox4x32: multipliers and Weyl constants (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW_32 = 0xFFFFFFFF
BLOCK = 256
"""Columns that the first level of a draw takes together; a power of two."""
BLOCK_COUNTERS = 1 << 31
"""From here on counters are of blocks; below, of columns, of which there are four to a counter and fewer than 2^33."""

# Elements of a [rows, vocab] chunk. The sort for top-k and top-p has float32, int64 and bool temporaries of that size:
# chunks keep the workspace of 256 rows over a vocabulary of 151,936 below 300 MiB instead of gigabytes, memory that the
# KV cache would miss. Smaller chunks are slower on a large GPU (more launches); larger ones are hardly faster.
CHUNK_ELEMENTS = 1 << 21

_FIXED_POINT = 2.0**40


def rows_per_chunk(vocab_size: int) -> int:
    """How many rows of [rows, vocab_size] temporaries to process at a time (a matter of memory, not of results)."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def _inputs(t, rows, vocab_size, filtered=0):
    on = {"top_k": t.integers(0, 50, rows, dtype=torch.int32), "top_p": t.uniform(rows, low=0.1, dtype=torch.float32)}
    on["min_p"] = t.uniform(rows, high=0.1, dtype=torch.float32)
    temperature = t.uniform(rows, low=0.2, high=1.5, dtype=torch.float32)
    temperature[::3] = 0.6
    temperature[1::4] = 0.0
    return {
        "logits": t.normal(rows, vocab_size, scale=3 * t.scale),
        "temperature": temperature,
        **(on if filtered else dict.fromkeys(on)),
        "seeds": t.integers(-(2**62), 2**62, rows),
        "positions": t.integers(0, 40000, rows),
    }


def _cost(logits, temperature, top_k, top_p, min_p, seeds, positions):
    # A maximum, a difference, a product, an exponential and a sum for each logit; the random numbers hardly count.
    return Cost(nbytes(logits) + 8 * logits.shape[0], 5 * logits.numel())


def _compare(got, arguments, dtype):
    """Rounding may decide between blocks, or tokens of a block, with all but equal scores; nothing else may."""
    logits, temperature, top_k, top_p, min_p, seeds, positions = arguments.values()
    if got.shape != logits.shape[:1] or got.dtype != torch.int64:
        return f"gave {got.dtype}{list(got.shape)}"
    if not got.numel():
        return None
    if bool(((got < 0) | (got >= logits.shape[1])).any()):
        return "gave an id outside the vocabulary"
    log_weights = as_blocks(filter_logits(logits, temperature, top_k, top_p, min_p))
    block, column = got[:, None] // BLOCK, got[:, None] % BLOCK
    levels = {
        "block": (block_scores(log_weights, seeds, positions), block, 1e-4),
        "token": (token_scores(log_weights, block, seeds, positions), column, 1e-4),
        "greedy token": (logits.float(), got[:, None], 0.0),
    }
    greedy = temperature == 0
    for name, (scores, chosen, tolerance) in levels.items():
        best, score = scores.amax(-1), scores.gather(-1, chosen)[:, 0]
        short = (best - score) / best.abs().clamp_min(1)
        wrong = ((short > tolerance) | score.isneginf()) & (greedy if name == "greedy token" else ~greedy)
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            return f"row {row}: the {name} of {int(got[row])} lies {float(short[row]):.3g} below the best"
    return None


@op(
    arguments={
        "logits": "[rows, vocab_size]", "temperature": "float32[rows]", "top_k": "int32[rows]",
        "top_p": "float32[rows]", "min_p": "float32[rows]", "seeds": "int64[rows]", "positions": "int64[rows]",
    },
    inputs=Inputs(
        _inputs, small=[(1, 1), (5, 100), (3, 1000, 1), (0, 50), (9, 777, 1)],
        decode=[(1, 151936), (64, 151936), (256, 151936), (64, 151936, 1)], large=[(512, 151936)], scales=(1.0, 20.0),
    ),
    cost=_cost,
    compare=_compare,
    fake=lambda logits, *args, **kwargs: logits.new_empty(logits.shape[0], dtype=torch.int64),
)  # fmt: skip
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token id per row.

    Row r takes the largest logit if `temperature[r]` is 0, else a draw from the softmax of what the filters keep, by
    the Gumbel-max trick (Maddison et al., "A* sampling", 2014): the argmax of `block_scores`, then that of
    `token_scores` in this block. Ties go to the lowest id. Pure; launches no host synchronisation and has no
    data-dependent shape, so a CUDA graph can capture it.

    Args:
        logits: [R, V], float32, float16 or bfloat16. -inf bars a token; other non-finite values give some valid id.
        temperature: [R] float32, at least 0; 0 is greedy.
        top_k: [R] int32, at most 0 where off; None: off for all rows, which spares the sort if top_p is None too.
        top_p: [R] float32 in [0, 1], 1 where off; None: off for all rows.
        min_p: [R] float32 in [0, 1], 0 where off; None: off for all rows.
        seeds: [R] int64, all 64 bits of it the key of the row's random numbers.
        positions: [R] int64, which draw of that key this is; its low 32 bits count.

    Returns:
        [R] int64 token ids.

    Raises:
        ValueError: no column in logits; where values are checked (NANOVLLM_CHECK=1, and on a CPU), a row whose
            temperature is negative, whose top_p or min_p is not in [0, 1], or one of which is NaN.
    """
    check_sample(logits, temperature, top_p, min_p)
    n = rows_per_chunk(max(logits.shape[-1], BLOCK))
    tokens = []
    for start in range(0, max(logits.shape[0], 1), n):
        rows = slice(start, start + n)
        filters = (None if f is None else f[rows] for f in (top_k, top_p, min_p))
        log_weights = as_blocks(filter_logits(logits[rows], temperature[rows], *filters))
        block = block_scores(log_weights, seeds[rows], positions[rows]).argmax(-1, keepdim=True)
        column = token_scores(log_weights, block, seeds[rows], positions[rows]).argmax(-1)
        tokens.append(block[:, 0] * BLOCK + column)
    return torch.where(temperature == 0, logits.argmax(-1), torch.cat(tokens))


def check_sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> None:
    """Raise a ValueError that names the first wrong argument of `sample`."""
    if not logits.shape[1]:
        raise ValueError(f"logits: expected [rows, vocab_size] with at least one column, not {list(logits.shape)}")
    if values_checked(logits.device):
        check_sampling(temperature, top_p, min_p)


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, each on what the one before it keeps, as in vLLM and transformers.

    top-k keeps every token that ties with the k-th. top-p keeps a token if the tokens before it, in order of falling
    probability and rising id, hold less than p of the mass: the smallest set that reaches p, and always one token.
    min-p keeps tokens whose probability is at least min_p times the largest.

    Args: as `sample`. A temperature of 0 counts as 1.

    Returns:
        [R, V] float32: (logit - the row's largest) / temperature, -inf where removed. Largest is 0, which keeps what
        is added to the likely tokens accurate however large the logits or small the temperature.
    """
    x = logits.float()
    temperature = torch.where(temperature == 0, 1.0, temperature)[:, None]
    # The clamp keeps a row of nothing but -inf from turning into NaN.
    best = x.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    log_weights = (x - best) / temperature
    if top_k is not None or top_p is not None:
        # Stable, so that which of several equal tokens top-p keeps is defined: the lowest ids.
        ordered, order = x.sort(dim=-1, descending=True, stable=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if top_k is not None:
            k = torch.where(top_k <= 0, x.shape[-1], top_k).clamp_max(x.shape[-1]).long()
            keep = ordered >= ordered.gather(-1, k[:, None] - 1)
        if top_p is not None:
            # Probabilities as integers in units of 2^-40 of the largest: sums are exact, thus the same in any order
            # (see the module's docstring), and a vocabulary of 2^23 cannot overflow them.
            weights = ((ordered - best) / temperature).exp_().mul_(_FIXED_POINT).long().mul_(keep)
            mass_before = weights.cumsum(-1) - weights
            total = weights.sum(-1, keepdim=True)
            p = top_p[:, None]
            keep &= (mass_before.double() < p.double() * total.double()) | (p >= 1)
            keep[:, :1] = True  # a p that underflowed to 0
        keep = torch.empty_like(keep).scatter_(-1, order, keep)
        log_weights.masked_fill_(~keep, -torch.inf)
    if min_p is not None:
        log_weights.masked_fill_(log_weights.exp() < min_p[:, None], -torch.inf)
    return log_weights


def as_blocks(log_weights: torch.Tensor) -> torch.Tensor:
    """[R, V] as [R, blocks, BLOCK], with -inf after the last column."""
    rows, vocab_size = log_weights.shape
    num_blocks = -(-vocab_size // BLOCK)
    return F.pad(log_weights, (0, num_blocks * BLOCK - vocab_size), value=-torch.inf).view(rows, num_blocks, BLOCK)


def block_scores(log_weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R, blocks] float32: the logarithm of each block's weight plus Gumbel noise, -log of an exponential variate.

    Args:
        log_weights: [R, blocks, BLOCK] float32, of `filter_logits`.
    """
    largest = log_weights.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    weights = (log_weights - largest[..., None]).exp()
    while weights.shape[-1] > 1:  # in pairs: see the module's docstring
        weights = weights[..., ::2] + weights[..., 1::2]
    index = torch.arange(log_weights.shape[1], device=log_weights.device)[None, :]
    return largest + (weights[..., 0] / exponentials(seeds, positions, index, BLOCK_COUNTERS)).log()


def token_scores(
    log_weights: torch.Tensor, block: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[R, BLOCK] float32: the logarithmic weights of one block's tokens plus Gumbel noise.

    Args:
        log_weights: [R, blocks, BLOCK] float32, of `filter_logits`.
        block: [R, 1] int64, which block of each row.
    """
    column = torch.arange(BLOCK, device=block.device)[None, :]
    inside = log_weights.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
    return inside - exponentials(seeds, positions, block * BLOCK + column).log()


def exponentials(
    seeds: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, first_counter: int = 0
) -> torch.Tensor:
    """Independent standard exponential variates, one for each row and index.

    -log1p(-u) in float32, u = uniform(w), with w one of the four output words of Philox4x32-10 under key (low, high
    half of seeds[r]) and counter (n, low half of positions[r], 0, 0), what `tl.philox(seed, n, position, 0, 0)` returns
    in Triton. 1024 indices have 256 counters n, one after the other from `first_counter` on, whose first words are for
    the first 256 indices, and so on: a kernel has them where it needs them, without moving any.

    It is -log1p(-u) rather than -log(u) because a float32 is dense near 0 and coarse (2^-24) near 1, and a draw is
    decided where the variate is near 0: with -log(u) tokens of probability below 1e-7 would hardly ever be drawn.

    Args:
        seeds, positions: [R] int64.
        index: [R, n] or [1, n] int64.

    Returns:
        [R, n] float32, positive and finite.
    """
    counters = first_counter + index // (4 * BLOCK) * BLOCK + index % BLOCK
    zero = torch.zeros_like(counters[:, :1])
    words = torch.stack(philox(counters, (positions & _LOW_32)[:, None], zero, zero, seeds[:, None]))
    word = words.gather(0, (index // BLOCK % 4).expand(words.shape[1:])[None])[0]
    return -torch.log1p(-uniform(word))


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Random 32-bit words to float32 in (0, 1): min(float32(word) + 0.5, 2^32 - 256) * 2^-32.

    float32() and the sum round to nearest, ties to even; the rest is exact. The extremes are 2^-33 and 1 - 2^-24, never
    0 or 1. All 32 bits count for small values, unlike in Triton's `uint_to_uniform_float`, which also yields 0. The
    half puts a value in the middle of the 2^-32 that its word stands for: without it a token would be drawn 2^-33 too
    often.
    """
    return words.float().add_(0.5).clamp_max_(2.0**32 - 256).mul_(2.0**-32)


def philox(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, key: torch.Tensor, rounds: int = 10
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32, by default of 10 rounds: a random function of a 128-bit counter and a 64-bit key (Salmon et al., SC
    2011).

    Args:
        c0, c1, c2, c3: the counter's words, int64 tensors in [0, 2^32), that broadcast against each other and the key.
        key: int64, its low half the first key word and its high half the second.
        rounds: 7 are the fewest that pass the authors' statistical tests.

    Returns:
        The four output words, int64 in [0, 2^32).
    """
    k0, k1 = key & _LOW_32, (key >> 32) & _LOW_32
    for _ in range(rounds):
        # The product of two 32-bit words wraps around int64 as it does around uint64, so its bits are right; the
        # arithmetic shift then fills the high half with sign bits, which the mask removes. The low half is masked
        # where it is used.
        p0, p1 = c0 * _MUL_0, c2 * _MUL_1
        c0, c2 = ((p1 >> 32) ^ (c1 ^ k0)) & _LOW_32, ((p0 >> 32) ^ (c3 ^ k1)) & _LOW_32
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL_0) & _LOW_32, (k1 + _WEYL_1) & _LOW_32
    return c0, c1 & _LOW_32, c2, c3 & _LOW_32


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalise tokens for having occurred.

    Repetition, over prompt and output: divide a positive logit, multiply a negative one (Keskar et al., "CTRL", 2019;
    transformers). Then frequency * count and presence, over the output alone, are subtracted (OpenAI, vLLM).

    Args:
        logits: [R, V], any float dtype; not modified.
        prompt_mask: [R, V] bool, the tokens of the prompt.
        output_counts: [R, V] int, how often each token is in the output.
        repetition, presence, frequency: [R] float32; 1, 0 and 0 leave a row as it is.

    Returns:
        [R, V] float32.
    """
    x = logits.float()
    in_output = output_counts > 0
    factor = torch.where(prompt_mask | in_output, repetition[:, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    x -= frequency[:, None] * output_counts
    x -= presence[:, None] * in_output
    return x

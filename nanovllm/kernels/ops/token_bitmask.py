"""Banning tokens by bit masks: what a grammar allows next, a bit a token."""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.ops.checks import values_checked


def _inputs(t, rows, vocab_size, num_masks):
    num_words = -(-vocab_size // 32)
    return {
        "logits": t.normal(rows, vocab_size),
        "bitmask": t.integers(-(2**31), 2**31, num_masks, num_words, dtype=torch.int32),
        "rows": t.permutation(rows)[:num_masks],
    }


def _cost(logits, bitmask, rows):
    return Cost(nbytes(bitmask, rows) + rows.numel() * logits.shape[1] * logits.element_size())


def check_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise a ValueError if the masks have too few bits, or, where values are checked, if a row is not there."""
    if 32 * bitmask.shape[1] < logits.shape[1]:
        raise ValueError(
            f"apply_token_bitmask: bitmask: {bitmask.shape[1]} words have {32 * bitmask.shape[1]} bits; expected one"
            f" for each of the {logits.shape[1]} columns of logits"
        )
    if values_checked(logits.device) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(logits):
        raise ValueError(
            f"apply_token_bitmask: rows: {int(rows.min())} to {int(rows.max())}; expected 0 to {len(logits) - 1}"
        )


@op(
    arguments={
        "logits": "[rows, vocab_size]", "bitmask": "int32[num_masks, num_words]", "rows": "int64[num_masks]",
    },
    inputs=Inputs(
        _inputs,
        needs=at_least_one("vocab_size"),
        small=[(1, 1, 1), (5, 100, 3), (3, 31, 0), (4, 64, 4), (2, 9001, 2)],
        decode=[(1, 151936, 1), (64, 151936, 16), (256, 151936, 256)],
        scales=(1.0,),
    ),
    cost=_cost,
    mutates=("logits",),
    fake=lambda *args, **kwargs: None,
)  # fmt: skip
def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits to -inf where a bit is 0, in place: bit `t % 32` of `bitmask[i, t // 32]` is token t of row `rows[i]`.

    Args:
        logits: [rows, vocab_size], any float dtype.
        bitmask: [num_masks, num_words] int32, as llguidance and xgrammar fill it; bits beyond the vocabulary are not
            read.
        rows: [num_masks] int64, distinct. The other rows of the logits stay as they are.

    Raises:
        ValueError: `num_words` is less than vocab_size / 32.
    """
    check_bitmask(logits, bitmask, rows)
    in_bytes = bitmask.contiguous().view(torch.uint8)[:, :, None]
    bits = in_bytes & (1 << torch.arange(8, device=bitmask.device)).to(torch.uint8)
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)

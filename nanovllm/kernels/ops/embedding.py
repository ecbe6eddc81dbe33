"""Token embedding."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.ops.checks import check_token_ids, values_checked


def _inputs(t, num_tokens, vocab_size, hidden_size):
    return {"token_ids": t.integers(0, vocab_size, num_tokens), "weight": t.normal(vocab_size, hidden_size)}


def _cost(token_ids, weight):
    return Cost(nbytes(token_ids) + 2 * token_ids.numel() * weight.shape[1] * weight.element_size())


@op(
    arguments={"token_ids": "int64[num_tokens]", "weight": "[vocab_size, hidden_size]"},
    inputs=Inputs(
        _inputs,
        needs=at_least_one("vocab_size"),
        small=[(1, 1, 1), (3, 50, 96), (0, 7, 64), (7, 100, 33), (40, 300, 576)],
        decode=[(1, 151936, 1024), (64, 151936, 1024), (256, 151936, 4096)],
        large=[(16384, 151936, 1024), (16384, 151936, 4096)],
        scales=(1.0,),
    ),
    cost=_cost,
    fake=lambda token_ids, weight: weight.new_empty((*token_ids.shape, weight.shape[1])),
)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The row of the embedding table for each token.

    Args:
        token_ids: [num_tokens] int64, from 0 to vocab_size - 1.
        weight: [vocab_size, hidden_size], any float dtype.

    Returns:
        [num_tokens, hidden_size], the dtype of weight.

    Raises:
        ValueError: an id has no row in the table, which is checked on a CPU, elsewhere with NANOVLLM_CHECK=1.
    """
    if values_checked(token_ids.device):
        check_token_ids(token_ids, weight.shape[0])
    return F.embedding(token_ids, weight)

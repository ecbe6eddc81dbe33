"""The experts of a mixture of experts: for each token the gated MLPs that it was routed to, and their weighted sum."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, at_least_one, nbytes
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.checks import values_checked


def routed(t, tokens, experts, top_k, skewed=0):
    """(weights, experts) [tokens, top_k]. skewed: all tokens go to the last experts, in one order."""
    # Different experts for each token: the places of its largest random numbers.
    chosen = torch.arange(experts - top_k, experts, device=t.device).expand(tokens, top_k)
    if not skewed:
        chosen = t.uniform(tokens, experts, dtype=torch.float32).topk(top_k, dim=-1).indices
    weights = t.uniform(tokens, top_k, low=0.1, dtype=torch.float32)
    return weights / weights.sum(-1, keepdim=True), chosen.int()


def _inputs(t, tokens, experts, top_k, intermediate, hidden, skewed=0):
    weights, chosen = routed(t, tokens, experts, top_k, skewed)
    return {
        "x": t.normal(tokens, hidden),
        "gate_up": t.parameter(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        "down": t.parameter(experts, hidden, intermediate, scale=intermediate**-0.5),
        "weights": weights,
        "experts": chosen,
    }


def expert_needs(numbers):
    """For `Inputs.needs`."""
    if not 1 <= numbers["top_k"] <= numbers["experts"]:
        return f"TOP_K from 1 to {numbers['experts']}, not {numbers['top_k']}"
    return at_least_one("experts", "intermediate", "hidden")(numbers)


def experts_cost(x, weights, experts, down, *others):
    """Only the weights of experts that have a token are read. others: `down`'s scales, and gate_up with its own."""
    read = int(experts.unique().numel()) * (nbytes(down, *others) // len(down))
    return Cost(nbytes(x, x, weights, experts) + read, 6 * experts.numel() * down.shape[1] * down.shape[2])


@op(
    arguments={
        "x": "[tokens, hidden]", "gate_up": "[num_experts, 2*intermediate, hidden]",
        "down": "[num_experts, hidden, intermediate]", "weights": "float32[tokens, top_k]",
        "experts": "int32[tokens, top_k]",
    },
    inputs=Inputs(
        _inputs,
        needs=expert_needs,
        # One token, one expert, no token, experts without a token, sizes that fill no tile, all tokens to one expert.
        small=[
            (1, 4, 2, 24, 48), (5, 6, 3, 33, 70), (0, 4, 2, 16, 32), (3, 1, 1, 40, 64), (2, 32, 2, 48, 136),
            (19, 8, 2, 64, 96), (40, 4, 1, 24, 72, 1), (70, 3, 2, 16, 40),
        ],
        # Qwen3-30B-A3B.
        decode=[(1, 128, 8, 768, 2048), (8, 128, 8, 768, 2048), (32, 128, 8, 768, 2048), (128, 128, 8, 768, 2048)],
        large=[(2048, 128, 8, 768, 2048), (8191, 128, 8, 768, 2048), (1024, 128, 8, 768, 2048, 1)],
        scales=(1.0, 10.0),
    ),
    cost=lambda x, gate_up, down, weights, experts: experts_cost(x, weights, experts, down, gate_up),
    cancels=True,
    # The reference rounds gate, up, SiLU, the product and each expert's result, each in its turn.
    tolerance={torch.float16: 4e-3, torch.float32: 2e-5, torch.bfloat16: 3.2e-2},
    fake=lambda x, *args, **kwargs: x.new_empty(x.shape),
)  # fmt: skip
def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the gated MLPs of the experts that each token was routed to.

    For token t it is the sum over j of weights[t, j] * mlp(x[t]), with the weights G, U and D of expert experts[t, j]:
    mlp(x) = (silu(x G^T) * (x U^T)) D^T.

    Args:
        x: [tokens, hidden], any float dtype.
        gate_up: [num_experts, 2 * intermediate, hidden], same dtype: of each expert the rows of the gate, then those of
            the up projection.
        down: [num_experts, hidden, intermediate], same dtype.
        weights: [tokens, top_k] float32, finite.
        experts: [tokens, top_k] int32, from 0 to num_experts - 1. `moe_route` gives both.

    Returns:
        [tokens, hidden], same dtype. The sum is in float32, and rounded once. The same arguments give the same bits.

    Raises:
        ValueError: an expert that does not exist; values are checked on a CPU, and elsewhere with NANOVLLM_CHECK=1.
    """
    if values_checked(experts.device):
        check_experts(experts, gate_up.shape[0])
    return sum_of_experts(x, weights, experts, gate_up.shape[0], lambda e: (gate_up[e], down[e]))


def sum_of_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    matrices: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """The reference, one expert after the other.

    Args:
        matrices: an expert -> its (gate_up [2 * intermediate, hidden], down [hidden, intermediate]).
    """
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for e in range(num_experts):
        mine = experts == e
        # On a GPU every expert computes all tokens: which are its own is known to the device alone, where a CUDA graph
        # may have to hold this call.
        rows = mine.any(1).nonzero()[:, 0] if x.device.type == "cpu" else torch.arange(len(x), device=x.device)
        gate_up, down = matrices(e)
        y = F.linear(silu_and_mul.native(F.linear(x[rows], gate_up)), down)
        weight = (weights * mine).sum(1)[rows, None]
        total[rows] += torch.where(mine.any(1)[rows, None], y * weight, 0)
    return total.to(x.dtype)


def check_experts(experts: torch.Tensor, num_experts: int) -> None:
    """Raise a ValueError that names the first expert that does not exist."""
    wrong = (experts < 0) | (experts >= num_experts)
    if bool(wrong.any()):
        token, choice = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"moe_experts: experts: token {token} has expert {int(experts[token, choice])}, expected 0 to"
            f" {num_experts - 1}"
        )

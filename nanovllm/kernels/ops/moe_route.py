"""Routing of a mixture of experts: which experts a token goes to, and with what weight."""

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes

_LARGEST = torch.finfo(torch.float32).max


def _needs(numbers):
    if numbers["experts"] < 1:
        return f"EXPERTS of at least 1, not {numbers['experts']}"
    if not 1 <= numbers["top_k"] <= numbers["experts"]:
        return f"TOP_K from 1 to {numbers['experts']}, not {numbers['top_k']}"
    return None


def _cost(logits, top_k, renormalise):
    # A maximum for each of the top_k; a difference, an exponential and a sum for each logit.
    return Cost(nbytes(logits) + 8 * logits.shape[0] * top_k, (3 + top_k) * logits.numel())


def _compare(got, arguments, dtype):
    """Experts are equal: logits are compared, and not rounded. Weights are float32 whatever the dtype of the logits."""
    logits, top_k, renormalise = arguments.values()
    weights, experts = got
    want_weights, want_experts = moe_route.native(logits.double(), top_k, renormalise)
    for name, value, want in (("weights", weights, want_weights), ("experts", experts, want_experts)):
        if value.dtype != want.dtype or value.shape != want.shape:
            return f"{name}: gave {value.dtype}{list(value.shape)} instead of {want.dtype}{list(want.shape)}"
    if bool((wrong := experts != want_experts).any()):
        token = int(wrong.any(1).int().argmax())
        return f"token {token} goes to experts {experts[token].tolist()} instead of {want_experts[token].tolist()}"
    if not torch.allclose(weights, want_weights, rtol=1e-5, atol=1e-37):
        token = int((weights - want_weights).abs().amax(1).argmax())
        return f"token {token} has the weights {weights[token].tolist()} instead of {want_weights[token].tolist()}"
    return None


@op(
    arguments={"logits": "[tokens, num_experts]"},
    inputs=Inputs(
        lambda t, tokens, experts, top_k: {"logits": t.normal(tokens, experts), "top_k": top_k, "renormalise": True},
        needs=_needs,
        small=[(1, 4, 2), (5, 6, 3), (0, 8, 2), (9, 128, 8), (33, 60, 1), (3, 5, 5), (2, 1, 1)],
        # Qwen3-30B-A3B.
        decode=[(1, 128, 8), (8, 128, 8), (128, 128, 8)],
        large=[(8192, 128, 8)],
        variants=[{"renormalise": True}, {"renormalise": False}],
    ),
    cost=_cost,
    compare=_compare,
    fake=lambda logits, top_k, renormalise: (
        logits.new_empty((logits.shape[0], top_k), dtype=torch.float32),
        logits.new_empty((logits.shape[0], top_k), dtype=torch.int32),
    ),
)
def moe_route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token, and their softmax weights.

    Source: Shazeer et al., "Outrageously large neural networks", 2017.

    Args:
        logits: [tokens, num_experts], any float dtype. NaN and -inf count as the smallest finite number, inf as
            the largest one, so that weights are always finite and experts always exist.
        top_k: experts of a token, from 1 to num_experts.
        renormalise: divide the weights of a token by their sum (`norm_topk_prob` of a config.json).

    Returns:
        weights [tokens, top_k] float32 and experts [tokens, top_k] int32, by falling logit. Of equal logits that of the
        lower index stands first.

    Raises:
        ValueError: top_k is out of range.
    """
    check_top_k(logits, top_k)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = wide.nan_to_num(-_LARGEST, _LARGEST, -_LARGEST)
    values, experts = wide.sort(dim=-1, descending=True, stable=True)
    weights = values[:, :top_k].softmax(-1) if renormalise else values.softmax(-1)[:, :top_k]
    return weights.float(), experts[:, :top_k].int()


def check_top_k(logits: torch.Tensor, top_k: int) -> None:
    """Raise a ValueError if there are fewer experts than each token wants."""
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"moe_route: top_k: expected 1 to {logits.shape[1]}, the experts that logits has, not {top_k!r}"
        )

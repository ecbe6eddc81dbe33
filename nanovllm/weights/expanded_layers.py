"""After loading: packed weights of small layers get a dequantised copy where its products are faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.nn as nn

from nanovllm.kernels.op.expansion_plan import ANY, ExpansionPlan
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.models.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)


class _Expansion(NamedTuple):
    """A weight that gets a copy."""

    layer: nn.Module
    weight: PackedWeight
    num_tokens: range

    @property
    def replaces(self) -> bool:
        """Whether the packed form is never used, and so not kept."""
        return self.num_tokens == ANY

    @property
    def more_bytes(self) -> int:
        """Bytes beyond those of the packed form alone."""
        return self.weight.numel() * self.weight.dtype.itemsize - self.weight.nbytes * self.replaces


def expand_layers(model: DecoderForCausalLM, plan: ExpansionPlan, smallest: Callable[[int], int] = int) -> None:
    """Give the packed weights of decoder layers the copies that `plan` wants, if memory allows all of them.

    A copy that is used for any number of tokens replaces the packed weight.

    Args:
        smallest: the least of the numbers that the ranks of a group give, so that all decide alike.
    """
    wanted = list(_wanted(model, plan))
    nbytes = sum(each.more_bytes for each in wanted)
    if not smallest(nbytes <= plan.max_bytes):
        logger.info(
            "expand_small_weights: the quantised matrices of small layers, %d, stay packed: copies would take %.2f GB"
            " more, and %.2f are allowed",
            len(wanted), nbytes / 1e9, plan.max_bytes / 1e9,
        )  # fmt: skip
        return
    for layer, weight, num_tokens in wanted:
        if num_tokens == ANY:
            whole = nn.Parameter(weight.dequantised(), requires_grad=False)
            del layer.weight  # a parameter's name takes no module
            layer.weight = whole
        else:
            weight.expand_for(num_tokens)
    if wanted:
        _log(wanted, nbytes)


def _wanted(model: DecoderForCausalLM, plan: ExpansionPlan) -> Iterator[_Expansion]:
    for decoder_layer in model.model.layers:
        _, weights = bytes_and_weights(decoder_layer)
        for module in decoder_layer.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, PackedWeight):
                wanted = plan.num_tokens(weight.ops, weights)
                # Before the numbers of tokens for which it has another form.
                if num_tokens := range(wanted.start, min(wanted.stop, *weight.form_changes, ANY.stop)):
                    yield _Expansion(module, weight, num_tokens)


def _log(wanted: list[_Expansion], nbytes: int) -> None:
    dtype = str(wanted[0].weight.dtype).removeprefix("torch.")
    counts: dict[range, int] = {}
    for each in wanted:
        counts[each.num_tokens] = counts.get(each.num_tokens, 0) + 1
    said = "; ".join(f"{count} for {_tokens(num_tokens)}" for num_tokens, count in counts.items())
    logger.info(
        'quantised matrices of small layers are expanded to %s, which is faster there and takes %.2f GB more: %s;'
        ' expand_small_weights="off" keeps them packed',
        dtype, nbytes / 1e9, said,
    )  # fmt: skip


def _tokens(num_tokens: range) -> str:
    if num_tokens == ANY:
        return "all steps"
    if num_tokens.stop == ANY.stop:
        return f"steps of {num_tokens.start} tokens or more"
    return f"steps of {max(1, num_tokens.start)} to {num_tokens.stop - 1} tokens"

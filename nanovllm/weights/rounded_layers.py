"""After loading: packed weights get a form of 8-bit floats for steps of many tokens (`prompt_activations="fp8"`)."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.op.expansion_plan import ANY, ExpansionPlan
from nanovllm.layers.moe import StackedMatrices
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.layers.rounded_matrix import rounded, rounded_bytes
from nanovllm.models.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)

_OP = "linear_fp8_dynamic"


def round_layers(
    model: DecoderForCausalLM, kernels: Kernels, least_tokens: int, small_layers: ExpansionPlan | None = None
) -> None:
    """Let the packed weights of decoder layers multiply in 8-bit floats for `least_tokens` tokens and more.

    All of them are rounded into one buffer, which has room for the largest. Experts and the LM head are left alone.

    Args:
        small_layers: up to how many tokens 16 bits are as fast as fp8 tensor cores in small layers; None: that is not
            known.

    Raises:
        ValueError: the model has no weight that can be multiplied so.
    """
    found = [
        (layer, weight)
        for layer in model.model.layers
        for weight in layer.modules()
        if isinstance(weight, PackedWeight)
    ]
    experts = any(isinstance(module, StackedMatrices) for module in model.modules())
    if not found:
        raise ValueError(
            "prompt_activations='fp8': the layers have no quantised weights"
            + (" but those of experts, which it does not change" if experts else "")
            + "; pass quantization='int4' or a quantised checkpoint, or leave the argument out"
        )
    device = found[0][1].planes[0].device
    buffer = torch.empty(max(rounded_bytes(weight) for _, weight in found), dtype=torch.uint8, device=device)
    counts: Counter[int] = Counter()
    refused: list[PackedWeight] = []
    for layer, weight in found:
        start = least_tokens
        if small_layers is not None:
            start = max(start, small_layers.num_tokens((_OP,), bytes_and_weights(layer)[1]).stop)
        if set(weight.ops) == {_OP}:  # the checkpoint was made for it
            continue
        form = rounded(weight, buffer, kernels)
        wanted = sum(m.shape[0] * m.shape[1] for m in form.matrices if m.quantising_op)
        if wanted and form.quantised_weights(start) == wanted:
            weight.use_for(range(start, ANY.stop), form)
            counts[start] += 1
        else:
            refused.append(form)
    if refused and not counts:
        raise ValueError(_why_not(refused[0], kernels, least_tokens))
    _log(counts, len(refused), buffer.nbytes, experts)


def _why_not(form: PackedWeight, kernels: Kernels, num_tokens: int) -> str:
    matrix = next(m for m in form.matrices if m.quantising_op)
    weight, scale = matrix.operands()
    accepts = kernels.provider(_OP).accepts
    x = torch.empty((), dtype=form.dtype, device=weight.device).expand(num_tokens, weight.shape[1])
    reason = accepts and accepts(x, weight, scale)
    reason = reason or f"{_OP} does not take it"
    return f"prompt_activations='fp8': no quantised weight can be multiplied so: {reason}; leave the argument out"


def _log(counts: Counter[int], refused: int, nbytes: int, experts: bool) -> None:
    if not counts:
        logger.info('prompt_activations="fp8" changes nothing: the checkpoint is made for activations in fp8 already')
        return
    steps = "; ".join(f"{count} in steps of {start} tokens or more" for start, count in sorted(counts.items()))
    others = [f"{refused} of other shapes"] * bool(refused) + ["experts"] * experts
    logger.info(
        'prompt_activations="fp8": quantised weights are multiplied in fp8: %s; those that are rounded share %.1f MB%s',
        steps, nbytes / 1e6, f"; {' and '.join(others)} are multiplied as before" if others else "",
    )  # fmt: skip

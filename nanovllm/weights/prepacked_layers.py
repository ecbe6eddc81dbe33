"""After loading: plain weights get the form in which the provider of `linear` multiplies fastest."""

from __future__ import annotations

import logging

from nanovllm.kernels import Kernels
from nanovllm.layers.embed_head import LMHead
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.prepacked_matrix import prepacked
from nanovllm.models.decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)

_READ_DENSE = ("add_rms_norm_linear", "add_rms_norm_gate_up", "linear_add_rms_norm", "linear_silu_and_mul")
"""Fused ops that layers may call with the same weights."""


def prepack_layers(model: DecoderForCausalLM, kernels: Kernels) -> None:
    """Prepack the weights of linear layers and the LM head, if the provider of `linear` has a form of its own.

    Each dense tensor is freed before the next one is packed. All stay dense if another op reads them: a fused op that
    was selected, or the provider of `embedding` that the user chose, if the LM head is tied to the embedding.
    """
    if kernels.provider("linear").prepack is None:
        return
    if fused := [name for name in _READ_DENSE if kernels.providers[name] != "native"]:
        logger.info("weights of linear layers are not prepacked: %s reads them", ", ".join(fused))
        return
    tied = model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    count = nbytes = 0
    for module in model.modules():
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear, LMHead)):
            continue
        is_tied = tied and module is model.lm_head
        if is_tied and kernels.providers["embedding"] != "native":
            continue
        weight = prepacked(module.weight, kernels, readable=is_tied)
        if weight is None:
            continue
        count, nbytes = count + 1, nbytes + weight.nbytes
        for owner in (module, model.model.embed_tokens) if is_tied else (module,):
            del owner.weight  # a parameter's name takes no module
            owner.weight = weight
    if count:
        provider = kernels.providers["linear"]
        logger.info("%d matrices are prepacked for %s, %.0f MB", count, provider, nbytes / 1e6)

"""The mixture of experts of a model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.model_entries import Entries, fail


@dataclass(frozen=True)
class MoeConfig:
    """Experts in place of the MLP, of which a router gives each token some.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        intermediate_size: the intermediate size of an expert.
        renormalise: the weights of a token's experts are divided by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool


def read_moe(entries: Entries) -> MoeConfig:
    """The experts that a Qwen3-MoE's config.json describes; missing entries take the defaults of transformers.

    Raises:
        ValueError: an entry is out of range; the message names it.
    """
    activation = entries.get("hidden_act", "silu")
    if activation != "silu":
        fail("hidden_act", activation, " is not supported for experts; only 'silu' is")
    # transformers 5 writes num_local_experts, 4 wrote num_experts.
    name = "num_experts" if entries.config.get("num_experts") is not None else "num_local_experts"
    num_experts, top_k = entries.count(name, 128), entries.count("num_experts_per_tok", 8)
    if top_k > num_experts:
        fail("num_experts_per_tok", top_k, f": must be at most {name}={num_experts}")
    return MoeConfig(num_experts, top_k, entries.count("moe_intermediate_size", 768), entries.flag("norm_topk_prob"))


def sparse_layers(entries: Entries, num_layers: int) -> list[bool]:
    """Of each layer, whether it has experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`.

    Raises:
        ValueError: an entry is out of range; the message names it.
    """
    dense = entries.config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        fail("mlp_only_layers", dense, f": must be a list of layers, from 0 to {num_layers - 1}")
    step = entries.count("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]

"""Recognises the decoder layers of a model that one loop may compute (`stack.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.decoder_layer import LayerKind
from nanovllm.adapters.transformers.patches import Packed, foreign_forward
from nanovllm.adapters.transformers.probe import is_linear, plain_parameter, random, run, stand_in
from nanovllm.adapters.transformers.selected import NOT_WANTED, Selection
from nanovllm.adapters.transformers.stack import LayerWeights, Stack, StackOps, only_recorders

Parts = Mapping[nn.Module, Any]
"""Of each module that was replaced: what it was recognised as, and its packed weights."""
_CONSTANTS = {"scaling", "sliding_window", "softcap"}


def layer_lists(model: nn.Module, parts: Parts) -> Iterator[tuple[nn.Module, str, list[Any]]]:
    """The lists of decoder layers in a model: (the module that has it, its name there, the layers)."""
    for owner in model.modules():
        for name, child in owner._modules.items():
            if (
                isinstance(child, nn.ModuleList)
                and len(child)
                and all(isinstance(parts.get(m), LayerKind) for m in child)
            ):
                yield owner, name, list(child)


def stack_of(
    owner: nn.Module, name: str, layers: list[Any], parts: Parts, selection: Selection, captures: bool
) -> Stack | str:
    """The loop over these layers, or why there is none."""
    if "attention_decode" not in selection.wanted:
        return NOT_WANTED
    if foreign_forward(owner) is not None:
        return "the forward of its model was replaced by other code"
    kinds = [parts[layer] for layer in layers]
    if any(kind != kinds[0] or kind.after_attention or kind.after_mlp for kind in kinds):
        return "its layers have norms of results, or differ"
    attention: list[Any] = [parts.get(layer._modules[kind.attention]) for layer, kind in zip(layers, kinds)]
    mlps: list[Any] = [parts.get(layer._modules[kind.mlp]) for layer, kind in zip(layers, kinds)]
    norms: list[Any] = [
        parts.get(layer._modules[n]) for layer, kind in zip(layers, kinds) for n in (kind.first, kind.second)
    ]
    if not all((*attention, *mlps, *norms)):
        return "a part of its layers was left alone"
    kind, mlp = attention[0][0], mlps[0][0]
    if any(a[0] != kind for a in attention) or any(m[0] != mlp for m in mlps):
        return "its layers differ"
    if len(set(getattr(owner.__dict__.get("config"), "layer_types", None) or ())) > 1:
        return "its layers have several kinds of attention"
    if kind.constants.get("sliding_window"):
        return "its static caches have the length of a window"
    if any(value for constant, value in kind.constants.items() if constant not in _CONSTANTS):
        return "its attention takes other arguments"
    if any(n.one_plus for n in (*norms, kind.head_norm) if n is not None):
        return "its norms multiply by 1 + weight"
    if getattr(owner.__dict__.get("config"), "num_hidden_layers", None) != len(layers):
        return "its configuration has another number of layers"
    reason = next(filter(None, (_unsuited(layer) for layer in layers)), None)
    if reason is None and not _runs_in_order(owner, name, layers):
        reason = "its model does more than to call the layers one after the other"
    return reason or _made(owner.config, layers, kinds[0], parts, selection, captures)


def _unsuited(layer: nn.Module) -> str | None:
    """Why a layer cannot be computed without its modules; None: it can."""
    device, dtype = next(layer.parameters()).device, next(layer.parameters()).dtype
    for module in layer.modules():
        if "_hf_hook" in module.__dict__:
            return "accelerate moves tensors between its modules"
        if not only_recorders((module._forward_hooks, module._forward_pre_hooks)):
            return "its modules have hooks"
        for parameter in module._parameters.values():
            if parameter is not None and (reason := plain_parameter(parameter)) is not None:
                return reason
            if parameter is not None and (parameter.device, parameter.dtype) != (device, dtype):
                return "its weights have several dtypes or devices"
    return None


def _made(
    config: Any, layers: list[Any], layer_kind: LayerKind, parts: Parts, selection: Selection, captures: bool
) -> Stack | str:
    kernels = selection.kernels(next(layers[0].parameters()).device)
    kind = parts[layers[0]._modules[layer_kind.attention]][0]
    rotate = "qk_norm_rope" if kind.head_norm is not None else "rotary_embedding"
    if rotate not in selection.wanted:
        return f"it needs {rotate}, too"
    weights = _weights(layers, layer_kind, parts)
    if weights is None:
        return "its projections of results are no plain linear layers"
    activation = parts[layers[0]._modules[layer_kind.mlp]][0].activation
    ops = StackOps(
        kernels.rms_norm, kernels.add_rms_norm, getattr(kernels, rotate), kernels.attention_decode,
        kernels.attention_dense, _activation(kernels, activation),
    )  # fmt: skip
    slots = [layer._modules[layer_kind.attention].layer_idx for layer in layers]
    return Stack(config, layers, slots, kind, weights, ops, selection, activation == "silu", captures)


def _activation(kernels: Any, name: str) -> Any:
    if name == "silu":
        return kernels.silu_and_mul
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return lambda gate_up: kernels.gelu_and_mul(gate_up, approximate)


def _weights(layers: list[Any], kind: LayerKind, parts: Parts) -> list[LayerWeights] | None:
    firsts = [_norm(layer._modules[kind.first], parts) for layer in layers]
    weights = []
    for layer, first, following in zip(layers, firsts, [*firsts[1:], None]):
        attention, mlp = layer._modules[kind.attention], layer._modules[kind.mlp]
        attention_kind, qkv = parts[attention]
        mlp_kind, gate_up, _ = parts[mlp]
        out, down = attention._modules["o_proj"], mlp._modules[mlp_kind.down]
        if not all(is_linear(m) for m in (out, down)):
            return None
        norm = attention_kind.head_norm
        heads = () if norm is None else (attention.q_norm.weight, attention.k_norm.weight, norm.eps)
        weights.append(
            LayerWeights(
                first, _packed(qkv), heads, (out.weight, out.bias), _norm(layer._modules[kind.second], parts),
                _packed(gate_up), (down.weight, down.bias), following,
            )
        )  # fmt: skip
    return weights


def _norm(module: Any, parts: Parts) -> tuple[torch.Tensor, float]:
    return module.weight, parts[module].eps


def _packed(packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
    return packed.weight, packed.bias


def _runs_in_order(owner: Any, name: str, layers: list[Any]) -> bool:
    """Whether a model calls its layers one after the other, each with the result of the one before and the same
    arguments: its own forward, on layers that do nothing.
    """
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    results: list[torch.Tensor] = []

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((x, args, kwargs))
        results.append(x + 1)
        return results[-1]

    children: dict[str, Any] = {key: stand_in(child) for key, child in owner._modules.items() if child is not None}
    children[name] = nn.ModuleList(stand_in(layer, forward=forward) for layer in layers)
    for idle in children[name]:
        idle.__dict__["_modules"] = {}  # transformers adds hooks to modules within, if its configuration wants outputs
    weight = next(layers[0].parameters())
    x = random(2, 3, owner.config.hidden_size, dtype=weight.dtype, device=weight.device)
    try:
        run(stand_in(owner, **children), inputs_embeds=x, use_cache=False)
    except Exception:  # code of others, on modules that it does not know
        return False
    if len(calls) != len(layers):
        return False
    given = calls[0][2]
    return all(
        not args and kwargs.keys() == given.keys() and all(kwargs[key] is given[key] for key in given)
        for _, args, kwargs in calls
    ) and all(x is result for (x, _, _), result in zip(calls[1:], results))

"""A decoder layer's sum and the norm after it, as one op."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.norms import NormKind, Norms
from nanovllm.adapters.transformers.probe import hooked, random, run, same, stand_in
from nanovllm.adapters.transformers.selected import Call, differentiated


@dataclass(frozen=True)
class LayerKind:
    """x + attention(norm(x)), then x + mlp(norm(x)); with a norm after either, where there is one.

    Attributes:
        first, attention, second, mlp: the names of submodules in the order in which they are called.
        after_attention, after_mlp: the norms of results; None: there is none.
        defaults: the forward's arguments besides hidden_states, with their defaults.
    """

    first: str
    attention: str
    after_attention: str | None
    second: str
    mlp: str
    after_mlp: str | None
    defaults: dict[str, Any]


class _Stub(nn.Module):
    """Stands for a submodule: notes that it was called, and computes something simple."""

    def __init__(self, name: str, calls: list[tuple[str, dict[str, Any]]], factor: float, returns_tuple: bool) -> None:
        super().__init__()
        self.name, self.calls, self.factor, self.returns_tuple = name, calls, factor, returns_tuple

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append((self.name, kwargs))
        y = torch.sin(hidden_states * self.factor)
        return (y, None) if self.returns_tuple else y


def recognise_layer(module: nn.Module, norms: Norms) -> LayerKind | None:
    """What a module does if it is a pre-norm decoder layer; None: it is not."""
    kinds = {name: norms.kind(child) for name, child in module._modules.items()}
    norm_names = [name for name, kind in kinds.items() if kind is not None]
    attention = [name for name, child in module._modules.items() if child is not None and "layer_idx" in child.__dict__]
    if len(norm_names) not in (2, 4) or len(attention) != 1 or module._parameters:
        return None
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if not parameters or parameters[0].name != "hidden_states":
        return None
    named = [p for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    calls: list[tuple[str, dict[str, Any]]] = []
    factors = {name: 0.5 + 0.25 * i for i, name in enumerate(module._modules)}
    stubs = {
        name: nn.Identity() if isinstance(child, nn.Dropout) else _Stub(name, calls, factors[name], name in attention)
        for name, child in module._modules.items() if child is not None
    }  # fmt: skip
    x, given = random(2, 3, 4), {p.name: object() for p in named} | {"nanovllm_extra": object()}
    given = {name: value for name, value in given.items() if name != "use_cache"} | {"use_cache": False}
    try:
        out = run(stand_in(module, **stubs), x, **given)
    except Exception:  # code of others, with submodules that it does not know
        return None
    order = [name for name, _ in calls]
    kind = _kind(order, norm_names, attention[0], {p.name: p.default for p in named})
    if kind is None or not same(out, _expected(kind, factors, x)):
        return None
    passed = next(kwargs for name, kwargs in calls if name == kind.attention)
    return kind if passed.keys() == given.keys() and all(passed[name] is given[name] for name in given) else None


def _kind(order: list[str], norms: list[str], attention: str, defaults: dict[str, Any]) -> LayerKind | None:
    """The order of calls as a kind, if it is one."""
    if len(order) == 4 and order[1] == attention and {order[0], order[2]} == set(norms):
        return LayerKind(order[0], attention, None, order[2], order[3], None, defaults)
    if len(order) == 6 and order[1] == attention and {order[0], order[2], order[3], order[5]} == set(norms):
        return LayerKind(order[0], attention, order[2], order[3], order[4], order[5], defaults)
    return None


def _expected(kind: LayerKind, factors: dict[str, float], x: torch.Tensor) -> torch.Tensor:
    def of(name: str | None, x: torch.Tensor) -> torch.Tensor:
        return x if name is None else torch.sin(x * factors[name])

    x = x + of(kind.after_attention, of(kind.attention, of(kind.first, x)))
    return x + of(kind.after_mlp, of(kind.mlp, of(kind.second, x)))


def layer_forward(kind: LayerKind, norm: NormKind, call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the layer in which the first sum and the norm after it are the op `add_rms_norm`."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part: dict[str, Any] = module._modules
        second = part[kind.second]
        given = {**dict(zip(("hidden_states", *kind.defaults), args)), **kwargs}
        x = given.pop("hidden_states")
        # Hooks on the norm that is fused would not run.
        if hooked(second) or differentiated(module, x):
            return original(module, *args, **kwargs)
        if x.dtype != second.weight.dtype or x.device != second.weight.device:
            return original(module, *args, **kwargs)
        for name, default in kind.defaults.items():
            if name not in given and default is not inspect.Parameter.empty:
                given[name] = default
        residual = x
        x = part[kind.attention](hidden_states=part[kind.first](x), **given)[0]
        if kind.after_attention is not None:
            x = part[kind.after_attention](x)
        x, residual = call(x, residual, norm.weight(second.weight), norm.eps)
        x = part[kind.mlp](x)
        if kind.after_mlp is not None:
            x = part[kind.after_mlp](x)
        return residual + x

    return forward

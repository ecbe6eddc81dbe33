"""Gated MLPs: recognised by what they compute, and replaced by one product and the ops after it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.adapters.transformers.patches import Packed
from nanovllm.adapters.transformers.probe import is_linear, random, run, same, stand_in
from nanovllm.adapters.transformers.selected import Call, differentiated

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_SIZES = 4, 6  # hidden and intermediate size of a stand-in


@dataclass(frozen=True)
class MLPKind:
    """down(activation(gate(x)) * up(x)), by the names of the submodules. One name in `gate_up` stands for both."""

    gate_up: tuple[str, ...]
    down: str
    activation: str

    def linears(self, module: nn.Module) -> list[nn.Linear]:
        """The layers that make gate and up."""
        return [module._modules[name] for name in self.gate_up]  # type: ignore[misc]


@dataclass
class MLPs:
    """The gated MLPs of a model. Modules of one class and activation are probed once."""

    _known: dict[tuple[Any, ...], MLPKind | None] = field(default_factory=dict)

    def kind(self, module: Any) -> MLPKind | None:
        """What a module computes if it is a gated MLP; None: it is not."""
        linears = {name: child for name, child in module._modules.items() if is_linear(child)}
        others = [child for name, child in module._modules.items() if name not in linears and child is not None]
        if len(linears) not in (2, 3) or len(others) > 1 or module._parameters:
            return None
        shapes = tuple((name, child.weight.shape, child.bias is not None) for name, child in linears.items())
        key = type(module), shapes, *(repr(child) for child in others)
        if key not in self._known:
            self._known[key] = next(_matching(module, linears), None)
        return self._known[key]


def _matching(module: nn.Module, linears: dict[str, nn.Linear]) -> Iterator[MLPKind]:
    hidden, intermediate = _SIZES
    x = random(5, hidden, seed=7) * 2
    for *gate_up, down in permutations(linears):
        parts = {name: _linear(intermediate * (3 - len(linears) + 1), hidden, i) for i, name in enumerate(gate_up)}
        parts[down] = _linear(hidden, intermediate, 5)
        try:
            got = run(stand_in(module, **parts), x)
        except Exception:  # code of others, on input that it was not made for
            continue
        gate, up = torch.cat([parts[name](x) for name in gate_up], -1).chunk(2, -1)
        for activation, fn in ACTIVATIONS.items():
            if same(got, parts[down](fn(gate) * up)):
                yield MLPKind(tuple(gate_up), down, activation)


def _linear(outputs: int, inputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = nn.Parameter(random(outputs, inputs, seed=seed), requires_grad=False)
    return layer


@dataclass(frozen=True)
class MLPCalls:
    """What an MLP is computed with.

    Attributes:
        activate: silu_and_mul or gelu_and_mul.
        small: linear_silu_and_mul, for the numbers of tokens in `counts`; None: not used.
    """

    activate: Call
    small: Call | None = None
    counts: Container[int] | None = None


def mlp_forward(kind: MLPKind, packed: Packed, calls: MLPCalls, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the ops."""
    approximate = () if kind.activation == "silu" else ("tanh" if kind.activation == "gelu_tanh" else "none",)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(module, *args, **kwargs)
        x, layers, down = args[0], kind.linears(module), module._modules[kind.down]
        unsuited = x.dtype != packed.weight.dtype or differentiated(module, x) or not packed.current(layers)
        if unsuited or down is None:
            return original(module, x)
        small = calls.small
        if small is not None and (calls.counts is None or x.numel() // x.shape[-1] in calls.counts):
            return down(small(x, packed.weight))
        return down(calls.activate(packed(x), *approximate))

    return forward

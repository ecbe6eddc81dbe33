"""Changes to a model that can be taken back, in the reverse order, and weights that were moved side by side."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.adapters.transformers.probe import hooked, plain_parameter

ATTRIBUTE = "_nanovllm_patches"
"""Of a patched model: its `Patches`."""
_SLOTS = ("forward", "_old_forward")
_PUT_IN: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The forwards that are in models now."""


@dataclass
class _Attribute:
    """An attribute of an object, and what it was before."""

    owner: Any
    name: str
    new: Any
    had: bool
    old: Any

    def undo(self) -> None:
        # accelerate moves a forward from one of these attributes to the other when its hooks are added or removed.
        for name in _SLOTS if self.name in _SLOTS else (self.name,):
            if self.name not in _SLOTS or self.owner.__dict__.get(name) == self.new:
                if self.had:
                    self.owner.__dict__[name] = self.old
                elif name == "_old_forward":  # added after `apply`: its hooks call what is there
                    self.owner.__dict__[name] = MethodType(type(self.owner).forward, self.owner)
                else:
                    self.owner.__dict__.pop(name, None)


@dataclass
class _Joined:
    """Parameters that were made views of one tensor."""

    parameters: list[nn.Parameter]
    joined: torch.Tensor

    def undo(self) -> None:
        for parameter in self.parameters:
            if parameter.data.untyped_storage().data_ptr() == self.joined.untyped_storage().data_ptr():
                parameter.data = parameter.data.clone()


@dataclass
class Patches:
    """The changes to one model. They are records, so that a deep copy of the model has its own, of its own parts."""

    model: nn.Module
    changes: list[_Attribute | _Joined] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model.__dict__[ATTRIBUTE] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Patches:
        same = memo[id(self)] = object.__new__(Patches)
        same.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return same

    def __reduce__(self) -> Any:
        """A model that is loaded from a pickle runs its own code: bound forwards are pickled by their name."""
        return type(None), ()

    def undo(self) -> None:
        """Take everything back. A second call does nothing."""
        while self.changes:
            self.changes.pop().undo()
        if self.model.__dict__.get(ATTRIBUTE) is self:
            del self.model.__dict__[ATTRIBUTE]

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, which it may or may not have had."""
        self.changes.append(_Attribute(owner, name, value, name in owner.__dict__, owner.__dict__.get(name)))
        owner.__dict__[name] = value

    def put_in(self, name: str) -> dict[int, Any]:
        """The value that was set last under this name, by the id of its owner: of those that had none before."""
        found: dict[int, Any] = {}
        for change in self.changes:
            if isinstance(change, _Attribute) and change.name == name and (id(change.owner) in found or not change.had):
                found[id(change.owner)] = change.new
        return found

    def set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give one module another forward: a function of the module and its arguments, with the name `forward`.

        It is bound to the module like a method, so that a deep copy of the module calls it with the copy. accelerate
        (`device_map`) wraps a module's forward and keeps the one within as `_old_forward`. That one is replaced, so
        that its hooks still move tensors.
        """
        _PUT_IN.add(forward)
        self.set_attribute(module, forward_slot(module), MethodType(forward, module))

    def join(self, parameters: Sequence[nn.Parameter]) -> nn.Parameter:
        """Make parameters views of one new tensor, one after the other along their first dimension; that tensor."""
        joined = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=False)
        self.changes.append(_Joined(list(parameters), joined))
        for parameter, part in zip(parameters, joined.data.split([len(p) for p in parameters])):
            parameter.data = part
        return joined


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds a module's own forward."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def foreign_forward(module: nn.Module) -> str | None:
    """Why a module's forward must not be replaced: it is not that of its class; None: it may be."""
    given = module.__dict__.get(forward_slot(module))
    if given is None or getattr(given, "__func__", None) is type(module).forward:
        return None
    return "its forward was replaced by other code"


def put_in_here(module: nn.Module) -> bool:
    """Whether a module's forward is one that `Patches.set_forward` set."""
    given = module.__dict__.get(forward_slot(module))
    return getattr(given, "__func__", None) in _PUT_IN


class Packed:
    """Linear layers of the same input, whose parameters are made views of one tensor.

    Parameters stay the objects that they are, with the same values. After `undo` each has memory of its own again.

    Attributes:
        weight: [outputs of all layers, inputs].
        bias: [outputs of all layers] or None.
        sizes: outputs of each layer.
    """

    def __init__(self, layers: Sequence[nn.Linear], patches: Patches) -> None:
        self.sizes = [layer.out_features for layer in layers]
        weights: list[Any] = [layer.weight for layer in layers]
        self.weight = patches.join(weights)
        biases: list[Any] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = patches.join(biases) if biases else None
        self._layers = list(layers)
        self._addresses = [layer.weight.data_ptr() for layer in layers]

    @staticmethod
    def refused(layers: Sequence[nn.Linear]) -> str | None:
        """Why layers cannot be packed; None: they can."""
        for layer in layers:
            for parameter in (layer.weight, *([] if layer.bias is None else [layer.bias])):
                if (reason := plain_parameter(parameter)) is not None:
                    return reason
            if hooked(layer):
                return "its projections have hooks"
            if (reason := foreign_forward(layer)) is not None:
                return f"of a projection: {reason}"
        first = layers[0].weight
        if any(x.weight.dtype != first.dtype or x.weight.device != first.device for x in layers):
            return "its projections have weights of several dtypes or devices"
        if len({layer.bias is None for layer in layers}) > 1:
            return "only some of its projections have a bias"
        return None

    def current(self, layers: Sequence[nn.Linear]) -> bool:
        """Whether these are the layers, with the weights that were packed and without hooks: not after `model.to(...)`,
        nor in a copy, nor with the adapters of PEFT, which have the weight of the layer within. Nor for torch.export,
        which names weights after modules, and would write the packed ones too.
        """
        if torch.compiler.is_exporting():
            return False
        if any(a is not b or hooked(a) for a, b in zip(layers, self._layers)):
            return False
        if torch.compiler.is_compiling():
            return True  # addresses cannot be traced
        return all(layer.weight.data_ptr() == address for layer, address in zip(layers, self._addresses))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers side by side."""
        return F.linear(x, self.weight, self.bias)

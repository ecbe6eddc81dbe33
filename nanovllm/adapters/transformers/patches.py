"""Changes to a model that can be taken back, in the reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ATTRIBUTE = "_nanovllm_patches"
"""Of a patched model: its `Patches`."""
_SLOTS = ("forward", "_old_forward")


class Patches:
    """The changes to one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._steps: list[Callable[[], None]] = []
        model.__dict__[ATTRIBUTE] = self

    def undo(self) -> None:
        """Take everything back. A second call does nothing."""
        while self._steps:
            self._steps.pop()()
        if self._model.__dict__.get(ATTRIBUTE) is self:
            del self._model.__dict__[ATTRIBUTE]

    def on_undo(self, step: Callable[[], None]) -> None:
        """Run `step` when the model is restored."""
        self._steps.append(step)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, which it may or may not have had."""
        had, old = name in owner.__dict__, owner.__dict__.get(name)
        owner.__dict__[name] = value

        def restore() -> None:
            if had:
                owner.__dict__[name] = old
            else:
                owner.__dict__.pop(name, None)

        self.on_undo(restore)

    def set_forward(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """Give one module another forward.

        accelerate (`device_map`) wraps a module's forward and keeps the one within as `_old_forward`. That one is
        replaced, so that its hooks still move tensors. They may be removed while the patch is there.
        """
        slot = forward_slot(module)
        had, old = slot in module.__dict__, module.__dict__.get(slot)
        module.__dict__[slot] = forward

        def restore() -> None:
            for name in _SLOTS:
                if module.__dict__.get(name) is forward:
                    if had:
                        module.__dict__[name] = old
                    else:
                        del module.__dict__[name]

        self.on_undo(restore)


def forward_slot(module: torch.nn.Module) -> str:
    """The attribute that holds a module's own forward."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def own_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that a patch falls back to: the module's own, without hooks of accelerate."""
    return module.__dict__.get(forward_slot(module)) or type(module).forward.__get__(module)


def foreign_forward(module: torch.nn.Module) -> str | None:
    """Why a module's forward must not be replaced: it is not that of its class; None: it may be."""
    given = module.__dict__.get(forward_slot(module))
    if given is None or getattr(given, "__func__", None) is type(module).forward:
        return None
    return "its forward was replaced by other code"

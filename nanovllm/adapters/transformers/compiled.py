"""What `generate` compiles of a patched model: a stand-in whose modules have no forward of their own.

Under torch.compile the modules of a patched model run the code of their classes, except for the attention function. So
a compiled step needs no replaced forward. But torch.compile checks each replaced forward, and what it refers to, before
every call. PyTorch 2.11 skips whole modules in these checks only if nothing in them is replaced.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from nanovllm.adapters.transformers.attention import CALL
from nanovllm.adapters.transformers.patches import ATTRIBUTE, Patches
from nanovllm.adapters.transformers.probe import stand_in

STAND_IN = "_nanovllm_stand_in"
"""Of a patched model: its `StandIn`."""
_NOT_COPIED = (
    CALL,
    ATTRIBUTE,
    STAND_IN,
    "_nanovllm_stack",
    "get_compiled_call",
    "_compiled_call",
    "_last_compile_config",
)
_SHARED = "_parameters", "_buffers"


class StandIn:
    """A copy of a model's tree of modules, which shares its parameters and buffers, and has no replaced forward."""

    def __init__(self) -> None:
        self._made: nn.Module | None = None
        self._then: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return StandIn()

    def __reduce__(self) -> Any:
        return type(None), ()

    def of(self, model: nn.Module) -> nn.Module | None:
        """The stand-in of the model as it is now; None: the model has hooks, forwards of others, or is in training."""
        patches = model.__dict__.get(ATTRIBUTE)
        if patches is None:
            return None
        forwards = patches.put_in("forward")
        if any(_unlike_its_class(m, forwards.get(id(m))) for m in model.modules()):
            return None
        if self._made is None or not all(_same(now, then) for now, then in self._then):
            self._made, self._then = _copy(model, {}), []
            for module in model.modules():
                # transformers keeps caches and compiled calls in a model. Only its modules and its config count.
                names = ("_modules", "config") if hasattr(module, "get_compiled_call") else tuple(module.__dict__)
                then = {name: module.__dict__.get(name) for name in names if name not in _NOT_COPIED}
                self._then += [(module.__dict__, then), (module._modules, dict(module._modules))]
        return self._made


def compile_own_code(model: nn.Module, patches: Patches) -> None:
    """Let `generate` compile the stand-in of a model, if it is a model that `generate` can compile."""
    if not hasattr(type(model), "get_compiled_call"):
        return
    patches.set_attribute(model, STAND_IN, StandIn())
    patches.set_attribute(model, "get_compiled_call", MethodType(_get_compiled_call, model))


def _get_compiled_call(model: Any, *args: Any, **kwargs: Any) -> Any:
    keeps = model.__dict__.get(STAND_IN)
    found = None if keeps is None else keeps.of(model)
    return type(model).get_compiled_call(model if found is None else found, *args, **kwargs)


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return all(now.get(name) is value for name, value in then.items())


def _unlike_its_class(module: nn.Module, put_in: Any) -> bool:
    """Whether a call of the module does more than the forward of its class, apart from what was put in here."""
    attributes = module.__dict__
    if module.training or module._forward_hooks or module._forward_pre_hooks:
        return True
    if "_hf_hook" in attributes or attributes.get("_compiled_call_impl") is not None:
        return True
    return "forward" in attributes and attributes["forward"] != put_in


def _copy(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The stand-in of a module and of those within it. Modules that occur twice stay one."""
    if module not in known:
        made = known[module] = stand_in(module)
        for name in _NOT_COPIED:
            made.__dict__.pop(name, None)
        for name in _SHARED:
            made.__dict__[name] = module.__dict__[name]
        for name, child in module._modules.items():
            made._modules[name] = None if child is None else _copy(child, known)
    return known[module]

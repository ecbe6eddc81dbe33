"""What `generate` compiles of a patched model: a stand-in whose modules have no forward of their own.

Under torch.compile the modules of a patched model run the code of their classes, except for the attention function. So
a compiled step needs no replaced forward. But torch.compile checks each replaced forward, and what it refers to, before
every call. PyTorch 2.11 skips whole modules in these checks only if nothing in them is replaced.

Models keep values from call to call as attributes, such as the `rope_deltas` of Qwen2-VL: the prompt's step, which is
not compiled, sets what the compiled steps read. So the stand-in has the modules themselves where nothing is replaced
within, and a compiled call takes over the attributes of the other models of transformers, and gives them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from nanovllm.adapters.transformers.attn_implementation import CALL
from nanovllm.adapters.transformers.patches import ATTRIBUTE, Patches
from nanovllm.adapters.transformers.probe import hooked, stand_in

STAND_IN = "_nanovllm_stand_in"
"""Of a patched model: its `StandIn`."""
_NOT_COPIED = (
    CALL, ATTRIBUTE, STAND_IN, "_nanovllm_stack", "get_compiled_call", "_compiled_call", "_last_compile_config",
    "_nanovllm_sampling", "_get_logits_processor",
)  # fmt: skip
_KEPT_APART = frozenset([*_NOT_COPIED, "forward", *nn.Module().__dict__])
"""Of a stand-in and its model: the attributes that a call does not hand over."""
_REPLACED = (*_NOT_COPIED[:4], "forward")
_SHARED = "_parameters", "_buffers"


class StandIn:
    """A copy of a model's tree of modules, which shares its parameters and buffers, and has no replaced forward."""

    def __init__(self) -> None:
        self._made: nn.Module | None = None
        self._then: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._models: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of the models of transformers that were copied, and of their copies."""

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
            known: dict[nn.Module, nn.Module] = {}
            self._made, self._then, self._models = _copy(model, known), [], []
            for module, made in known.items():
                if made is module:
                    continue
                names: Iterable[str] = module.__dict__
                if hasattr(module, "get_compiled_call"):  # attributes are handed over at each call
                    names = "_modules", "config"
                    self._models.append((module.__dict__, made.__dict__))
                then = {name: module.__dict__.get(name) for name in names if name not in _NOT_COPIED}
                self._then += [(module.__dict__, then), (module._modules, dict(module._modules))]
        return self._made

    def with_state(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled call of the stand-in, as a call of the model: it reads and sets the attributes of the model."""
        models = self._models

        def call(*args: Any, **kwargs: Any) -> Any:
            for own, copied in models:
                _hand_over(own, copied)
            try:
                return compiled(*args, **kwargs)
            finally:
                for own, copied in models:
                    _hand_over(copied, own)

        return call


def compile_own_code(model: nn.Module, patches: Patches) -> None:
    """Let `generate` compile the stand-in of a model, if it is a model that `generate` can compile."""
    if not hasattr(type(model), "get_compiled_call"):
        return
    patches.set_attribute(model, STAND_IN, StandIn())
    patches.set_attribute(model, "get_compiled_call", MethodType(get_compiled_call, model))


def get_compiled_call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What a patched model has in place of the method of its class. A pickle has that method, by this name."""
    keeps = model.__dict__.get(STAND_IN)
    found = None if keeps is None else keeps.of(model)
    if found is None:
        return type(model).get_compiled_call(model, *args, **kwargs)
    compiled = type(model).get_compiled_call(found, *args, **kwargs)
    if compiled == found.__call__:  # transformers does not compile it
        return model.__call__
    return keeps.with_state(compiled)


def _hand_over(given: dict[str, Any], taken: dict[str, Any]) -> None:
    for name, value in given.items():
        # What is the same is not written: torch.compile would check the whole module again.
        if name not in _KEPT_APART and taken.get(name, taken) is not value:
            taken[name] = value


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return all(now.get(name) is value for name, value in then.items())


def _unlike_its_class(module: nn.Module, put_in: Any) -> bool:
    """Whether a call of the module does more than the forward of its class, apart from what was put in here."""
    attributes = module.__dict__
    if module.training or hooked(module) or "_hf_hook" in attributes:
        return True
    if attributes.get("_compiled_call_impl") is not None:
        return True
    return "forward" in attributes and attributes["forward"] != put_in


def _copy(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The stand-in of a module and of those within it: itself, if nothing is replaced there.

    Modules that occur twice stay one.
    """
    if module in known:
        return known[module]
    within = {name: None if child is None else _copy(child, known) for name, child in module._modules.items()}
    known[module] = made = module
    if not module.__dict__.keys().isdisjoint(_REPLACED) or within != module._modules:
        known[module] = made = stand_in(module)
        for name in _NOT_COPIED:
            made.__dict__.pop(name, None)
        for name in _SHARED:
            made.__dict__[name] = module.__dict__[name]
        made._modules.update(within)
    return made

"""What modules compute, found by running their own code on small inputs.

A probe runs the forward of a module's class on a stand-in: an object of that class with the module's attributes, and
with other parameters or submodules. The model itself is not touched.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn


def stand_in(module: nn.Module, **replaced: Any) -> nn.Module:
    """A shallow copy in eval mode, without hooks; `replaced` are parameters, submodules or plain attributes of it."""
    copy: Any = object.__new__(type(module))
    copy.__dict__ = {**module.__dict__, "training": False}
    for slot in ("forward", "_old_forward", "_hf_hook"):
        copy.__dict__.pop(slot, None)
    for slot in ("_parameters", "_modules", "_buffers"):
        copy.__dict__[slot] = dict(module.__dict__[slot])
    for slot in ("_forward_hooks", "_forward_pre_hooks"):  # its own, since code that is run may add some
        copy.__dict__[slot] = OrderedDict()
    for name, value in replaced.items():
        if name in copy._parameters:
            copy._parameters[name] = value
        elif name in copy._modules:
            copy._modules[name] = value
        else:
            copy.__dict__[name] = value
    return copy


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, without hooks."""
    with torch.no_grad():
        return type(module).forward(module, *args, **kwargs)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> torch.Tensor:
    """Normally distributed, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)


def same(got: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether a result is a tensor with the values wanted, relative to the largest."""
    if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
        return False
    bound = tolerance * max(1e-30, float(wanted.abs().max()))
    return bool(((got.double() - wanted.double()).abs() <= bound).all())


def plain_parameter(parameter: Any) -> str | None:
    """Why a parameter is not one that kernels read; None: it is."""
    if not isinstance(parameter, torch.Tensor):
        return "it has no such weight"
    if type(parameter) not in (nn.Parameter, torch.Tensor) or type(parameter.data) is not torch.Tensor:
        return f"its weight is a {type(parameter.data).__name__}"
    if parameter.is_meta:
        return "its weights are elsewhere (offloaded)"
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"its weight is {parameter.dtype}, not float16, bfloat16 or float32".replace("torch.", "")
    return None if parameter.is_contiguous() else "its weight is not contiguous"


def hooked(*modules: nn.Module) -> bool:
    """Whether calls of one of the modules run more than its forward. What moves tensors between devices is no more."""
    return any(m._forward_hooks or m._forward_pre_hooks or _of_accelerate(m) for m in modules)


def _of_accelerate(module: nn.Module) -> bool:
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and type(hook).__name__ != "AlignDevicesHook"


def is_linear(module: Any) -> bool:
    """Whether it is a plain linear layer, not a quantised or adapted one."""
    return type(module) is nn.Linear


def changed_linear(module: nn.Module) -> str | None:
    """Why a module with the sizes of a linear layer is left alone: it is another class. None: it is no such module."""
    if is_linear(module) or not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        return None
    return "no plain linear layer: quantised, adapted or of another kind"

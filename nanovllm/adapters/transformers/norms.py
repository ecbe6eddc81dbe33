"""RMS norms: recognised by what they compute, and replaced by the op `rms_norm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.probe import plain_parameter, random, run, same, stand_in
from nanovllm.adapters.transformers.selected import Call, differentiated

Tensor = torch.Tensor


@dataclass(frozen=True)
class NormKind:
    """What a norm computes: rms_norm(x) * weight; with `one_plus` rms_norm(x) * (1 + weight), in float32 throughout."""

    eps: float
    one_plus: bool

    def __call__(self, call: Call, x: Tensor, weight: Tensor) -> Tensor:
        if not self.one_plus:
            return call(x, weight, self.eps)
        # Gemma's: 1 + weight would lose most of a 16-bit weight, and the product is rounded once.
        return call(x.float(), 1.0 + weight.float(), self.eps).to(x.dtype)

    def fuses(self, dtype: torch.dtype) -> bool:
        """Whether an op that takes the weight in the dtype of x computes the same."""
        return not self.one_plus or dtype == torch.float32

    def weight(self, weight: Tensor) -> Tensor:
        """The weight as an op takes it, in a dtype that it `fuses`."""
        return 1.0 + weight if self.one_plus else weight


@dataclass
class Norms:
    """The norms of a model. Modules of one class, size and eps are probed once."""

    _known: dict[tuple[Any, ...], NormKind | None] = field(default_factory=dict)

    def kind(self, module: Any) -> NormKind | None:
        """What a module computes if it is an RMS norm over its input's last dimension; None: it is not."""
        if not isinstance(module, nn.Module) or module._modules or set(module._parameters) != {"weight"}:
            return None
        weight = module._parameters["weight"]
        small = {value for value in module.__dict__.values() if isinstance(value, float) and 0 < value < 0.1}
        if weight is None or weight.dim() != 1 or len(small) != 1:
            return None
        eps = small.pop()
        key = type(module), weight.shape[0], eps
        if key not in self._known:
            self._known[key] = _probed(module, weight.shape[0], eps)
        return self._known[key]


def _probed(module: nn.Module, size: int, eps: float) -> NormKind | None:
    x, weight = random(3, size) * 30 * eps**0.5, random(size, seed=1)  # at which eps shows
    try:
        got = run(stand_in(module, weight=nn.Parameter(weight)), x)
    except Exception:  # code of others, on input that it was not made for
        return None
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for one_plus in (False, True):
        if same(got, normed * (weight + one_plus)):
            return NormKind(eps, one_plus)
    return None


def unsuited_norm(module: nn.Module) -> str | None:
    """Why the kernels do not read a norm's weight."""
    return plain_parameter(module._parameters["weight"])


def norm_forward(kind: NormKind, call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the op."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight: Any = module.weight
        if len(args) != 1 or kwargs or args[0].dtype != weight.dtype or differentiated(module, args[0]):
            return original(module, *args, **kwargs)
        return kind(call, args[0], weight)

    return forward

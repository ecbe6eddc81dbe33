"""Which ops a model gets, and the provider of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.arguments import reject_unknown
from nanovllm.kernels import Kernels, all_ops, resolve_kernels
from nanovllm.kernels.op.priority import checked_priority
from nanovllm.wording import brief

OPS = (
    "rms_norm", "add_rms_norm", "qk_norm_rope", "rotary_embedding", "attention_dense", "attention_decode",
    "linear_silu_and_mul", "silu_and_mul", "gelu_and_mul", "linear", "embedding", "sample",
)  # fmt: skip
"""The ops that `apply` puts into a model."""


NOT_WANTED = "not among `ops`"
"""Why an op is left that the user did not ask for. Reports are silent on it."""


@dataclass(frozen=True)
class Call:
    """An op with the provider that was selected for it.

    Attributes:
        fn: the provider's function, which eager calls run.
        fresh: whether it is to be told that an argument keeps its memory.
    """

    name: str
    provider: str
    fn: Callable[..., Any]
    fresh: bool = False

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            # The reference is traced, and an inductor fuses it. Other providers are one node of the graph.
            return all_ops()[self.name].native(*args) if self.provider == "native" else all_ops()[self.name](*args)
        return self.fn(*args, fresh=True) if self.fresh else self.fn(*args)


@dataclass
class Selection:
    """The ops that the user wants.

    Attributes:
        wanted: op -> providers that the user named for it, best first; none: the usual selection.
        explicit: whether the user named ops. If not, an op whose provider is the reference is not put into the model.
    """

    wanted: Mapping[str, tuple[str, ...]]
    explicit: bool
    _kernels: dict[torch.device, Kernels] = field(default_factory=dict)

    @staticmethod
    def of(ops: str | Iterable[str] | Mapping[str, str | Iterable[str]] | None) -> Selection:
        """The argument `ops` of `apply`, checked. ValueError for an unknown op."""
        if ops is None:
            return Selection(dict.fromkeys(OPS, ()), explicit=False)
        if not isinstance(ops, Iterable):
            raise TypeError(f"ops: expected names of ops, or a mapping from these to providers, not {brief(ops)}")
        named: Mapping[str, Any] = (
            ops if isinstance(ops, Mapping) else dict.fromkeys([ops] if isinstance(ops, str) else ops, ())
        )
        if not named:
            raise ValueError(f"ops: names no op; leave it out, or name some of {', '.join(OPS)}")
        try:
            reject_unknown("ops", named, OPS)
        except TypeError as error:
            message = str(error).replace(" got an unknown argument", ": unknown op")
            known = "" if "known are" in message else f" The ops of a transformers model are {', '.join(OPS)}"
            raise ValueError(message + known) from None
        wanted = {op: (given,) if isinstance(given, str) else given for op, given in named.items()}
        checked = checked_priority({op: given for op, given in wanted.items() if given != ()}, "ops", all_ops())
        return Selection({op: tuple(checked.get(op, ())) for op in wanted}, explicit=True)

    def without(self, ops: Container[str]) -> Selection:
        """The same without some ops. ValueError if none would be left."""
        wanted = {op: providers for op, providers in self.wanted.items() if op not in ops}
        if not wanted:
            raise ValueError("exclude: it names every op that could be put in")
        return Selection(wanted, self.explicit)

    @property
    def described(self) -> str:
        """The ops, as the end of a sentence about what modules compute."""
        return f"{' or '.join(self.wanted)} computes" if self.explicit else "an op computes"

    def call(self, op: str, device: torch.device) -> Call | str:
        """The op on a device, or why it is left alone.

        Raises:
            ValueError: a provider that the user named is unknown, or not available.
        """
        if op not in self.wanted:
            return NOT_WANTED
        kernels = self.kernels(device)
        provider = kernels.provider(op)
        if provider.name == "native" and not self.explicit:
            return f"on {device.type} its provider is the PyTorch reference, as fast as the model's own code"
        fn = on_device(device, getattr(kernels, op))
        if all_ops()[op].reuses and provider.name != "native" and not provider.takes_fresh:
            return Call(op, provider.name, lambda *args: fn(*(copied(a) for a in args)))
        return Call(op, provider.name, fn, provider.takes_fresh)

    def kernels(self, device: torch.device) -> Kernels:
        """The providers of all ops on a device."""
        kernels = self._kernels.get(device)
        if kernels is None:
            priority = {op: providers for op, providers in self.wanted.items() if providers}
            kernels = self._kernels[device] = resolve_kernels(device, priority=priority, who="ops", in_engine=False)
        return kernels

    def function(self, op: str, weight: torch.Tensor, tokens: int) -> Callable[..., Any] | None:
        """The provider's function of an op, if it is faster than its parts with this weight and `tokens` tokens."""
        kernels = self.kernels(weight.device)
        provider = kernels.provider(op)
        counts = provider.num_tokens_fn
        if provider.name == "native" or (counts is not None and tokens not in counts(weight)):
            return None
        return getattr(kernels, op)

    def token_counts(self, op: str, weight: torch.Tensor) -> Container[int] | None:
        """For how many tokens a provider is to be called with this weight; None: any number."""
        counts = self._kernels[weight.device].provider(op).num_tokens_fn
        return None if counts is None else counts(weight)


def on_device(device: torch.device, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with this GPU as the current one, on which Triton launches whatever the tensors are on."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):
            return fn(*args, **kwargs)

    return call


def copied(value: Any) -> Any:
    """A copy of a tensor, for a function that may write to it; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def differentiated(module: torch.nn.Module, *tensors: torch.Tensor | None) -> bool:
    """Whether a call is part of training, for which the kernels have no backward pass: the module is in training mode,
    or gradients are on and a tensor or parameter requires one.
    """
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (*tensors, *module.parameters()))

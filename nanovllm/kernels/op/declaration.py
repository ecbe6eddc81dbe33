"""The declaration of an op: its reference, and all that tests, benchmarks and documentation derive from it.

An *op* is a function with a readable PyTorch reference, which is its provider `native`. Other *providers* of the same
op (Triton, CUDA C++, a library) register with its declaration. `registry.py` keeps all ops, `dispatch.py` makes an op
callable, and `selection.py` picks the provider.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.arguments import reject_unknown
from nanovllm.early_exit import is_interactive
from nanovllm.kernels.op.argument_check import ArgumentCheck
from nanovllm.kernels.op.inputs import Cost, Inputs
from nanovllm.kernels.op.provider import (
    NATIVE,
    KernelError,
    Provider,
    Support,
    anywhere,
    checked_reason,
    describe_call,
    reason_if_it_fails,
)
from nanovllm.kernels.op.records import Records
from nanovllm.kernels.op.registry import current_plugin

# Relative, of the order of vLLM's: a few roundings in the dtype.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
)


@dataclass(eq=False, repr=False)
class OpDeclaration:
    """What is declared of an op, and its providers.

    Attributes:
        native: the reference.
        parameters: the names of its parameters. At those of a signature torch.compile of PyTorch 2.11 breaks the graph.
        records: which parameters of the reference are records. The declaration names their fields one by one.
        arguments: the patterns of tensor arguments, as in `ArgumentCheck`.
        inputs: realistic inputs, for tests and benchmarks.
        cost: (arguments as the reference takes them) -> what such a call must do at least.
        tolerance: relative, per dtype, against the reference in float64.
        magnitude: errors are relative to at least this; for ops that round intermediate values larger than their
            result.
        cancels: a result may be small where its arguments are not, as a difference or the tail of a GELU. An error in a
            row of few elements is then relative to at least the arguments' magnitude.
        mutates: arguments that the op writes to; they are results like its return value.
        reuses: arguments whose memory a provider may use for its results: not to be read after the call.
        fuses: the ops that this one combines. If the user names a provider of one of these, an engine calls them
            separately.
        compare: (got, arguments, dtype) -> None or what is wrong, where comparing numbers does not decide.
        fake: the reference on tensors without data, where the reference itself cannot run on such.
        native_capturable: whether a CUDA graph can hold a call of the reference.
        exported: whether the op is in `torch.ops.nanovllm` as well, which takes tensors and numbers only.
        origin: the plugin that declares it; None: this package, or a program.
        resolved_calls: what plain calls have resolved so far. Emptied when a plugin's providers are taken back.
    """

    native: Callable[..., Any]
    _: KW_ONLY
    arguments: Mapping[str, str] = field(default_factory=dict)
    inputs: Inputs | None = None
    cost: Callable[..., Cost] | None = None
    tolerance: Mapping[torch.dtype, float] = field(default_factory=dict)
    magnitude: float = 0.0
    cancels: bool = False
    mutates: Sequence[str] = ()
    reuses: Sequence[str] = ()
    fuses: Sequence[str] = ()
    compare: Callable[[Any, dict[str, Any], torch.dtype], str | None] | None = None
    fake: Callable[..., Any] | None = None
    native_capturable: bool = True
    exported: bool = True
    origin: str | None = field(init=False)
    providers: dict[str, Provider] = field(init=False)
    resolved_calls: dict[tuple[Any, ...], Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.native.__name__
        self.signature = inspect.signature(self.native)
        self.parameters = tuple(self.signature.parameters)
        self.tolerance = {**TOLERANCE, **self.tolerance}
        self.records = Records(self.native)
        self.check = ArgumentCheck(self.name, self.arguments, self.records.flat)
        reject_unknown(f"arguments of {self.name}", self.arguments, self.records.flat.parameters)
        self.origin = current_plugin()
        self.providers = {NATIVE: Provider(NATIVE, self.native, capturable=self.native_capturable)}

    def provider(
        self,
        name: str,
        support: Support = anywhere,
        accepts: Callable[..., str | None] | None = None,
        architectures: str = "any",
        **capabilities: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: register a function as the provider `name` of this op.

        Args:
            support: device -> None, or why the provider cannot run there.
            accepts: the call's arguments -> None, or why the provider does not take them.
            architectures: where it runs, for people: "sm_80+".
            capabilities: further fields of `Provider`, such as `takes_out` or `num_tokens`.

        Raises:
            ValueError: the op has a provider of that name, the function does not take the op's parameters, or an
                argument is not what `Provider` takes.
            TypeError: an argument has another name.
        """
        if callable(name):  # the decorator without parentheses
            raise ValueError(
                f"op {self.name!r}: a provider needs a name: @{self.name}.provider('mine') above its function"
            )

        reject_unknown(f"provider {name!r}", capabilities, [f.name for f in dataclasses.fields(Provider)[2:]])

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            wanted, taken = (list(inspect.signature(f).parameters.values()) for f in (self.native, fn))
            generic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken)
            optional = [p for p in ("out", "concurrent", "fresh") if capabilities.get(f"takes_{p}")]
            expected = [*(p.name for p in wanted), *optional]
            if not generic and expected != [p.name for p in taken]:
                raise ValueError(
                    f"provider {name!r} of op {self.name!r}: expected the parameters "
                    f"({', '.join(expected)}), not ({', '.join(p.name for p in taken)})"
                )
            # A module may be imported before it is named as a plugin: the function's module says where it comes from.
            module = getattr(fn, "__module__", None) or ""
            origin = current_plugin() or (None if module.partition(".")[0] == "nanovllm" else module)
            self.add(Provider(name, fn, support, accepts, origin, architectures, **capabilities))
            return fn

        return register

    def add(self, provider: Provider) -> None:
        """Register a provider. One that a plugin adds without an origin gets the plugin as its origin.

        At a prompt and in a notebook it replaces one that was defined there: people run a cell again.
        """
        known = self.providers.get(provider.name)
        if known is not None and known.origin == provider.origin == "__main__" and is_interactive():
            self.resolved_calls.clear()
        elif known is not None:
            whose = f", from {known.origin}" if known.origin else ""
            raise ValueError(
                f"op {self.name!r} already has a provider {provider.name!r}{whose}; give yours another name"
            )
        support = reason_if_it_fails(provider.support, f"op {self.name!r}, provider {provider.name!r}")
        origin = provider.origin or current_plugin()
        self.providers[provider.name] = dataclasses.replace(provider, support=support, origin=origin)

    def bind(self, arguments: Mapping[str, Any]) -> inspect.BoundArguments:
        """Arguments by name, such as the op's inputs are, as its functions take them: with records in place of their
        fields.
        """
        return self.signature.bind(**self.records.group(arguments))

    def refusal(self, provider: Provider, *args: Any, **kwargs: Any) -> str | None:
        """Why a provider does not take a call; None: it does.

        Raises:
            KernelError: its `accepts` fails, or gives something else.
        """
        if provider.accepts is None:
            return None
        try:
            return checked_reason(provider.accepts(*args, **kwargs))
        except Exception as e:
            where = f"op {self.name!r}, provider {provider.name!r}, called with ({describe_call(args, kwargs)})"
            raise KernelError(f"{where}: its accepts function failed: {type(e).__name__}: {e}") from e

    def require(self, name: str, device: torch.device, who: str) -> Provider:
        """The op's provider of that name; a ValueError that names `who` if it cannot run on `device`."""
        provider = self.providers[name]
        reason = provider.support(device)
        if reason is not None:
            raise ValueError(f"{who} names {name!r}, which is not available for {self.name!r}: {reason}")
        return provider

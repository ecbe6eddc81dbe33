"""From a module to a graph of ATen operators, by torch.export: nothing is computed, so tensors may be on the meta device."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

SUPPORTED = (
    "supported are an nn.Module, a torch.fx.GraphModule, a function of tensors or a torch.export.ExportedProgram, with fixed "
    "shapes, no branch on a tensor's value, and operators of ATen or ones that are registered with a fake implementation"
)


class TraceError(ValueError):
    """A module cannot be turned into a graph; the message has the reason and what is supported."""


class _Wrapped(torch.nn.Module):
    """torch.export takes modules only."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def trace(
    target: torch.nn.Module | torch.export.ExportedProgram | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> torch.export.ExportedProgram:
    """The graph of `target(*args, **kwargs)` for arguments of these shapes, dtypes and devices.

    Operators stay those that eager PyTorch runs (no decomposition), so that a node is a kernel or a view.

    Raises:
        TraceError: it cannot be traced.
    """
    if isinstance(target, torch.export.ExportedProgram):
        return _fixed(target, "the exported program")
    name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", repr(target))
    if not callable(target):
        raise TraceError(f"cannot trace {target!r:.80}: it is neither a module nor a function; {SUPPORTED}")
    module = target if isinstance(target, torch.nn.Module) else _Wrapped(target)
    try:
        with torch.no_grad(), _silence():
            program = torch.export.export(module, tuple(args), dict(kwargs or {}), strict=False)
    except Exception as e:  # the tracer raises many types, and also passes on whatever the module raises
        raise TraceError(f"cannot trace {name}: {_reason(e)}; {SUPPORTED}") from e
    return _fixed(program, name)


def _fixed(program: torch.export.ExportedProgram, name: str) -> torch.export.ExportedProgram:
    """The program if all of its shapes are numbers."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(t, torch.Tensor) and not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
                shape = ", ".join(map(str, t.shape))
                raise TraceError(
                    f"cannot trace {name}: {node.name} ({node.target}) has the shape [{shape}]; {SUPPORTED}"
                )
    return program


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the tracer from printing half a graph and a traceback before it raises: the exception says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """The first line that says something; the tracer's messages go on for pages."""
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        kind = "it branches on a tensor's value, or its shapes follow from one"
    if kind == "UnsupportedOperatorException":
        return f"the operator {str(error).split()[0]} has no fake implementation (torch.library.register_fake gives it one)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{kind}: {lines[0][:300]}" if lines else kind

"""From a module to a graph of ATen operators, by torch.export. Nothing is computed; meta tensors will do."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.wording import brief

SUPPORTED = (
    "supported are an nn.Module, a torch.fx.GraphModule, a function of tensors or a torch.export.ExportedProgram, with "
    "fixed shapes, no branch on a tensor's value, and operators of ATen or ones that are registered with a fake "
    "implementation"
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
        raise TraceError(f"cannot trace {brief(target)}: it is neither a module nor a function; {SUPPORTED}")
    module = target if isinstance(target, torch.nn.Module) else _Wrapped(target)
    try:
        with torch.no_grad(), _silence():
            program = torch.export.export(module, tuple(args), dict(kwargs or {}), strict=False)
    except Exception as e:  # the tracer raises many types, and also passes on whatever the module raises
        raise TraceError(f"cannot trace {name}: {_reason(e)}{place_of(e)}; {SUPPORTED}") from e
    return _fixed(program, name)


def _fixed(program: torch.export.ExportedProgram, name: str) -> torch.export.ExportedProgram:
    """The program if all of its tensors are strided ones of their own, with shapes that are numbers."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(t, torch.Tensor):
                continue
            where = f"cannot trace {name}: {node.name} ({node.target})"
            if unusual := _unusual(t):
                raise TraceError(f"{where} is {unusual}, whose memory is not known; {SUPPORTED}")
            if not all(isinstance(n, int) for n in (*t.shape, *t.stride())):
                raise TraceError(f"{where} has the shape [{', '.join(map(str, t.shape))}]; {SUPPORTED}")
    return program


def _unusual(t: torch.Tensor) -> str | None:
    """The kind of tensor, if it has no strided memory of its own."""
    if t.layout is not torch.strided:
        return f"a tensor of layout {str(t.layout).removeprefix('torch.')}"
    if torch._C._functorch.is_batchedtensor(t):
        return "a tensor within torch.vmap"
    try:
        t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of some kind
        return f"a {type(t).__name__} without a storage"
    return None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the tracer from printing half a graph and a traceback; the exception says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """The first line of the message with a content; the tracer's messages have pages."""
    kind = type(error).__name__
    if kind == "UnsupportedOperatorException":
        operator = str(error).split()[0]
        return f"the operator {operator} has no fake implementation (torch.library.register_fake gives it one)"
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        kind = "it branches on a tensor's value, or its shapes follow from one"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), None)
    return f"{kind}: {first[:300]}" if first else kind


_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parents[1], Path(traceback.__file__).parent)


def place_of(error: BaseException) -> str:
    """ " (file.py:12)", the user's own line at which an error arose; "" if it arose only in PyTorch and here."""
    place = ""
    cause: BaseException | None = error
    while cause is not None:
        for frame, line in traceback.walk_tb(cause.__traceback__):
            path = Path(frame.f_code.co_filename)
            if path.suffix == ".py" and not any(path.is_relative_to(root) for root in _NOT_THE_USERS):
                inside = path.resolve().is_relative_to(Path.cwd())
                place = f" ({path.resolve().relative_to(Path.cwd()) if inside else path}:{line})"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return place

"""The five ways of a lesson on a device: what to call, or why it cannot run there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.op.availability import refused_by_interpreter, triton_support
from nanovllm.lab import cuda_build
from nanovllm.lab.lesson import WAYS, Lesson


@dataclass(frozen=True)
class Way:
    """One way. `call` takes the arguments of the lesson; it is None if `reason` says why."""

    name: str
    call: Callable[..., torch.Tensor] | None
    reason: str | None = None


def ways(lesson: Lesson, device: torch.device, dtype: torch.dtype, names: Sequence[str] = WAYS) -> list[Way]:
    """The ways of these names. Compiles the CUDA C++ if that was not done before."""
    makers: dict[str, Callable[[], Way]] = {
        "plain": lambda: Way("plain", lesson.plain),
        "torch": lambda: Way("torch", lesson.own),
        "compile": lambda: Way("compile", _CompiledPerShape(lesson.compiled or lesson.plain)),
        "cuda": lambda: _cuda(lesson, device),
        "triton": lambda: _triton(lesson, device, dtype),
    }
    return [makers[name]() for name in names]


def check_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """The given names in the order of `WAYS`; all for None. Raises ValueError if a name is none of them."""
    for name in names or ():
        if name not in WAYS:
            raise ValueError(f"way: expected one of {', '.join(WAYS)}, not {name!r}")
    return tuple(w for w in WAYS if not names or w in names)


class _CompiledPerShape:
    """torch.compile of a function, anew for each shape, so that the compiler knows the shape."""

    def __init__(self, fn: Callable[..., torch.Tensor]) -> None:
        self._fn = fn
        self._by_shape: dict[Any, Callable[..., torch.Tensor]] = {}

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        key = tuple((a.shape, a.dtype, a.device) for a in args)
        if key not in self._by_shape:
            torch._dynamo.reset()  # else PyTorch stops compiling after eight shapes
            # On a CPU the profiler sees compiled kernels only with this option.
            options: Any = {"cpp.enable_kernel_profile": True} if args[0].device.type == "cpu" else None
            self._by_shape = {key: torch.compile(self._fn, dynamic=False, fullgraph=True, options=options)}
        return self._by_shape[key](*args)


def _cuda(lesson: Lesson, device: torch.device) -> Way:
    reason = cuda_build.cuda_reason(device)
    if reason is not None:
        return Way("cuda", None, reason)
    try:
        library = cuda_build.load(lesson.name, torch.cuda.get_device_capability(device))
    except (RuntimeError, OSError) as error:
        return Way("cuda", None, f"it did not compile: {' / '.join(str(error).strip().splitlines()[:3])}")

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(inputs[0].device):
            return lesson.run_cuda(library, *inputs, stream=torch.cuda.current_stream().cuda_stream)

    return Way("cuda", call)


def _triton(lesson: Lesson, device: torch.device, dtype: torch.dtype) -> Way:
    reason = triton_support(device)
    if reason is None and lesson.name == "matmul":
        reason = refused_by_interpreter(torch.empty(0, dtype=dtype, device=device))
    return Way("triton", None, reason) if reason else Way("triton", lambda *args: lesson.launch(*args).run())

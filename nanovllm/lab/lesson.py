"""What a lesson of the lab consists of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.kernels import Cost

WAYS = ("plain", "torch", "compile", "cuda", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as lab.cuh has them
LARGEST_DIM = 32768  # a row is held by one Triton program


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel. It can be run, or only compiled, also for a GPU that is not here.

    Attributes:
        args: the arguments that are not constants, in order: tensors, integers, floats.
        constants: the tl.constexpr parameters.
        options: num_warps, num_stages.
        result: the tensor that the kernel writes.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    result: torch.Tensor
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)

    def run(self) -> torch.Tensor:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)
        return self.result


Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Lesson:
    """A function and its five ways. Every way takes the tensors of `inputs` and returns the result in their dtype.

    Attributes:
        formula: the function, for people.
        dtypes: what the ways take, the default first. On a CPU float32 is the default, and always taken.
        inputs: (rows, dim, dtype, device, generator) -> random arguments, the first of them [rows, dim].
        exact: the function in float64, for arguments in float64. Row r of the result depends on row r of the first
            argument only.
        plain: written out with elementary operations of PyTorch.
        own: what PyTorch has for it.
        cuda: (the compiled library of <name>.cu, *arguments) -> result.
        launch: arguments -> the launch of the Triton kernel.
        cost: (dim, bytes of an element) -> what a square call must move and compute at least.
        compiled: what torch.compile gets; `plain` if None.
        plain_limit: the largest dim at which `plain` is timed, and why.
        interpreted_limit: the largest dim that Triton's interpreter is asked for.
    """

    name: str
    formula: str
    dtypes: tuple[torch.dtype, ...]
    inputs: Callable[[int, int, torch.dtype, torch.device, torch.Generator], Inputs]
    exact: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    own: Callable[..., torch.Tensor]
    cuda: Callable[..., torch.Tensor]
    launch: Callable[..., Launch]
    cost: Callable[[int, int], Cost]
    compiled: Callable[..., torch.Tensor] | None = None
    plain_limit: tuple[int, str] | None = None
    interpreted_limit: int = 256


def lesson(name: str) -> Lesson:
    """The lesson of a name: gelu, softmax, layernorm or matmul."""
    from importlib import import_module

    if name not in NAMES:
        raise ValueError(f"lesson: expected one of {', '.join(NAMES)}, not {name!r}")
    return import_module(f"nanovllm.lab.{name}").LESSON


NAMES = ("gelu", "softmax", "layernorm", "matmul")


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def normal(*shape: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Random numbers. Never zeros: the bits that a kernel computes with decide its power, hence its clock."""
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def call_cuda(function: Any, first: torch.Tensor, *args: Any) -> None:
    """Call a launcher of a lesson's library on the current stream of `first`'s device. Tensors go as pointers.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    with torch.cuda.device(first.device):
        stream = torch.cuda.current_stream().cuda_stream
        error = function(*(_c_value(a) for a in args), ctypes.c_void_p(stream))
    if error:
        raise RuntimeError(f"{function.__name__}: the launch failed with CUDA error {error}")


def _c_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return value

"""What a lesson of the lab consists of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from nanovllm.kernels import Cost

NAMES = ("gelu", "softmax", "layernorm", "matmul")
WAYS = ("plain", "torch", "compile", "cuda", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
LARGEST_DIM = 32768  # a row is held by one Triton program
_DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as lab.cuh has them

Inputs = tuple[torch.Tensor, ...]


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


def normal(*shape: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Random numbers. Never zeros: the bits that a kernel computes with decide its power, hence its clock."""
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def one_matrix(rows: int, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    return (normal(rows, dim, dtype=dtype, device=device, generator=generator),)


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A function and its five ways. Every way takes the tensors of `inputs` and returns the result in their dtype.

    Attributes:
        formula: the function, for people.
        exact: the function in float64, for arguments in float64. Row r of the result depends on row r of the first
            argument only.
        plain: the function written out with elementary operations of PyTorch.
        own: PyTorch's own function.
        launch: arguments -> the launch of the Triton kernel.
        cuda_arguments: (*arguments, result) -> the arguments of `lab_<name>` in <name>.cu, without dtype and stream.
        cost: (dim, bytes of an element) -> what a square call must move and compute at least.
        inputs: (rows, dim, dtype, device, generator) -> random arguments, the first of them [rows, dim].
        dtypes: what the ways take, the default first. On a CPU float32 is the default, and always taken.
        compiled: the function for torch.compile; None: `plain`.
        plain_limit: the largest dim at which `plain` is timed, and why.
        interpreted_limit: the largest dim for Triton's interpreter.
    """

    name: str
    formula: str
    exact: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    own: Callable[..., torch.Tensor]
    launch: Callable[..., Launch]
    cuda_arguments: Callable[..., tuple[Any, ...]]
    cost: Callable[[int, int], Cost]
    inputs: Callable[[int, int, torch.dtype, torch.device, torch.Generator], Inputs] = one_matrix
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    compiled: Callable[..., torch.Tensor] | None = None
    plain_limit: tuple[int, str] | None = None
    interpreted_limit: int = 256

    def run_cuda(self, library: ctypes.CDLL, *inputs: torch.Tensor, stream: int | None = None) -> torch.Tensor:
        """Call the launcher of the compiled <name>.cu.

        Args:
            stream: the CUDA stream; None: the default one.

        Raises:
            RuntimeError: CUDA refused the launch.
        """
        result = torch.empty(inputs[0].shape[0], inputs[-1].shape[-1], dtype=inputs[0].dtype, device=inputs[0].device)
        arguments = self.cuda_arguments(*inputs, result)
        assert all(a.is_contiguous() for a in arguments if isinstance(a, torch.Tensor))
        values = (ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments)
        function = getattr(library, f"lab_{self.name}")
        error = function(*values, _DTYPE_NUMBERS[result.dtype], ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"{function.__name__}: the launch failed with CUDA error {error}")
        return result


def lesson(name: str) -> Lesson:
    """The lesson of a name: gelu, softmax, layernorm or matmul."""
    if name not in NAMES:
        raise ValueError(f"lesson: expected one of {', '.join(NAMES)}, not {name!r}")
    return import_module(f"nanovllm.lab.{name}").LESSON


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")

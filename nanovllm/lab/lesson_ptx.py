"""The PTX of the Triton and CUDA C++ kernels of a lesson, for a GPU that need not be here."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from nanovllm.lab import cuda_build
from nanovllm.lab.lesson import Launch, Lesson
from nanovllm.lab.ptx import Reading, kernels_of, read

_TRITON_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_CUDA_TYPES = {torch.float32: "f", torch.float16: "6__half", torch.bfloat16: "13__nv_bfloat16"}  # as C++ mangles them
_MATMUL_SHARED = 3 * 2 * (128 * 40 + 32 * 136)  # three stages of padded tiles, matmul.cu


def triton_reading(lesson: Lesson, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[str, Reading]:
    """(PTX, reading) of what Triton compiles for a square call. Errors: as `compile_launch`."""
    _triton()  # before the kernel is imported
    small = lesson.inputs(2, 2, dtype, torch.device("cpu"), torch.Generator())
    inputs = (torch.empty([dim] * t.dim(), dtype=t.dtype, device="meta") for t in small)
    return compile_launch(lesson.launch(*inputs), capability)


def compile_launch(launch: Launch, capability: tuple[int, int]) -> tuple[str, Reading]:
    """(PTX, reading) of what Triton compiles for a launch. Nothing runs, and no GPU is needed.

    Args:
        launch: its tensors may be on the meta device. They count as aligned to 16 bytes, as PyTorch allocates them.
        capability: what to compile for, such as (9, 0).

    Raises:
        ValueError: Triton is not installed, or it interprets and so compiles nothing.
        RuntimeError: the compiler failed.
    """
    _triton()
    from triton.backends.nvidia.compiler import get_ptxas

    from nanovllm.kernels.triton.offline_compiler import compile_kernel

    number = 10 * capability[0] + capability[1]
    compiled = compile_kernel(launch.kernel, _arguments(launch), number, **launch.options)
    ptx = compiled.asm["ptx"]
    name, body = next(iter(kernels_of(ptx).items()))
    assembler = Path(get_ptxas(number).path)  # Triton's own knows this version of PTX
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(ptx)
        # The architecture of the PTX, with its suffix: sm_90a.
        architecture = next(line.split()[1].rstrip(",") for line in ptx.splitlines() if line.startswith(".target"))
        report = cuda_build.assemble(assembler, path, architecture)
    return ptx, read(name, body, report, 32 * compiled.metadata.num_warps, compiled.metadata.shared)


def _triton() -> Any:
    try:
        import triton
    except ImportError:
        raise ValueError("Triton is not installed; pip install triton (Linux)") from None
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: Triton interprets, and compiles nothing; unset it to see PTX")
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # Triton's default is what is wanted
    return triton


def cuda_reading(lesson: Lesson, dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[str, Reading]:
    """(PTX, reading) of the variant of <name>.cu that a square call takes.

    Raises:
        RuntimeError: no nvcc, or it failed.
    """
    ptx, report = cuda_build.ptx_and_report(lesson.name, capability)
    size = torch.empty(0, dtype=dtype).element_size()
    vectors = (dim * dim if lesson.name == "gelu" else dim) * size % 16 == 0
    width = 16 // size if vectors else 1
    mangled = f"I{_CUDA_TYPES[dtype]}L{f'b{int(vectors)}' if lesson.name == 'matmul' else f'i{width}'}E"
    name, body = next((n, b) for n, b in kernels_of(ptx).items() if mangled in n)
    dynamic = _MATMUL_SHARED if lesson.name == "matmul" else 0
    first = ptx.rfind("\n", 0, ptx.find(".entry")) + 1
    alone = f"{ptx[:first].rstrip()}\n\n.visible {body}\n}}\n"  # without the other kernels of the file
    return alone, read(name, body, report, _cuda_threads(lesson.name, dim, width), dynamic)


def _cuda_threads(name: str, dim: int, width: int) -> int:
    """Threads of a block, as the .cu files choose them."""
    if name in ("gelu", "matmul"):
        return 256
    threads = 32
    while threads < 512 and threads * width * 2 < dim:
        threads *= 2
    return threads


def _arguments(launch: Launch) -> dict[str, Any]:
    """What Triton's launcher knows of each argument when it compiles: types, divisibility by 16, and ones."""
    from nanovllm.kernels.triton.offline_compiler import Pointer, Scalar

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Pointer(_TRITON_TYPES[value.dtype])
        if isinstance(value, int):
            return 1 if value == 1 else Scalar(value % 16 == 0, "i32" if value < 2**31 else "i64")
        return "fp32"

    names = [p.name for p in launch.kernel.params if p.name not in launch.constants]
    return {**launch.constants, **dict(zip(names, map(argument, launch.args), strict=True))}

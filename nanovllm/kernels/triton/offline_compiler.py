"""Compiles Triton kernels for a GPU that need not be here.

Triton ships its own assembler and `cuobjdump`, so neither a GPU nor a CUDA toolkit is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resources:
    """What one program of a kernel takes, as the compiler reports it.

    Attributes:
        shared: bytes of shared memory a block.
        registers: 32-bit registers a thread.
        spilled: bytes of local memory a thread: registers that found no room, and arrays.
    """

    shared: int
    registers: int
    spilled: int


@dataclass(frozen=True)
class Scalar:
    """An integer argument that is not known when the kernel is compiled.

    Attributes:
        divisible: by 16, which Triton compiles a kernel for, since it proves addresses aligned.
    """

    divisible: bool = True
    type: str = "i32"


@dataclass(frozen=True)
class Pointer:
    """A tensor argument, aligned to 16 bytes; `type` is Triton's name of the element, such as "bf16"."""

    type: str


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor, whose blocks the Tensor Memory Accelerator moves."""

    type: str
    block: tuple[int, ...]


def compile_kernel(kernel: Any, arguments: Mapping[str, Any], capability: int, **options: Any) -> Any:
    """Compile a `triton.jit` function; nothing runs. Returns Triton's compiled kernel, with `asm` and `metadata`.

    Args:
        kernel: the function.
        arguments: every parameter that has no default: a `Pointer`, `Scalar` or `Descriptor`, the type "fp32", or the
            value of a constant.
        capability: the compute capability as a number: 90 for 9.0.
        options: num_warps, num_stages and such.

    Raises:
        ValueError: a parameter is missing or unknown.
        RuntimeError: the compiler gave up, for example because shared memory does not suffice.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [p.name for p in kernel.params]
    arguments = {**{p.name: p.default for p in kernel.params if p.has_default}, **arguments}
    if set(names) != set(arguments):
        raise ValueError(f"arguments: expected {', '.join(names)}; differing: {sorted(set(names) ^ set(arguments))}")
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, Pointer):
            signature[name] = "*" + value.type
        elif isinstance(value, Scalar):
            signature[name] = value.type
        elif isinstance(value, Descriptor):
            signature[name] = f"tensordesc<{value.type}{list(value.block)}>"
        elif value == "fp32" and not kernel.params[i].is_constexpr:
            signature[name] = value
        else:
            signature[name], constants[(i,)] = "constexpr", value
        if isinstance(value, Pointer) or isinstance(value, Scalar) and value.divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(kernel: Any, arguments: Mapping[str, Any], capability: int, **options: Any) -> Resources:
    """What one program of a kernel takes. Arguments and errors as of `compile_kernel`."""
    binary = compile_kernel(kernel, arguments, capability, **options)
    return Resources(binary.metadata.shared, *_registers_and_spills(binary.asm["cubin"]))


def _registers_and_spills(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) a thread, as the assembler allotted them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout)
    if not found:
        raise RuntimeError(f"cuobjdump reported no resources: {done.stdout[:200]}")
    registers, stack, local = (int(n) for n in found.groups())
    return registers, stack + local

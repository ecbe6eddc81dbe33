"""Launches recorded on CPU tensors and compiled without a GPU: what is compiled is what would be launched there.

The same constants, warps and properties of arguments count (a tensor's alignment, an integer's divisibility by 16).
"""

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from nanovllm.kernels.testing import gpu_compile
from nanovllm.kernels.testing.gpu_compile import compiled, specialised

__all__ = [
    "CAPABILITIES", "compiled", "in_turn", "launches_of", "parameter", "recorded", "resources", "specialised",
    "tensors", "wide",
]  # fmt: skip
CAPABILITIES = [80, 90, 100]
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def check_grid(grid):
    assert all(0 < size < 2**31 for size in grid[:1]) and all(0 < size < 2**16 for size in grid[1:]), grid


@contextmanager
def recorded(launches):
    """Within the block every launch of a kernel is appended to `launches` as (kernel, arguments, options)."""
    with gpu_compile.recorded(launches, check_grid):
        yield


def launches_of(cases):
    """(name, kernel, arguments, options) of every launch of the calls in `cases`, (name, call)."""
    launches = []
    with recorded(launches):
        for name, call in cases:
            before = len(launches)
            call()
            assert len(launches) > before, f"{name} launched nothing"
            launches[before:] = [(name, *launch) for launch in launches[before:]]
    return launches


def in_turn(launches, turn):
    """The launches, (name, kernel, ...), of a slice, and the first one of each kernel that has none in it."""
    chosen = launches[turn]
    names = {kernel.__name__ for _, kernel, *_ in chosen}
    first = {launch[1].__name__: launch for launch in reversed(launches)}
    return chosen + [launch for name, launch in first.items() if name not in names]


def resources(binary, tmp_path):
    """(registers, bytes of stack, bytes of local memory) a thread, as the assembler allotted them."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    done = subprocess.run(
        [_TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return tuple(int(n) for n in found.groups())


def wide(ptx, what):
    """How many 16-byte accesses of device memory there are; `what` is "ld" or "st"."""
    return len(re.findall(rf"{what}\.global[a-zA-Z0-9_.:]*\.(?:v4\.b32|v2\.b64|v4\.f32|v8\.b16)", ptx))


def tensors(dtype):
    """A maker of tensors without contents."""
    return lambda *shape: torch.empty(shape, dtype=dtype)


def parameter(tensor):
    """tensor as a module's weight, which kernels may read early."""
    return torch.nn.Parameter(tensor, requires_grad=False)

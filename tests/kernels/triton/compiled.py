"""Launches recorded on CPU tensors and compiled without a GPU: what is compiled is what would be launched there.

The same constants, warps and properties of arguments count (a tensor's alignment, an integer's divisibility by 16).
"""

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

CAPABILITIES = [80, 90, 100]
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@contextmanager
def recorded(launches):
    """Within the block every launch of a kernel is appended to `launches` as (kernel, arguments, options)."""
    original = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        assert all(0 < size < 2**31 for size in grid[:1]) and all(0 < size < 2**16 for size in grid[1:]), grid
        named = {p.name: value for p, value in zip(self.params, args)}
        named |= {p.name: options.pop(p.name) for p in self.params if p.name in options}
        launches.append((self, tuple(named.get(p.name, p.default) for p in self.params), options))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


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


def specialised(kernel, args):
    """What Triton compiles a kernel for, of a launch's arguments: (types, constants, attributes)."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "layout"):  # Gluon's descriptors
            signature[parameter.name] = mangle_type(value)
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def compiled(kernel, args, options, capability):
    """What Triton would compile for this launch."""
    source_of = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_of
    source = source_of(kernel, *specialised(kernel, args))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


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

"""Every launch that `linear_bias_act` and `gated_mlp` make, compiled for sm_80, sm_90 and sm_100 without a GPU.

As in `test_triton_ops_compile`: the wrappers run on CPU tensors with the launch replaced by a recorder.
"""

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.gemm import products
from nanovllm.kernels.triton.gemm.products import gated_mlp, linear_bias_act
from tests.kernels.sass_wgmma import machine_code, touched_in_flight

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Shared memory a program may have: on sm_80 what the smallest GPU of compute capability 8 has.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@contextmanager
def recorded(launches):
    """Within the block every launch of a kernel is appended to `launches` as (kernel, arguments, options)."""
    original = JITFunction.run

    def run(self, *args, grid, warmup, **options):
        assert all(0 < size < 2**31 for size in grid[:1]) and all(0 < size < 2**16 for size in grid[1:]), grid
        launches.append((self, args, options))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


def compiled(kernel, args, options, capability):
    """What Triton would compile for this launch."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(binary, tmp_path):
    """(registers, bytes of stack, bytes of local memory) a thread, as the assembler allotted them."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    done = subprocess.run(
        [TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return tuple(int(n) for n in found.groups())


def calls(dtype, features, monkeypatch):
    """(name, launches) of calls at the shapes of Qwen3-0.6B and 8B, and at odd and transposed ones."""
    monkeypatch.setattr(products, "features", lambda device: features)
    monkeypatch.setattr(products, "num_sms", lambda x: 132)

    def t(*shape):
        return torch.empty(shape, dtype=dtype)

    for m in (1, 16, 64, 256, 2048):
        for n, k in ((4096, 1024), (1024, 3072)) + (((6144, 4096),) if m >= 256 else ()):
            yield f"linear {m}x{k} {n}", lambda m=m, n=n, k=k: linear_bias_act(t(m, k), t(n, k), t(n), "gelu")
        yield f"gated_mlp {m}", lambda m=m: gated_mlp(t(m, 1024), t(6144, 1024), t(1024, 3072))
    yield "gated_mlp 8192", lambda: gated_mlp(t(8192, 4096), t(2 * 12288, 4096), t(4096, 12288))
    if features[1] and dtype != torch.float32:
        yield "silu_and_mul of many", lambda: products.silu_and_mul_of_many(t(8192, 1024), t(6144, 1024))
    yield "sums of few rows", lambda: linear_bias_act(t(1, 1024), t(256, 1024), t(256), "silu")
    for m in (1, 3, 40, 300):
        yield f"odd {m}", lambda m=m: linear_bias_act(t(m, 100), t(3700, 100), t(3700), "silu")
        yield f"odd gated_mlp {m}", lambda m=m: gated_mlp(t(m, 100), t(740, 100), t(100, 370))
        yield f"transposed {m}", lambda m=m: linear_bias_act(t(m, 128), t(128, 512).T, None, "silu")


@pytest.mark.parametrize("capability, features", [(80, (False, False)), (90, (True, True)), (100, (True, True))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_spills_and_wide_loads(dtype, capability, features, tmp_path, monkeypatch):
    seen, kernels = set(), set()
    for name, call in calls(dtype, features, monkeypatch):
        launches = []
        with recorded(launches):
            call()
        assert launches, f"{name} launched nothing"
        for kernel, args, options in launches:
            fixed = tuple(
                v for p, v in zip(kernel.params, args) if p.is_constexpr or v is None or (type(v) is int and v == 1)
            )
            key = kernel.__name__, fixed, tuple(v % 16 == 0 for v in args if type(v) is int), tuple(options.items())
            if key in seen:
                continue
            seen.add(key)
            kernels.add(kernel.__name__)
            binary = compiled(kernel, args, options, capability)
            registers, stack, local = resources(binary, tmp_path)
            what = f"{name}, {kernel.__name__} {fixed}"
            assert stack == local == 0, f"{what}: {registers} registers, {stack} stack, {local} local"
            assert binary.metadata.shared <= SHARED[capability], (
                f"{what}: {binary.metadata.shared} bytes of shared memory"
            )
            ptx = binary.asm["ptx"]
            assert ("griddepcontrol.wait" in ptx) == features[0], what
            if kernel.__name__ == "tma_kernel":
                assert "cp.async.bulk.tensor" in ptx, what
            elif "odd" not in name and "transposed" not in name:
                assert re.search(
                    r"ld\.global[a-zA-Z0-9_.:]*\.v4\.b32|cp\.async\.cg\.shared\.global[^,]*,[^,]*, 0x10", ptx
                ), what
            if capability == 90 and dtype != torch.float32 and kernel.__name__ in ("tma_kernel", "tile_kernel"):
                assert "wgmma" in ptx, what
            if "wgmma" in ptx:
                assert touched_in_flight(machine_code(binary)) == [], what
    assert kernels >= {"stream_kernel", "add_splits"}
    assert ("tma_kernel" in kernels) == (features[1] and dtype != torch.float32)
    assert "tile_kernel" in kernels

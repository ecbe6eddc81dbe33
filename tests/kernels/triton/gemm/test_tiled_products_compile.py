"""Every launch that `linear_bias_act` and `gated_mlp` make, compiled for sm_80, sm_90 and sm_100 without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.gemm import tiled_products
from nanovllm.kernels.triton.gemm.tiled_products import gated_mlp, linear_bias_act
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.compiled import compiled, in_turn, launches_of, resources, tensors

# Shared memory a program may have: on sm_80 what the smallest GPU of compute capability 8 has.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def calls(dtype, features, monkeypatch):
    """(name, launches) of calls at the shapes of Qwen3-0.6B and 8B, and at odd and transposed ones."""
    monkeypatch.setattr(tiled_products, "features", lambda device: features)
    monkeypatch.setattr(tiled_products, "num_sms", lambda x: 132)

    t = tensors(dtype)
    for m in (1, 16, 64, 256, 2048):
        for n, k in ((4096, 1024), (1024, 3072)) + (((6144, 4096),) if m >= 256 else ()):
            yield f"linear {m}x{k} {n}", lambda m=m, n=n, k=k: linear_bias_act(t(m, k), t(n, k), t(n), "gelu")
        yield f"gated_mlp {m}", lambda m=m: gated_mlp(t(m, 1024), t(6144, 1024), t(1024, 3072))
    yield "gated_mlp 8192", lambda: gated_mlp(t(8192, 4096), t(2 * 12288, 4096), t(4096, 12288))
    if features[1] and dtype != torch.float32:
        yield "silu_and_mul of many", lambda: tiled_products.silu_and_mul_of_many(t(8192, 1024), t(6144, 1024))
    yield "sums of few rows", lambda: linear_bias_act(t(1, 1024), t(256, 1024), t(256), "silu")
    for m in (1, 40, 300):
        yield f"odd {m}", lambda m=m: linear_bias_act(t(m, 100), t(3700, 100), t(3700), "silu")
        yield f"odd gated_mlp {m}", lambda m=m: gated_mlp(t(m, 100), t(740, 100), t(100, 370))
        yield f"transposed {m}", lambda m=m: linear_bias_act(t(m, 128), t(128, 512).T, None, "silu")


def fixed_of(kernel, args):
    return tuple(v for p, v in zip(kernel.params, args) if p.is_constexpr or v is None or (type(v) is int and v == 1))


def distinct(launches):
    """One of the launches that are compiled to the same code."""
    found = {}
    for name, kernel, args, options in launches:
        sixteens = tuple(v % 16 == 0 for v in args if type(v) is int)
        key = kernel.__name__, fixed_of(kernel, args), sixteens, tuple(options.items())
        found.setdefault(key, (name, kernel, args, options))
    return list(found.values())


# Every kernel; of bfloat16 half of the launches on sm_90. The others take turns, as in test_rows_compile.
@pytest.mark.parametrize(
    "dtype, capability, features, turns",
    [
        (torch.bfloat16, 90, (True, True), slice(0, None, 2)), (torch.bfloat16, 80, (False, False), slice(0, None, 8)),
        (torch.bfloat16, 100, (True, True), slice(1, None, 8)), (torch.float32, 90, (True, True), slice(2, None, 8)),
    ],
)  # fmt: skip
def test_no_spills_and_wide_loads(dtype, capability, features, turns, tmp_path, monkeypatch):
    launches = distinct(launches_of(calls(dtype, features, monkeypatch)))
    for name, kernel, args, options in in_turn(launches, turns):
        binary = compiled(kernel, args, options, capability)
        registers, stack, local = resources(binary, tmp_path)
        what = f"{name}, {kernel.__name__} {fixed_of(kernel, args)}"
        assert stack == local == 0, f"{what}: {registers} registers, {stack} stack, {local} local"
        assert binary.metadata.shared <= SHARED[capability], f"{what}: {binary.metadata.shared} bytes of shared memory"
        ptx = binary.asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == features[0], what
        if kernel.__name__ == "tma_kernel":
            assert "cp.async.bulk.tensor" in ptx, what
        elif "odd" not in name and "transposed" not in name:
            wide_load = r"ld\.global[a-zA-Z0-9_.:]*\.v4\.b32|cp\.async\.cg\.shared\.global[^,]*,[^,]*, 0x10"
            assert re.search(wide_load, ptx), what
        if capability == 90 and dtype != torch.float32 and kernel.__name__ in ("tma_kernel", "tile_kernel"):
            assert "wgmma" in ptx, what
        if "wgmma" in ptx:
            assert touched_in_flight(machine_code(binary)) == [], what
    kernels = {kernel.__name__ for _, kernel, _, _ in launches}
    assert kernels >= {"stream_kernel", "add_splits"}
    assert ("tma_kernel" in kernels) == (features[1] and dtype != torch.float32)
    assert "tile_kernel" in kernels

"""Rates of this machine: measured once, kept, and measured honestly."""

import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nanovllm.hardware import measured_rates as device
from nanovllm.hardware.measured_rates import Rates
from tests.shared_gpu import gpu_is_shared, preset_here

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    calls = []

    def measure(where, dtypes):
        calls.append(dtypes)
        return Rates(device.device_name(where), 2.0, 2.0, 1.0, dict.fromkeys(dtypes, 3.0))

    def measure_matmul(where, dtypes):
        calls.append(("products", *dtypes))
        return dict.fromkeys(dtypes, 4.0)

    monkeypatch.setattr(device, "measure", measure)
    monkeypatch.setattr(device, "measure_matmul", measure_matmul)
    return calls, tmp_path


def test_rates_are_measured_once_a_device_and_version(counted, monkeypatch):
    calls, folder = counted
    first = device.rates(CPU, ("float32",))
    assert device.rates(CPU, ("float32",)) == first and len(calls) == 1
    device.rates(CPU, ("float32", "bfloat16"))  # one that is not known yet
    assert device.rates(CPU, ("float32",)).matmul == {"float32": 3.0, "bfloat16": 4.0} and len(calls) == 2
    device.rates(CPU, ("float32",), refresh=True)
    assert len(calls) == 3
    monkeypatch.setattr(device, "versions", lambda: {"torch": "another"})
    device.rates(CPU, ("float32",))
    assert len(calls) == 4 and len(list((folder / "rates").iterdir())) == 2


def test_dtypes_asked_for_in_turns_are_measured_once_each(counted):
    calls, _ = counted
    for dtypes in (("bfloat16",), ("float32",), (), ("bfloat16",), ("float32", "int8"), ("bfloat16", "int8")):
        assert set(dtypes) <= set(device.rates(CPU, dtypes).matmul)
    assert calls == [("bfloat16",), ("products", "float32"), ("products", "int8")]
    # Anew: what was measured is told, and what is known of other dtypes stays in the file.
    assert device.rates(CPU, ("float32",), refresh=True).matmul == {"float32": 3.0}
    assert device.rates(CPU).matmul == {"bfloat16": 3.0, "float32": 3.0, "int8": 4.0} and len(calls) == 4


def test_products_in_every_dtype(monkeypatch):
    """At the size of a CPU: each way gives the product, float32 and tf32 differ, and float8 and int8 may be missing."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (48, 64))
    expected = x.float() @ weight.float().T
    for dtype, scale, most in (("bfloat16", 1, 0.1), ("float8", 1, 1.5), ("int8", 1 / 1024, 1.0)):
        calls = device._products(dtype, x, weight)
        assert len(calls) == (2 if dtype == "float8" else 1)
        assert max((scale * call().float() - expected).abs().max() for call in calls) < most
    seen = []

    def timed(call):
        seen.append((call.func, torch.backends.cuda.matmul.fp32_precision))
        if call.func is torch._int_mm:
            raise RuntimeError("no kernel")
        return 2.0

    before, randn = torch.backends.cuda.matmul.fp32_precision, torch.randn
    monkeypatch.setattr(device, "_least_cuda", timed)
    monkeypatch.setattr(torch, "randn", lambda size, device: randn(16, 16))
    for dtype, precision in (("tfloat32", "tf32"), ("float32", "ieee"), ("float16", before)):
        seen.clear()
        assert max(device._matmul_rates(dtype, CPU)) > 1e10
        assert {p for _, p in seen} == {precision} and torch.backends.cuda.matmul.fp32_precision == before
    assert max(device._matmul_rates("float8", CPU)) > 1e10 and max(device._matmul_rates("int8", CPU)) == 0.0
    monkeypatch.setattr(device, "_least_cuda", lambda call: (_ for _ in ()).throw(RuntimeError("no kernel")))
    with pytest.raises(RuntimeError, match="no kernel"):
        max(device._matmul_rates("bfloat16", CPU))


def test_the_better_of_two_measurements():
    a = Rates("x", 5.0, 5.0, 4.0, {"float32": 1.0, "float16": 9.0}, 64, 7.0, 2.0)
    b = Rates("x", 6.0, 3.0, 6.0, {"float32": 2.0}, 64, 6.0, 1.0)
    assert device.best_of(a, b) == Rates("x", 6.0, 5.0, 6.0, {"float32": 2.0, "float16": 9.0}, 64, 7.0, 1.0)


def test_a_broken_cache_is_measured_again(counted):
    calls, folder = counted
    device.rates(CPU, ("float32",))
    (path,) = (folder / "rates").iterdir()
    for content in ("{", json.dumps({"schema": 0}), json.dumps({"schema": 1, "unknown": 2})):
        path.write_text(content)
        device.rates(CPU, ("float32",))
    assert len(calls) == 4


def test_a_home_that_cannot_be_written(counted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file"))
    assert device.rates(CPU, ("float32",)).bandwidth == 2.0


def test_measured_on_this_machine():
    rates = device.measure(CPU, ("float32",))
    # From the slowest to the fastest computer that might run this.
    assert 5e8 < rates.copy <= rates.bandwidth < 5e12 and rates.bandwidth == max(rates.read, rates.copy)
    assert 1e8 < rates.matmul["float32"] < 1e15
    assert rates.device == f"cpu, {torch.get_num_threads()} threads" and rates.cache_bytes == 0


@pytest.mark.gpu
def test_measured_on_a_gpu():
    """Bounds from the data sheet hold whoever else uses the GPU, if others take at most 7/8 of it; ratios only
    without others.
    """
    shared = gpu_is_shared()
    rates = device.measure(torch.device("cuda", torch.cuda.current_device()), ("bfloat16",))
    shared = shared or gpu_is_shared()
    assert rates.bandwidth == max(rates.read, rates.copy) and 1e-7 < rates.kernel_seconds < 1e-3
    if model := preset_here():
        assert model.bandwidth / 8 < min(rates.read, rates.copy) and rates.bandwidth < model.peak_bandwidth
        assert model.matmul["bfloat16"] / 8 < rates.matmul["bfloat16"] < model.peak_matmul["bfloat16"]
        assert rates.cache_bandwidth < 2 * model.l2_bandwidth
    if shared:
        pytest.skip("another program uses the GPU: what was measured is compared with the data sheet alone")
    assert 0.8 < rates.read / rates.copy < 1.5 and rates.cache_bandwidth > 1.2 * rates.bandwidth
    assert rates.matmul["bfloat16"] > 1e13 and rates.kernel_seconds < 1e-4


def test_nothing_stays_allocated(monkeypatch):
    """With a GPU's calls replaced: what is alive when the allocator is told to give its blocks back."""
    alive, cleared = [], []

    def empty_cache():
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.float32]
        alive.append(sum(t.untyped_storage().nbytes() >= 2**24 for t in tensors))

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**26, 2**26))  # a quarter of it is taken: 2**24
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(True), raising=False)
    monkeypatch.setattr(device, "_least_cuda", lambda call, *_: float(call() is None) + 1)
    monkeypatch.setattr(device, "_matmul_rates", lambda dtype, where: iter([5.0]))
    monkeypatch.setattr(device, "_kernel_seconds", lambda where: 1.0)
    monkeypatch.setattr(device, "_latencies", lambda where, size: (1.0, 1.0))
    probes = SimpleNamespace(read_time=lambda x, *_: 1.0)
    monkeypatch.setitem(sys.modules, "nanovllm.hardware.probe_kernels", probes)
    assert device._measure_cuda(CPU, "x", ("bfloat16",)).matmul == {"bfloat16": 5.0}
    assert alive and not any(alive) and cleared


@pytest.mark.gpu
def test_a_gpu_is_left_as_it_was_found():
    where = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=where)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(where)
    device.measure(where, ("bfloat16", "float32"))
    assert torch.cuda.memory_reserved(where) - reserved < 64 * 2**20


def test_a_slow_dtype_is_not_repeated_for_minutes(monkeypatch):
    now = [0.0]

    def slow():
        now[0] += 2.0

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    assert device._least([slow], repeats=20) == 2.0 and now[0] == 2.0


def test_the_reading_kernel_reads_everything():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = (
        "import torch; from nanovllm.hardware.probe_kernels import read_kernel, READ_BLOCK\n"
        "x = torch.randint(0, 9, (READ_BLOCK * 11,)).float(); out = torch.full((4,), float('nan'))\n"
        "read_kernel[4,](x, out, 11, 3, BLOCK=READ_BLOCK, num_warps=8)\n"
        "assert out.sum() == 3 * x.sum(), (out, x.sum())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=os.environ | {"TRITON_INTERPRET": "1"})

"""Rates of this machine: measured once, kept, and measured honestly."""

import json
import os

import pytest
import torch

from nanovllm.hardware import measured_rates, product_rates
from nanovllm.hardware.gpu_name import device_name
from nanovllm.hardware.measured_rates import Rates, rates
from tests.shared_gpu import gpu_is_shared, preset_here

CPU = torch.device("cpu")


class Counted(measured_rates.Meter):
    """Counts what is measured, and says the same each time."""

    def __init__(self, versions=None):
        self.calls = []

        def measure(where, dtypes):
            self.calls.append(dtypes)
            return Rates(measured_rates.device_name(where), 2.0, 2.0, 1.0, dict.fromkeys(dtypes, 3.0))

        def measure_matmul(where, dtypes):
            self.calls.append(("products", *dtypes))
            return dict.fromkeys(dtypes, 4.0)

        super().__init__(measure, measure_matmul, lambda: versions or {"torch": "1"})

    def __call__(self, *dtypes, refresh=False):
        return rates(CPU, dtypes, refresh, self)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    return tmp_path / "rates"


def test_rates_are_measured_once_a_device_and_version(folder):
    counted = Counted()
    first = counted("float32")
    assert counted("float32") == first and len(counted.calls) == 1
    counted("float32", "bfloat16")  # one that is not known yet
    assert counted("float32").matmul == {"float32": 3.0, "bfloat16": 4.0} and len(counted.calls) == 2
    counted("float32", refresh=True)
    assert len(counted.calls) == 3
    newer = Counted({"torch": "another"})
    newer("float32")
    assert len(newer.calls) == 1 and len(list(folder.iterdir())) == 2


def test_dtypes_asked_for_in_turns_are_measured_once_each(folder):
    counted = Counted()
    for dtypes in (("bfloat16",), ("float32",), (), ("bfloat16",), ("float32", "int8"), ("bfloat16", "int8")):
        assert set(dtypes) <= set(counted(*dtypes).matmul)
    assert counted.calls == [("bfloat16",), ("products", "float32"), ("products", "int8")]
    # Anew: what was measured is told, and what is known of other dtypes stays in the file.
    assert counted("float32", refresh=True).matmul == {"float32": 3.0}
    assert counted().matmul == {"bfloat16": 3.0, "float32": 3.0, "int8": 4.0} and len(counted.calls) == 4


def test_products_in_every_dtype():
    """At the size of a CPU: each way gives the product, float32 and tf32 differ, and float8 and int8 may be missing."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (48, 64))
    expected = x.float() @ weight.float().T
    for dtype, scale, most in (("bfloat16", 1, 0.1), ("float8", 1, 1.5), ("int8", 1 / 1024, 1.0)):
        calls = product_rates.products(dtype, x, weight)
        assert len(calls) == (4 if dtype == "float8" else 1)
        assert max((scale * call().float() - expected).abs().max() for call in calls) < most


def test_the_rate_of_products_in_every_dtype():
    seen = []

    def timed(call):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        if call.args[0].dtype == torch.int8:
            raise RuntimeError("no kernel")
        return 2.0

    def best(dtype, least=timed):
        return max(product_rates.matmul_rates(dtype, CPU, [(16, 16, 16), (8, 8, 8)], least))

    before = torch.backends.cuda.matmul.fp32_precision
    for dtype, precision in (("tfloat32", "tf32"), ("float32", "ieee"), ("float16", before)):
        seen.clear()
        assert best(dtype) == 16**3 and set(seen) == {precision}
        assert torch.backends.cuda.matmul.fp32_precision == before
    assert best("float8") == 16**3 and best("int8") == 0.0

    def broken(call):
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        best("bfloat16", broken)
    sizes = product_rates.product_sizes("bfloat16", 132)
    assert (
        len(sizes) == 4
        and sizes[-1][:2] == (256 * 11, 128 * 12)
        and len(product_rates.product_sizes("float32", 8)) == 1
    )


def test_the_better_of_two_measurements():
    a = Rates("x", 5.0, 5.0, 4.0, {"float32": 1.0, "float16": 9.0}, 64, 7.0, 2.0, 5.0, 2.0)
    b = Rates("x", 6.0, 3.0, 6.0, {"float32": 2.0}, 64, 6.0, 1.0, 4.0, 3.0)
    best = Rates("x", 6.0, 5.0, 6.0, {"float32": 2.0, "float16": 9.0}, 64, 7.0, 1.0, 4.0, 2.0)  # latencies: the shorter
    assert measured_rates.best_of(a, b) == best


def test_a_broken_cache_is_measured_again(folder):
    counted = Counted()
    counted("float32")
    (path,) = folder.iterdir()
    for content in ("{", json.dumps({"schema": 0}), json.dumps({"schema": 1, "unknown": 2})):
        path.write_text(content)
        counted("float32")
    assert len(counted.calls) == 4


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file"))
    assert Counted()("float32").bandwidth == 2.0


def test_measured_on_this_machine():
    found = measured_rates.measure(CPU, ("float32",))
    # From the slowest to the fastest computer that might run this.
    assert 5e8 < found.copy <= found.bandwidth < 5e12 and found.bandwidth == max(found.read, found.copy)
    assert 1e8 < found.matmul["float32"] < 1e15
    assert found.device == device_name(torch.device("cpu")) and found.cache_bytes == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_measured_on_a_gpu():
    """Bounds from the data sheet hold whoever else uses the GPU, if others take at most 7/8 of it; ratios only
    without others.
    """
    shared = gpu_is_shared()
    found = measured_rates.measure(torch.device("cuda", torch.cuda.current_device()), ("bfloat16",))
    shared = shared or gpu_is_shared()
    assert found.bandwidth == max(found.read, found.copy) and 1e-7 < found.kernel_seconds < 1e-3
    if model := preset_here():
        assert model.bandwidth / 8 < min(found.read, found.copy) and found.bandwidth < model.peak_bandwidth
        assert model.matmul["bfloat16"] / 8 < found.matmul["bfloat16"] < model.peak_matmul["bfloat16"]
        assert found.cache_bandwidth < 2 * model.l2_bandwidth
    if shared:
        pytest.skip("another program uses the GPU: what was measured is compared with the data sheet alone")
    assert 0.8 < found.read / found.copy < 1.5 and found.cache_bandwidth > 1.2 * found.bandwidth
    assert found.matmul["bfloat16"] > 1e13 and found.kernel_seconds < 1e-4


@pytest.mark.gpu
def test_a_gpu_is_left_as_it_was_found():
    where = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=where)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(where)
    measured_rates.measure(where, ("bfloat16", "float32"))
    assert torch.cuda.memory_reserved(where) - reserved < 64 * 2**20


def test_a_slow_dtype_is_not_repeated_for_minutes():
    now = [0.0]

    def slow():
        now[0] += 2.0

    assert measured_rates.least([slow], repeats=20, clock=lambda: now[0]) == 2.0 and now[0] == 2.0


def test_kernels_read_everything_and_follow_the_ring(warm_python):
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = (
        "import torch; from nanovllm.hardware.probe_kernels import chase_kernel, read_kernel, ring, READ_BLOCK\n"
        "links, order = ring(128 * 50, torch.device('cpu')); end = torch.empty(1, dtype=torch.int32)\n"
        "chase_kernel[(1,)](links, end, int(order[7]), 64, num_warps=1)\n"
        "assert int(end) == int(order[(7 + 64) % 50]), (end, order)\n"
        "x = torch.randint(0, 9, (READ_BLOCK * 11,)).float(); out = torch.full((4,), float('nan'))\n"
        "read_kernel[4,](x, out, 11, 3, BLOCK=READ_BLOCK, num_warps=8)\n"
        "assert out.sum() == 3 * x.sum(), (out, x.sum())"
    )
    done = warm_python.run("-c", code, timeout=600, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr

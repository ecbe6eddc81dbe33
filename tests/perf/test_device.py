import json

import pytest
import torch

from nanovllm.perf import device
from nanovllm.perf.device import Rates

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    calls = []

    def measure(where, dtypes):
        calls.append(dtypes)
        return Rates(device.device_name(where), 2.0, 2.0, 1.0, dict.fromkeys(dtypes, 3.0))

    monkeypatch.setattr(device, "measure", measure)
    return calls, tmp_path


def test_rates_are_measured_once_a_device_and_version(counted, monkeypatch):
    calls, folder = counted
    first = device.rates(CPU, ("float32",))
    assert device.rates(CPU, ("float32",)) == first and len(calls) == 1
    device.rates(CPU, ("float32", "bfloat16"))  # one that is not known yet
    assert device.rates(CPU, ("float32",)).matmul == {"float32": 3.0, "bfloat16": 3.0} and len(calls) == 2
    device.rates(CPU, ("float32",), refresh=True)
    assert len(calls) == 3
    monkeypatch.setattr(device, "versions", lambda: {"torch": "another"})
    device.rates(CPU, ("float32",))
    assert len(calls) == 4 and len(list((folder / "rates").iterdir())) == 2


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
    rates = device.measure(torch.device("cuda", torch.cuda.current_device()), ("bfloat16",))
    assert 0.8 < rates.read / rates.copy < 1.5 and rates.cache_bandwidth >= rates.bandwidth * 0.99
    assert rates.matmul["bfloat16"] > 1e13 and 1e-7 < rates.kernel_seconds < 1e-4


def test_the_reading_kernel_reads_everything():
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    import subprocess
    import sys

    pytest.importorskip("triton")
    code = (
        "import torch; from nanovllm.perf.read_kernel import _read, _BLOCK\n"
        "x = torch.randint(0, 9, (_BLOCK * 11,)).float(); out = torch.full((4,), float('nan'))\n"
        "_read[4,](x, out, 11, 3, BLOCK=_BLOCK, num_warps=8)\n"
        "assert out.sum() == 3 * x.sum(), (out, x.sum())"
    )
    import os

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=os.environ | {"TRITON_INTERPRET": "1"})

"""Timing, on a CPU's clock here and with events and graphs on a GPU."""

import functools
import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch

from nanovllm.hardware import timing
from nanovllm.hardware.roofline import copies, copy_bandwidth, copy_time
from nanovllm.hardware.timing import Timing, time_in_graph, time_kernel
from nanovllm.kernels import Provider, all_ops, benchmark_kernel
from nanovllm.kernels.op.availability import triton_support
from nanovllm.kernels.testing.compare import (
    WITHOUT_PLAN,
    Measurement,
    _copy,
    bench_cases,
    measure,
    providers_by_speed,
    slower_somewhere,
)
from nanovllm.kernels.testing.verify import Case
from tests.shared_gpu import gpu_is_shared

CPU = torch.device("cpu")


def test_seconds_per_call(capsys, monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def sleep(x):
        calls.append(x)
        now[0] += 0.002

    seconds = benchmark_kernel(sleep, torch.zeros(1), warmup=3, iters=7)
    assert seconds == pytest.approx(0.002) and len(calls) == 10 and not capsys.readouterr().out
    benchmark_kernel(sleep, torch.zeros(1), warmup=0, iters=2, verbose=True)
    assert "sleep: p20 2" in capsys.readouterr().out
    for wrong in ({"iters": 0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="expected iters >= 1 and warmup >= 0"):
            benchmark_kernel(sleep, torch.zeros(1), **wrong)


def test_percentiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing.median == 3 and timing.p20 == pytest.approx(1.8) and timing.p80 == pytest.approx(4.2)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


def test_a_measurement_of_a_provider():
    op = all_ops()["rms_norm"]
    (case,) = bench_cases(op, torch.float32, [(4, 64)])
    m = measure(op, op.providers["native"], case, CPU)
    assert m.timing.median > 0 and m.method == "host" and m.bytes == 4 * (256 + 64 + 256)
    assert m.as_dict()["us"] == pytest.approx(1e6 * m.timing.median)
    unavailable = Provider("x", lambda *a: None, lambda device: "not today")
    assert measure(op, unavailable, case, CPU).reason == "not today"
    choosy = Provider("x", lambda *a: None, accepts=lambda **a: "not these")
    assert measure(op, choosy, case, CPU).reason == "not these"
    in_the_interpreter = Provider("it", op.native, functools.wraps(triton_support)(lambda device: None))
    assert "timed on a GPU only" in measure(op, in_the_interpreter, case, CPU).reason


def measured(provider, shape, seconds, **fields):
    timing = None if seconds is None else Timing(seconds, seconds, seconds)
    return Measurement("op", provider, Case(shape, torch.float32), timing, **fields)


class Planner:
    """A provider of rms_norm that takes 5 ms on the host for a plan of each call, and has `planned`."""

    def __init__(self):
        self.plans = self.runs = 0

    def planned(self, x, weight, eps):
        self.plans += 1
        time.sleep(0.005)
        assert x.dim() == 2 and weight.dim() == 1
        return functools.partial(self._run, x, weight, eps)

    def __call__(self, x, weight, eps):
        result = self.planned(x, weight, eps)()
        if x.is_cuda:
            torch.cuda.synchronize()  # as who reads lengths on the host does; a graph cannot hold it
        return result

    def _run(self, x, weight, eps):
        self.runs += 1
        return all_ops()["rms_norm"].native(x, weight, eps)


@pytest.fixture
def planner(monkeypatch):
    made = Planner()
    monkeypatch.setitem(
        all_ops()["rms_norm"].providers,
        "planner",
        Provider("planner", made, planned=lambda **arguments: made.planned(**arguments)),
    )
    return made


def test_a_plan_is_not_in_the_time_of_what_is_planned_once(planner):
    op = all_ops()["rms_norm"]
    (case,) = bench_cases(op, torch.float32, [(4, 64)])
    whole = measure(op, op.providers["planner"], case, CPU)
    assert planner.plans == planner.runs == 12 and whole.timing.median >= 0.005  # a plan a call
    assert whole.provider == "planner" and not whole.without_plan and whole.as_dict()["without_plan"] is False
    m = measure(op, op.providers["planner"], case, CPU, without_plan=True)
    assert planner.plans == 13 and planner.runs == 24 and m.timing.median < 0.005 and m.bytes == whole.bytes
    assert m.provider == "planner, without its plan" and m.as_dict()["without_plan"] is True
    planner.planned = lambda **arguments: 1 / 0
    failed = measure(op, op.providers["planner"], case, CPU, without_plan=True)
    assert (
        failed.reason == "ZeroDivisionError: division by zero"
        and failed.without_plan
        and WITHOUT_PLAN in failed.provider
    )


def test_nothing_is_chosen_by_a_time_without_its_plan():
    results = [
        measured("native", (1,), 4.0), measured("planner", (1,), 5.0),
        measured("planner" + WITHOUT_PLAN, (1,), 1.0, without_plan=True),
    ]  # fmt: skip
    assert providers_by_speed(results) == {"native": 1.0, "planner": pytest.approx(1.25)}
    assert slower_somewhere(results, "native") == slower_somewhere(results, "planner", 1.3) == []


def bench_rms_norm(providers, save=None, json_file=None, wide=False):
    from nanovllm.cli import kernels_bench

    kernels_bench.bench(
        op="rms_norm", dtype="float32", shape=["4x64"], provider=providers, compile=False, device="cpu",
        kernel_plugin=None,
        save=save, save_table=None, wide=wide, json_file=json_file,
    )  # fmt: skip


def test_bench_shows_whole_calls_and_those_without_a_plan(planner, tmp_path, monkeypatch, capsys):
    from nanovllm.cli import kernels_bench

    bench_rms_norm(["native"])
    assert "plan" not in capsys.readouterr().out  # of plans where none are made
    bench_rms_norm(["native", "planner"], tmp_path / "it.json")
    printed = capsys.readouterr().out
    (whole,) = (line for line in printed.splitlines() if " planner " in line and "[1]" not in line)
    (without,) = (line for line in printed.splitlines() if " planner [1] " in line)
    assert printed.index(whole) < printed.index(without)
    assert "plan was made once for a batch, before the clock started" in " ".join(printed.split())
    bench_rms_norm(["native", "planner"], wide=True)
    assert " planner, without its plan " in capsys.readouterr().out
    assert "is faster than" not in printed  # of what is chosen
    rows = {m["provider"]: m for m in json.loads((tmp_path / "it.json").read_text())["measurements"]}
    assert [m["without_plan"] for m in rows.values()] == [False, False, True]
    assert rows["planner"]["us"] >= 5000 > rows["planner, without its plan"]["us"] > 0
    bench_rms_norm(["native", "planner"], json_file="-")
    assert [m["provider"] for m in json.loads(capsys.readouterr().out)["measurements"]] == list(rows)

    def table(*results):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        path = kernels_bench.write_table(torch.device("cuda", 0), list(results), tmp_path / "tables", "2026-01-01")
        return json.loads(path.read_text())

    slow = [measured("native", (1,), 1.0), measured("planner", (1,), 2.0)]
    text = json.dumps(table(*slow, measured("planner" + WITHOUT_PLAN, (1,), 0.5, without_plan=True)))
    assert '"order": ["native", "planner"]' in text and "plan," not in text


@pytest.mark.gpu
@pytest.mark.alone
def test_what_is_planned_once_is_timed_in_a_graph(planner):
    op, device = all_ops()["rms_norm"], torch.device("cuda", 0)
    (case,) = bench_cases(op, torch.bfloat16, [(2048, 4096)])
    whole = measure(op, op.providers["planner"], case, device)
    plans = planner.plans
    m = measure(op, op.providers["planner"], case, device, without_plan=True)
    assert (whole.method, m.method, m.cold) == ("events", "graph", True), (whole.reason, m.reason)
    assert whole.timing.median > 0.005 > 10 * m.timing.median
    assert 1 < planner.plans - plans <= 60  # one for each set of inputs


def test_a_copy_of_as_many_bytes(monkeypatch):
    from nanovllm.cli.kernels_bench import wide_table

    assert measured("op", (1,), 4.0).as_dict()["copy_us"] is None
    timing = Timing(4e-6, 4e-6, 4e-6)
    m = Measurement("op", "own", Case((1,), torch.float32), timing, share=0.5, copy=3e-6)
    assert m.as_dict()["copy_us"] == pytest.approx(3)
    absent = Measurement("op", "absent", Case((1,), torch.float32), None, reason="no fish")
    heads, rows, notes = wide_table([m, absent, measured("third", (1,), 1.0)])
    assert notes == ["[1] no fish"] and rows[1][-1] == "[1]" and "peak MiB" not in heads
    columns = dict(zip(heads, map(list, zip(*rows, strict=True)), strict=True))
    assert columns["of limit"] == ["50%", "", ""] and columns["of copy"] == ["75%", "", ""]
    heads, rows, notes = wide_table([measured("third", (1,), 1.0)], "G", 1e9)
    assert list(heads) == ["op", "case", "provider", "us", "p20-p80", "GB/s", "GFLOP/s"] and not notes


def test_who_is_fastest():
    results = [
        measured("native", (1,), 4.0), measured("native", (2,), 4.0), measured("native", (3,), 1.0),
        measured("triton", (1,), 1.0), measured("triton", (2,), 4.0), measured("triton", (3,), None),
        measured("torch.compile", (1,), 0.1), measured("absent", (1,), None),
    ]  # fmt: skip
    # Over the cases that both ran: native 4, 4; triton 1, 4: a geometric mean of 2.
    assert providers_by_speed(results) == {"triton": 1.0, "native": 2.0}
    assert [m.case.shape for m in slower_somewhere(results, "native")] == [(1,)]
    assert slower_somewhere(results, "triton") == []


@pytest.mark.gpu
@pytest.mark.alone
def test_device_time():
    x = torch.randn(1 << 26, device="cuda")
    y = torch.empty_like(x)
    seconds = time_kernel(y.copy_, x)
    moved = 2 * x.numel() * 4 / seconds.median
    assert 0.2e12 < moved < 20e12 and seconds.p20 <= seconds.median <= seconds.p80
    warm = benchmark_kernel(torch.neg, x[: 1 << 20], cold_l2=False)
    assert warm < benchmark_kernel(torch.neg, x)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_share_of_the_limit_is_a_share():
    op = all_ops()["rms_norm"]
    shared = gpu_is_shared()
    for case in bench_cases(op, torch.bfloat16):
        m = measure(op, op.providers["triton"], case, torch.device("cuda", 0))
        assert m.method == "graph" and m.share > 0 and m.peak_bytes > 0
        if shared or gpu_is_shared():
            pytest.skip("another program uses the GPU, so the rates that are its limit say nothing")
        assert m.share < 1.05
        assert (m.copy is None) == (m.bytes < 8 << 20)
        if m.copy is not None:
            assert m.share < m.copy / m.timing.median < 1.5  # starting and running out count in both


@pytest.mark.gpu
@pytest.mark.alone
def test_a_copy_is_timed_once_for_each_size():
    device = torch.device("cuda", 0)
    small, large = copy_time(device, 8 << 20), copy_time(device, 512 << 20)
    assert copy_time(device, 8 << 20) is small and 8 * small < large < 64 * small
    assert 0.5 < (512 << 20) / large / copy_bandwidth(device) < 1.1


# Some of each size were 1.3 to 1.6 times as long as the others when a copy was a node of the driver's.
SIZES = [
    19448320, 22282240, 33556480, 33562624, 33570816, 33685504, 49909760, 50335744, 67108864,
    77793280, 83896320, 134217728,
    155586560, 201326592, 312143872, 335675392, 536870912, 536879104, 603979776, 840957952, 1073741824, 1080557568,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.alone
def test_more_bytes_take_longer_to_copy_and_as_many_as_long():
    device = torch.device("cuda", 0)
    shared, seconds = gpu_is_shared(), {}
    for size in SIZES:
        seconds[size] = copy_time(device, size)
        shared = shared or gpu_is_shared()  # other programs come and go within the seconds that all sizes take
    if shared:
        pytest.skip("another program uses the GPU: times of copies mean nothing")
    for few, many in itertools.combinations(SIZES, 2):
        assert seconds[few] <= 1.1 * seconds[many], (few, many, seconds[few], seconds[many])
        # A start, which both have, and a rate.
        assert seconds[many] / seconds[few] <= 1.1 * many / few, (few, many, seconds[few], seconds[many])


@pytest.mark.gpu
@pytest.mark.alone
def test_the_copy_is_no_easier_than_the_driver_s():
    device = torch.device("cuda", 0)
    shared, times = gpu_is_shared(), []
    for num_bytes in (33562624, 134225920):
        size = num_bytes // 2
        sources = torch.empty(10, size, dtype=torch.int8, device=device).random_()
        targets = torch.empty_like(sources)
        theirs = time_in_graph([functools.partial(b.copy_, a) for a, b in zip(sources, targets)] * 4).median
        times.append((copy_time(device, num_bytes), theirs))
    if shared or gpu_is_shared():
        pytest.skip("another program uses the GPU: times of copies mean nothing")
    assert all(ours <= 1.05 * theirs for ours, theirs in times), times


def test_copies_are_kernels_where_triton_runs():
    triton = pytest.importorskip("triton")
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        assert copies(CPU) == [torch.Tensor.copy_]
        triton.knobs.runtime.interpret = True
        assert len(copies(CPU)) > 1 and torch.Tensor.copy_ not in copies(CPU)


def test_copied_arguments_keep_strides_and_parameters():
    """Kernels are compiled for strides and read parameters early: a copy without them would time another launch."""
    op = all_ops()["rms_norm"]
    given = Case((4, 64), torch.float32, strided=True).arguments(op, CPU)
    copied = _copy(given)
    assert type(copied["weight"]) is torch.nn.Parameter and copied["x"].stride() == given["x"].stride() != (64, 1)
    for name in ("x", "weight"):
        assert torch.equal(copied[name], given[name]) and copied[name].data_ptr() != given[name].data_ptr()

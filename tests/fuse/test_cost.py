"""Predicted times of kernels and groups."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from nanovllm.cli.fuse_layer import decoder_layer
from nanovllm.fuse import FusionAnalyzer, FusionCostModel, KernelGroup
from nanovllm.fuse.op_graph import build
from nanovllm.hardware.gpu_presets import device_model
from tests.fuse.modules import H100, PLAIN, meta, norm


def test_times_are_those_of_the_formula():
    n = 1 << 20
    graph = build(lambda x, y: torch.tanh(x * 2 + y), (meta(n), meta(n)))
    group = KernelGroup(graph, graph.kernels)
    model = FusionCostModel(PLAIN, overlap=0)
    mul, add, tanh = 1, 1, 16  # flops an element
    moved = 4 * n * (2 + 3 + 2)
    assert model.unfused(group) == pytest.approx(3e-6 + moved / 1e12 + n * (mul + add + tanh) / 1e13)
    fused = model.fused(group)
    assert fused.bytes == 4 * n * 3 and fused.flops == n * 18
    assert fused.seconds == pytest.approx(1e-6 + fused.bytes / 1e12 + n * 18 / 1e13)
    hidden = FusionCostModel(PLAIN, overlap=1).fused(group)
    assert hidden.seconds == pytest.approx(1e-6 + max(fused.bytes / 1e12, n * 18 / 1e13))


def test_times_that_were_measured_on_an_h200():
    """Medians of PyTorch 2.11 there: microseconds of the kernels one by one, and of torch.compile's one."""
    model = FusionCostModel(device_model("h200"), "memory")

    def predict(fn, *args):
        graph = build(fn, args)
        group = KernelGroup(graph, graph.kernels)
        return 1e6 * model.unfused(group), 1e6 * model.fused(group).seconds

    x, square, half = meta(16, 128, 4096), meta(16384, 16384), torch.bfloat16
    for fn, args, unfused, fused in [
        (lambda a, b, c: a * b + c, (x, x.clone(), x.clone()), 55.7, 37.2),
        (lambda x, b: F.gelu(x + b), (x, meta(4096)), 47.7, 21.5),
        (F.gelu, (square,), 510, 509),
        (lambda x: torch.softmax(x, -1), (square,), None, 503),
        (F.linear, (meta(1, 1024, dtype=half), meta(4096, 1024, dtype=half)), 5.1, None),
        (F.linear, (meta(1, 1024, dtype=half), meta(6144, 1024, dtype=half)), 5.7, None),
        (F.linear, (meta(1, 1024, dtype=half), meta(151936, 1024, dtype=half)), 77.7, None),
        (F.linear, (meta(8192, 8192, dtype=half), meta(8192, 8192, dtype=half)), 1381, None),
    ]:
        for predicted, measured in zip(predict(fn, *args), (unfused, fused)):
            assert measured is None or abs(predicted / measured - 1) < 0.3, (predicted, measured)


NEAR = [n + d for n in (64, 1024, 40000) for d in (-1, 0, 1)]
ROWS = (1, 2, 3, 9, 1000, 50_000)
FLAT = sorted({*range(1, 10), *NEAR, 65536, 100_001, 1 << 20, (1 << 24) + 1})


@pytest.mark.parametrize("dtype", (torch.float32, torch.int8), ids=str)
@pytest.mark.parametrize(
    "fn, shapes",
    [
        (lambda x: x * 2 + x, [[(n,)] for n in FLAT]),
        (lambda x, b: (x + b) * 2, [[(n, 100), (100,)] for n in ROWS]),
        (lambda x, b: (x + b) * 2, [[(7, n), (n,)] for n in NEAR]),
        (lambda x: torch.cat([x, x], -1) + 1, [[(n,)] for n in FLAT[::2]]),
        (lambda x: torch.softmax(x * 2, -1), [[(64, n)] for n in (1, 2, 3, 31, 33, *NEAR)]),
        (lambda x: torch.softmax(x * 2, -1), [[(n, 100)] for n in ROWS]),
        (lambda x: F.layer_norm(x + 1, x.shape[-1:]), [[(50_000, n)] for n in (1, 2, 3, 31, 33, *NEAR)]),
        (lambda x: (x * x).sum(0), [[(n, 100)] for n in ROWS]),
        (lambda x: F.relu(F.linear(x, x.new_ones(64, 100))), [[(n, 100)] for n in (*ROWS, 127, 129)]),
    ],
    ids="flat bias-rows bias-columns cat softmax-columns softmax-rows norm-columns sum-rows product".split(),
)  # fmt: skip
def test_more_elements_never_take_less(fn, shapes, dtype):
    if not dtype.is_floating_point and {"softmax", "layer_norm", "linear"} & set(fn.__code__.co_names):
        pytest.skip("an operator of floating point")
    last = [0.0] * 4
    for shape in sorted(shapes):
        graph = build(fn, [meta(*s, dtype=dtype) for s in shape])
        group = KernelGroup(graph, graph.kernels)
        models = [FusionCostModel(H100, where) for where in ("memory", "cache")]
        now = [t for m in models for t in (m.unfused(group), m.fused(group).seconds)]
        assert all(b >= a * (1 - 1e-12) for a, b in zip(last, now)), (shape, last, now)
        last = now


def test_a_product_takes_its_rate_and_others_the_vector_rate():
    graph = build(lambda x, w: F.relu(F.linear(x, w)), (meta(64, 128), meta(256, 128)))
    product, relu = graph.kernels
    model = FusionCostModel(PLAIN, overlap=0)
    moved, flops = 4 * (64 * 128 + 256 * 128 + 64 * 256), 2 * 64 * 128 * 256
    assert model.kernel(product).seconds == pytest.approx(1e-6 + moved / 1e12 + flops / 1e14)
    half = build(lambda x, w: F.linear(x, w), (meta(64, 128).half(), meta(256, 128).half())).kernels[0]
    assert "float16" not in PLAIN.matmul
    assert model.kernel(half).seconds > 2 * 64 * 128 * 256 / 1e13  # no matrix unit for it: on the ordinary ones


def test_where_inputs_lie():
    graph = build(lambda x: torch.softmax(x * 2, -1) + 1, (meta(1024, 1024),))
    mul, softmax, _ = graph.kernels
    computed, memory, cache = (FusionCostModel(H100, where) for where in ("computed", "memory", "cache"))
    assert computed.kernel(mul).seconds == memory.kernel(mul).seconds > cache.kernel(mul).seconds  # the graph's input
    assert computed.kernel(softmax).seconds == cache.kernel(softmax).seconds < memory.kernel(softmax).seconds
    large = build(lambda x: torch.softmax(x * 2, -1), (meta(16384, 16384),)).kernels[1]  # does not stay in the cache
    assert computed.kernel(large).seconds == memory.kernel(large).seconds == cache.kernel(large).seconds


def test_long_rows_lower_the_occupancy_and_then_are_read_twice():
    model = FusionCostModel(H100)

    def of(size):
        graph = build(norm, (meta(4096, size), meta(size)))
        return model.fused(KernelGroup(graph, graph.kernels))

    short, long, longer = of(1024), of(40000), of(200000)
    assert short.passes == long.passes == 1 and longer.passes == 2
    assert 0 < long.occupancy < short.occupancy <= 1
    assert longer.bytes == pytest.approx(1.5 * 200000 / 40000 * long.bytes, rel=1e-3)  # 3 transfers of the row, not 2
    # A smaller chip holds fewer rows at once.
    small = dataclasses.replace(H100, registers_per_sm=32768)
    graph = build(norm, (meta(4096, 1024), meta(1024)))
    group = KernelGroup(graph, graph.kernels)
    assert FusionCostModel(small).fused(group).occupancy < model.fused(group).occupancy


def test_a_prologue_is_repeated_by_every_tile_of_columns():
    model = FusionCostModel(H100)

    def gain(tokens):
        args = (meta(tokens, 4096).bfloat16(), meta(4096).bfloat16(), meta(8192, 4096).bfloat16())
        graph = build(lambda x, w, m: F.linear(norm(x, w), m), args)
        alone, product = KernelGroup(graph, graph.kernels[:-1]), KernelGroup(graph, graph.kernels[-1:])
        return model.gain(alone, product, KernelGroup(graph, graph.kernels))

    assert gain(1) > 0 > gain(512)


def test_an_epilogue_that_holds_many_accumulators_spills():
    def many(x, m, *others):
        y = F.linear(x, m)
        for o in others:
            y = torch.sin(y) * o + torch.cos(y) * (o + y)
        return y

    args = (meta(4096, 64), meta(4096, 64), *(meta(4096, 4096) for _ in range(3)))
    graph = build(many, args)
    assert FusionCostModel(H100).fused(KernelGroup(graph, graph.kernels)).repeated > 0
    graph = build(lambda x, m: F.relu(F.linear(x, m)), args[:2])
    assert FusionCostModel(H100).fused(KernelGroup(graph, graph.kernels)).repeated == 0


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["nvidia-a100", "nvidia-h200", "nvidia-b200", "nvidia-rtx-4090"])
def test_decisions_of_a_layer_on_every_gpu(gpu):
    layer, kwargs, known = decoder_layer("smollm2-135m", 4, 64)
    report = FusionAnalyzer(layer, (), kwargs, known=known, device=gpu).report()
    assert report.fused < report.unfused and report.device == gpu
    for r in report.rows:
        assert 0 < r.fused <= r.unfused and 0 < r.estimate.occupancy <= 1
        assert r.estimate.bytes <= r.group.unfused_bytes
    kernels = [k.name for r in report.rows for k in r.group.kernels]
    assert len(kernels) == len(set(kernels))

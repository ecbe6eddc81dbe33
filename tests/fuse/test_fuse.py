"""Tracing, predicted times, reports and measurements of fusion; groups, matches and loop nests have files of their
own.
"""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm.cli.fuse_layer import decoder_layer
from nanovllm.cli.fuse_tables import missing
from nanovllm.fuse import FusionAnalyzer, FusionCostModel, Group, TraceError, kept_timings
from nanovllm.fuse.cpu_model import CpuModel, measure_cpu
from nanovllm.fuse.group_timing import Comparison, Measured, agreement, measure, spearman
from nanovllm.fuse.op_graph import build
from nanovllm.fuse.tracing import trace
from nanovllm.hardware.gpu_presets import PRESETS, device_model
from tests.shared_gpu import gpu_is_shared

# A device on which times are easily worked out by hand.
PLAIN = CpuModel("plain", 1e12, 0, 1e12, 1e-6, 1e13, {"float32": 1e14})
H100 = device_model("h100")
REPO = Path(__file__).parents[2]


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------------------------------------------------------- cost


def test_times_are_those_of_the_formula():
    n = 1 << 20
    graph = build(lambda x, y: torch.tanh(x * 2 + y), (meta(n), meta(n)))
    group = Group(graph, graph.kernels)
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
        group = Group(graph, graph.kernels)
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


NEAR = [n + d for n in (64, 256, 1024, 8192, 40000) for d in (-1, 0, 1)]
FLAT = sorted({*range(1, 20), *NEAR, 65536, 100_001, 1 << 20, (1 << 24) + 1})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64, torch.int8), ids=str)
@pytest.mark.parametrize(
    "fn, shapes",
    [
        (lambda x: x * 2 + x, [[(n,)] for n in FLAT]),
        (lambda x, b: (x + b) * 2, [[(n, 100), (100,)] for n in (1, 2, 3, 9, 1000, 50_000)]),
        (lambda x, b: (x + b) * 2, [[(7, n), (n,)] for n in NEAR]),
        (lambda x: torch.cat([x, x], -1) + 1, [[(n,)] for n in FLAT[::2]]),
        (lambda x: torch.softmax(x * 2, -1), [[(64, n)] for n in (1, 2, 3, 31, 33, *NEAR)]),
        (lambda x: torch.softmax(x * 2, -1), [[(n, 100)] for n in (1, 2, 3, 9, 1000, 50_000)]),
        (lambda x: F.layer_norm(x + 1, x.shape[-1:]), [[(50_000, n)] for n in (1, 2, 3, 31, 33, *NEAR)]),
        (lambda x: (x * x).sum(0), [[(n, 100)] for n in (1, 2, 3, 9, 1000, 50_000)]),
        (
            lambda x: F.relu(F.linear(x, x.new_ones(64, 100))),
            [[(n, 100)] for n in (1, 2, 3, 9, 127, 129, 1000, 50_000)],
        ),
    ],
    ids=[
        "flat",
        "bias, rows",
        "bias, columns",
        "cat",
        "softmax, columns",
        "softmax, rows",
        "norm, columns",
        "sum, rows",
        "product",
    ],
)
def test_more_elements_never_take_less(fn, shapes, dtype):
    if not dtype.is_floating_point and {"softmax", "layer_norm", "linear"} & set(fn.__code__.co_names):
        pytest.skip("an operator of floating point")
    last = [0.0] * 4
    for shape in shapes:
        graph = build(fn, [meta(*s, dtype=dtype) for s in shape])
        group = Group(graph, graph.kernels)
        models = [FusionCostModel(H100, where) for where in ("memory", "cache")]
        now = [t for m in models for t in (m.unfused(group), m.fused(group).seconds)]
        assert all(b >= a * (1 - 1e-12) for a, b in zip(last, now)), (shape, last, now)
        last = now


def test_a_product_takes_its_rate_and_others_the_vector_rate():
    graph = build(lambda x, w: F.relu(F.linear(x, w)), (meta(64, 128), meta(256, 128)))
    product, relu = graph.kernels
    model = FusionCostModel(PLAIN, overlap=0)
    assert model.kernel(product).seconds == pytest.approx(
        1e-6 + 4 * (64 * 128 + 256 * 128 + 64 * 256) / 1e12 + 2 * 64 * 128 * 256 / 1e14
    )
    half = build(lambda x, w: F.linear(x, w), (meta(64, 128).half(), meta(256, 128).half())).kernels[0]
    assert "float16" not in PLAIN.matmul
    assert model.kernel(half).seconds > 2 * 64 * 128 * 256 / 1e13  # no matrix unit for it: on the ordinary ones


def test_where_inputs_lie():
    graph = build(lambda x: torch.softmax(x * 2, -1) + 1, (meta(1024, 1024),))
    mul, softmax, _ = graph.kernels
    computed, memory, cache = (FusionCostModel(H100, where) for where in ("computed", "memory", "cache"))
    assert (
        computed.kernel(mul).seconds == memory.kernel(mul).seconds > cache.kernel(mul).seconds
    )  # an input of the graph
    assert computed.kernel(softmax).seconds == cache.kernel(softmax).seconds < memory.kernel(softmax).seconds
    large = build(lambda x: torch.softmax(x * 2, -1), (meta(16384, 16384),)).kernels[1]  # does not stay in the cache
    assert computed.kernel(large).seconds == memory.kernel(large).seconds == cache.kernel(large).seconds


def norm(x, w):
    return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_long_rows_lower_the_occupancy_and_then_are_read_twice():
    model = FusionCostModel(H100)

    def of(size):
        graph = build(norm, (meta(4096, size), meta(size)))
        return model.fused(Group(graph, graph.kernels))

    short, long, longer = of(1024), of(40000), of(200000)
    assert short.passes == long.passes == 1 and longer.passes == 2
    assert 0 < long.occupancy < short.occupancy <= 1
    assert longer.bytes == pytest.approx(1.5 * 200000 / 40000 * long.bytes, rel=1e-3)  # 3 transfers of the row, not 2
    # A smaller chip holds fewer rows at once.
    small = dataclasses.replace(H100, registers_per_sm=32768)
    graph = build(norm, (meta(4096, 1024), meta(1024)))
    group = Group(graph, graph.kernels)
    assert FusionCostModel(small).fused(group).occupancy < model.fused(group).occupancy


def test_a_prologue_is_repeated_by_every_tile_of_columns():
    model = FusionCostModel(H100)

    def gain(tokens):
        args = (meta(tokens, 4096).bfloat16(), meta(4096).bfloat16(), meta(8192, 4096).bfloat16())
        graph = build(lambda x, w, m: F.linear(norm(x, w), m), args)
        alone, product = Group(graph, graph.kernels[:-1]), Group(graph, graph.kernels[-1:])
        return model.gain(alone, product, Group(graph, graph.kernels))

    assert gain(1) > 0 > gain(512)


def test_an_epilogue_that_holds_many_accumulators_spills():
    def many(x, m, *others):
        y = F.linear(x, m)
        for o in others:
            y = torch.sin(y) * o + torch.cos(y) * (o + y)
        return y

    args = (meta(4096, 64), meta(4096, 64), *(meta(4096, 4096) for _ in range(3)))
    graph = build(many, args)
    assert FusionCostModel(H100).fused(Group(graph, graph.kernels)).repeated > 0
    graph = build(lambda x, m: F.relu(F.linear(x, m)), args[:2])
    assert FusionCostModel(H100).fused(Group(graph, graph.kernels)).repeated == 0


@pytest.mark.parametrize("gpu", PRESETS)
def test_decisions_of_a_layer_on_every_gpu(gpu):
    layer, kwargs, known = decoder_layer("smollm2-135m", 4, 64)
    report = FusionAnalyzer(layer, (), kwargs, known=known, device=gpu).report()
    assert report.fused < report.unfused and report.device == gpu
    for r in report.rows:
        assert 0 < r.fused <= r.unfused and 0 < r.occupancy <= 1 and math.isfinite(r.fused)
        assert r.fused_bytes <= r.unfused_bytes
    assert sum(len(r.kernels) for r in report.rows) == len({k for r in report.rows for k in r.kernels})


# -------------------------------------------------------------------------------------------------------------- layers


def test_the_ops_that_we_have_are_the_ones_that_a_decode_step_wants():
    """At one token a norm goes into the product behind it; at 64 that would be repeated too often."""
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 1, 1024)
    one = FusionAnalyzer(layer, (), kwargs, known=known).report()
    assert [r.served for r in one.rows if r.served != "linear"] == [
        "add_rms_norm_linear", "qk_norm_rope_store", "attention_decode",
        "linear (1 of 2 kernels); part of linear_add_rms_norm", "add_rms_norm_gate_up",
    ]  # fmt: skip
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 64, 1024)
    many = FusionAnalyzer(layer, (), kwargs, known=known).report()
    assert {"add_rms_norm", "qk_norm_rope_store", "linear_silu_and_mul"} <= {r.served for r in many.rows}
    assert any("every tile repeats" in d.reason for d in many.decisions if not d.made)
    # Attention's traffic is that of the keys and values: 64 sequences of 1024 tokens, 8 heads of 128.
    (attention,) = [r for r in many.rows if r.served == "attention_decode"]
    assert attention.fused_bytes == pytest.approx(2 * 64 * 1024 * 8 * 128 * 2, rel=0.01)


def test_prefill_and_llama_and_the_numbers_of_a_layer():
    layer, kwargs, known = decoder_layer("llama3.2-1b", 48, 80, decode=False, device="cpu", dtype=torch.float32)
    x, residual = layer(**kwargs)
    assert x.isfinite().all() and residual.isfinite().all() and x.shape == (48, 2048)
    report = FusionAnalyzer(layer, (), kwargs, known=known, device="a100").report()
    assert any("rotary_embedding" in r.served or "qk_norm_rope_store" in r.served for r in report.rows)
    for bad in (dict(tokens=0), dict(context=3), dict(name="gpt")):
        with pytest.raises(ValueError, match="tokens: expected at least 1|context: expected at least|no preset 'gpt'"):
            decoder_layer(**{"name": "llama3.2-1b", "tokens": 4, "context": 8, "decode": False, **bad})


def test_report_as_json():
    report = FusionAnalyzer(norm, (torch.randn(4, 8), torch.randn(8)), device="rtx4090").report()
    data = json.loads(json.dumps(report.to_json()))
    (group,) = data["groups"]
    assert group["served"] == "rms_norm" and group["gain_us"] == pytest.approx(
        group["unfused_us"] - group["fused_us"], abs=1e-3
    )
    assert data["device"] == "nvidia-rtx-4090" and all(d["made"] for d in data["decisions"])


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_traced_is_one_line_that_says_what_can(capfd):
    x = torch.ones(3)
    library = torch.library.Library("fusion_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x + 1, "CPU")
    for fn, said in [
        (lambda x: x + 1 if x.sum() > 0 else x, "it branches on a tensor's value"),
        (lambda x: x[x > 0], r"has the shape \[u0\]"),
        (
            lambda x: torch.ops.fusion_test.opaque(x),
            r"the operator fusion_test.opaque.default has no fake implementation",
        ),
        (lambda x: x.nope(), "has no attribute 'nope'"),
        (lambda x: x @ torch.ones(4), "size mismatch|got 3"),
        (7, "neither a module nor a function"),
    ]:
        with pytest.raises(TraceError, match=said) as e:
            FusionAnalyzer(fn, (x,))
        assert "\n" not in str(e.value) and "supported are an nn.Module" in str(e.value)
    assert capfd.readouterr() == ("", "")  # the tracer prints pages of its own


def test_tensors_without_memory_of_their_own_are_named():
    x = torch.ones(4, 4)
    for fn, said in [
        (
            lambda x: torch.sparse.mm(x.to_sparse(), x),
            r"to_sparse \(aten.to_sparse.*\) is a tensor of layout sparse_coo",
        ),
        (lambda x: torch.vmap(lambda a: a.sum())(x), "is a tensor within torch.vmap"),
    ]:
        with pytest.raises(TraceError, match=said) as e:
            FusionAnalyzer(fn, (x,))
        assert "\n" not in str(e.value) and "supported are an nn.Module" in str(e.value)


class Mistaken(torch.nn.Module):
    def forward(self, x):
        return {}["key"] + x


def test_an_error_of_the_users_has_its_line():
    line = Mistaken.forward.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"KeyError: 'key' \(.*test_fuse.py:{line}\)"):
        FusionAnalyzer(Mistaken(), (torch.ones(3),))
    analyzer = FusionAnalyzer(F.embedding, (torch.tensor([99]), torch.ones(4, 4)), device=PLAIN)
    with pytest.raises(ValueError, match="the module cannot be run: IndexError: index out of range in self$"):
        measure(analyzer, (torch.tensor([99]), torch.ones(4, 4)))


@pytest.mark.parametrize("rows", (0, 1))
def test_no_rows_are_no_work(rows):
    w = torch.randn(8, 4)
    for fn, args in [
        (lambda x: F.linear(F.layer_norm(x, (4,)), w), (torch.randn(rows, 4),)),
        (lambda x: torch.relu(F.linear(torch.exp(x), w)), (torch.randn(rows, 4),)),
        (lambda x: torch.softmax(x * 2, -1), (torch.randn(rows, 4),)),
    ]:
        analyzer = FusionAnalyzer(fn, args)
        report = analyzer.report()
        for r in report.rows:
            assert (r.unfused == r.fused == r.unfused_bytes == r.fused_bytes == 0) == (rows == 0)
        found = measure(analyzer, args, ways=("unfused", "ours"), iters=1)
        assert all(r.unfused.seconds for r in found) and (agreement(found).unfused_error is None) == (rows == 0)
    # What is left of nothing may be something: a sum of no rows is zeros, which are written.
    (zeros,) = FusionAnalyzer(lambda x: x.sum(0) * 2, (torch.randn(rows, 4),)).report().rows
    assert zeros.kernels == ("sum_1", "mul") and 0 < zeros.fused < zeros.unfused


def test_other_bad_input():
    with pytest.raises(ValueError, match="gpu: no preset for 'v100'; known are a100, h100"):
        FusionAnalyzer(norm, (torch.ones(2, 2), torch.ones(2)), device="v100")
    with pytest.raises(ValueError, match=r"example_inputs: expected a sequence of arguments, not one tensor"):
        FusionAnalyzer(torch.relu, torch.ones(2))


def test_modules_functions_and_programs_are_traced():
    x = torch.randn(4, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    program = torch.export.export(module, (x,))
    symbolic = torch.fx.symbolic_trace(module)
    ops = [[k.op for k in build(t, (x,))] for t in (module, program, symbolic, lambda x: module(x))]
    assert ops == [["linear", "gelu"]] * 4
    assert trace(program) is program


# ------------------------------------------------------------------------------------------------------------ measuring


def mlp(x, w, up, down):
    return x + F.linear(F.gelu(F.linear(norm(x, w), up)), down)


ARGS = (torch.randn(8, 32), torch.randn(32), torch.randn(64, 32), torch.randn(32, 64))


def test_measure_on_a_cpu():
    analyzer = FusionAnalyzer(mlp, ARGS, device=PLAIN)
    said = []
    rows = measure(analyzer, ARGS, backend="aot_eager", iters=3, progress=said.append)
    assert [r.number for r in rows] == list(range(1, len(analyzer.groups) + 1)) and len(said) == len(rows)
    for r in rows:
        assert r.unfused.seconds > 0 and r.compile.seconds > 0 and r.compile.error < 1e-5
        assert (r.ours.seconds or 0) > 0 or r.ours.reason == "no op of ours"
        assert r.predicted_fused <= r.predicted_unfused
    (only,) = measure(FusionAnalyzer(torch.cosh, (ARGS[0],), device=PLAIN), ARGS[:1], ways=("unfused", "ours"), iters=1)
    assert only.ours == Measured(None, "no op of ours") and only.compile.reason == "not asked for"


def test_a_way_that_fails_or_is_wrong_is_a_row():
    analyzer = FusionAnalyzer(norm, ARGS[:2], device=PLAIN)

    def no_compiler(module, inputs):
        raise RuntimeError("no C++ compiler\nand much more")

    def wrong(module, inputs):
        return lambda *args: tuple(t + 1e-2 for t in module(*args))

    (row,) = measure(analyzer, ARGS[:2], backend=no_compiler, iters=1)
    assert row.compile.seconds is None and "no C++ compiler" in row.compile.reason and "\n" not in row.compile.reason
    (row,) = measure(analyzer, ARGS[:2], backend=wrong, iters=1)
    assert row.compile == Measured(None, "its result differs from the unfused one")


WITHOUT_A_COMPILER = """
import torch, torch._inductor.config as config
from nanovllm.fuse import FusionAnalyzer
from nanovllm.fuse.group_timing import measure
from tests.fuse.test_fuse import PLAIN
config.cpp.cxx, config.force_disable_caches = ("/nowhere/c++",), True
x = torch.randn(3, 7)
(row,) = measure(FusionAnalyzer(lambda x: torch.cosh(x * 3.25), (x,), device=PLAIN), (x,), iters=1)
assert row.unfused.seconds > 0 and row.compile.seconds is None and row.compile.reason
"""


def test_a_missing_compiler_of_inductor_is_a_row():
    # In a process of its own: Inductor remembers what it has found out about compilers.
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_COMPILER], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_groups_that_write_are_measured_on_copies():
    def fn(cache, index, x):
        cache[index] = x * 2
        return cache.sum(-1)

    args = (torch.zeros(8, 4), torch.arange(3), torch.ones(3, 4))
    rows = measure(FusionAnalyzer(fn, args, device=PLAIN), [a.clone() for a in args], ways=("unfused", "ours"), iters=1)
    assert all(r.unfused.seconds for r in rows) and not args[0].any()


def test_results_that_are_tuples_are_compared(monkeypatch):
    import nanovllm.fuse.group_timing as module

    x = torch.randn(8, 16)
    for fn in (
        lambda x: torch.sort(x),
        lambda x: torch.topk(x * 2, 3),
        lambda x: (torch.sort(x)[0] * 2, torch.topk(x, 2)[1] + 1),
    ):
        for r in measure(FusionAnalyzer(fn, (x,), device=PLAIN), (x,), backend="aot_eager", iters=1):
            assert r.unfused.seconds and r.compile.seconds and r.compile.error == 0, r
    one = torch.sort(x)
    other = (one[0], one[1].flip(1))
    assert module._difference((one,), (one,)) == 0 and module._difference((other,), (one,)) is None
    assert module._difference((one[0],), (one,)) is None
    # What enters a group as a tuple is copied and counted like any other tensors.
    (copied,) = module._fresh([one])
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(copied, one))
    monkeypatch.setattr(module, "l2_bytes", lambda device: 1 << 10)
    assert module._copies([tuple(one)], 1 << 20, torch.device("cuda")) == module._copies(
        list(one), 1 << 20, torch.device("cuda")
    )


def test_random_numbers_are_timed_and_not_compared():
    x = torch.randn(64, 64)
    for fn, op in [(lambda x: F.dropout(x * 2, 0.5), "dropout"), (lambda x: torch.rand_like(x), "rand_like")]:
        *_, r = measure(
            FusionAnalyzer(fn, (x,), device=PLAIN), (x,), ways=("unfused", "compile"), backend="aot_eager", iters=1
        )
        for m in (r.unfused, r.compile):
            assert m.seconds and m.error is None
            assert m.reason == f"{op} draws random numbers, so results were not compared"
        assert missing([r]) == [f"group {r.number}: {m.reason}"]
        (group,) = kept_timings.document([r], "NVIDIA H200", {}, Path("."))["groups"]
        assert group["unfused"]["us"] and group["unfused"]["not_compared"] == m.reason
    inference = measure(
        FusionAnalyzer(lambda x: F.dropout(x * 2, 0.5, False), (x,), device=PLAIN), (x,), ways=("unfused",), iters=1
    )
    assert inference[0].unfused.error == 0


def test_meta_tensors_and_unknown_ways_are_errors():
    analyzer = FusionAnalyzer(torch.relu, (meta(4),), device=PLAIN)
    with pytest.raises(ValueError, match="is on the meta device: measuring needs real tensors"):
        measure(analyzer, (meta(4),))
    with pytest.raises(ValueError, match="ways: expected some of unfused, compile, ours, not 'jax'"):
        measure(analyzer, (torch.ones(4),), ways=("jax",))


def test_inputs_are_rotated_clearly_within_or_beyond_the_cache(monkeypatch):
    import nanovllm.fuse.group_timing as module

    monkeypatch.setattr(module, "l2_bytes", lambda device: 60 << 20)
    where = torch.device("cuda")
    for size in (4, 1 << 10, 1 << 16, 1 << 20, 3 << 20, 16 << 20, 1 << 30):
        for read in (size, size // 2, size // 16, 0):
            copies, near = module._copies([torch.empty(size, dtype=torch.int8, device="meta")], read, where)
            assert copies >= 1 and (copies * read <= 15 << 20 if near else copies * read >= 2 * (60 << 20)), (
                size,
                read,
                copies,
                near,
            )
            assert copies * size <= 8 << 30
    assert module._copies([torch.ones(4)], 16, torch.device("cpu")) == (1, True)
    # Attention reads little of two caches of 134 MB: many sets would be needed, and few of them stay in the L2 cache.
    caches = [torch.empty(134 << 20, dtype=torch.int8, device="meta")] * 2
    assert module._copies(caches, 1 << 20, where) == (8, True) and module._copies(caches, 64 << 20, where) == (3, False)


def test_what_is_read_of_a_cache_decides_how_a_group_is_timed(monkeypatch):
    import nanovllm.fuse.group_timing as module

    asked = []
    monkeypatch.setattr(module, "_copies", lambda inputs, read, device: asked.append((inputs, read)) or (1, True))
    layer, kwargs, known = decoder_layer("smollm2-135m", 2, 48, True, "cpu", torch.float32)
    analyzer = FusionAnalyzer(layer, (), kwargs, device=PLAIN, known=known)
    with torch.inference_mode(False):
        measure(analyzer, (), kwargs, ways=("unfused",), iters=1)
    (inputs, read) = next(
        a for a, group in zip(asked, analyzer.groups) if any("attention" in k.op for k in group.kernels)
    )
    whole = sum(t.numel() * t.element_size() for t in inputs if isinstance(t, torch.Tensor))
    assert read < whole / 4


def test_what_goes_through_the_host_is_not_fused_across():
    def one(x):
        return x * x.max().item()

    def two(x):
        return torch.relu(x + 1) * (2 * x.abs().sum().item() + 1) + x

    for fn in (one, two):
        args = (torch.randn(64, 64),)
        analyzer = FusionAnalyzer(fn, args, device=PLAIN)
        groups = [[k.op for k in g.kernels] for g in analyzer.groups]
        at = groups.index(["item"])
        assert not any("item" in g for i, g in enumerate(groups) if i != at)
        # What the number is made of comes before, what is made of it after.
        (source,) = [i for i, g in enumerate(groups) if {"max", "sum"} & set(g)]
        (scaled,) = [i for i, g in enumerate(groups) if g[-1] in ("mul", "add") and "mul" in g]
        assert source < at < scaled
        rows = measure(analyzer, args, ways=("unfused",), iters=1)
        assert [r.unfused.seconds is None for r in rows] == [i == at for i in range(len(groups))]
        assert rows[at].unfused.reason == "it takes a value to the host"


def comparison(predicted, measured, kernels=2):
    (a, b), (c, d) = predicted, measured
    return Comparison(1, "x", kernels, "none", "cache", a, b, Measured(c), Measured(d), Measured(None, "no op of ours"))


def test_agreement():
    rows = [
        comparison((10, 5), (8, 4)),
        comparison((20, 5), (25, 5)),
        comparison((6, 5), (6, 4)),
        comparison((9, 9), (9, 9), 1),
    ]
    found = agreement(rows)
    assert found.rank == pytest.approx(1.0)  # gains of 5, 15, 1 and 4, 20, 2
    assert found.unfused_error == pytest.approx((0.2 + 0.0) / 2) or found.unfused_error == pytest.approx(0.1)
    assert found.fused_error == pytest.approx(0.25)
    assert agreement(rows[:2]).rank is None
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1 and spearman([1, 1], [1, 2]) is None
    assert spearman([1, 2, 2, 4], [1, 3, 3, 9]) == pytest.approx(1.0)


def test_kept_results(tmp_path):
    analyzer = FusionAnalyzer(norm, ARGS[:2], device=PLAIN)
    rows = measure(analyzer, ARGS[:2], ways=("unfused", "ours"), iters=1)
    for tokens in (1, 2, 1):
        run = kept_timings.document(rows, "NVIDIA H200", {"module": "norm", "tokens": tokens}, tmp_path)
        path = kept_timings.keep(run, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "fusion.json"
    runs = kept_timings.load(path)
    assert [r["arguments"]["tokens"] for r in runs] == [2, 1]  # the latest of each
    (group,) = runs[0]["groups"]
    assert (
        group["served"] == "rms_norm" and group["unfused"]["us"] > 0 and group["compile"] == {"reason": "not asked for"}
    )
    path.write_text("[1]")
    with pytest.raises(ValueError, match="is not a file of measured fusions"):
        kept_timings.load(path)


def test_a_host_is_measured():
    host = measure_cpu(cache_bytes=1 << 18)
    assert host.bandwidth > 1e8 and host.l2_bandwidth >= host.bandwidth and 0 < host.launch < 1e-3
    assert host.rate("float32") > 1e8
    with pytest.raises(ValueError, match="the products of float16 were not measured; float32 were"):
        host.rate("float16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measure_on_a_gpu(tmp_path, monkeypatch):
    """Every way gives the same results anywhere; times mean something only where nothing else runs on the device."""
    from nanovllm.hardware.gpu_presets import this_device

    # Rates of this minute; if they are disturbed, nobody keeps them.
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    where = torch.device("cuda")
    shared = gpu_is_shared()
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 64, 1024, device=where)
    analyzer = FusionAnalyzer(layer, (), kwargs, known=known, device=this_device(where))
    rows = measure(analyzer, (), kwargs)
    assert all(r.unfused.seconds and r.compile.seconds and r.ours.seconds for r in rows)
    if shared or gpu_is_shared():
        pytest.skip("another program uses the GPU, so its times are not compared with predictions")
    found = agreement(rows)
    told = "\n".join(
        f"{r.ops}: unfused {1e6 * r.predicted_unfused:.1f} predicted, {1e6 * r.unfused.seconds:.1f} us; "
        f"fused {1e6 * r.predicted_fused:.1f} predicted, compile {1e6 * r.compile.seconds:.1f}, ours"
        f" {1e6 * r.ours.seconds:.1f} us"
        for r in rows
    )
    # Of the five groups of several kernels two pairs have nearly the same gain: the two norms, and the two products
    # with something after them. Either order of both leaves a correlation of 0.8.
    assert found.rank > 0.75 and found.unfused_error < 0.5 and found.fused_error < 0.5, f"{found}\n{told}"

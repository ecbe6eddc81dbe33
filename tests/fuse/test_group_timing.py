"""Groups are timed in every way, compared and kept."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm.cli.fuse_layer import decoder_layer
from nanovllm.cli.fuse_tables import missing
from nanovllm.fuse import FusionAnalyzer, kept_timings
from nanovllm.fuse.cpu_model import measure_cpu
from nanovllm.fuse.group_timing import Agreement, Comparison, GroupTiming, difference, input_sets, measure, spearman
from nanovllm.hardware.gpu_presets import device_model
from tests.fuse.modules import PLAIN, meta, mlp, norm
from tests.shared_gpu import gpu_is_shared, preset_here

REPO = Path(__file__).parents[2]
ARGS = (torch.randn(8, 32), torch.randn(32), torch.randn(64, 32), torch.randn(32, 64))


def test_measure_on_a_cpu():
    analyzer = FusionAnalyzer(mlp, ARGS, device=PLAIN)
    said = []
    rows = list(measure(analyzer, ARGS, backend="aot_eager", iters=3, progress=said.append))
    assert [r.number for r in rows] == list(range(1, len(analyzer.groups) + 1)) and len(said) == len(rows)
    for r in rows:
        assert r.unfused.seconds > 0 and r.compile.seconds > 0 and r.compile.error < 1e-5
        assert (r.ours.seconds or 0) > 0 or r.ours.reason == "no op of ours"
        assert r.predicted_fused <= r.predicted_unfused
    (only,) = measure(FusionAnalyzer(torch.cosh, (ARGS[0],), device=PLAIN), ARGS[:1], ways=("unfused", "ours"), iters=1)
    assert only.ours == GroupTiming(None, "no op of ours") and only.compile.reason == "not asked for"


def test_a_way_that_fails_or_is_wrong_is_a_row():
    analyzer = FusionAnalyzer(norm, ARGS[:2], device=PLAIN)

    def no_compiler(module, inputs):
        raise RuntimeError("no C++ compiler\nand much more")

    def wrong(module, inputs):
        return lambda *args: tuple(t + 1e-2 for t in module(*args))

    (row,) = measure(analyzer, ARGS[:2], backend=no_compiler, iters=1)
    assert row.compile.seconds is None and "no C++ compiler" in row.compile.reason and "\n" not in row.compile.reason
    (row,) = measure(analyzer, ARGS[:2], backend=wrong, iters=1)
    assert row.compile == GroupTiming(None, "its result differs from the unfused one")


WITHOUT_A_COMPILER = """
import torch, torch._inductor.config as config
from nanovllm.fuse import FusionAnalyzer
from nanovllm.fuse.group_timing import measure
from tests.fuse.modules import PLAIN
config.cpp.cxx, config.force_disable_caches = ("/nowhere/c++",), True
x = torch.randn(3, 7)
(row,) = measure(FusionAnalyzer(lambda x: torch.cosh(x * 3.25), (x,), device=PLAIN), (x,), iters=1)
assert row.unfused.seconds > 0 and row.compile.seconds is None and row.compile.reason
"""


@pytest.mark.slow
def test_a_missing_compiler_of_inductor_is_a_row(warm_python):
    # In a process of its own: Inductor remembers what it has found out about compilers.
    done = warm_python.run("-c", WITHOUT_A_COMPILER, cwd=REPO)
    assert done.returncode == 0, done.stderr[-2000:]


def test_groups_that_write_are_measured_on_copies():
    def fn(cache, index, x):
        cache[index] = x * 2
        return cache.sum(-1)

    args = (torch.zeros(8, 4), torch.arange(3), torch.ones(3, 4))
    rows = list(
        measure(FusionAnalyzer(fn, args, device=PLAIN), [a.clone() for a in args], ways=("unfused", "ours"), iters=1)
    )
    assert all(r.unfused.seconds for r in rows) and not args[0].any()


def test_results_that_are_tuples_are_compared():
    x = torch.randn(8, 16)
    for fn in (torch.sort, lambda x: (torch.sort(x)[0] * 2, torch.topk(x, 2)[1] + 1)):
        for r in measure(FusionAnalyzer(fn, (x,), device=PLAIN), (x,), backend="aot_eager", iters=1):
            assert r.unfused.seconds and r.compile.seconds and r.compile.error == 0, r
    one = torch.sort(x)
    assert difference((one,), (one,)) == 0 and difference(((one[0], one[1].flip(1)),), (one,)) is None
    assert difference((one[0],), (one,)) is None
    assert input_sets([tuple(one)], 1 << 20, 1 << 10) == input_sets(list(one), 1 << 20, 1 << 10)


def test_random_numbers_are_timed_and_not_compared():
    x = torch.randn(64, 64)
    for fn, op in [(lambda x: F.dropout(x * 2, 0.5), "dropout"), (lambda x: torch.rand_like(x), "rand_like")]:
        analyzer = FusionAnalyzer(fn, (x,), device=PLAIN)
        *_, r = measure(analyzer, (x,), ways=("unfused", "compile"), backend="aot_eager", iters=1)
        for m in (r.unfused, r.compile):
            assert m.seconds and m.error is None
            assert m.reason == f"{op} draws random numbers, so results were not compared"
        assert missing([r]) == [f"group {r.number}: {m.reason}"]
        (group,) = kept_timings.document([r], "NVIDIA H200", {}, Path("."))["groups"]
        assert group["unfused"]["us"] and group["unfused"]["not_compared"] == m.reason
    inference = FusionAnalyzer(lambda x: F.dropout(x * 2, 0.5, False), (x,), device=PLAIN)
    (row,) = measure(inference, (x,), ways=("unfused",), iters=1)
    assert row.unfused.error == 0


def test_meta_tensors_and_unknown_ways_are_errors():
    analyzer = FusionAnalyzer(torch.relu, (meta(4),), device=PLAIN)
    with pytest.raises(ValueError, match="is on the meta device: measuring needs real tensors"):
        list(measure(analyzer, (meta(4),)))
    with pytest.raises(ValueError, match="ways: expected some of unfused, compile, ours, not 'jax'"):
        list(measure(analyzer, (torch.ones(4),), ways=("jax",)))


def test_inputs_are_rotated_clearly_within_or_beyond_the_cache():
    cache = 60 << 20
    for size in (4, 1 << 10, 1 << 16, 1 << 20, 3 << 20, 16 << 20, 1 << 30):
        for read in (size, size // 2, size // 16, 0):
            sets, near = input_sets([meta(size, dtype=torch.int8)], read, cache)
            assert sets >= 1 and (sets * read <= 15 << 20 if near else sets * read >= 2 * cache), (size, read)
            assert sets * size <= 8 << 30
    # Attention reads little of two caches of 134 MB: many sets would be needed, and few of them stay in the L2 cache.
    caches = [meta(134 << 20, dtype=torch.int8)] * 2
    assert input_sets(caches, 1 << 20, cache) == (8, True) and input_sets(caches, 64 << 20, cache) == (3, False)
    layer, kwargs, known = decoder_layer("smollm2-135m", 2, 48)
    groups = FusionAnalyzer(layer, (), kwargs, device=PLAIN, known=known).groups
    (attention,) = (g for g in groups if any("attention" in k.op for k in g.kernels))
    assert attention.read_bytes < sum(t.nbytes for name, t in kwargs.items() if "cache" in name) / 4


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
        rows = list(measure(analyzer, args, ways=("unfused",), iters=1))
        assert [r.unfused.seconds is None for r in rows] == [i == at for i in range(len(groups))]
        assert rows[at].unfused.reason == "it takes a value to the host"


def comparison(predicted, measured, kernels=2):
    (a, b), (c, d) = predicted, measured
    return Comparison(
        1, "x", kernels, "none", "cache", a, b, GroupTiming(c), GroupTiming(d), GroupTiming(None, "no op of ours")
    )


def test_agreement():
    rows = [comparison(*both) for both in (((10, 5), (8, 4)), ((20, 5), (25, 5)), ((6, 5), (6, 4)))]
    rows.append(comparison((9, 9), (9, 9), 1))
    found = Agreement.of(rows)
    assert found.rank == pytest.approx(1.0)  # gains of 5, 15, 1 and 4, 20, 2
    assert found.unfused_error == pytest.approx(0.1) and found.fused_error == pytest.approx(0.25)
    assert Agreement.of(rows[:2]).rank is None
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1 and spearman([1, 1], [1, 2]) is None
    assert spearman([1, 2, 2, 4], [1, 3, 3, 9]) == pytest.approx(1.0)


def test_kept_results(tmp_path):
    analyzer = FusionAnalyzer(norm, ARGS[:2], device=PLAIN)
    rows = list(measure(analyzer, ARGS[:2], ways=("unfused", "ours"), iters=1))
    for tokens in (1, 2, 1):
        run = kept_timings.document(rows, "NVIDIA H200", {"module": "norm", "tokens": tokens}, tmp_path)
        path = kept_timings.keep(run, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "fusion.json"
    runs = kept_timings.load(path)
    assert [r["arguments"]["tokens"] for r in runs] == [2, 1]  # the latest of each
    (group,) = runs[0]["groups"]
    assert group["served"] == "rms_norm" and group["unfused"]["us"] > 0
    assert group["compile"] == {"reason": "not asked for"}
    path.write_text("[1]")
    with pytest.raises(ValueError, match="is not a file of measured fusions"):
        kept_timings.load(path)


def test_a_host_is_measured():
    host = measure_cpu(cache_bytes=1 << 18)
    assert host.bandwidth > 1e8 and host.l2_bandwidth >= host.bandwidth and 0 < host.launch < 1e-3
    assert host.rate("float32") > 1e8
    with pytest.raises(ValueError, match="the products of float16 were not measured; float32 were"):
        host.rate("float16")


def timed_on_a_gpu(device):
    """A decoder layer's groups, timed in every way: each gives the same results anywhere."""
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 64, 1024, device=torch.device("cuda"))
    rows = list(measure(FusionAnalyzer(layer, (), kwargs, known=known, device=device), (), kwargs))
    assert all(r.unfused.seconds and r.compile.seconds and r.ours.seconds for r in rows)
    return rows


@pytest.mark.gpu
def test_every_way_is_right_on_a_gpu():
    """Beside other tests, and Inductor keeps what it compiles here for the test below."""
    timed_on_a_gpu(preset_here() or device_model("h200"))


@pytest.mark.gpu
@pytest.mark.alone
def test_times_on_a_gpu_are_as_predicted(measured_gpu):
    """They mean something only where nothing else runs on the device."""
    device, shared = measured_gpu
    rows = timed_on_a_gpu(device)
    if shared or gpu_is_shared():
        pytest.skip("another program uses the GPU, so its times are not compared with predictions")
    found = Agreement.of(rows)
    told = "\n".join(
        f"{r.ops}: unfused {1e6 * r.predicted_unfused:.1f} predicted, {1e6 * r.unfused.seconds:.1f} us; "
        f"fused {1e6 * r.predicted_fused:.1f} predicted, compile {1e6 * r.compile.seconds:.1f}, ours"
        f" {1e6 * r.ours.seconds:.1f} us"
        for r in rows
    )
    # Of the five groups of several kernels two pairs have nearly the same gain: the two norms, and the two products
    # with something after them. Either order of both leaves a correlation of 0.8.
    assert found.rank > 0.75 and found.unfused_error < 0.5 and found.fused_error < 0.5, f"{found}\n{told}"

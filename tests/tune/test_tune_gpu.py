"""Tuning on a GPU: real timings, real failures, and a result that the kernel takes and that is right."""

import json
import math

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan
from nanovllm.kernels.triton.rows.plans import RowPlan
from nanovllm.tune import Budget, Skipped
from nanovllm.tune.jobs import jobs
from nanovllm.tune.measure import JobTimer
from nanovllm.tune.run import tune
from nanovllm.tune.spaces import candidates

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """(device, its model), with a fresh user's directory."""
    from nanovllm.hardware.gpu_presets import this_device

    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    for tunable in tunables.ALL.values():
        tunable.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    yield device, this_device(device)
    for tunable in tunables.ALL.values():
        tunable.forget()


def one(op, *shapes, model, dtype=BF16):
    (job,), remarks = jobs(op, shapes, dtype, model)
    assert not remarks
    return job


@pytest.mark.alone
def test_a_search_finds_writes_and_is_used(gpu, tmp_path):
    device, model = gpu
    job = one("rms_norm", (64, 1024), model=model)
    (result,) = tune([job], device, model, config_files.gpu_of(device), tmp_path, budget=Budget(patience=12))
    found = result.outcome
    best = next(iter(found.ranking))
    assert 0 < found.ranking[best] <= found.ranking[job.builtin] * 1.02 and found.tried >= 3
    tunables.RMS_NORM.forget()
    assert tunables.RMS_NORM.find(device, 64, 1024, BF16) == best
    data = json.loads((tmp_path / f"{config_files.gpu_of(device)}.json").read_text())["entries"]
    assert len(data) == 1 and math.isclose(data[0]["us"], 1e6 * found.ranking[best], rel_tol=1e-3)


SHAPES = [
    ("silu_and_mul", (64, 3072)), ("linear_bias_act", (256, 1024, 4096)), ("gated_mlp", (16, 1024, 3072)),
    ("linear", (1, 40000, 1024)), ("add_rms_norm_gate_up", (8, 3072, 1024)),
    ("attention_decode", (8, 512, 512, 16, 8, 128, 256)),
    ("attention_prefill", (2, 700, 700, 0, 16, 8, 128, 256)), ("qk_norm_rope", (8, 16, 8, 128)),
]  # fmt: skip
HOPPER_SHAPES = [
    ("linear", (8, 4096, 1024)), ("linear", (100, 6144, 4096)), ("linear_silu_and_mul", (32, 3072, 1024)),
    ("linear_silu_and_mul", (128, 12288, 4096)), ("linear_add_rms_norm", (1, 1024, 3072)),
    ("linear_add_rms_norm", (64, 4096, 12288)), ("linear_add_rms_norm", (200, 1024, 2048)),
    *((op, shape) for op in ("attention_decode", "qk_norm_rope_attention")
      for shape in ((1, 2048, 2048, 16, 8, 128, 256), (64, 512, 512, 9, 3, 64, 64))),
]  # fmt: skip


@pytest.mark.parametrize("op, shape", SHAPES + HOPPER_SHAPES, ids=str)
def test_every_kind_of_kernel_asks_for_its_key_and_the_built_in_choice_is_right(gpu, op, shape):
    """The key that is worked out without running the kernel is the one that it asks for: `measure` checks it."""
    device, model = gpu
    job = one(op, shape, model=model)
    timer = JobTimer(job, device)
    timer.prepare([job.builtin])
    assert min(timer.measure(plan, 3) for plan in (job.builtin, None)) > 0  # None: as the kernel chooses
    timer.verify(job.builtin)


@pytest.mark.alone
@pytest.mark.parametrize("op, shape", [*SHAPES[:3], *HOPPER_SHAPES[:6:2], *HOPPER_SHAPES[-2:]], ids=str)
def test_the_built_in_choice_takes_as_long_as_what_the_kernel_chooses(gpu, op, shape):
    """It is the same."""
    device, model = gpu
    job = one(op, shape, model=model)
    timer = JobTimer(job, device)
    timer.prepare([job.builtin])
    times = [timer.measure(job.builtin, 10), timer.measure(None, 10)]
    assert max(times) < 1.3 * min(times)


@pytest.mark.parametrize("op, shape", HOPPER_SHAPES, ids=str)
def test_what_is_tried_of_kernels_for_hopper_is_right(gpu, op, shape):
    """Plans at the edges of the space of products, and some between, compile, fit as computed and are right."""
    device, model = gpu
    if model.capability != 90:
        pytest.skip("no Hopper GPU")
    job = one(op, shape, model=model)
    assert job.tunable in (tunables.HOPPER_PRODUCT, tunables.ATTENTION_DECODE_HOPPER)
    timer = JobTimer(job, device)
    plans, edges = candidates(job.tunable, job.key, job.builtin, model).plans, []
    if job.tunable is tunables.HOPPER_PRODUCT:
        values = [
            lambda p: p.chunks * p.slots, lambda p: (p.chunks, p.slots), lambda p: (p.slots, p.chunks),
            lambda p: (p.splits, p.slots), lambda p: (p.rounds, p.slots),
            lambda p: (p.splits * p.chunks * p.slots * p.rounds, p.chunks),
        ]  # fmt: skip
        edges = [edge(plans, key=value) for edge in (max, min) for value in values]
    tried = list(dict.fromkeys([job.builtin, *edges, *plans[1 :: len(plans) // 6]]))
    timer.prepare(tried)
    for plan in tried:
        timer.verify(plan)
        assert timer.measure(plan, 3) > 0


def test_what_does_not_fit_or_does_not_compile_is_skipped_with_its_reason(gpu):
    device, model = gpu
    job = one("linear_bias_act", (64, 1024, 4096), model=model)
    timer = JobTimer(job, device)
    with pytest.raises(Skipped, match="out of shared memory"):
        timer.measure(StreamPlan(64, 64, 128, 1, 4, 8), 3)
    with pytest.raises(Skipped, match="does not compile"):
        timer.measure(TilePlan(64, 48, 64, 8, 1, 4, 3), 3)
    assert timer.measure(job.builtin, 3) > 0  # the device is none the worse for it


@pytest.mark.alone
def test_a_time_is_of_a_cold_cache(gpu):
    """Reading and writing cannot be faster than device memory allows: the inputs of a call are not in the L2 cache."""
    device, model = gpu
    job = one("rms_norm", (8192, 1024), model=model)
    timer = JobTimer(job, device)
    seconds = timer.measure(RowPlan(1, 4), 15)
    assert 2 * 2 * 8192 * 1024 / seconds < 1.05 * model.peak_bandwidth

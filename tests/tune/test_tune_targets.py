"""From ops and shapes to candidates: keys, built-in choices, spaces, what planner and compiler leave out."""

import inspect
import itertools
import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels.triton import tunables
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.tune import measure, pruning
from nanovllm.tune.launches import recorded
from nanovllm.tune.measure import Bench, TuningError, reason_of
from nanovllm.tune.pruning import candidates, compile_all, distance
from nanovllm.tune.shapes import shapes_of
from nanovllm.tune.spaces import spaces_of
from nanovllm.tune.targets import TARGETS, arguments_of, jobs, neighbour, target

H200, A100 = device_model("h200"), device_model("a100")
BF16 = torch.bfloat16


def one(op, *shapes, dtype=BF16, device=H200):
    found, remarks = jobs(target(op), shapes, dtype, device)
    assert len(found) == 1 and not remarks
    return found[0]


def test_every_tunable_has_a_target_and_a_space():
    reached = set()
    for name, t in TARGETS.items():
        for device in (H200, A100):
            found, _ = jobs(t, None, BF16, device)
            assert found or (device is A100 and t.choices == (tunables.HOPPER_PRODUCT,)), name
            reached |= {job.tunable.name for job in found}
    assert reached == set(tunables.ALL)


@pytest.mark.parametrize("op", TARGETS)
def test_the_built_in_choice_is_among_what_is_tried_or_launches_at_least(op):
    shapes = dict(shapes_of(preset("qwen3-0.6b"))).get(op)
    found, _ = jobs(target(op), shapes, BF16, H200)
    assert found
    for job in found:
        plans = [plan for space in spaces_of(job.tunable, job.named, H200) for plan in space.split()[0]]
        assert len(plans) == len(set(plans)) > 3
        assert job.tunable.refuse(job.builtin, job.named) is None
        assert job.builtin in plans, job
        for plan in plans:  # what is tried can be written and read
            assert job.tunable.plan_from_json(job.tunable.plan_to_json(plan), job.key) == plan


def test_shapes_with_the_same_key_are_one_job():
    shapes = [(n, length, length, 16, 8, 128, 256) for n, length in ((8, 512), (8, 4096), (64, 512))]
    named = {
        "num_seqs": 8,
        "kv_heads": 8,
        "group": 2,
        "head_dim": 128,
        "dtype": BF16,
        "cache_dtype": BF16,
        "block_size": 256,
    }
    for device, more in ((A100, {"rotate": False}), (H200, {"new": False})):
        found, remarks = jobs(target("attention_decode"), shapes, BF16, device)
        assert [len(j.shapes) for j in found] == [2, 1] and not remarks
        assert found[0].named == named | more


def test_a_key_is_what_the_kernel_asks_on_that_gpu():
    job = one("linear_bias_act", (256, 1024, 4096))
    assert job.named == {"m": 256, "n": 4096, "k": 1024, "dtype": BF16, "gated": False, "tma": True} and job.builtin.tma
    older = one("linear_bias_act", (256, 1024, 4096), device=A100)
    assert not older.named["tma"] and not older.builtin.tma
    assert not one("linear_bias_act", (256, 1023, 4096)).named["tma"]  # rows of 2046 bytes
    assert one("gated_mlp", (256, 1024, 3072)).named["gated"]
    decode = (8, 512, 512, 16, 8, 128, 256)
    for op in ("attention_decode", "qk_norm_rope_attention"):
        assert one(op, decode).tunable is tunables.ATTENTION_DECODE_HOPPER
        assert (
            one(op, decode, dtype=torch.float32).tunable
            is one(op, decode, device=A100).tunable
            is tunables.ATTENTION_DECODE
        )
        for other in (
            (600, *decode[1:]),
            (8, 512, 512, 72, 8, 128, 256),
            (8, 512, 512, 16, 8, 80, 256),
            (*decode[:-1], 32),
        ):
            assert one(op, other).tunable is tunables.ATTENTION_DECODE
    assert one("attention_prefill", (2, 64, 64, 0, 8, 4, 64, 32)).tunable is tunables.ATTENTION_PREFILL_HOPPER
    few = one("attention_prefill", (2, 8, 8, 0, 8, 4, 64, 32))
    assert few.tunable is tunables.ATTENTION_PREFILL and few.named["few_rows"] == 16
    assert one("attention_prefill", (2, 64, 64, 0, 8, 4, 64, 32), device=A100).named["few_rows"] == 0
    assert one("rms_norm", (5, 100)).named == {"rows": 8, "size": 100, "dtype": BF16}


def test_what_chooses_nothing_is_said():
    found, remarks = jobs(target("linear_bias_act"), [(4, 64, 64)], torch.float32, H200)
    assert not found and remarks == ["linear_bias_act 4x64x64 float32: its kernel chooses nothing for such a call"]
    found, remarks = jobs(target("linear"), [(64, 1024, 1024), (8, 1024, 1024)], BF16, A100)
    assert [job.tunable for job in found] == [tunables.SMALL_PRODUCT]
    assert remarks == ["linear 64x1024x1024 bfloat16: its kernel chooses nothing for such a call"]
    for op in ("linear_silu_and_mul", "linear_add_rms_norm"):
        found, remarks = jobs(target(op), [(8, 1024, 1024), (32, 1024, 1024)], BF16, A100)
        said = f"{op}: only its kernel for Hopper chooses anything, and nvidia-a100 is another GPU"
        assert not found and remarks == [said]
        found, remarks = jobs(target(op), [(8, 1024, 100), (257, 64, 64), (1, 2048, 2048)], BF16, H200)
        assert not found and len(remarks) == 3 and all("chooses nothing" in r for r in remarks)
        assert not jobs(target(op), [(8, 1024, 1024)], torch.float32, H200)[0]
    # Of few rows, `linear` leaves many tokens to the library; where columns are split, nothing does.
    assert jobs(target("linear_add_rms_norm"), [(64, 1024, 3072)], BF16, H200)[0]
    assert (
        not jobs(target("linear"), [(64, 1024, 3072)], BF16, H200)[0]
        and jobs(target("linear"), [(32, 1024, 3072)], BF16, H200)[0]
    )
    with pytest.raises(ValueError, match="store_kvcache: its kernels choose nothing that can be tuned"):
        target("store_kvcache")
    with pytest.raises(ValueError, match="unknown op 'rms_nrom'; did you mean 'rms_norm'"):
        target("rms_nrom")
    with pytest.raises(ValueError, match="shape 3: rms_norm takes ROWSxSIZE, not 1 number$"):
        jobs(target("rms_norm"), [(3,)], BF16, H200)


def test_what_the_product_for_hopper_takes_is_tuned_for_it_and_the_rest_for_the_other_kernels():
    few = [(1, 1024, 2048), (8, 1024, 2048), (8, 1024, 100), (1, 40000, 1024)]  # Hopper's takes the first two
    for device, taken in ((H200, few[:2]), (A100, [])):
        found, remarks = jobs(target("linear"), few, BF16, device)
        hopper = [job for job in found if job.tunable is tunables.HOPPER_PRODUCT]
        assert [job.shapes for job in hopper] == ([tuple(taken)] if taken else []) and not remarks
        small = [tuple(job.named[k] for k in ("tokens", "outputs", "size")) for job in found if job not in hopper]
        assert small == [shape for shape in few if shape not in taken]
        assert len(jobs(target("add_rms_norm_linear"), few, BF16, device)[0]) == len(few)
    assert one("linear", (1, 2048, 2048)).tunable is tunables.SMALL_PRODUCT  # only from two tokens on
    assert one("linear", few[0], dtype=torch.float32).tunable is tunables.SMALL_PRODUCT


@pytest.mark.parametrize(
    "op, gated, split",
    [("linear", False, False), ("linear_silu_and_mul", True, False), ("linear_add_rms_norm", False, True)],
)
def test_the_key_of_a_product_for_hopper_is_what_its_launch_asks(op, gated, split, monkeypatch):
    """As a Hopper GPU calls it: the wrapper up to the launch runs here too."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.gemm import hopper_product

    monkeypatch.setattr(hopper_product, "takes", lambda *args, **kwargs: True)
    cpu = torch.device("cpu")
    for tokens, size in ((1, 1024), (8, 192), (9, 1024), (32, 1024), (100, 1024), (150, 1024), (256, 1024)):
        if op == "linear" and tokens > 128:  # the library's
            continue
        job = one(op, (tokens, 96, size))
        assert job.tunable is tunables.HOPPER_PRODUCT and job.asked is None
        assert job.named == {
            "tokens": tunables.hopper_product_tokens(tokens, 256), "outputs": 96, "size": size, "dtype": BF16, "gated": gated,
            "split": split,
        }  # fmt: skip
        arguments = arguments_of(job.target, job.shapes[0], BF16, {})
        plans = candidates(job, H200).plans
        for plan in (
            job.builtin,
            plans[-1],
            None,
        ):  # None: as `plan_hopper_product` says, for the multiprocessors of an H200
            with tunables.HOPPER_PRODUCT.using(cpu, job.key, plan) as asked, recorded() as launches:
                job.target.launcher.fn(**arguments)
            assert asked == [job.key]
            product = launches[0]
            assert product.name == "hopper_product_kernel" and product.arguments["TOKENS"] + product.arguments[
                "MORE"
            ] == tunables.hopper_product_tokens(tokens, (plan or job.builtin).block)
            given = tuple(product.arguments[name.upper()] for name in ("splits", "chunks", "slots", "rounds"))
            assert hopper_product.HopperProductPlan(*given, (plan or job.builtin).block) == (plan or job.builtin)
            assert product.arguments["GATED"] == gated
            assert [launch.name for launch in launches[1:]] == (["sum_norm_kernel"] if split else [])


@pytest.mark.parametrize("op, new", [("attention_decode", False), ("qk_norm_rope_attention", True)])
def test_the_key_of_decode_attention_for_hopper_is_what_its_launch_asks(op, new, monkeypatch):
    """As a Hopper GPU calls it: the wrapper up to the launch runs here too."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.attention import decode, decode_hopper
    from nanovllm.kernels.triton.attention.decode_plan import HopperDecodePlan

    monkeypatch.setattr(decode_hopper, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(decode_hopper, "num_multiprocessors", lambda device: H200.sms)
    assert decode.takes is decode_hopper.takes
    cpu = torch.device("cpu")
    for count, heads, kv_heads, dim, block in (
        (1, 16, 8, 128, 256),
        (9, 9, 3, 64, 64),
        (64, 32, 8, 128, 128),
        (300, 14, 2, 64, 256),
    ):
        job = one(op, (count, 512, 512, heads, kv_heads, dim, block))
        assert job.tunable is tunables.ATTENTION_DECODE_HOPPER
        assert job.named == {
            "num_seqs": 1 << (count - 1).bit_length(), "kv_heads": kv_heads, "group": heads // kv_heads, "head_dim": dim,
            "dtype": BF16, "cache_dtype": BF16, "block_size": block, "new": new,
        }  # fmt: skip
        arguments = arguments_of(job.target, job.shapes[0], BF16, {})
        plans = candidates(job, H200).plans
        for plan in (
            job.builtin,
            plans[-1],
            None,
        ):  # None: as `plan_hopper_decode` says, for the multiprocessors of an H200
            with tunables.ATTENTION_DECODE_HOPPER.using(cpu, job.key, plan) as asked, recorded() as launches:
                job.target.launcher.fn(**arguments)
            assert asked == [job.key]
            (launch,) = launches
            assert launch.name == "decode_hopper_kernel" and launch.arguments["NEW"] == new
            assert launch.options["num_warps"] == launch.arguments["WARPS"]
            given = [
                launch.arguments[n]
                for n in ("most_pieces", "least", "WARPS", "SLOTS", "BOX", "CHUNK", "EMPTY_LAST", "CLUSTER")
            ]
            assert HopperDecodePlan(*given) == (plan or job.builtin)


def test_a_product_for_hopper_has_one_plan_for_all_tokens_of_a_key():
    """So a configuration replaces the choice that the kernel would make for any of them."""
    from nanovllm.kernels.triton.gemm.hopper_product import MAX_TOKENS, plan_hopper_product

    shapes = (4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (80, 64)
    for (rows, size), split in itertools.product(shapes, (False, True)):
        for tokens in range(1, MAX_TOKENS + 1):
            of_key = tunables.hopper_product_key(tokens, rows, size, BF16, False, split)[0]
            assert of_key >= tokens and all(
                tunables.hopper_product_tokens(of_key, b) == tunables.hopper_product_tokens(tokens, b)
                for b in (128, 256)
            )
            for sms in (78, 132):
                planned = (plan_hopper_product(n, rows, size, split, sms) for n in (tokens, of_key))
                assert len(set(planned)) == 1
    job = one("linear", (1, 4096, 1024), (8, 4096, 1024))
    assert job.shapes == ((1, 4096, 1024), (8, 4096, 1024))


def test_what_is_tried_of_a_product_for_hopper():
    plain, parts = one("linear", (32, 1024, 3072)), one("linear_add_rms_norm", (32, 1024, 3072))
    for job in (plain, parts):
        plans = candidates(job, H200).plans
        assert plans[0] == job.builtin
        assert {p.chunks for p in plans} == {1, 2, 4, 8} and max(p.slots for p in plans) == 16
        for p in plans:  # all columns are covered, with no round, slot or program more than that takes
            columns = p.chunks * p.slots * p.rounds
            assert (p.splits - 1) * columns < 48 <= p.splits * columns and p.chunks * (p.slots - 1) < -(-48 // p.splits)
            assert p.splits * p.chunks * p.slots * (p.rounds - 1) < 48
            assert p.chunks * p.slots * 96 * 128 <= H200.shared_per_block
    assert {p.splits for p in candidates(plain, H200).plans} == {1}
    assert {p.splits for p in candidates(parts, H200).plans} >= {1, 2, 3, 4, 6, 8, 12, 16}
    found = candidates(one("linear_add_rms_norm", (64, 4096, 12288)), H200)
    assert max(p.splits for p in found.plans) * 4096 // 64 <= 4 * H200.sms
    assert any("splits where the programs already fill the GPU" in reason for reason in found.counts())


def test_the_first_to_try_are_near_the_built_in_choice():
    job = one("attention_decode", (64, 512, 512, 16, 8, 128, 256))
    found = candidates(job, H200)
    assert found.plans[0] == job.builtin
    distances = [distance(plan, job.builtin) for plan in found.plans]
    assert distances == sorted(distances) and distances[0] == 0 < distances[1] <= 1
    assert found.total == len(found.plans) + sum(p.total for p in found.pruned.values())


def test_the_planner_leaves_out_what_it_predicts_to_be_slow():
    job = one("linear_bias_act", (2048, 1024, 4096))
    found = candidates(job, H200)
    assert 0 < len(found.plans) <= pruning.MOST_PREDICTED and set(found.plans) == set(found.predicted) & set(
        found.plans
    )
    predicted = [found.predicted[plan] for plan in found.plans]
    assert predicted == sorted(predicted) and predicted[-1] <= pruning.SLOWER * predicted[0]
    reasons = found.pruned["planner"].counts
    assert reasons[f"predicted to take more than {pruning.SLOWER} times the best prediction"] > 0
    assert "planner: predicted to take more than" in " ".join(found.counts())
    prefill = candidates(one("attention_prefill", (2, 512, 512, 0, 16, 8, 128, 256), device=A100), A100)
    assert "planner" in prefill.pruned and prefill.predicted


def test_without_a_planner_nothing_is_pruned_by_it_and_that_is_said(monkeypatch):
    def broken(job, device):
        raise ImportError("no planner")

    monkeypatch.setattr(pruning, "_gemm_planner", broken)
    found = candidates(one("linear_bias_act", (2048, 1024, 4096)), H200)
    assert found.remarks[0] == "not pruned by the planner: no planner" and list(found.pruned) == [
        "constraints",
        "distance",
    ]


def test_a_plan_that_does_not_fit_is_left_out_by_the_planner():
    job = one("linear_bias_act", (2048, 1024, 4096), device=A100)
    found = candidates(job, A100)
    assert not any(plan.tma for plan in found.plans)
    assert all(2 * plan.block_k * (plan.block_m + plan.block_n) * (plan.stages - 1) <= A100.shared_per_block for plan in found.plans)  # fmt: skip
    assert any("shared memory" in reason for reason in found.counts())


def test_the_compiler_says_what_a_plan_takes_and_leaves_out_what_spills():
    job = one("linear_bias_act", (2048, 1024, 4096))
    found = candidates(job, H200)
    good = next(p for p in found.plans if p.tma and p.block_m == p.block_n == 128 and p.warps == 8)
    spilling = type(good)(**{f.name: getattr(good, f.name) for f in fields(good)} | {"block_n": 256, "warps": 4})
    found.plans = [good, spilling]
    compile_all(job, found, H200, None)
    assert found.plans == [good] and found.pruned["compiler"].counts == {"spills registers, as compiled": 1}
    shared, registers, spilled = found.compiled[good]
    assert 64 << 10 <= shared <= H200.shared_per_block and 64 < registers <= 255 and spilled == 0
    assert found.compiled[spilling][2] > 0


def test_compiling_ends_with_the_limit_and_says_what_is_left():
    job = one("rms_norm", (64, 1024))
    found = candidates(job, H200)
    number = len(found.plans)
    times = iter([0.0, 0.0, 5.0])
    compile_all(job, found, H200, 4.0, clock=lambda: next(times))
    assert len(found.plans) == number and len(found.compiled) == 1
    assert found.remarks[-1] == f"not compiled: {number - 1} of {number}, for the time limit of 4 s"
    shapes = {
        "attention_prefill": (2, 64, 64, 0, 8, 4, 64, 32),
        "attention_decode": (8, 512, 512, 16, 8, 128, 256),
        "linear": (8, 1024, 1024),
    }
    for hopper in (one(*item) for item in shapes.items()):
        found = candidates(hopper, H200)
        compile_all(hopper, found, H200, None)
        assert found.remarks[-1].startswith("not compiled: only a GPU of that kind")


def test_a_plan_that_does_not_compile_is_left_out_with_the_compilers_words(monkeypatch):
    def broken(launch, capability):
        raise RuntimeError("PassManager::run failed\nmore")

    monkeypatch.setattr(pruning, "compile_for", broken)
    job = one("rms_norm", (1, 1024))
    found = candidates(job, H200)
    number = len(found.plans)
    compile_all(job, found, H200, None)
    assert not found.plans and found.pruned["compiler"].counts == {"does not compile: PassManager::run failed": number}


@pytest.mark.parametrize(
    "op, shape",
    [("add_rms_norm", (8, 256)), ("silu_and_mul", (8, 256)), ("qk_norm_rope_store", (4, 4, 2, 64)), ("linear", (2, 64, 136)),
     ("attention_decode", (2, 40, 40, 4, 2, 64, 32)), ("gated_mlp", (32, 64, 64))],
)  # fmt: skip
def test_launches_of_every_kind_compile_without_a_gpu(op, shape):
    job = one(op, shape)
    found = candidates(job, H200)
    found.plans = [job.builtin]
    compile_all(job, found, H200, None)
    assert found.plans == [job.builtin] and found.compiled[job.builtin][1] > 8


def test_the_shapes_of_models_fit_their_ops():
    for name in PRESETS:
        for op, shapes in shapes_of(preset(name)).items():
            make = inspect.signature(target(op).declared.inputs.make)
            assert len(set(shapes)) == len(shapes)
            for shape in shapes:
                make.bind(None, *shape)


def test_a_neighbour_keeps_the_key():
    assert neighbour((64, 1024)) == (63, 1024) and neighbour((1, 5)) is None and neighbour((2, 5)) is None
    assert neighbour((5, 7)) is None  # 4 is another bucket
    for rows in range(3, 3000):
        beside = neighbour((rows, 64))
        assert beside is None or one("rms_norm", beside).key == one("rms_norm", (rows, 64)).key or rows > 8
        if rows == 8:
            break


def test_why_a_plan_cannot_run():
    out = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})(
        "out of resource: shared memory, Required: 9"
    )
    out.name = "shared memory"
    assert reason_of(out) == "out of shared memory: out of resource: shared memory, Required: 9"
    assert reason_of(RuntimeError("PassManager::run failed")).startswith("does not compile: ")
    assert reason_of(ValueError("x: no")) == "refused: x: no"
    assert reason_of(torch.OutOfMemoryError("x")).startswith("out of device memory")
    assert reason_of(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_an_error_that_may_have_cost_the_device_names_the_plan():
    job = one("rms_norm", (64, 1024))
    bench = object.__new__(Bench)
    bench._job = job

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(
        TuningError, match=r"rms_norm: .*rows=64 .*RowPlan\(rows=1, warps=4\) failed .*illegal memory access"
    ):
        bench._tried(job.builtin, lost)


def test_a_plan_is_verified_with_the_most_rows_that_it_is_for_and_with_one_fewer(monkeypatch):
    """1 and 8 tokens have one plan: that it is right for one says little."""
    verified = []

    def record(op, launcher, device, case):
        verified.append(case.shape)
        return SimpleNamespace(failure=None)

    monkeypatch.setattr(measure, "verify", record)
    bench = object.__new__(Bench)
    bench._device, bench._job = torch.device("cpu"), one("linear", (1, 96, 128), (8, 96, 128), (2, 96, 128))
    bench.verify(bench._job.builtin)
    assert verified == [(8, 96, 128), (7, 96, 128)]


def test_in_the_interpreter(tmp_path):
    """The real measure and verify, with a clock of the host in place of CUDA graphs; wrong plans are found."""
    command = [sys.executable, "-W", "ignore", "-c", _INTERPRETED, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr


_INTERPRETED = """
import os
import sys
from pathlib import Path

import torch
from nanovllm.kernels import configs, tunables
from nanovllm.hardware.timing import time_kernel
from nanovllm.tune import Budget, Skipped, measure, targets
from nanovllm.tune import tune as session
from nanovllm.tune.targets import Job, target
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels.triton.rows.plans import RowPlan, BlockPlan

measure.time_in_graph = lambda calls, rounds: time_kernel(calls[0], warmup=0, iters=1)
measure.l2_bytes = lambda device: 1000
torch.cuda.empty_cache = lambda: None
cpu = torch.device("cpu")

def bench(op, tunable, key, shape, dtype=torch.float32, variant=None):
    job = Job(target(op), tunable, key, (tunable, key), (shape,), dtype, variant or {}, None)
    return measure.Bench(job, cpu)

timer = bench("rms_norm", tunables.RMS_NORM, (4, 96, torch.float32), (3, 96))
assert len(timer._sets[0]) == 2
assert timer.measure(RowPlan(2, 4), 3) > 0
timer.verify(RowPlan(2, 4))
timer.verify(None)
try:
    bench("rms_norm", tunables.RMS_NORM, (4, 97, torch.float32), (3, 96)).measure(RowPlan(2, 4), 3)
except RuntimeError as e:
    assert "did not ask for rms_norm (4, 97" in str(e), e
else:
    raise AssertionError

# A kernel that forgets a part of its row: what a broken configuration would do.
from nanovllm.kernels.triton.rows import activation
key = 256, 64, torch.float32, "silu"
timer = bench("silu_and_mul", tunables.ACTIVATE_AND_MUL, key, (4, 64))
timer.verify(BlockPlan(32, 4))
activation.cdiv = lambda a, b: a // b
timer.verify(BlockPlan(32, 4))
timer.verify(BlockPlan(64, 4))
try:
    timer.verify(BlockPlan(128, 4))
except Skipped as e:
    assert str(e).startswith("wrong result: 4x64 float32: "), e
else:
    raise AssertionError
assert tunables.RMS_NORM.find(cpu, 4, 96, torch.float32) is None
try:
    targets.jobs(target("rms_norm"), None, torch.bfloat16, None)
except ValueError as e:
    assert "TRITON_INTERPRET=1: expected it not to be set" in str(e)

# A whole run, from candidates to a file that the kernel then reads; only the launches are recorded elsewhere.
configs.gpu_of = session.gpu_of = lambda device: "nvidia-test-9"
torch.cuda.get_device_name = lambda device: "NVIDIA Test 9"
key = 4, 96, torch.float32
job = Job(target("rms_norm"), tunables.RMS_NORM, key, (tunables.RMS_NORM, key), ((3, 96), (4, 96)), torch.float32, {}, RowPlan(4, 1))
(result,) = session.tune([job], cpu, device_model("h200"), Path(sys.argv[1]), budget=Budget(patience=3, batch=4))
assert result.outcome.best is not None and result.outcome.default_seconds > 0, result
os.environ["NANOVLLM_KERNEL_CONFIGS"] = sys.argv[1]
tunables.RMS_NORM.forget()
with tunables.RMS_NORM.using(cpu, (), None):
    pass
assert tunables.RMS_NORM.find(cpu, *key) == result.outcome.best
x = torch.randn(3, 96)
ours = target("rms_norm").launcher.fn(x, torch.ones(96), 1e-6)
torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (96,), eps=1e-6))
print("done")
"""

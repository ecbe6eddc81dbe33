"""From ops and shapes to candidates: keys, built-in choices, and what the spaces leave out."""

import inspect
import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels import all_ops
from nanovllm.kernels.triton import tunables
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.tune.jobs import TUNABLES, call_arguments, check_tunable, jobs, neighbour
from nanovllm.tune.launches import recorded
from nanovllm.tune.model_shapes import shapes_of
from nanovllm.tune.spaces import candidates as plans_for

H200, A100 = device_model("h200"), device_model("a100")
BF16 = torch.bfloat16


def candidates(job, device):
    return plans_for(job.tunable, job.key, job.builtin, device)


def named(job):
    return job.tunable.named(job.key)


def one(op, *shapes, dtype=BF16, device=H200):
    found, remarks = jobs(op, shapes, dtype, device)
    assert len(found) == 1 and not remarks
    return found[0]


@pytest.mark.slow
def test_every_tunable_has_a_target_and_a_space():
    reached = set()
    for op, choices in TUNABLES.items():
        for device in (H200, A100):
            found, _ = jobs(op, None, BF16, device)
            assert found or (device is A100 and choices == (tunables.HOPPER_PRODUCT,)), op
            reached |= {job.tunable.name for job in found}
    assert reached == set(tunables.ALL)


@pytest.mark.parametrize("op", TUNABLES)
def test_the_built_in_choice_is_among_what_is_tried_or_launches_at_least(op):
    shapes = dict(shapes_of(preset("qwen3-0.6b"))).get(op)
    found, _ = jobs(op, shapes, BF16, H200)
    assert found
    for job in {id(job): job for job in (found[0], found[-1])}.values():
        found_plans = candidates(job, H200)
        plans = found_plans.plans
        assert len(plans) == len(set(plans)) > 3 and found_plans.total == len(plans) + found_plans.left_out.total()
        assert job.tunable.refuse(job.builtin, named(job)) is None
        assert plans[0] == job.builtin, job
        for plan in plans[:50]:  # what is tried can be written and read
            assert job.tunable.plan_from_json(job.tunable.plan_to_json(plan), job.key) == plan


def test_shapes_with_the_same_key_are_one_job():
    shapes = [(n, length, length, 16, 8, 128, 256) for n, length in ((8, 512), (8, 4096), (64, 512))]
    expected = {
        "num_seqs": 8, "kv_heads": 8, "group": 2, "head_dim": 128, "dtype": BF16, "cache_dtype": BF16,
        "block_size": 256,
    }  # fmt: skip
    for device, more in ((A100, {"rotate": False}), (H200, {"new": False})):
        found, remarks = jobs("attention_decode", shapes, BF16, device)
        assert [len(j.shapes) for j in found] == [2, 1] and not remarks
        assert named(found[0]) == expected | more


def test_a_key_is_what_the_kernel_asks_on_that_gpu():
    job = one("linear_bias_act", (256, 1024, 4096))
    assert named(job) == {"m": 256, "n": 4096, "k": 1024, "dtype": BF16, "gated": False, "tma": True}
    assert job.builtin.tma
    older = one("linear_bias_act", (256, 1024, 4096), device=A100)
    assert not named(older)["tma"] and not older.builtin.tma
    assert not named(one("linear_bias_act", (256, 1023, 4096)))["tma"]  # rows of 2046 bytes
    assert named(one("gated_mlp", (256, 1024, 3072)))["gated"]
    decode = (8, 512, 512, 16, 8, 128, 256)
    for op in ("attention_decode", "qk_norm_rope_attention"):
        assert one(op, decode).tunable is tunables.ATTENTION_DECODE_HOPPER
        others = (600, *decode[1:]), (8, 512, 512, 72, 8, 128, 256), (8, 512, 512, 16, 8, 80, 256), (*decode[:-1], 32)
        found = [one(op, decode, dtype=torch.float32), one(op, decode, device=A100), *(one(op, o) for o in others)]
        assert {job.tunable for job in found} == {tunables.ATTENTION_DECODE}
    assert one("attention_prefill", (2, 64, 64, 0, 8, 4, 64, 32)).tunable is tunables.ATTENTION_PREFILL_HOPPER
    few = one("attention_prefill", (2, 8, 8, 0, 8, 4, 64, 32))
    assert few.tunable is tunables.ATTENTION_PREFILL and named(few)["few_rows"] == 16
    assert named(one("attention_prefill", (2, 64, 64, 0, 8, 4, 64, 32), device=A100))["few_rows"] == 0
    assert named(one("rms_norm", (5, 100))) == {"rows": 8, "size": 100, "dtype": BF16}


def test_what_chooses_nothing_is_said():
    found, remarks = jobs("linear_bias_act", [(4, 64, 64)], torch.float32, H200)
    assert not found and remarks == ["linear_bias_act 4x64x64 float32: its kernel chooses nothing for such a call"]
    found, remarks = jobs("linear", [(64, 1024, 1024), (8, 1024, 1024)], BF16, A100)
    assert [job.tunable for job in found] == [tunables.SMALL_PRODUCT]
    assert remarks == ["linear 64x1024x1024 bfloat16: its kernel chooses nothing for such a call"]
    for op in ("linear_silu_and_mul", "linear_add_rms_norm"):
        found, remarks = jobs(op, [(8, 1024, 1024), (32, 1024, 1024)], BF16, A100)
        said = f"{op}: only its kernel for Hopper chooses anything, and nvidia-a100 is another GPU"
        assert not found and remarks == [said]
        found, remarks = jobs(op, [(8, 1024, 100), (257, 64, 64), (1, 2048, 2048)], BF16, H200)
        assert not found and len(remarks) == 3 and all("chooses nothing" in r for r in remarks)
        assert not jobs(op, [(8, 1024, 1024)], torch.float32, H200)[0]
    # Of few rows, `linear` leaves many tokens to the library; where columns are split, nothing does.
    assert jobs("linear_add_rms_norm", [(64, 1024, 3072)], BF16, H200)[0]
    assert not jobs("linear", [(64, 1024, 3072)], BF16, H200)[0] and jobs("linear", [(32, 1024, 3072)], BF16, H200)[0]
    with pytest.raises(ValueError, match="store_kvcache: its kernels choose nothing that can be tuned"):
        check_tunable("store_kvcache")
    with pytest.raises(ValueError, match="unknown op 'rms_nrom'; did you mean 'rms_norm'"):
        check_tunable("rms_nrom")
    with pytest.raises(ValueError, match="shape 3: rms_norm takes ROWSxSIZE, not 1 number$"):
        jobs("rms_norm", [(3,)], BF16, H200)


def test_what_the_product_for_hopper_takes_is_tuned_for_it_and_the_rest_for_the_other_kernels():
    few = [(1, 1024, 2048), (8, 1024, 2048), (8, 1024, 100), (1, 40000, 1024)]  # Hopper's takes the first two
    for device, taken in ((H200, few[:2]), (A100, [])):
        found, remarks = jobs("linear", few, BF16, device)
        hopper = [job for job in found if job.tunable is tunables.HOPPER_PRODUCT]
        assert [job.shapes for job in hopper] == ([tuple(taken)] if taken else []) and not remarks
        small = [tuple(named(job)[k] for k in ("tokens", "outputs", "size")) for job in found if job not in hopper]
        assert small == [shape for shape in few if shape not in taken]
        assert len(jobs("add_rms_norm_linear", few, BF16, device)[0]) == len(few)
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
        assert job.tunable is tunables.HOPPER_PRODUCT
        assert named(job) == {
            "tokens": tunables.hopper_product_tokens(tokens, 256), "outputs": 96, "size": size, "dtype": BF16,
            "gated": gated, "split": split,
        }  # fmt: skip
        arguments = call_arguments(job.op, job.shapes[0], BF16, {})
        # None: as `plan_hopper_product` says, for the multiprocessors of an H200.
        for plan in (job.builtin, candidates(job, H200).plans[-1], None):
            with tunables.HOPPER_PRODUCT.using(cpu, job.key, plan) as asked, recorded() as launches:
                job.provider.fn(**arguments)
            assert asked == [job.key]
            expected, launched = plan or job.builtin, launches[0].arguments
            kernels = ["hopper_product_kernel", *(["sum_norm_kernel"] if split else [])]
            assert [launch.name for launch in launches] == kernels
            of_tokens = tunables.hopper_product_tokens(tokens, expected.block)
            assert launched["TOKENS"] + launched["MORE"] == of_tokens and launched["GATED"] == gated
            given = tuple(launched[name.upper()] for name in ("splits", "chunks", "slots", "rounds"))
            assert hopper_product.HopperProductPlan(*given, expected.block) == expected


@pytest.mark.parametrize("op, new", [("attention_decode", False), ("qk_norm_rope_attention", True)])
def test_the_key_of_decode_attention_for_hopper_is_what_its_launch_asks(op, new, monkeypatch):
    """As a Hopper GPU calls it: the wrapper up to the launch runs here too."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.attention import decode, decode_hopper
    from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan

    monkeypatch.setattr(decode_hopper, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(decode_hopper, "num_multiprocessors", lambda device: H200.sms)
    assert decode.takes is decode_hopper.takes
    cpu = torch.device("cpu")
    shapes = (1, 16, 8, 128, 256), (9, 9, 3, 64, 64), (64, 32, 8, 128, 128), (300, 14, 2, 64, 256)
    for count, heads, kv_heads, dim, block in shapes:
        job = one(op, (count, 512, 512, heads, kv_heads, dim, block))
        assert job.tunable is tunables.ATTENTION_DECODE_HOPPER
        assert named(job) == {
            "num_seqs": 1 << (count - 1).bit_length(), "kv_heads": kv_heads, "group": heads // kv_heads,
            "head_dim": dim, "dtype": BF16, "cache_dtype": BF16, "block_size": block, "new": new,
        }  # fmt: skip
        fn = job.provider.fn
        arguments = job.op.records.group(call_arguments(job.op, job.shapes[0], BF16, {}))
        # None: as `plan_hopper_decode` says, for the multiprocessors of an H200.
        for plan in (job.builtin, replace(job.builtin, empty_last=not job.builtin.empty_last), None):
            with tunables.ATTENTION_DECODE_HOPPER.using(cpu, job.key, plan) as asked, recorded() as launches:
                fn(**arguments)
            assert asked == [job.key]
            (launch,) = launches
            assert launch.name == "decode_hopper_kernel" and launch.arguments["NEW"] == new
            assert launch.options["num_warps"] == launch.arguments["WARPS"]
            names = "most_pieces", "least", "WARPS", "SLOTS", "BOX", "CHUNK", "EMPTY_LAST", "CLUSTER"
            assert HopperDecodePlan(*(launch.arguments[n] for n in names)) == (plan or job.builtin)


def test_a_product_for_hopper_has_one_plan_for_all_tokens_of_a_key():
    """So a configuration replaces the choice that the kernel would make for any of them."""
    from nanovllm.kernels.triton.gemm.hopper_product import MAX_TOKENS, plan_hopper_product

    shapes = (4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (80, 64)
    for (rows, size), split in itertools.product(shapes, (False, True)):
        for tokens in range(1, MAX_TOKENS + 1):
            of_key = tunables.hopper_product_key(tokens, rows, size, BF16, False, split)[0]
            assert of_key >= tokens
            for block in (128, 256):
                padded = (tunables.hopper_product_tokens(n, block) for n in (tokens, of_key))
                assert len(set(padded)) == 1
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
    assert found.left_out["splits where the programs already fill the GPU"] > 0


def test_the_shapes_of_models_fit_their_ops():
    for name in PRESETS:
        for op, shapes in shapes_of(preset(name)).items():
            make = inspect.signature(all_ops()[check_tunable(op)].inputs.make)
            assert len(set(shapes)) == len(shapes)
            for shape in shapes:
                make.bind(None, *shape)


def test_what_does_not_fit_or_has_no_tma_is_left_out():
    job = one("linear_bias_act", (2048, 1024, 4096), device=A100)
    found = candidates(job, A100)
    assert not any(plan.tma for plan in found.plans)
    for p in found.plans:
        assert 2 * p.block_k * (p.block_m + p.block_n) * (p.stages - 1) <= A100.shared_per_block
    assert any("shared memory" in reason for reason in found.left_out)


def test_a_neighbour_keeps_the_key():
    assert neighbour((64, 1024)) == (63, 1024) and neighbour((1, 5)) is None and neighbour((2, 5)) is None
    assert neighbour((5, 7)) is None  # 4 is another bucket
    for rows in range(3, 9):
        less = neighbour((rows, 64))
        assert less is None or one("rms_norm", less).key == one("rms_norm", (rows, 64)).key

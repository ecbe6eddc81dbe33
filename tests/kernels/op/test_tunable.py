"""A choice before a launch: buckets, its keys and plans as JSON, and a plan for the length of a block."""

import json

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan
from nanovllm.kernels.triton.rows.plans import RowPlan
from tests.kernels.config_files import BF16, CPU, rms_norm


def test_buckets():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 200, 1025)] == [1, 1, 2, 4, 4, 8, 256, 2048]
    assert [bucket(n, 4) for n in (200, 256, 257, 320, 321, 1000, 1024, 1025)] == [
        256,
        256,
        320,
        320,
        384,
        1024,
        1024,
        1280,
    ]
    for n in range(1, 5000):
        assert n <= bucket(n, 4) <= bucket(n) < 2 * n or n == 1
        assert bucket(bucket(n, 4), 4) == bucket(n, 4)


def test_keys_and_plans_survive_json():
    for tunable in tunables.ALL.values():
        key = tuple({int: 64, bool: False, str: "silu", torch.dtype: BF16}[kind] for kind in tunable.key.values())
        assert tunable.key_from_json(json.loads(json.dumps(tunable.key_to_json(key)))) == key
    for plan in (StreamPlan(16, 64, 64, 2, 4, 3), TilePlan(64, 64, 64, 8, 1, 4, 3)):
        key = 8, 4096, 1024, BF16, False, False
        data = json.loads(json.dumps(tunables.PRODUCT.plan_to_json(plan)))
        assert tunables.PRODUCT.plan_from_json(data, key) == plan


@pytest.mark.parametrize(
    "tunable, name, wrong, right",
    [
        (tunables.RMS_NORM, "rows", 100, 128), (tunables.RMS_NORM, "rows", 0, 1),
        (tunables.ACTIVATION, "width", 3000, 4096),
        (tunables.ROTARY, "tokens", 5, 8), (tunables.PRODUCT, "m", 300, 320), (tunables.HOPPER_PRODUCT, "tokens", 4, 8),
        (tunables.ATTENTION_DECODE, "num_seqs", 3, 4), (tunables.ATTENTION_PREFILL, "few_rows", 8, 16),
    ],
)  # fmt: skip
def test_a_key_that_no_call_asks_for_is_refused(tunable, name, wrong, right):
    data = {n: {int: 64, bool: False, str: "silu", torch.dtype: "bfloat16"}[kind] for n, kind in tunable.key.items()}
    assert tunable.key_from_json({**data, name: right})
    with pytest.raises(
        ValueError, match=f"key.{name}: expected {right}, to which kernels round {wrong} before they ask"
    ):
        tunable.key_from_json({**data, name: wrong})
    assert set(tunable.rounded) <= set(tunable.key)


def test_rounding_twice_is_rounding_once():
    for tunable in tunables.ALL.values():
        for name, rounded in tunable.rounded.items():
            most = 64 if name == "few_rows" else 256 if tunable is tunables.HOPPER_PRODUCT else 5000
            assert all(rounded(rounded(n)) == rounded(n) for n in range(1, most + 1)), (tunable.name, name)
    # Few rows are counted from 16 on; 0 is any other run.
    assert {tunables.ATTENTION_PREFILL.rounded["few_rows"](n) for n in range(65)} == {0, 16, 32, 64}


def test_using_is_for_its_block_and_its_key(config_folder):
    key = 4, 64, BF16
    with tunables.RMS_NORM.using(CPU, key, RowPlan(4, 4)) as asked:
        assert rms_norm() == RowPlan(4, 4) and rms_norm(size=128) is None
    assert asked == [key, (4, 128, BF16)] and rms_norm() is None

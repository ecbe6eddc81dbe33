"""Plans of attention, convolutions, elementwise and row kernels; what is said to bad input; tables."""

import json
from dataclasses import replace

import pytest

from nanovllm.plan import (
    AttentionProblem,
    AttentionTile,
    ConvProblem,
    ElementwiseProblem,
    ElementwiseTile,
    GemmProblem,
    ReductionProblem,
    ReductionTile,
    plan_attention,
    plan_elementwise,
    plan_gemm,
    plan_reduction,
)
from nanovllm.plan import attention_tiles as attention
from nanovllm.plan import elementwise_tiles as elementwise
from nanovllm.plan import reduction_tiles as reduction
from nanovllm.plan.plan_tables import document, table_rows
from nanovllm.plan.resources import padded, positive
from tests.plan.devices import A100, H100, ROUND, SOME


def test_attention_by_hand():
    p = AttentionProblem(2, 512, 2048, 32, 8)
    assert p.group == 4 and p.seen == 2048 - 511 / 2
    assert p.flops == 4 * 2 * 32 * 512 * p.seen * 128
    assert p.least_bytes == 2 * 2 * 128 * (2 * 32 * 512 + 2 * 8 * 2048)
    assert AttentionProblem(1, 8, 8, 1, 1, causal=False).seen == 8
    tile = AttentionTile(128, 64, 8, 2)
    # 4 x 128 x 64 x 128 flops for 2 x 64 x 128 x 2 bytes
    assert attention.intensity(tile, p) == 128
    # Q: 32 KiB; K and V: 16 KiB each, for each of two stages
    assert attention.shared_bytes(tile, p, H100) == (32 + 2 * 32) * 1024
    assert attention.shared_bytes(tile, p, A100) == (32 + 32) * 1024
    # fewer rows than columns of output: warps share rows, and exchange 64 x 64 probabilities
    assert attention.shared_bytes(AttentionTile(64, 64, 4, 2), p, A100) == (16 + 32 + 8) * 1024
    # 128 rows are 32 tokens of 4 heads: 16 runs x 8 KV heads x 2 sequences
    assert attention.predict(tile, p, H100).blocks == 256
    assert padded(80) == 128 and padded(5) == 16


def test_decoding_cuts_the_context_into_pieces():
    plans = plan_attention(AttentionProblem(1, 1, 8192, 32, 8), H100)
    assert plans[0].config.pieces > 1 and plans[0].blocks >= H100.sms // 3
    assert all(p.config.pieces == 1 for p in plan_attention(AttentionProblem(256, 1, 1024, 32, 8), H100))
    assert plan_attention(AttentionProblem(256, 1, 2048, 32, 8), H100)[0].limit == "memory"


@pytest.mark.parametrize("model", SOME, ids=lambda m: m.name)
def test_every_plan_of_attention_fits(model):
    for problem in (
        AttentionProblem(4, 1000, 3000, 14, 2, 64),
        AttentionProblem(1, 1, 100, 8, 8, 256),
        AttentionProblem(1, 64, 64, 1, 1, 16),
    ):
        for p in plan_attention(problem, model):
            assert p.shared <= model.shared_per_block and p.registers <= 255 and p.occupancy.blocks >= 1
            assert p.seconds > problem.flops / model.rate("bfloat16") and p.config.rows >= problem.group


def test_elementwise_by_hand():
    p = ElementwiseProblem(1_000_000, 2, 1, "float16", 10)
    tile = ElementwiseTile(1024, 4)
    assert tile.items == 8 and tile.vector("float16") == 8 and tile.vector("float32") == 4
    plan = elementwise.predict(tile, p, ROUND)
    assert plan.blocks == 977 and plan.bytes == 6_000_000
    assert plan.parts["memory"] == pytest.approx(6e-6)
    assert plan.intensity == pytest.approx(10 / 6)
    resident = plan.occupancy.blocks
    assert plan.in_flight == resident * 1024 * 2 * 2 and plan.needed == pytest.approx(200_000)
    # 98 blocks on the busiest, each 2 us of latency and 500 cycles, as many at a time as are resident
    assert plan.parts["latency"] == pytest.approx(98 / resident * 2.5e-6)
    # a thread: 25 to begin, two loads and a store of 3 each, 10 an element; 128 lanes at 1 GHz
    assert plan.parts["compute"] == pytest.approx(98 * 128 * (25 + 9 + 80) / 128e9)
    assert plan.parts["blocks"] == pytest.approx(98 * 100e-9)


def test_too_little_in_flight_is_slow():
    p = ElementwiseProblem(1 << 26, 1, 1, "bfloat16")
    plans = {str(x.config): x for x in plan_elementwise(p, H100)}
    thin, wide = plans["32 w1 (1 a thread)"], plan_elementwise(p, H100)[0]
    assert thin.in_flight < thin.needed and thin.limit in ("latency", "blocks") and thin.seconds > 2 * wide.seconds
    assert wide.in_flight >= wide.needed and wide.limit == "memory" and wide.config.vector("bfloat16") >= 4


def test_reduction_by_hand():
    p = ReductionProblem("rms_norm", 1000, 4096, "float32")
    tile = ReductionTile(1, 4096, 8)
    assert tile.items == 16
    plan = reduction.predict(tile, p, ROUND)
    assert (
        plan.blocks == 1000
        and plan.bytes == 2 * 1000 * 4096 * 4
        and plan.in_flight == min(plan.occupancy.blocks, 100) * 16384
    )
    # 2 us for the row, 500 cycles to start, five shuffles of 30 cycles and an exchange of 120
    assert plan.parts["latency"] == pytest.approx(100 / plan.occupancy.blocks * (2e-6 + 500e-9 + 270e-9))
    assert plan.shared == 4 * 8 and reduction.shared_bytes(ReductionTile(4, 2048, 4), p) == 4 * 4 * 4
    assert reduction.shared_bytes(ReductionTile(8, 64, 8), p) == 0  # a row is a warp's own
    # 16-bit rows of 4096 are 16 warps': with 32 the weight, loaded by all, is rearranged
    assert reduction.shared_bytes(ReductionTile(2, 4096, 32), replace(p, dtype="bfloat16")) == 4 * 4096
    pieces = reduction.predict(ReductionTile(1, 1024, 4, False), p, ROUND)
    assert pieces.bytes == plan.bytes  # the second reading comes from the cache
    # 4 pieces twice: the first from memory, seven from the cache
    assert pieces.parts["latency"] == pytest.approx(100 / pieces.occupancy.blocks * (2e-6 + 7 * 1e-6 + 770e-9))
    small = replace(ROUND, l2_bytes=1 << 16)
    assert reduction.predict(ReductionTile(1, 1024, 4, False), p, small).bytes == 3 * 1000 * 4096 * 4


def test_a_row_of_equal_blocks_is_not_padded():
    p = ReductionProblem("rms_norm", 4096, 3 * 2048, "bfloat16")
    held = ReductionTile(1, 2048, 8, held=3)
    tiles = reduction.candidates(p, H100)
    assert [t for t in tiles if t.held > 1] == [ReductionTile(1, 1024, 4, held=6), held]
    assert held.items == 24 and str(held) == "1x2048 x 3 w8"
    plan, padded = reduction.predict(held, p, H100), reduction.predict(ReductionTile(1, 8192, 8), p, H100)
    assert plan.bytes == padded.bytes == 2 * 4096 * 6144 * 2 and plan.parts["compute"] < 0.8 * padded.parts["compute"]
    assert plan.registers < padded.registers and plan.in_flight == plan.occupancy.blocks * 6144 * 2
    for other in (replace(p, size=4096), replace(p, size=6145), replace(p, kind="softmax")):
        assert not any(t.held > 1 for t in reduction.candidates(other, H100))


def test_one_pass_where_the_row_fits():
    assert plan_reduction(ReductionProblem("rms_norm", 16384, 4096), H100)[0].config.one_pass
    long = plan_reduction(ReductionProblem("layer_norm", 64, 1_000_000, "float32"), H100)
    assert not any(p.config.one_pass for p in long)
    short = plan_reduction(ReductionProblem("softmax", 100_000, 64), H100)[0]
    assert short.config.one_pass and short.config.rows > 1
    assert all(p.config.rows == 1 for p in plan_reduction(ReductionProblem("layer_norm", 4096, 64), H100))


@pytest.mark.parametrize("model", SOME, ids=lambda m: m.name)
@pytest.mark.parametrize("kind", ["softmax", "layer_norm", "rms_norm"])
def test_every_plan_of_a_reduction_fits(model, kind):
    for rows, size in ((1, 1), (7, 1000), (4096, 4096), (3, 200_000)):
        for p in plan_reduction(ReductionProblem(kind, rows, size), model):
            assert p.occupancy.blocks >= 1 and p.registers * 32 * p.config.warps <= 65536
            assert p.config.rows * p.blocks >= rows and (p.config.block >= size or not p.config.one_pass)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GemmProblem(0, 1, 1), "m: expected a positive integer, not 0"),
        (lambda: GemmProblem(1, 2.0, 1), "n: expected a positive integer, not 2.0"),
        (lambda: GemmProblem(1, 1, True), "k: expected a positive integer, not True"),
        (lambda: GemmProblem(1, 1, 1, "int4"), "dtype: expected one of bfloat16"),
        (lambda: GemmProblem(1, 1, 128, weight="int3"), "weight: expected one of int4"),
        (lambda: GemmProblem(1, 1, 128, "float32", "int4"),
        "dtype: packed weights are converted to bfloat16 or float16"),
        (lambda: GemmProblem(1, 1, 100, weight="int4"), "k: expected a multiple of the group of 128 weights, not 100"),
        (lambda: AttentionProblem(1, 1, 1, 3, 2), "heads: expected a multiple of the 2 KV heads, not 3"),
        (lambda: AttentionProblem(1, 8, 4, 1, 1), "context: expected at least the 8 query tokens, not 4"),
        (lambda: AttentionProblem(1, 1, 1, 1, 1, 512), "head_dim: expected at most 256, not 512"),
        (lambda: AttentionProblem(1, 1, 1, 1, 1, dtype="float32"), "dtype: expected one of bfloat16, float16"),
        (lambda: ConvProblem(1, 1, 2, 9, 1, 5, 5, padding=1),
        "filter_height: 5 taps with dilation 1 need 5 pixels, the padded image has 4"),
        (lambda: ConvProblem(1, 1, 9, 9, 1, padding=-1), "padding: expected an integer of at least 0, not -1"),
        (lambda: ElementwiseProblem(8, 0), "inputs: expected a positive integer, not 0"),
        (lambda: ElementwiseProblem(8, dtype="int8"), "dtype: expected one of bfloat16"),
        (lambda: ReductionProblem("max", 1, 1), "kind: expected one of softmax, layer_norm, rms_norm, not 'max'"),
        (lambda: plan_gemm(GemmProblem(8, 8, 8, "float8"), A100), "dtype: nvidia-a100 does not multiply float8"),
        (lambda: plan_elementwise(ElementwiseProblem(1024, 900), H100),
        "elementwise: nothing fits nvidia-h100: .* 470 reg.* a thread 247"),
        (lambda: AttentionProblem(1, 8, 8, 512, 1),
        "heads: a tile holds at most 256 query heads of one KV head, not 512"),
        (lambda: positive(rows=-1), "rows: expected a positive integer, not -1"),
    ],
)  # fmt: skip
def test_bad_input(make, message):
    with pytest.raises(ValueError, match="^" + message):
        make()


def test_tables_and_json():
    plans = plan_gemm(GemmProblem(256, 256, 256), H100)[:3]
    columns, rows, notes = table_rows(plans, 1e-7, wide=True)
    assert {"flops/\nbyte", "stages\nneeded", "waves"} <= set(columns) and all(len(r) == len(columns) for r in rows)
    assert rows[0][columns.index("us")] == f"{1e6 * plans[0].seconds:.2f}" and not notes
    columns, *_ = table_rows(plan_reduction(ReductionProblem("softmax", 8, 64), H100)[:2], 1e-7, wide=True)
    assert "KiB in flight\n/ needed" in columns and "stages\nneeded" not in columns
    *_, notes = table_rows(plans[:1], 1e-7, [{"error": "no room"}])
    assert notes == ["plan 1 does not compile: no room"]
    found = json.loads(json.dumps(document("gemm", GemmProblem(256, 256, 256), H100, plans, 9, 1e-7), allow_nan=False))
    assert (
        found["plans"][0]["config"]["block_m"] == plans[0].config.block_m
        and found["plans"][0]["limit"] == plans[0].limit
    )

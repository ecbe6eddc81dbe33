"""The planner's arithmetic, each formula against numbers worked out by hand, and what it refuses."""

import math
from dataclasses import replace

import pytest

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import GemmProblem, GemmTile, occupancy, plan_gemm, stages_needed, waves
from nanovllm.plan import gemm_tiles as gemm
from nanovllm.plan.loop import LoopStep, loaded_latency, loop_seconds, overlapped
from nanovllm.plan.resources import bytes_needed, combine
from tests.plan.devices import A100, H100, ROUND, SOME


def test_occupancy_by_hand():
    # 48 KiB and the 1 KiB that the hardware keeps: 228 // 49 = 4; 4 warps of 64 registers: 65536 // (64 * 128) = 8
    assert occupancy(H100, 48 << 10, 64, 4) == occupancy(H100, 48 << 10, 60, 4)
    fit = occupancy(H100, 48 << 10, 64, 4)
    assert (fit.blocks, fit.limit, fit.warps) == (4, "shared memory", 16 / 64)
    # 168 registers, handed out by 256 a warp: 65536 // (168 * 32 * 8) = 1; 170 count as 176
    assert occupancy(H100, 1 << 10, 168, 8).blocks == 1 and occupancy(H100, 0, 120, 4).blocks == 4
    assert occupancy(H100, 0, 121, 4).blocks == 65536 // (128 * 32 * 4)
    assert occupancy(H100, 0, 32, 4) == type(fit)(16, "warps", 1.0)  # 2048 threads
    assert occupancy(H100, 0, 16, 1) == type(fit)(32, "blocks", 0.5)
    assert occupancy(device_model("rtx-4090"), 0, 16, 1).blocks == 24
    assert occupancy(H100, (227 << 10) + 1, 32, 4).blocks == 0  # more than a block may have
    assert occupancy(H100, 0, 256, 4).blocks == 0 and occupancy(A100, 160 << 10, 32, 4).blocks == 1


def test_waves_by_hand():
    w = waves(1000, 2, 132)
    assert w.count == 1000 / 264 and w.efficiency == pytest.approx(1000 / (132 * 8)) and w.busiest == 8
    assert waves(264, 2, 132).efficiency == 1.0 and waves(265, 2, 132).efficiency == pytest.approx(265 / 396)
    # Room for more blocks leaves no multiprocessor idle: 256 blocks on 132 are one or two for each.
    assert waves(256, 7, 132).efficiency == pytest.approx(256 / 264)
    assert waves(1, 4, 132).busiest == 1


def test_stages_needed():
    # a latency of 0.9 us and tiles of 0.4 us: ceil(2.25) + 1
    assert stages_needed(0.9e-6, 0.4e-6) == 4 and stages_needed(0.1e-6, 0.4e-6) == 2


def test_littles_law():
    # twice the idle latency of 1 us x 1 TB/s over 10 multiprocessors
    assert bytes_needed(ROUND) == pytest.approx(200_000)


def test_parts_overlap():
    assert combine({"a": 10.0, "b": 1.0}, 2.0) == pytest.approx(12.0)
    assert combine({"a": 1.0, "b": 1.0}, 0.0) == pytest.approx(2 ** (1 / 12))


def test_gemm_intensity_and_shared_memory():
    p = GemmProblem(4096, 4096, 4096)
    tile = GemmTile(128, 256, 64, 8, 3, tma=True)
    # 2 * 128 * 256 * 64 / ((128 + 256) * 64 * 2 bytes) = 85.33
    assert gemm.intensity(tile, p) == pytest.approx(256 / 3)
    # 3 * (48 KiB + a barrier of 8 bytes) + an output tile of 64 KiB
    assert gemm.shared_bytes(tile, p, H100) == 3 * (48 * 1024 + 8) + 64 * 1024
    pointers = replace(tile, tma=False)
    assert gemm.shared_bytes(pointers, p, H100) == 3 * 48 * 1024  # wgmma reads shared memory
    assert gemm.shared_bytes(pointers, p, A100) == 2 * 48 * 1024  # fragments are in registers by then
    assert gemm.intensity(tile, replace(p, dtype="float32")) == pytest.approx(128 / 3)


def test_packed_weights_count_their_bytes():
    p = GemmProblem(16, 4096, 4096, weight="int4", group=128)
    assert p.bytes_weight == 0.5 + 2 / 128
    tile = GemmTile(16, 64, 128, 4, 3)
    assert gemm.intensity(tile, p) == pytest.approx(2 * 16 * 64 * 128 / (128 * (16 * 2 + 64 * 0.515625)))
    packed, plain = plan_gemm(p, H100)[0], plan_gemm(replace(p, weight=None), H100)[0]
    assert packed.bytes == pytest.approx(4096 * 4096 * 0.515625 + 2 * 16 * 4096 * 2)
    assert packed.seconds < plain.seconds and "conversion" in packed.parts and "conversion" not in plain.parts
    # Much work for each weight: unpacking it again for every tile of rows costs more than its bytes save.
    wide = GemmProblem(8192, 4096, 4096, weight="int4")
    assert plan_gemm(wide, H100)[0].seconds > plan_gemm(replace(wide, weight=None), H100)[0].seconds


def test_conversion_time_by_hand():
    p = GemmProblem(16, 64, 128, weight="int4")
    tile = GemmTile(16, 64, 128, 4, 2)
    plan = gemm.predict(tile, p, ROUND)
    # one block, one step: 64 x 128 weights x 1.25 instructions / 64 lanes / 1 GHz
    assert plan.parts["conversion"] == pytest.approx(64 * 128 * 1.25 / 64 / 1e9)


def test_rounds_of_blocks_are_counted_not_listed():
    """A billion rounds take no longer than one; the start and end of each are shared by the blocks of its round."""
    import tracemalloc

    fit = occupancy(ROUND, 64 << 10, 64, 4)  # 3 blocks
    step = LoopStep(1e6, 8192, 8192, 64, 8192, 8192, wgmma=True)
    for busiest in (1, 2, 3, 4, 5, 6, 301):
        rounds = [3] * (busiest // 3) + [busiest % 3] * (busiest % 3 > 0)
        rounds = rounds if busiest >= 3 else [busiest]
        blocks = 10 * busiest
        parts, fixed = loop_seconds(ROUND, step, 8, blocks, fit, waves(blocks, 3, 10), 4, 3, 1e14, 0)
        assert parts["latency"] == pytest.approx(len(rounds) * 8 * 2.15e-6 / 2)
        assert fixed == pytest.approx(1e-6 + 1.15e-6 * sum(1 / r for r in rounds))
    tracemalloc.start()
    huge = waves(3 * 10**10, 3, 10)
    assert loop_seconds(ROUND, step, 8, 3 * 10**10, fit, huge, 4, 3, 1e14, 0)[1] > 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_loop_by_hand():
    fit = occupancy(ROUND, 64 << 10, 64, 4)  # 3 blocks
    assert fit.blocks == 3
    # 1 MFLOP a step on 10 TFLOP/s a multiprocessor: 0.1 us. 25 blocks of 8 steps on 10: the busiest has 3, all
    # resident.
    step = LoopStep(1e6, 8192, 8192, 64, 8192, 8192, wgmma=True)
    parts, fixed = loop_seconds(ROUND, step, 8, 25, fit, waves(25, 3, 10), 4, 3, 1e14, 20_000)
    assert parts["compute"] == pytest.approx(24 * (0.1e-6 + 60e-9 / 3))
    # written once, x and the weight read once: 32 KiB at 128 bytes a cycle
    assert parts["shared memory"] == pytest.approx(24 * 32768 / 128 / 1e9)
    # a round of 8 steps, two tiles ahead: L_total = 2 x 1 us + 150 cycles
    assert loaded_latency(ROUND) == pytest.approx(2.15e-6)
    assert parts["latency"] == pytest.approx(8 * 2.15e-6 / 2)
    assert parts["L2"] == pytest.approx(25 * 8 * 16384 / 2.9e13)
    # the launch, and a third of the first load (idle: 1.15 us) and of the store (20 kB at 1 TB/s a multiprocessor)
    assert fixed == pytest.approx(1e-6 + (1.15e-6 + 20e-9) / 3)
    alone, _ = loop_seconds(ROUND, replace(step, wgmma=False), 8, 10, fit, waves(10, 3, 10), 2, 3, 1e14, 0)
    assert alone["compute"] == pytest.approx(8 * (0.1e-6 / 0.5 / 0.62 + 60e-9))  # two warps use two of four units
    # Eight warps, 50 cycles more around each step; two groups of four share 64 rows, and each reads all of x.
    wide, _ = loop_seconds(ROUND, step, 8, 10, fit, waves(10, 3, 10), 8, 3, 1e14, 0)
    assert wide["compute"] == pytest.approx(8 * (0.1e-6 + 110e-9))
    assert wide["shared memory"] == pytest.approx(8 * (16384 + 2 * 8192 + 8192) / 128e9)


def test_a_loop_without_tensor_cores_by_hand():
    """Two warps keep a unit busy, and the warps that multiply read the operands too."""
    fit = occupancy(ROUND, 64 << 10, 64, 4)
    # 64 rows and columns, 32 of k, 4 bytes; 128 threads have 32 sums each, and read two times their root for each
    # column of k.
    step = LoopStep(2 * 64 * 64 * 32, 8192, 8192, 64, 8192, 8192, wgmma=False, tensor_cores=False)
    parts, _ = loop_seconds(ROUND, step, 8, 10, fit, waves(10, 3, 10), 4, 3, 1e13, 0)
    read = 128 * 2 * math.sqrt(32) * 128
    assert parts["shared memory"] == pytest.approx(8 * (16384 + read) / 128e9)
    assert parts["compute"] == pytest.approx(8 * (2 * 262144 / 1e12 + 60e-9) + parts["shared memory"])


def test_what_is_inside_overlaps_better():
    """Two equal limits cost 2^(1/4) inside a multiprocessor, 2^(1/2.5) with what comes from outside."""
    none = {"compute": 0.0, "shared memory": 0.0, "latency": 0.0, "L2": 0.0, "memory": 0.0}
    assert overlapped({**none, "compute": 1.0, "latency": 1.0}, 2.0) == pytest.approx(2 + 2**0.25)
    assert overlapped({**none, "compute": 1.0, "memory": 1.0}, 0.0) == pytest.approx(2**0.4)
    assert overlapped({**none, "memory": 1.0}, 0.5) == pytest.approx(1.5)


def test_gemm_reads_memory_once_if_the_cache_holds_it():
    tile = GemmTile(128, 128, 64, 8, 3, tma=True)
    small = GemmProblem(1024, 1024, 1024)
    assert gemm.dram_bytes(tile, small, H100, 1) == 3 * 2 * 1024**2
    large = GemmProblem(16384, 16384, 4096)
    once = 2 * 2 * 16384 * 4096 + 2 * 16384**2
    # 132 tiles at a time, 8 rows and 17 columns of 128: (8 + 17) x 128 x 4096 x 2 bytes for each 132 of 128 x 128 tiles
    assert gemm.dram_bytes(tile, large, H100, 1) == pytest.approx(25 * 128 * 4096 * 2 * 128 * 128 / 132 + 2 * 16384**2)
    assert gemm.dram_bytes(replace(tile, group_m=1), large, H100, 1) > gemm.dram_bytes(tile, large, H100, 1) > once


def test_small_tiles_want_room_for_four_blocks():
    many = GemmProblem(4096, 4096, 4096)
    assert gemm.wanted_blocks(GemmTile(64, 64, 64, 4, 3), many, H100) == 4
    assert gemm.wanted_blocks(GemmTile(128, 64, 64, 4, 3), many, H100) == 1
    assert (
        gemm.wanted_blocks(GemmTile(64, 64, 64, 4, 3), GemmProblem(64, 8192, 4096), H100) == 1
    )  # 128 tiles: there are no more
    for plan in plan_gemm(many, H100):
        if plan.config.block_m * plan.config.block_n <= 64 * 64:
            assert plan.occupancy.blocks >= 4


@pytest.mark.parametrize("model", SOME, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [(1, 4096, 1024), (16, 151936, 1024), (777, 333, 111), (4096, 4096, 4096), (1, 1, 1)])
def test_every_plan_of_a_product_fits(model, shape):
    problem = GemmProblem(*shape)
    plans = plan_gemm(problem, model)
    assert plans == plan_gemm(problem, model)  # the same order every time
    least = max(
        plans[0].flops / model.rate("bfloat16"),
        2 * (shape[0] * shape[2] + shape[1] * shape[2] + shape[0] * shape[1]) / model.bandwidth,
    )
    for p in plans:
        c = p.config
        assert p.shared <= model.shared_per_block and p.registers <= 247 and p.occupancy.blocks >= 1
        assert p.seconds > least and p.seconds >= max(p.parts.values()) and math.isfinite(p.seconds)
        assert p.occupancy.blocks * (p.shared + 1024) <= model.shared_per_sm
        assert p.blocks == -(-shape[0] // c.block_m) * -(-shape[1] // c.block_n) * c.splits
    times = [p.seconds for p in plans]
    assert all(b >= a * 0.99 for a, b in zip(times, times[1:]))


ODD = [
    GemmProblem(m, n, k, dtype)
    for dtype in ("bfloat16", "float16", "float32", "tfloat32")
    for m in (16, 17, 64, 65, 777)
    for n, k in ((3333, 1111), (5, 7), (333, 1000), (1000, 1000), (1008, 2000), (4096, 20))
]


def test_the_engines_tile_is_planned():
    """Also where rows are not aligned, or the rule takes a size that is not enumerated; few rows have another
    kernel.
    """
    pytest.importorskip("triton")
    found = 0
    for problem in ODD:
        plans, own = plan_gemm(problem, H100), gemm.engine_tile(problem, H100)
        assert (own is None) == (problem.m <= (16 if problem.bytes_x == 4 else 64))
        if own is not None:
            assert [plan.config for plan in plans].count(own) == 1, problem
            found += 1
        assert len({plan.config for plan in plans}) == len(plans)
        assert problem.aligned or len(plans) < 800
    assert found == 72


def test_the_engines_tile_spills_where_it_is_not_planned():
    """Compute capability 8.0, k a multiple of 8 and not of 16: what the compiler says of it is in
    test_tiles_compile.py.
    """
    pytest.importorskip("triton")
    for problem in ODD:
        plans, own = plan_gemm(problem, A100), gemm.engine_tile(problem, A100)
        left = problem.bytes_x < 4 and problem.k % 8 == 0 and problem.k % 16 and own is not None and own.block_k == 64
        assert (own not in [plan.config for plan in plans]) == (own is None or left), problem


def test_rows_that_are_not_aligned():
    problem, h200 = GemmProblem(777, 3333, 1111), device_model("h200")
    plans = plan_gemm(problem, h200)
    # No stages: one plan of each tile, and the time of one says nothing of stages.
    assert len({replace(plan.config, stages=1) for plan in plans}) == len(plans) > 40
    slow, fast = (gemm.predict(GemmTile(64, 64, 32, 4, stages), problem, h200) for stages in (2, 4))
    assert slow == replace(fast, config=slow.config)
    assert gemm.staged(plans[0].config, replace(problem, k=1120)) and gemm.staged(
        plans[0].config, replace(problem, dtype="float32")
    )
    # Beyond what a thread has the line for registers is too high: the compiler loads in several passes, up to a point.
    assert gemm.gemm_registers(GemmTile(64, 64, 64, 4, 3), problem, h200) == 255 - 8
    assert gemm.gemm_registers(GemmTile(128, 128, 64, 8, 2), problem, h200) > 255
    assert gemm.gemm_registers(GemmTile(64, 64, 64, 4, 3), problem, A100) > 255
    # Shared memory does not depend on stages either, on any GPU and with k a multiple of 8.
    assert all(
        not gemm.staged(plan.config, GemmProblem(17, 1000, 1000))
        for plan in plan_gemm(GemmProblem(17, 1000, 1000), A100)
    )


def test_without_triton_there_is_no_tile_of_the_engine(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "nanovllm.kernels.triton.gemm.product_plan", None)
    problem = GemmProblem(777, 3333, 1111)
    assert gemm.engine_tile(problem, H100) is None and len(plan_gemm(problem, H100)) > 40


def test_what_binds():
    assert plan_gemm(GemmProblem(8192, 8192, 8192), H100)[0].limit == "compute"
    assert plan_gemm(GemmProblem(16, 65536, 8192), H100)[0].limit == "memory"
    assert plan_gemm(GemmProblem(1, 64, 64), H100)[0].limit == "launch"

"""Plans of convolutions: what a tile loads, what the image costs, which tiles are listed."""

import random
from dataclasses import replace

import pytest

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.plan import ConvProblem, ConvTile, plan_conv
from nanovllm.plan import conv_tiles as conv
from nanovllm.plan.conv_problem import positions_read
from tests.plan.devices import A100, H100, ROUND, SOME


def test_convolution_by_hand():
    p = ConvProblem(2, 64, 56, 56, 128, padding=1)
    assert (p.out_height, p.out_width, p.taps) == (56, 56, 9)
    assert p.flops == 2 * 2 * 56 * 56 * 128 * 64 * 9
    assert ConvProblem(1, 3, 224, 224, 64, 7, 7, 2, 3).out_height == 112
    tile = ConvTile(8, 8, 128, 16, 4, 2)
    # 8 x 8 pixels and a halo of one on each side: 10 x 10
    assert conv.patch(tile, p) == 100
    # a third of the patch for each filter row, and three taps of weights
    assert conv.step_bytes(tile, p) == (pytest.approx(3200 / 3), 128 * 16 * 3 * 2)
    assert conv.shared_bytes(tile, p) == 2 * 3200 + 2 * 12288
    assert conv.intensity(tile, p) == pytest.approx(2 * 64 * 128 * 16 * 9 / (3200 + 36864))
    strided = replace(p, stride=2, dilation=2)
    # 0, 2, ... 18 of 19: (8 - 1) + (3 - 1) + 1, and nothing between
    assert conv.patch(tile, strided) == 10 * 10
    assert conv.patch(tile, replace(p, stride=2)) == 17 * 17 and conv.patch(tile, replace(p, dilation=2)) == 12 * 12
    plan = conv.predict(tile, p, H100)
    assert plan.blocks == 2 * 7 * 7 * 1 and plan.bytes == 2 * (2 * 64 * 56 * 56 + 128 * 64 * 9 + 2 * 128 * 56 * 56)


def test_a_convolution_reads_a_large_image_again():
    """Once where it fits the cache, else with the halo of each wave."""
    p = ConvProblem(1, 64, 56, 56, 128, padding=1)
    tile = ConvTile(8, 8, 64, 16, 4, 2)
    image, weights, output = 2 * 64 * 56 * 56, 2 * 128 * 64 * 9, 2 * 128 * 56 * 56
    assert conv.dram_bytes(tile, p, H100, 1) == p.least_bytes == image + weights + output
    small = replace(ROUND, sms=14, l2_bytes=1 << 16)
    # 7 x 7 spots of 2 blocks each; 14 at a time are 7 spots, a row of them: 10 rows of 56 pixels. 7 waves, each with
    # all weights.
    assert conv.dram_bytes(tile, p, small, 1) == 7 * (2 * 64 * 10 * 56 + weights) + output
    # Twice as many are two rows: 18 pixels high.
    assert conv.dram_bytes(tile, p, small, 2) == pytest.approx(3.5 * (2 * 64 * 18 * 56 + weights) + output)
    # 4 at a time: 2 spots side by side.
    assert conv.dram_bytes(tile, p, replace(small, sms=4), 1) == pytest.approx(
        24.5 * (2 * 64 * 10 * 18 + weights) + output
    )


def test_the_halo_saves_loads():
    """A 3 x 3 filter loads each pixel once for nine taps, where unfolding would load it nine times."""
    p = ConvProblem(16, 256, 56, 56, 256, padding=1)
    tile = plan_conv(p, H100)[0].config
    x, weight = conv.step_bytes(tile, p)
    unfolded = tile.block_m * tile.block_c * 3 * 2
    assert x < unfolded / 4
    assert conv.intensity(tile, p) > 2 * tile.block_m * tile.block_n * tile.block_c * 3 / (unfolded + weight)
    one = ConvProblem(16, 256, 56, 56, 256, 1, 1, padding=0)
    assert not any(q.config.halo for q in plan_conv(one, H100))  # no halo without a border


def test_a_gathered_convolution_by_hand():
    """Patches of an image: 196 of 16 x 16 pixels and 3 channels, k = 768."""
    p = ConvProblem(1, 3, 224, 224, 768, 16, 16, 16, padding=0)
    assert not p.shares and p.flops == 2 * 196 * 768 * 768
    assert p.least_bytes == 2 * (3 * 224 * 224 + 768 * 768 + 768 * 196)
    tile = ConvTile(1, 64, 128, 32, 4, 3, halo=False)
    assert str(tile) == "64 pixels x 128, k32 w4 s3"
    assert conv.step_bytes(tile, p) == (64 * 32 * 2, 128 * 32 * 2)
    assert conv.shared_bytes(tile, p) == 3 * (4096 + 8192)
    assert conv.intensity(tile, p) == pytest.approx(2 * 64 * 128 / (192 * 2))
    plan = conv.predict(tile, p, H100)
    assert plan.blocks == 4 * 6 and plan.bytes == p.least_bytes  # 196 pixels in tiles of 64
    # 24 steps of 32 of k: 12 KiB each for 24 blocks
    assert plan.parts["L2"] == pytest.approx(24 * 24 * 12288 / (2.9 * H100.l2_bandwidth))
    assert not any(q.config.halo for q in plan_conv(p, H100))
    # Two images at a time of 14 blocks' worth: nothing is read twice, but the weights in each wave.
    small = replace(ROUND, sms=12, l2_bytes=1 << 16)
    image, weights, output = 2 * 3 * 224 * 224, 2 * 768 * 768, 2 * 768 * 196
    assert conv.dram_bytes(tile, p, small, 1) == pytest.approx(2 * (image / 2 + weights) + output)


@pytest.mark.parametrize(
    "problem, model",
    [
        (ConvProblem(1, 3, 224, 224, 768, 16, 16, 16, padding=0), H100),
        (ConvProblem(1, 3, 224, 224, 768, 32, 32, 32, padding=0), H100),
        (ConvProblem(1, 3, 14, 14, 768, 14, 14, 14, padding=0), device_model("rtx-4090")),
        (ConvProblem(1, 64, 9, 9, 64, 3, 3, 100, padding=0), H100),
        (ConvProblem(1, 64, 199, 199, 64, 91, 91), A100),  # shared, but no patch fits
    ],
    ids=str,
)
def test_large_strides_and_filters_are_gathered(problem, model):
    plans = plan_conv(problem, model)
    assert not any(p.config.halo for p in plans)
    assert all(p.shared <= model.shared_per_block and p.seconds > problem.flops / model.rate("bfloat16") for p in plans)


def test_what_lies_between_filters_is_not_read():
    one = ConvProblem(1, 64, 9, 9, 64, 3, 3, 100, padding=0)
    assert (one.read_height, one.read_width) == (3, 3) and one.least_bytes == 2 * (64 * 9 + 64 * 64 * 9 + 64)
    # Every second pixel each way, of 64 channels; 3 channels share sectors of 32 bytes with their neighbours in a row.
    assert ConvProblem(1, 64, 56, 56, 64, 1, 1, 2, padding=0).least_bytes == 2 * (64 * 28 * 28 + 64 * 64 + 64 * 28 * 28)
    assert ConvProblem(1, 3, 56, 56, 64, 1, 1, 2, padding=0).least_bytes == 2 * (3 * 28 * 55 + 64 * 3 + 64 * 28 * 28)
    # Padding is not in memory: rows -1, 0, 1 and 3, 4, 5 of 6.
    assert ConvProblem(1, 64, 6, 6, 64, 3, 3, 4, padding=1).read_height == 5


def test_positions_that_outputs_read():
    """Against sets of them."""
    chance = random.Random(0)
    for _ in range(500):
        outputs, taps, stride, dilation, padding = (chance.randint(1, 9) for _ in range(5))
        size = chance.randint(1, 60)
        read = {i * stride + j * dilation for i in range(outputs) for j in range(taps)}
        assert positions_read(outputs, taps, stride, dilation) == len(read)
        inside = [x for x in read if 0 <= x - padding < size]
        assert positions_read(outputs, taps, stride, dilation, padding, size) == len(inside)


def test_few_channels_may_be_gathered():
    """A step of 16 channels would be zeros but for three."""
    p = ConvProblem(16, 3, 224, 224, 64, 7, 7, 2, 3)
    assert p.shares and {q.config.halo for q in plan_conv(p, H100)} == {True, False}
    assert not plan_conv(p, H100)[0].config.halo


@pytest.mark.parametrize("model", SOME, ids=lambda m: m.name)
def test_every_plan_of_a_convolution_fits(model):
    for problem in (
        ConvProblem(1, 3, 224, 224, 64, 7, 7, 2, 3),
        ConvProblem(8, 512, 7, 7, 512, padding=1),
        ConvProblem(1, 1, 3, 3, 1),
    ):
        plans = plan_conv(problem, model)
        assert plans and all(p.shared <= model.shared_per_block and p.occupancy.blocks >= 1 for p in plans)
        assert all(p.seconds > problem.flops / model.rate("bfloat16") for p in plans)

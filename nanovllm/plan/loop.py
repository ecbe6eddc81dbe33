"""The loop of a tiled product, shared by matrix products and convolutions: seconds by limit, from what one step of
one block needs.

The constants marked FITTED are fitted together to the products of 32 shapes timed on an H200 (`python -m
benchmarks.planner_proof --times`: every tile that the planner keeps, PyTorch 2.11, Triton 3.6). The fit looks at the
share of the best that the first choice and the first five reach, not at the times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import LOADED, Occupancy, Waves, cdiv, combine

ISSUE_CYCLES = 150
"""From request to start of a load, and from data to product: barriers, address arithmetic. ASSUMED."""
_STEP_CYCLES = 60
"""Cycles around the product of a step in which the block issues no other product. Other resident blocks keep the tensor
cores busy meanwhile. FITTED."""
_GROUP_CYCLES = 50
"""Cycles that each group of four warps beyond the first adds: the groups wait for each other at barriers. FITTED."""
_SHARED_LOADS = 2.9
"""The rate of tiles from the L2 cache over its bandwidth. A tile that several multiprocessors load at the same time
does not cross the cache once for each. FITTED."""
_MMA_ON_HOPPER = 0.62
"""Share of the rate that Ampere's instructions reach on Hopper (Luo et al., arXiv 2402.13499, rounded)."""
_OUTSIDE = ("L2", "memory")
_INSIDE_P, _OUTSIDE_P = 4, 2.5
"""Exponents of `combine` for the limits inside a multiprocessor, and for these together with L2 and memory. Two equal
limits cost 19 % and 32 % more than one. FITTED."""
_SHARED_WIDTH = 128
"""Bytes that shared memory delivers or takes a cycle."""


def latency(device: DeviceModel) -> float:
    """Seconds from the request for a tile to its product, if memory is idle: at the start of a block."""
    return device.dram_latency + ISSUE_CYCLES / device.clock


def loaded_latency(device: DeviceModel) -> float:
    """L_total: the same while memory is kept busy, which stages must cover."""
    return LOADED * device.dram_latency + ISSUE_CYCLES / device.clock


@dataclass(frozen=True)
class LoopStep:
    """What one block does in one step of its loop.

    Attributes:
        flops: of the product, padding included. x_bytes, weight_bytes: loaded. convert: seconds to unpack a packed
            weight.
        rows: of the product; x_read, weight_read: bytes that one reading of each operand takes from shared memory.
        wgmma: whether the instructions of Hopper multiply, which read both operands from shared memory.
        tensor_cores: whether tensor cores multiply at all.
    """

    flops: float
    x_bytes: float
    weight_bytes: float
    rows: int
    x_read: float
    weight_read: float
    wgmma: bool
    convert: float = 0.0
    tensor_cores: bool = True


def loop_seconds(
    device: DeviceModel, step: LoopStep, steps: int, blocks: int, fit: Occupancy, wave: Waves, warps: int, stages: int,
    rate: float, store_bytes: float,
) -> tuple[dict[str, float], float]:  # fmt: skip
    """(seconds by limit, those that nothing overlaps) of `blocks` blocks of `steps` steps; device memory is the
    caller's.

    Args:
        rate: sustained flops a second of the device in this dtype.
        store_bytes: that a block writes at its end.
    """
    resident = min(fit.blocks, wave.busiest)
    per_step = step.flops / (rate / device.sms)
    # A multiprocessor has four units. A warp keeps one busy with products of tensor cores, and it takes two without
    # them (FITTED).
    share = min(1.0, warps * resident / (4 if step.tensor_cores else 8))
    if device.matrix_unit == "wgmma" and step.tensor_cores and not step.wgmma:
        share *= _MMA_ON_HOPPER
    # A multiprocessor's blocks run in rounds of `resident` blocks; the last round has the remainder.
    full, rest = divmod(wave.busiest, resident)
    rounds, first_and_last = full + (rest > 0), full / resident + (1 / rest if rest else 0.0)
    wait = loaded_latency(device)
    # An asynchronous product holds its buffer a step longer: with two, the next load begins when it has ended.
    alone = stages == 1 or (stages == 2 and step.wgmma)
    at_a_time = wait + per_step if alone else wait / (stages - 1)
    groups = cdiv(warps, 4)
    around = (_STEP_CYCLES + _GROUP_CYCLES * (groups - 1)) / device.clock / resident
    store = store_bytes * device.sms / device.l2_bandwidth
    work = wave.busiest * steps
    # A block unpacks its weights before it multiplies them; the other blocks multiply meanwhile.
    product = max(per_step / share, step.convert) + min(per_step / share, step.convert) / resident
    shared = _shared_seconds(step, device, warps)
    if not step.tensor_cores:  # the same warps read the operands and multiply them
        product += shared
    parts = {
        "compute": work * (product + around),
        "shared memory": work * shared,
        "latency": rounds * steps * at_a_time,
        "L2": blocks * steps * (step.x_bytes + step.weight_bytes) / (_SHARED_LOADS * device.l2_bandwidth),
    }
    if step.convert:
        parts["conversion"] = work * step.convert
    # A block's first load and last store are hidden by the other blocks of its multiprocessor.
    return parts, device.launch + (latency(device) + store) * first_and_last


def _shared_seconds(step: LoopStep, device: DeviceModel, warps: int) -> float:
    """Seconds that shared memory is busy with a step: what is loaded is written once, and read by every unit that
    needs it.

    wgmma reads both operands there: 64 rows of x at a time, and the whole weight for each of them. Other tensor cores
    take the rows and columns of each warp from registers, the warps being arranged so that they read least, and
    ordinary units those of each thread.
    """
    if step.wgmma:
        # Groups of four warps beyond the rows' share the columns, and each reads all of x.
        read = step.x_read * cdiv(warps // 4, cdiv(step.rows, 64)) + cdiv(step.rows, 64) * step.weight_read
    elif not step.tensor_cores:
        # A thread has a square of the sums, and for each column of k reads a value for every row and column of it.
        depth = step.x_read / step.rows
        sums = step.rows * step.weight_read / depth / (32 * warps)
        read = 32 * warps * 2 * math.sqrt(sums) * depth
    elif device.matrix_unit == "tcgen05":
        read = step.x_read + step.weight_read
    else:
        grids = [(w, warps // w) for w in (1, 2, 4, 8, 16) if w <= warps and w <= cdiv(step.rows, 16)]
        read = min(step.x_read * across + step.weight_read * down for down, across in grids)
    # Unpacked weights that the product reads from shared memory are written back to it.
    unpacked = step.weight_read if step.convert and (step.wgmma or device.matrix_unit == "tcgen05") else 0
    return (step.x_bytes + step.weight_bytes + unpacked + read) / (_SHARED_WIDTH * device.clock)


def overlapped(parts: dict[str, float], fixed: float) -> float:
    """Seconds of a loop from its limits; those inside a multiprocessor overlap better than those outside of it."""
    inside = combine({name: parts[name] for name in parts if name not in _OUTSIDE}, 0.0, _INSIDE_P)
    return combine({"inside": inside, **{name: parts[name] for name in _OUTSIDE}}, fixed, _OUTSIDE_P)

"""Blocks of elementwise kernels: how many elements a thread, how wide its loads, how many warps.

Such a kernel only waits for memory, so enough bytes must be under way: items per thread x bytes x resident threads
at least latency x bandwidth (Little's law). Larger blocks waste the end of the grid. Smaller blocks repeat their
start. The kernels are those of `kernels/triton/rows`: `activation_kernel` (one input), `activate_and_mul_kernel`
(two), `_mul_add_kernel` (three).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.registers import elementwise_registers
from nanovllm.plan.resources import (
    LOADED,
    SPILL_MARGIN,
    VECTOR_BYTES,
    Plan,
    bytes_needed,
    cdiv,
    combine,
    occupancy,
    one_of,
    positive,
    ranked,
    that_fit,
    waves,
)

DTYPES = ("bfloat16", "float16", "float32")
_THREAD_INSTRUCTIONS = 25
"""Instructions of a thread for its start and its bounds. ASSUMED."""
_ACCESS_INSTRUCTIONS = 3
"""Instructions of a load or store: address, mask and the access itself. ASSUMED."""
START_CYCLES = 500
"""Cycles from the end of a block to the first load of its successor. ASSUMED."""
BLOCK_CYCLES = 100
"""The least cycles between the starts of two blocks on a multiprocessor. ASSUMED."""
MOST_ITEMS = 64


@dataclass(frozen=True)
class ElementwiseProblem:
    """`elements` results from as many elements of each input.

    Attributes:
        inputs, outputs: tensors read and written.
        operations: instructions an element besides loads and stores; 20 for a GELU.

    Raises:
        ValueError: a number is not positive, or the dtype is unknown.
    """

    elements: int
    inputs: int = 1
    outputs: int = 1
    dtype: str = "bfloat16"
    operations: int = 8

    def __post_init__(self) -> None:
        positive(elements=self.elements, inputs=self.inputs, outputs=self.outputs, operations=self.operations)
        one_of("dtype", self.dtype, DTYPES)

    @property
    def itemsize(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def least_bytes(self) -> float:
        """Inputs and outputs once."""
        return self.elements * (self.inputs + self.outputs) * self.itemsize


@dataclass(frozen=True)
class ElementwiseTile:
    """`block` elements a program of `warps` warps."""

    block: int
    warps: int

    @property
    def items(self) -> int:
        """Elements a thread."""
        return self.block // (32 * self.warps)

    def vector(self, dtype: str) -> int:
        """Elements of a thread's widest load."""
        return min(self.items, int(VECTOR_BYTES / DTYPE_BYTES[dtype]))

    def __str__(self) -> str:
        return f"{self.block} w{self.warps} ({self.items} a thread)"


def candidates(problem: ElementwiseProblem, device: DeviceModel) -> list[ElementwiseTile]:
    """Powers of two from one element a thread to `MOST_ITEMS`, without spilling, of at most twice the elements."""
    found = []
    for warps, items in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, MOST_ITEMS)):
        tile = ElementwiseTile(32 * warps * items, warps)
        if tile.block >= 2 * max(32, problem.elements):
            continue
        if (
            elementwise_registers(tile, problem)
            <= min(device.registers_per_thread, device.registers_per_sm // (32 * warps)) - SPILL_MARGIN
        ):
            found.append(tile)
    return found


def predict(tile: ElementwiseTile, problem: ElementwiseProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration."""
    p = problem
    registers = elementwise_registers(tile, p)
    fit = occupancy(device, 0, registers, tile.warps)
    blocks = cdiv(p.elements, tile.block)
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    resident = max(1, min(fit.blocks, wave.busiest))
    read, written = p.elements * p.inputs * p.itemsize, p.elements * p.outputs * p.itemsize
    in_flight = resident * tile.block * p.inputs * p.itemsize
    accesses = cdiv(tile.items, tile.vector(p.dtype)) * (p.inputs + p.outputs)
    instructions = _THREAD_INSTRUCTIONS + _ACCESS_INSTRUCTIONS * accesses + p.operations * tile.items
    # As one block ends the next one starts, so blocks follow each other without waves.
    turns = max(1.0, wave.busiest / resident)
    parts = {
        "memory": (read + written) / device.bandwidth,
        "latency": turns * (LOADED * device.dram_latency + START_CYCLES / device.clock),
        "compute": wave.busiest * 32 * tile.warps * instructions / (device.lanes * device.clock),
        "blocks": wave.busiest * BLOCK_CYCLES / device.clock,
        "L2": (read + written) / device.l2_bandwidth,
    }
    fixed = device.launch + device.dram_latency
    flops = float(p.operations * p.elements)
    intensity = flops / (read + written)
    return Plan(
        tile, blocks, intensity, 0, registers, fit, 0, wave, combine(parts, fixed) if fit.blocks else math.inf, parts,
        fixed, flops, read + written, in_flight, bytes_needed(device),
    )  # fmt: skip


def plan_elementwise(problem: ElementwiseProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits, the fastest by prediction first."""
    least, predicted = ElementwiseTile(32, 1), (predict(tile, problem, device) for tile in candidates(problem, device))
    plans = that_fit("elementwise", predicted, device, least, 0, elementwise_registers(least, problem))
    # One whole vector a thread, four warps: what streams best where prediction sees no difference
    # (docs/log/performance.md, "CUDA C++").
    full = VECTOR_BYTES / problem.itemsize
    return ranked(plans, lambda tile: (abs(math.log2(tile.items / full)), abs(math.log2(tile.warps / 4))))

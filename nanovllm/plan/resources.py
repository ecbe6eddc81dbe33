"""What a block takes of a multiprocessor, how many blocks fit, and how long they take together.

A configuration must fit (shared memory, registers, warps), do enough arithmetic for each byte, and have enough bytes
under way to cover the latency. Every planner of this package uses this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.hardware.occupancy import Occupancy
from nanovllm.hardware.occupancy import occupancy as occupancy

SPILL_MARGIN = 8
"""A prediction this near to the most registers of a thread counts as spilling: predictions are not exact."""
VECTOR_BYTES = 16
"""The widest load or store of a thread."""


@dataclass(frozen=True)
class Waves:
    """A grid on the multiprocessors.

    Attributes:
        count: blocks / (multiprocessors x blocks resident on one); 1.2 means a second wave for a fifth of them.
        efficiency: how evenly multiprocessors share the blocks: the mean number over that of the busiest, which sets
            the time if all blocks are equal and each multiprocessor takes the next as soon as it can.
        busiest: blocks that the busiest multiprocessor runs.
    """

    count: float
    efficiency: float
    busiest: int


def waves(blocks: int, resident: int, sms: int) -> Waves:
    busiest = math.ceil(blocks / sms)
    return Waves(blocks / (resident * sms), blocks / (sms * busiest), busiest)


def stages_needed(latency: float, tile_seconds: float) -> int:
    """Buffers so that a tile has arrived when its turn comes: ceil(latency / time of a tile) + 1."""
    return math.ceil(latency / tile_seconds) + 1


@dataclass(frozen=True)
class Plan:
    """One configuration of a kernel, what it takes, and how long it is predicted to run.

    Attributes:
        config: the kernel's own record: tiles, warps, stages.
        intensity: flops for each byte that a block loads (tiles) or that the kernel moves (elementwise, reductions).
        shared: bytes a block. registers: a thread.
        min_stages: buffers that cover the latency; 0 where nothing is pipelined.
        seconds: predicted, with a cold L2 cache, in a CUDA graph.
        parts: seconds by limit: "compute", "memory", "L2", "latency", "shared memory", "conversion", "blocks"
            (starting them). They overlap; the largest binds.
        fixed: seconds that nothing overlaps: the launch, the first load, the last store.
        flops: the flops of the problem, no padding. bytes: through device memory.
        in_flight: bytes that a multiprocessor has requested at a time, and needed: those that cover the latency
            (Little's law); 0 where stages do that.
        limit: the binding one; "launch" if the fixed part is larger.
    """

    config: Any
    blocks: int
    intensity: float
    shared: int
    registers: int
    occupancy: Occupancy
    min_stages: int
    waves: Waves
    seconds: float
    parts: dict[str, float]
    fixed: float
    flops: float
    bytes: float
    in_flight: float = 0.0
    needed: float = 0.0

    @property
    def limit(self) -> str:
        name = max(self.parts, key=lambda part: self.parts[part])
        return name if self.parts[name] >= self.fixed else "launch"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: bytes, flops, seconds."""
        return asdict(self) | {"limit": self.limit, "seconds": self.seconds if math.isfinite(self.seconds) else None}


LOADED = 2.0
"""The latency of a busy memory over that of an idle one. ASSUMED."""


def bytes_needed(device: DeviceModel) -> float:
    """Bytes that a multiprocessor must have in flight for its share of the bandwidth (Little's law)."""
    return LOADED * device.dram_latency * device.bandwidth / device.sms


def combine(parts: dict[str, float], fixed: float, p: float = 12) -> float:
    """Seconds from overlapping parts: the largest, and a little of the others, since overlap is never perfect.

    A p-norm. With p = 12, which is ASSUMED of what has no loop of products (`loop.overlapped`), two equal parts cost
    6 % more than one, and a part of half the size nothing.
    """
    return fixed + sum(t**p for t in parts.values()) ** (1 / p)


def ranked(plans: list[Plan], preferred: Callable[[Any], tuple[Any, ...]] = lambda config: ()) -> list[Plan]:
    """The fastest first; among those within half a percent what covers the latency or lacks the fewest stages for it,
    then what is `preferred` (the least by that key of its configuration), then what takes less of a multiprocessor."""

    def key(p: Plan) -> tuple[Any, ...]:
        uncovered = max(0, p.min_stages - getattr(p.config, "stages", p.min_stages)) or p.in_flight < p.needed
        return round(math.log(p.seconds) / 0.005), uncovered, *preferred(p.config), p.shared, p.registers

    return sorted(plans, key=key)


def positive(**sizes: int) -> None:
    """Raise a ValueError that names the first argument that is not a positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, not {value!r}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a ValueError that names the argument if its value is none of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, not {value!r}")


def that_fit(
    kind: str, plans: Iterable[Plan], device: DeviceModel, smallest: object, shared: float, registers: int
) -> list[Plan]:
    """The plans of which a multiprocessor holds a block.

    Raises:
        ValueError: there is none; with what the smallest tile takes.
    """
    found = [plan for plan in plans if plan.occupancy.blocks]
    if not found:
        raise nothing_fits(kind, smallest, shared, registers, device)
    return found


def nothing_fits(kind: str, smallest: object, shared: float, registers: int, device: DeviceModel) -> ValueError:
    """The error for a problem whose smallest tile does not fit a block: what the tile takes, and what a block has."""
    return ValueError(
        f"{kind}: nothing fits {device.name}: its smallest tile, {smallest}, takes {shared / 1024:,.0f} KiB of shared "
        f"memory and {registers:,} registers a thread; a block may have {device.shared_per_block // 1024} KiB, "
        f"a thread {device.registers_per_thread - SPILL_MARGIN} without spilling"
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def padded(head_dim: int) -> int:
    """The width of an attention tile: a power of two, and what a tensor core takes at least."""
    return max(16, next_power_of_2(head_dim))


def uses_wgmma(device: DeviceModel, rows: int, warps: int, dtype: str = "bfloat16") -> bool:
    """Whether Hopper's instructions multiply a tile of that many rows: groups of four warps, 64 rows each."""
    return device.matrix_unit == "wgmma" and rows >= 64 and warps >= 4 and dtype != "float32"

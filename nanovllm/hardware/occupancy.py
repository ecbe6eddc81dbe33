"""How many blocks of a kernel a multiprocessor holds at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanovllm.hardware.gpu_presets import DeviceModel

_RESERVED_SHARED = 1024
"""Bytes of shared memory that the hardware keeps of each block's, from compute capability 8.0 on."""
_REGISTERS_OF_A_WARP = 256
"""Registers are handed out to a warp in units of this many, 8 a thread."""


@dataclass(frozen=True)
class Occupancy:
    """Blocks of one kind on a multiprocessor at a time.

    Attributes:
        blocks: how many; 0 if not even one fits.
        limit: what there is too little of for one more: "shared memory", "registers", "warps" or "blocks".
        warps: resident warps, as a share of the most there can be.
    """

    blocks: int
    limit: str
    warps: float


def occupancy(device: DeviceModel, shared: int, registers: int, warps: int) -> Occupancy:
    """How many blocks fit.

    Args:
        shared: bytes a block. registers: 32-bit ones a thread. warps: a block.
    """
    per_warp = max(1, math.ceil(registers * 32 / _REGISTERS_OF_A_WARP)) * _REGISTERS_OF_A_WARP
    most = {
        "shared memory": device.shared_per_sm // (shared + _RESERVED_SHARED),
        "warps": device.warps_per_sm // warps,
        "registers": device.registers_per_sm // (per_warp * warps),
        "blocks": device.blocks_per_sm,
    }
    if shared > device.shared_per_block:
        most["shared memory"] = 0
    if registers > device.registers_per_thread:
        most["registers"] = 0
    limit = min(most, key=lambda name: most[name])
    return Occupancy(most[limit], limit, most[limit] * warps / device.warps_per_sm)

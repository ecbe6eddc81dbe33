"""What kernels take by themselves and as one, from bytes, flops, launches and what a multiprocessor can hold.

    unfused = sum over kernels of launch + bytes / bandwidth + flops / rate
    fused   = launch + boundary bytes / bandwidth + flops / rate

The boundary is what enters and leaves a group. Three things make a fused kernel slower than that:
- work that each program repeats (a norm before a matrix product is computed once for every tile of columns);
- registers or shared memory: what is alive at once in a row must be held, and the more of it, the fewer threads are
  resident and the fewer bytes in flight (Little's law: latency x bandwidth); beyond the chip, rows are read twice;
- too few rows to occupy the device.

Times are of the device, as in a CUDA graph; a launch is an empty kernel's time there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import legality
from nanovllm.fuse.classify import GATHERS, NORMALISATIONS, PER_ELEMENT, Kind, independent_parts
from nanovllm.fuse.cpu_model import CpuModel
from nanovllm.fuse.fx_nodes import fake
from nanovllm.fuse.grouping import Group
from nanovllm.fuse.op_graph import Kernel, Read
from nanovllm.hardware.gpu_presets import DeviceModel

FusionDevice = DeviceModel | CpuModel
"""Sizes in bytes and 32-bit registers, rates a second, times in seconds. `warps_per_sm` 0: any number is resident."""
InputsIn = Literal["computed", "memory", "cache"]
_ACCESS = 16  # bytes of a vector load, the most that a thread asks for at once
_REGISTERS = 24  # of a thread, for addresses and loop counters
_TILE = 128  # rows and columns of a product's tile, as large libraries take them; fewer rows where there are fewer
_TILE_THREADS = 256
# What a product takes beyond launch, latency and bytes: its pipeline fills before the first and drains after the last
# step. Measured on an H200: cuBLAS multiplies one row by 1024 x 4096, x 6144 and x 151936 weights in 5.1, 5.7 and 77.7
# us.
_PIPELINE = 1.4e-6


@dataclass(frozen=True)
class Estimate:
    """One kernel's predicted time in seconds and what it is made of.

    Attributes:
        occupancy: the share of the threads that a multiprocessor can hold which registers and shared memory leave.
        passes: how often the rows are read; 2 where they do not fit on the chip.
        repeated: seconds of work that programs repeat.
    """

    seconds: float
    bytes: int
    flops: int
    occupancy: float = 1.0
    passes: int = 1
    repeated: float = 0.0


@dataclass(frozen=True)
class FusionCostModel:
    """Predicts kernels and groups on a device.

    Args:
        inputs: where what enters a group lies. "computed": in the L2 cache if another kernel of the graph has just
            computed it and it takes at most a quarter of the cache, else in memory, as in a model that runs. "memory"
            or "cache": all of it there, as when a group is timed by itself.
        overlap: the share of the shorter of moving and computing that is hidden behind the longer. 0: the plain sum. By
            default what an H200 does: torch's gelu of 16384 x 16384 floats takes 510 us there, of which moving takes
            488 us and computing, by this count, 97 us; a product of 8192^3 in bfloat16 takes 1381 us (of 91 and 1394
            us).
    """

    device: FusionDevice
    inputs: InputsIn = "computed"
    overlap: float = 0.75

    def unfused(self, group: Group) -> float:
        """Seconds of the group's kernels one after the other."""
        return sum(self.kernel(k, group.members).seconds for k in group.kernels)

    def gain(self, a: Group, b: Group, both: Group) -> float:
        """Seconds saved by making one kernel of two groups."""
        return self.fused(a).seconds + self.fused(b).seconds - self.fused(both).seconds

    def kernel(self, k: Kernel, own: Collection[FxNode] = ()) -> Estimate:
        """One kernel of the graph by itself. `own`: kernels that ran just before; their results are in the cache."""
        if k.empty:
            return Estimate(0.0, 0, 0)
        reads: dict[FxNode, int] = {}
        for r in k.reads:
            reads[r.base] = reads.get(r.base, 0) + r.num_bytes
        fast, slow = self._split(reads, own)
        if k.kind in (Kind.MATMUL, Kind.OPAQUE):  # libraries and our own kernels: written to occupy the device
            memory = self._memory(fast, slow, k.written_bytes, 1 << 30, 1.0)
            return Estimate(self._together(memory, self._flops(k), k.kind is Kind.MATMUL), k.bytes, k.flops)
        return min(self._ways([k], reads, fast, slow, k.written_bytes), key=lambda e: e.seconds)

    def fused(self, group: Group) -> Estimate:
        """The group as one kernel."""
        if len(group.kernels) == 1:
            return self.kernel(group.kernels[0])
        fast, slow = self._split(group.boundary_reads, ())
        if group.product is not None:
            return self._with_product(group, group.product, fast, slow)
        ways = self._ways(list(group.kernels), group.boundary_reads, fast, slow, group.written_bytes)
        return min(ways, key=lambda e: e.seconds)

    def _ways(
        self, members: list[Kernel], reads: Mapping[FxNode, int], fast: int, slow: int, written: int
    ) -> Iterator[Estimate]:
        """A program for each row, and where it may be, elements shared out in any way.

        It may if nothing is reduced, and if nothing else in the kernel needs what is reduced: then every program
        reduces some elements, and a second kernel reduces their results. A library's kernel by itself has a way for any
        shape.
        """
        shared_reads = sum(reads[base] for base in _broadcast(members) if base in reads)
        own = fast + slow - shared_reads
        reductions = {k.fx for k in members if k.reduced}
        if not reductions and not any(k.kind is Kind.INJECTIVE for k in members):
            yield self._estimate(members, own, fast, slow, written, 0)
            return
        yield self._estimate(members, own, fast, slow, written, (legality.rows(members) or 1) * _parts(members))
        single = len(members) == 1
        final = not any(r.base in reductions for k in members for r in k.reads)
        if reductions and (single or final and not any(k.op in NORMALISATIONS for k in members)):
            shared = self._estimate(members, own, fast, slow, written, 0)
            yield shared if single else replace(shared, seconds=shared.seconds + self.device.launch)

    def _split(self, reads: dict[FxNode, int], own: Collection[FxNode]) -> tuple[int, int]:
        """Bytes read from the L2 cache and from memory."""
        fast = 0
        for base, num_bytes in reads.items():
            computed = base.op == "call_function" and self.inputs == "computed"
            near = computed or base in own or self.inputs == "cache"
            fast += num_bytes if near and num_bytes <= self.device.l2_bytes // 4 else 0
        return fast, sum(reads.values()) - fast

    def _estimate(self, kernels: list[Kernel], own: int, fast: int, slow: int, written: int, programs: int) -> Estimate:
        """Kernels as one that gives each of `programs` a row (0: each thread some elements).

        Args:
            own: of the bytes read, those that belong to one element each.
        """
        d = self.device
        elements = max((math.prod(k.domain) for k in kernels), default=1)
        occupancy, passes, threads = 1.0, 1, max(1.0, elements / 8)
        if programs and d.warps_per_sm:
            occupancy, passes, threads = self._rows(kernels, elements // max(1, programs), programs)
        elif d.warps_per_sm:
            registers = _REGISTERS + 8 * _most_alive(kernels)  # eight elements a thread
            occupancy = self._occupancy(registers, 128, 0)
        memory = self._memory(fast * passes, slow * passes, written, threads, occupancy, own * passes)
        arithmetic = sum(self._flops(k) for k in kernels)
        return Estimate(
            self._together(memory, arithmetic),
            (fast + slow) * passes + written,
            sum(k.flops for k in kernels),
            occupancy,
            passes,
        )

    def _rows(self, kernels: list[Kernel], length: int, programs: int) -> tuple[float, int, float]:
        """(occupancy, passes, threads in all) of row programs: in registers, else in shared memory, else read twice.

        Threads are counted as they have work: of a block that is rounded up to a power of two some have none. So a
        longer row never has fewer elements a thread.
        """
        d = self.device
        threads = min(1024, max(32, 1 << math.ceil(math.log2(max(1, length / 8)))))
        working = min(1024.0, max(32.0, length / 8))
        alive = _most_alive(kernels)
        registers = _REGISTERS + math.ceil(alive * length / working)
        if registers <= d.registers_per_thread and registers * threads <= d.registers_per_sm:
            return self._occupancy(registers, threads, 0), 1, programs * working
        shared = 4 * length
        if shared <= d.shared_per_block:
            return self._occupancy(_REGISTERS + 8 * alive, threads, shared), 1, programs * working
        return self._occupancy(_REGISTERS + 8 * alive, threads, 0), 2, programs * working

    def _occupancy(self, registers: int, threads: int, shared: int) -> float:
        d = self.device
        most = 32 * d.warps_per_sm
        registers = min(registers, d.registers_per_thread)
        blocks = min(most // threads, d.registers_per_sm // (registers * threads) or 1)
        if shared:
            blocks = min(blocks, max(1, d.shared_per_sm // shared))
        return blocks * threads / most

    def _memory(self, fast: int, slow: int, written: int, threads: float, occupancy: float, own: int = 0) -> float:
        """Seconds to move the bytes: at bandwidth, or as fast as what is in flight allows; and filling and draining.

        Args:
            threads: how many there are, of which not all need be resident at once.
            own: bytes that each thread reads a part of. Of a value that is broadcast all threads read the same, and the
                more of them there are, the less of its bytes is one thread's; it waits in no thread's queue.
        """
        d = self.device
        seconds = (slow + written) / d.bandwidth + fast / d.l2_bandwidth
        latency = d.dram_latency if slow else d.l2_latency
        if d.warps_per_sm:
            resident = d.sms * 32 * d.warps_per_sm * occupancy
            seconds = max(seconds, latency * max(own / threads, (fast + slow) / resident) / _ACCESS)
        return seconds + 2 * latency

    def _together(self, memory: float, arithmetic: float, product: bool = False) -> float:
        """Seconds of a kernel that moves and computes."""
        hidden = self.overlap * min(memory, arithmetic)
        fill = _PIPELINE if product and self.device.warps_per_sm else 0.0
        return self.device.launch + memory + arithmetic - hidden + fill

    def _flops(self, k: Kernel) -> float:
        return k.flops / (self._rate(k) if k.kind in (Kind.MATMUL, Kind.OPAQUE) else self.device.vector_flops)

    def _rate(self, k: Kernel) -> float:
        try:
            return self.device.rate(str(k.dtype).removeprefix("torch."))
        except ValueError:  # no matrix unit for it
            return self.device.vector_flops

    def _with_product(self, group: Group, product: Kernel, fast: int, slow: int) -> Estimate:
        d = self.device
        assert product.sizes is not None
        num_rows, columns, inner = product.sizes
        before, after = legality.parts(list(group.kernels), product)
        tile_rows = min(_TILE, max(1, num_rows))
        # With few rows the columns are cut finer, so that every multiprocessor has some.
        tile_columns = min(_TILE, max(8, columns * max(1, num_rows // _TILE) // d.sms))
        tiles = math.ceil(columns / tile_columns)
        repeated = 0.0
        if before:
            row_side = legality.row_members(before, product)
            again = sum(k.flops for k in row_side) * (tiles - 1) / d.vector_flops
            read = sum(r.num_bytes for k in row_side for r in k.reads if r.base not in group.members)
            repeated = again + read * (tiles - 1) / d.l2_bandwidth
            if any(k.reduced for k in row_side):  # the row must have been read before the first product is made
                rounds = tile_rows * inner * product.dtype.itemsize / (_TILE_THREADS * _ACCESS)
                repeated += d.l2_latency * max(1.0, rounds) if d.warps_per_sm else 0.0
        occupancy = 1.0
        if d.warps_per_sm:
            accumulators = tile_rows * tile_columns / _TILE_THREADS
            alive = _most_alive(after)
            registers = _REGISTERS + math.ceil(accumulators * alive)
            occupancy = self._occupancy(registers, _TILE_THREADS, 0)
            spilled = max(0, registers - d.registers_per_thread) / max(1.0, accumulators * alive)
            # Spilled registers are written and read again, through the cache.
            repeated += spilled * 2 * 4 * num_rows * columns / d.l2_bandwidth
        memory = self._memory(fast, slow, group.written_bytes, 1 << 30, 1.0)
        arithmetic = sum(self._flops(k) for k in group.kernels)
        total = self._together(memory, arithmetic, True) + repeated
        return Estimate(total, fast + slow + group.written_bytes, group.flops, occupancy, 1, repeated)


def _parts(kernels: list[Kernel]) -> int:
    """Parts of a row that nothing connects: the groups of a group norm, if the rest is element by element."""
    norms = [k for k in kernels if k.reduced]
    parts = {independent_parts(k.fx) for k in norms}
    alike = all(k.kind in PER_ELEMENT and k.domain == norms[0].domain for k in kernels if norms and not k.reduced)
    return parts.pop() if len(parts) == 1 and alike else 1


def _broadcast(kernels: Iterable[Kernel]) -> set[FxNode]:
    """The bases of which all that is read is broadcast (a weight, a bias), or says which rows a gather takes."""
    kernels = list(kernels)
    largest = max((k.domain for k in kernels), key=math.prod, default=())
    whole: set[FxNode] = set()
    some: set[FxNode] = set()
    for k in kernels:
        for r in k.reads:
            (some if any(_is_broadcast(k, r, domain) for domain in (k.domain, largest)) else whole).add(r.base)
    return some - whole


def _is_broadcast(k: Kernel, r: Read, domain: tuple[int, ...]) -> bool:
    if r.table or k.op in ("cat", "stack"):
        return False
    t = fake(r.value)[0]
    shape = [n if stride else 1 for n, stride in zip(t.shape, t.stride())]
    if k.op in GATHERS and math.prod(shape) < math.prod(domain):
        return True
    # A bias is one also beside a single row, so that rows may be added to it.
    smaller = len(shape) < len(domain) or math.prod(shape) < math.prod(domain)
    return smaller and all(n in (1, m) for n, m in zip(reversed(shape), reversed(domain)))


def _most_alive(kernels: Iterable[Kernel]) -> int:
    """The most results of the size of a row that are needed at once, if kernels run in program order.

    A result is alive from its computation to its last use among them; what is read from outside is loaded where it is
    used.
    """
    kernels = list(kernels)
    largest = max((math.prod(k.domain) for k in kernels), default=1)
    last_use: dict[FxNode, int] = {}
    for i, k in enumerate(kernels):
        for r in k.reads:
            last_use[r.base] = i
    alive: dict[FxNode, float] = {}
    most = 1.0
    for i, k in enumerate(kernels):
        val = k.fx.meta.get("val")
        alive[k.fx] = val.numel() / max(1, largest) if isinstance(val, torch.Tensor) else 1.0
        operands = {r.base: r.num_bytes / max(1, k.dtype.itemsize * largest) for r in k.reads if r.base not in alive}
        most = max(most, sum(alive.values()) + sum(min(1.0, share) for share in operands.values()))
        alive = {fx: share for fx, share in alive.items() if last_use.get(fx, -1) > i}
    return math.ceil(most)

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

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import legality
from nanovllm.fuse.classify import GATHERS, NORMALISATIONS, PER_ELEMENT, Kind, independent_parts
from nanovllm.fuse.cpu_model import CpuModel
from nanovllm.fuse.fx_nodes import fake
from nanovllm.fuse.grouping import KernelGroup
from nanovllm.fuse.op_graph import GraphKernel, Read
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
        occupancy: the share of the threads of a multiprocessor that registers and shared memory leave.
        passes: how often the rows are read; 2 if they do not fit on the chip.
        repeated: seconds of work that programs repeat.
    """

    seconds: float
    bytes: int
    flops: int
    occupancy: float = 1.0
    passes: int = 1
    repeated: float = 0.0


@dataclass(frozen=True)
class _Traffic:
    """Bytes that a kernel reads from the L2 cache and from memory, and writes.

    own: bytes of which each thread reads a part. Of a value that is broadcast all threads read the same, so that more
    threads do not read less each; it waits in no thread's queue.
    """

    cached: int
    memory: int
    written: int
    own: int = 0

    def times(self, passes: int) -> _Traffic:
        """The same with every read done several times."""
        return _Traffic(self.cached * passes, self.memory * passes, self.written, self.own * passes)

    @property
    def read(self) -> int:
        return self.cached + self.memory


@dataclass(frozen=True)
class FusionCostModel:
    """Predicts kernels and groups on a device.

    Args:
        inputs: where the inputs of a group lie. "computed": in the L2 cache if another kernel of the graph has just
            computed them and they take at most a quarter of the cache, else in memory, as in a model that runs.
            "memory" or "cache": all of them there, as when a group is timed by itself.
        overlap: the share of the shorter of moving and computing that is hidden behind the longer. The default is
            measured on an H200: torch's gelu of 16384 x 16384 floats takes 510 us, of which moving takes 488 us and
            computing, by this count, 97 us; a product of 8192^3 in bfloat16 takes 1381 us (of 91 and 1394 us).
    """

    device: FusionDevice
    inputs: InputsIn = "computed"
    overlap: float = 0.75

    def unfused(self, group: KernelGroup) -> float:
        """Seconds of the group's kernels one after the other."""
        return sum(self.kernel(k, group.members).seconds for k in group.kernels)

    def gain(self, a: KernelGroup, b: KernelGroup, both: KernelGroup) -> float:
        """Seconds saved by making one kernel of two groups."""
        return self.fused(a).seconds + self.fused(b).seconds - self.fused(both).seconds

    def kernel(self, k: GraphKernel, own: Collection[FxNode] = ()) -> Estimate:
        """One kernel of the graph by itself. `own`: kernels that ran just before; their results are in the cache."""
        if k.empty:
            return Estimate(0.0, 0, 0)
        reads: dict[FxNode, int] = {}
        for r in k.reads:
            reads[r.base] = reads.get(r.base, 0) + r.num_bytes
        if k.kind in (Kind.MATMUL, Kind.OPAQUE):  # libraries and our own kernels: written to occupy the device
            memory = self._memory(self._traffic(reads, k.written_bytes, own))
            return Estimate(self._together(memory, self._flops(k), k.kind is Kind.MATMUL), k.bytes, k.flops)
        return self._best([k], reads, k.written_bytes, own)

    def fused(self, group: KernelGroup) -> Estimate:
        """The group as one kernel."""
        if len(group.kernels) == 1:
            return self.kernel(group.kernels[0])
        if group.product is not None:
            return self._with_product(group, group.product)
        return self._best(list(group.kernels), group.boundary_reads, group.written_bytes)

    def _best(
        self, members: list[GraphKernel], reads: Mapping[FxNode, int], written: int, own: Collection[FxNode] = ()
    ) -> Estimate:
        """The faster of a program for each row and, if possible, elements shared out in any way.

        Sharing out is possible if nothing is reduced, or if nothing else in the kernel needs what is reduced: then
        every program reduces some elements, and a second kernel reduces their results. A library's kernel by itself has
        a way for any shape.
        """
        traffic = self._traffic(reads, written, own)
        broadcast = sum(reads[base] for base in _broadcast(members) if base in reads)
        traffic = replace(traffic, own=traffic.read - broadcast)
        reductions = {k.fx for k in members if k.reduced}
        if not reductions and not any(k.kind is Kind.INJECTIVE for k in members):
            return self._estimate(members, traffic, 0)
        found = [self._estimate(members, traffic, (legality.rows(members) or 1) * _parts(members))]
        single = len(members) == 1
        final = not any(r.base in reductions for k in members for r in k.reads)
        if reductions and (single or final and not any(k.op in NORMALISATIONS for k in members)):
            shared = self._estimate(members, traffic, 0)
            found.append(shared if single else replace(shared, seconds=shared.seconds + self.device.launch))
        return min(found, key=lambda e: e.seconds)

    def _traffic(self, reads: Mapping[FxNode, int], written: int, own: Collection[FxNode] = ()) -> _Traffic:
        cached = 0
        for base, num_bytes in reads.items():
            computed = base.op == "call_function" and self.inputs == "computed"
            near = computed or base in own or self.inputs == "cache"
            cached += num_bytes if near and num_bytes <= self.device.l2_bytes // 4 else 0
        return _Traffic(cached, sum(reads.values()) - cached, written)

    def _estimate(self, kernels: list[GraphKernel], traffic: _Traffic, programs: int) -> Estimate:
        """Kernels as one that gives each of `programs` a row (0: each thread some elements)."""
        elements = max((math.prod(k.domain) for k in kernels), default=1)
        occupancy, passes, threads = 1.0, 1, max(1.0, elements / 8)
        if programs and self.device.warps_per_sm:
            occupancy, passes, threads = self._rows(kernels, elements // max(1, programs), programs)
        elif self.device.warps_per_sm:
            occupancy = self._occupancy(_REGISTERS + 8 * _most_alive(kernels), 128, 0)  # eight elements a thread
        traffic = traffic.times(passes)
        seconds = self._together(self._memory(traffic, threads, occupancy), sum(map(self._flops, kernels)))
        return Estimate(seconds, traffic.read + traffic.written, sum(k.flops for k in kernels), occupancy, passes)

    def _rows(self, kernels: list[GraphKernel], length: int, programs: int) -> tuple[float, int, float]:
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
        fits = 4 * length <= d.shared_per_block
        occupancy = self._occupancy(_REGISTERS + 8 * alive, threads, 4 * length if fits else 0)
        return occupancy, 1 if fits else 2, programs * working

    def _occupancy(self, registers: int, threads: int, shared: int) -> float:
        d = self.device
        most = 32 * d.warps_per_sm
        registers = min(registers, d.registers_per_thread)
        blocks = min(most // threads, d.registers_per_sm // (registers * threads) or 1)
        if shared:
            blocks = min(blocks, max(1, d.shared_per_sm // shared))
        return blocks * threads / most

    def _memory(self, traffic: _Traffic, threads: float = 1 << 30, occupancy: float = 1.0) -> float:
        """Seconds to move the bytes: at bandwidth, or as fast as what is in flight allows; and filling and draining.

        Args:
            threads: the threads of the whole kernel; not all of them need be resident at once.
        """
        d = self.device
        seconds = (traffic.memory + traffic.written) / d.bandwidth + traffic.cached / d.l2_bandwidth
        latency = d.dram_latency if traffic.memory else d.l2_latency
        if d.warps_per_sm:
            resident = d.sms * 32 * d.warps_per_sm * occupancy
            seconds = max(seconds, latency * max(traffic.own / threads, traffic.read / resident) / _ACCESS)
        return seconds + 2 * latency

    def _together(self, memory: float, arithmetic: float, product: bool = False) -> float:
        """Seconds of a kernel that moves and computes."""
        hidden = self.overlap * min(memory, arithmetic)
        fill = _PIPELINE if product and self.device.warps_per_sm else 0.0
        return self.device.launch + memory + arithmetic - hidden + fill

    def _flops(self, k: GraphKernel) -> float:
        """Seconds of a kernel's arithmetic."""
        rate = self.device.vector_flops
        if k.kind in (Kind.MATMUL, Kind.OPAQUE):
            with contextlib.suppress(ValueError):  # no matrix unit for it
                rate = self.device.rate(str(k.dtype).removeprefix("torch."))
        return k.flops / rate

    def _with_product(self, group: KernelGroup, product: GraphKernel) -> Estimate:
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
            held = tile_rows * tile_columns / _TILE_THREADS * _most_alive(after)
            registers = _REGISTERS + math.ceil(held)
            occupancy = self._occupancy(registers, _TILE_THREADS, 0)
            spilled = max(0, registers - d.registers_per_thread) / max(1.0, held)
            # Spilled registers are written and read again, through the cache.
            repeated += spilled * 2 * 4 * num_rows * columns / d.l2_bandwidth
        traffic = self._traffic(group.boundary_reads, group.written_bytes)
        seconds = self._together(self._memory(traffic), sum(map(self._flops, group.kernels)), True) + repeated
        return Estimate(seconds, traffic.read + traffic.written, group.flops, occupancy, 1, repeated)


def _parts(kernels: list[GraphKernel]) -> int:
    """Parts of a row that nothing connects: the groups of a group norm, if the rest is element by element."""
    norms = [k for k in kernels if k.reduced]
    parts = {independent_parts(k.fx) for k in norms}
    alike = all(k.kind in PER_ELEMENT and k.domain == norms[0].domain for k in kernels if norms and not k.reduced)
    return parts.pop() if len(parts) == 1 and alike else 1


def _broadcast(kernels: list[GraphKernel]) -> set[FxNode]:
    """The bases of which all that is read is broadcast (a weight, a bias), or says which rows a gather takes."""
    largest = max((k.domain for k in kernels), key=math.prod, default=())
    reads = [
        (r.base, any(_is_broadcast(k, r, domain) for domain in (k.domain, largest))) for k in kernels for r in k.reads
    ]
    return {base for base, some in reads if some} - {base for base, some in reads if not some}


def _is_broadcast(k: GraphKernel, r: Read, domain: tuple[int, ...]) -> bool:
    if r.table or k.op in ("cat", "stack"):
        return False
    t = fake(r.value)[0]
    shape = [n if stride else 1 for n, stride in zip(t.shape, t.stride())]
    fewer = math.prod(shape) < math.prod(domain)
    if k.op in GATHERS and fewer:
        return True
    # A bias is one also beside a single row, so that rows may be added to it.
    return (len(shape) < len(domain) or fewer) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(domain)))


def _most_alive(kernels: Iterable[GraphKernel]) -> int:
    """The largest number of row-sized results that are needed at the same time, if kernels run in program order.

    A result is needed from its computation to its last use. A value from outside the group is loaded when it is used.
    """
    kernels = list(kernels)
    largest = max(1, *(math.prod(k.domain) for k in kernels), 1)
    last_use = {r.base: i for i, k in enumerate(kernels) for r in k.reads}
    alive: dict[FxNode, float] = {}
    most = 1.0
    for i, k in enumerate(kernels):
        val = k.fx.meta.get("val")
        alive[k.fx] = val.numel() / largest if isinstance(val, torch.Tensor) else 1.0
        operands = {r.base: r.num_bytes / max(1, k.dtype.itemsize * largest) for r in k.reads if r.base not in alive}
        most = max(most, sum(alive.values()) + sum(min(1.0, share) for share in operands.values()))
        alive = {fx: share for fx, share in alive.items() if last_use.get(fx, -1) > i}
    return math.ceil(most)

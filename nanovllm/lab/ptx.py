"""Reads PTX, the assembly language of NVIDIA GPUs, and says what it means for speed.

A compiler emits PTX, which decides the loads and their widths. The assembler ptxas turns it into machine code and
decides registers and spills. A reading covers both. Source: NVIDIA, "Parallel Thread Execution ISA".
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.hardware.occupancy import occupancy
from nanovllm.wording import counted

_INSTRUCTION = re.compile(r"^[ \t]*(?:@!?%\w+[ \t]+)?([a-z][a-z0-9_]*(?:[.:]+\w+)*)(?=[ \t;])[^;\n]*;?", re.MULTILINE)
_MEMORY = re.compile(r"^(ld|st)\.(?:\w+\.)*?(global|shared)(?:::\w+)?\b")
_TYPE = re.compile(r"\.(?:v(\d)\.)?[busf](\d+)$")
_REPORT = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s*\n.*?Used (\d+) registers(.*)"
)
_LONG_LIST = re.compile(r"\{[^{}]{25,}\}")  # more than four registers
_UNITS = {
    "ex2": "powers of two; exp is one of them and a multiplication", "rcp": "reciprocals", "sqrt": "square roots",
    "rsqrt": "reciprocal square roots", "tanh": "tanh", "lg2": "logarithms",
}  # fmt: skip
_MEANINGS = {
    "wgmma.mma": "Hopper's tensor-core instruction: 4 warps together, operands straight from shared memory",
    "tcgen05.mma": "Blackwell's tensor-core instruction: one thread starts it, sums in tensor memory",
    "mma": "tensor cores, a warp at a time, operands from registers",
    "ldmatrix": "shared memory to registers in the layout that mma wants",
    "wmma.load": "a tile from shared memory to registers; ptxas makes ldmatrix or plain loads of it",
    "wmma.store": "a tile of sums from registers to shared memory",
    "cp.async.bulk": "a bulk tensor copy (TMA): one thread asks for a whole tile, hardware computes the addresses",
    "fma": "a multiplication and an addition in one instruction, rounded once",
    "div": "a division: a reciprocal and some multiplications",
    "shfl": "threads of a warp exchange numbers, without memory",
    "redux": "threads of a warp combine integers in one instruction",
    "barrier": "the threads of a block wait for each other",
    "warp barrier": "the threads of a warp wait for each other",
    "bra": "a jump: a loop, or past work that is not for this thread",
    **{unit: f"{what}; on the special-function unit, at a quarter or less of the fma rate"
       for unit, what in _UNITS.items()},
}  # fmt: skip


@dataclass(frozen=True)
class MemoryAccess:
    """Instructions of one kind, each of which moves `bytes` bytes a thread.

    what: "ld" or "st". where: "global" (device memory) or "shared".
    """

    what: str
    where: str
    bytes: int
    count: int
    example: str = ""


@dataclass(frozen=True)
class Reading:
    """What is in the PTX of one kernel, and what the assembler made of it.

    Attributes:
        accesses: loads and stores through registers.
        async_copies: cp.async instructions by bytes. They copy device memory to shared memory past the registers.
        counts, examples: other instructions of interest by name: how often, and the first of them.
        registers: 32-bit, a thread. spilled: bytes a thread. shared: static bytes a block.
        dynamic_shared: further bytes of shared memory that the launch asks for.
        threads: the number of threads of a block.
    """

    kernel: str
    accesses: tuple[MemoryAccess, ...]
    async_copies: dict[int, int]
    counts: dict[str, int]
    examples: dict[str, str]
    registers: int
    spilled: int
    shared: int
    dynamic_shared: int
    threads: int


@dataclass(frozen=True)
class Line:
    """An instruction of the PTX, how often it is written there, and what it means for speed."""

    instruction: str
    count: int
    meaning: str


def kernels_of(ptx: str) -> dict[str, str]:
    """The body of every kernel (.entry) in a PTX file, by name."""
    entries = re.finditer(r"\.entry\s+(\w+)\s*\(", ptx)
    return {match[1]: ptx[match.start() : ptx.find("\n}", match.end())] for match in entries}


def read(kernel: str, body: str, report: str, threads: int, dynamic_shared: int = 0) -> Reading:
    """Read the PTX of one kernel.

    Args:
        report: what `ptxas -v` printed, of this kernel or of several.
        threads: the number of threads of a block.
        dynamic_shared: bytes of shared memory that the launch asks for.

    Raises:
        RuntimeError: the report does not have this kernel.
    """
    accesses: Counter[tuple[str, str, int]] = Counter()
    copies: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    first: dict[Any, str] = {}
    for match in _INSTRUCTION.finditer(body):
        name, text = match[1], " ".join(match[0].split())
        moved, kind = _MEMORY.match(name), _TYPE.search(name)
        if moved and kind:
            key: Any = (moved[1], moved[2], int(kind[1] or 1) * int(kind[2]) // 8)
            accesses[key] += 1
        elif name.startswith(("cp.async.ca", "cp.async.cg")):
            size = re.search(r"\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", text)
            key = int(size[1], 0) if size else 0
            copies[key] += 1
        elif found := _kind(name):
            key = found
            counts[found] += 1
        else:
            continue
        first.setdefault(key, _LONG_LIST.sub(lambda m: f"{{{m[0].count(',') + 1} registers}}", text))
    registers, spilled, shared = _resources(kernel, report)
    ordered = tuple(MemoryAccess(*key, count, first[key]) for key, count in sorted(accesses.items()))
    examples = {str(key): text for key, text in first.items() if not isinstance(key, tuple)}
    return Reading(
        kernel, ordered, dict(copies), dict(counts), examples, registers, spilled, shared, dynamic_shared, threads
    )


def _kind(name: str) -> str | None:
    head = name.split(".")[0]
    if head in ("wgmma", "tcgen05"):
        return f"{head}.mma" if ".mma" in name else None
    if head == "wmma":
        return {"mma": "mma", "load": "wmma.load", "store": "wmma.store"}.get(name.split(".")[1])
    if head == "div":
        return "div" if ".f" in name else None  # integer divisions are of addresses
    if head in ("bar", "barrier"):
        return "warp barrier" if name.startswith("bar.warp") else "barrier"
    if name.startswith("cp.async.bulk.tensor"):
        return "cp.async.bulk"
    return head if head in _MEANINGS else None


def _resources(kernel: str, report: str) -> tuple[int, int, int]:
    after = report[report.find(f"'{kernel}'") :] if f"'{kernel}'" in report else report
    found = _REPORT.search(after)
    if not found:
        raise RuntimeError(f"ptxas reported no registers of {kernel}:\n{report[:500]}")
    shared = re.search(r"(\d+) bytes smem", found[5])
    return int(found[4]), int(found[2]) + int(found[3]), int(shared[1]) if shared else 0


def explained(r: Reading) -> list[Line]:
    """The instructions that matter, each with what it means."""
    lines = [Line(a.example, a.count, _meaning(a)) for a in r.accesses]
    for size, count in sorted(r.async_copies.items()):
        meaning = "bytes from device to shared memory past the registers, for a pipeline: the thread does not wait"
        lines.append(Line(r.examples[str(size)], count, f"{size} {meaning}"))
    order = list(_MEANINGS)
    return [*lines, *(Line(r.examples[k], r.counts[k], _MEANINGS[k]) for k in sorted(r.counts, key=order.index))]


def _meaning(a: MemoryAccess) -> str:
    verb = "read" if a.what == "ld" else "written"
    if a.where == "shared":
        each = counted(a.bytes, "byte")
        return f"{each} a thread {verb} in shared memory, where the threads of a block exchange numbers"
    line = f"{counted(a.bytes, 'byte')} a thread {verb} in device memory, {32 * a.bytes} a warp: "
    if a.bytes >= 16:
        return line + "the widest there is" if a.bytes == 16 else line + "wider than 16, which only Blackwell has"
    why = "a thread has one element, its elements are not neighbours, or their alignment is unknown"
    return f"{line}{16 // a.bytes} times the instructions of 16-byte accesses; {why}"


def resources_in_words(r: Reading, device: DeviceModel) -> list[str]:
    """Registers, shared memory, and how many blocks an SM of the device holds."""
    shared = r.shared + r.dynamic_shared
    fit = occupancy(device, shared, r.registers, r.threads // 32)
    warps = fit.blocks * r.threads // 32
    # A kernel without shared memory meets the limit of blocks instead.
    limit = "blocks" if fit.limit == "shared memory" and not shared else fit.limit
    verb = "runs" if limit == "shared memory" else "run"
    why = "as many as there can be" if warps == device.warps_per_sm else f"{limit} {verb} out first"
    lines = [
        f"{r.registers} registers a thread, {r.threads} threads and {shared:,} bytes of shared memory a block: "
        f"a multiprocessor of {device.name} holds {counted(fit.blocks, 'such block')}, "
        f"{warps} of at most {device.warps_per_sm} warps: {why}."
    ]
    spilled = f"Spilled: registers ran out, and {r.spilled} bytes a thread go to memory and back."
    return [*lines, spilled if r.spilled else "Nothing spilled: every value found a register."]

"""Reads a Hopper kernel's machine code: does anything touch registers that an asynchronous tensor-core product still
uses?

PTX may be right and the machine code wrong: ptxas of CUDA 12.8 was seen to move the conversion of sums above
`wgmma.wait_group 0`, where an earlier wait, in a loop, named the same registers. An emulator of PTX cannot see that,
and on a GPU it is a race.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", re.M)
_PRODUCT = re.compile(r"[A-Z]GMMA\.64x(\d+)x\d+\.(F16\b)?")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_PREDICATE = re.compile(r"U?P[T\d]$")
_NOT_FOLLOWED = re.compile(r"(CALL|RET|JMP|JMX|JMXU|BRXU)\b")
_ENDS = ("BRA", "BRX", "EXIT")
_MOST_GROUPS = 16


class Instruction(NamedTuple):
    address: int
    guarded: bool
    name: str
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.address:04x}: {self.name} {', '.join(self.operands)}"

    @property
    def falls_through(self) -> bool:
        """BRA with more than a target depends on a predicate, or on whether the warp has diverged."""
        return self.guarded or self.name not in _ENDS or (self.name == "BRA" and len(self.operands) > 1)


class Span(NamedTuple):
    """Registers of a product under way."""

    first: int
    count: int
    sums: bool  # else the operand that it reads


Group = frozenset[Span]


def machine_code(kernel: Any) -> str:
    """The SASS of a compiled Triton kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def _width(name: str) -> int:
    """Registers of data of an instruction, of which it names the first; addresses say .64 themselves."""
    if re.search(r"\.128\b", name) or re.match(r"(LD|ST)SM.*\.4$", name):
        return 4
    return 2 if re.search(r"\.64\b", name) or name == "CS2R" or re.match(r"(LD|ST)SM.*\.2$", name) else 1


def _accesses(instruction: Instruction) -> tuple[set[int], set[int]]:
    """(registers that an instruction other than a product names, those of them that it writes)."""
    name, width = instruction.name, _width(instruction.name)
    named, written = set(), set()
    left = True  # of the first operand that is no predicate: what is written, unless it is a predicate or an address
    for operand in instruction.operands:
        target = left and "SETP" not in name and re.match(r"R\d", operand)
        left = left and bool(_PREDICATE.match(operand))
        for number, wide in _REGISTER.findall(operand):
            count = 2 if wide or (target and "IMAD.WIDE" in name) else 1 if "[" in operand else width
            named.update(range(int(number), int(number) + count))
        if target:
            written |= named
    return named, written


def _product(instruction: Instruction, match: re.Match[str]) -> tuple[Span, list[Span]]:
    """(the sums, all registers) of a product: of 64 rows over 128 threads, of 32 or 16 bits, and 4 of an operand
    that is not in memory.
    """
    numbers = [re.match(r"R(\d+)", operand) for operand in instruction.operands[:2]]
    if numbers[0] is None:
        raise ValueError(f"expected a product that names its sums first, got {instruction}")
    sums = Span(int(numbers[0][1]), int(match[1]) // (4 if match[2] else 2), True)
    return sums, [sums] + ([Span(int(numbers[1][1]), 4, False)] if numbers[1] else [])


def touched_in_flight(sass: str) -> list[str]:
    """Instructions that, on some path, touch registers of a product before it has been waited for.

    Those are: its sums, but for a product that adds to the very same ones; and an operand in registers, which may be
    read. A product is
    waited for with its group: those up to one that says gsb0. `WARPGROUP.DEPBAR.LE gsb0, N` leaves the newest N groups
    under way.

    Every branch is taken and not taken, whatever its predicate, and an indexed one goes to all code that nothing falls
    into.

    Raises:
        ValueError: there are no products, one is not reached, or there is a call, which is not followed.
    """
    code = [Instruction(int(m[1], 16), bool(m[2]), m[3], re.split(r",\s*", m[4])) for m in _LINE.finditer(sass)]
    place = {instruction.address: i for i, instruction in enumerate(code)}
    products = {i for i, instruction in enumerate(code) if _PRODUCT.match(instruction.name)}
    if not products:
        raise ValueError("expected machine code with products of 64 rows, found none")
    found: dict[int, str] = {}
    seen: set[tuple[int, tuple[Group, ...], Group]] = set()
    # (instruction, groups of products under way, products of the group that is not closed)
    todo: list[tuple[int, tuple[Group, ...], Group]] = [(0, (), frozenset())]
    while todo:
        state = todo.pop()
        i, groups, started = state
        if i == len(code) or state in seen:
            continue
        seen.add(state)
        instruction = code[i]
        name, operands = instruction.name, instruction.operands
        if _NOT_FOLLOWED.match(name):
            raise ValueError(f"expected no calls, got {instruction}")
        under_way = started.union(*groups)
        match = _PRODUCT.match(name)
        if match:
            sums, spans = _product(instruction, match)
            under_way -= {sums}
            named = {r for s in spans for r in range(s.first, s.first + s.count)}
            written = set(range(sums.first, sums.first + sums.count))
        else:
            named, written = _accesses(instruction)
        busy = {r for s in under_way for r in (named if s.sums else written) & set(range(s.first, s.first + s.count))}
        if busy:
            found[i] = f"{instruction} touches {sorted(busy)}"
        if match:
            started |= frozenset(spans)
            if "gsb0" in operands:
                groups, started = (*groups, started), frozenset()
                if len(groups) > _MOST_GROUPS:
                    groups = (groups[0] | groups[1], *groups[2:])
        elif name.startswith("WARPGROUP.DEPBAR") and not instruction.guarded:
            groups = groups[max(0, len(groups) - int(operands[-1], 0)) :]
        elif name == "BRX":
            todo += [(j, groups, started) for j in range(1, len(code)) if not code[j - 1].falls_through]
        elif name.startswith("BRA"):
            todo.append((place[int(operands[-1], 16)], groups, started))
        if instruction.falls_through:
            todo.append((i + 1, groups, started))
    missed = products - {i for i, _, _ in seen}
    if missed:
        raise ValueError(f"expected to reach every product, not {code[min(missed)]}")
    return [found[i] for i in sorted(found)]

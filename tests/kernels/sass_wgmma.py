"""Reads a Hopper kernel's machine code: does anything touch registers that an asynchronous tensor-core product still uses?

PTX may be right and the machine code wrong: ptxas of CUDA 12.8 was seen to move the conversion of sums above `wgmma.wait_group 0`, where an
earlier wait, in a loop, named the same registers. An emulator of PTX cannot see that, and on a GPU it is a race.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T\d]\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.F32")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_MOST_GROUPS = 16

Group = frozenset[int]


def machine_code(kernel: Any) -> str:
    """The SASS of a compiled Triton kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def _registers(operands: str) -> set[int]:
    found = set()
    for number, wide in _REGISTER.findall(operands):
        found |= {int(number), int(number) + 1} if wide else {int(number)}
    return found


def touched_in_flight(sass: str) -> list[str]:
    """Instructions, on any path, that name a register of sums before the product that adds to them has been waited for; and how many
    products there are as `len` of nothing found must not be: a text without products is an error."""
    lines = [m.groups() for m in map(_LINE.match, sass.splitlines()) if m]
    place = {int(address, 16): i for i, (address, _, _) in enumerate(lines)}
    always = {i for i, text in enumerate(m for m in sass.splitlines() if _LINE.match(m)) if "@" not in text.split("*/")[1]}
    if not any(_PRODUCT.match(name) for _, name, _ in lines):
        raise ValueError("expected machine code with products of 64 rows and float32 sums, found none")
    found: dict[int, str] = {}
    seen: set[tuple[int, tuple[Group, ...], Group]] = set()
    # (instruction, groups of products under way, registers of the group that is not closed)
    todo: list[tuple[int, tuple[Group, ...], Group]] = [(0, (), frozenset())]
    while todo:
        i, groups, started = todo.pop()
        while i < len(lines):
            if (i, groups, started) in seen:
                break
            address, name, operands = lines[i]
            jump = name.startswith(("BRA", "EXIT", "HGMMA", "WARPGROUP"))
            if jump:
                seen.add((i, groups, started))
            product = _PRODUCT.match(name)
            if product:
                first = int(_REGISTER.search(operands).group(1))  # type: ignore[union-attr]
                started |= frozenset(range(first, first + int(product[1]) // 2))
                if "gsb0" in operands:
                    groups, started = (*groups, started)[-_MOST_GROUPS:], frozenset()
            elif name.startswith("WARPGROUP.DEPBAR"):
                left = int(operands.split(",")[-1], 0)
                groups = groups[len(groups) - left :] if left < len(groups) else groups
            elif name == "BRA":
                target = re.search(r"0x([0-9a-f]+)", operands)
                todo.append((place[int(target[1], 16)], groups, started))  # type: ignore[index]
                if i in always:
                    break
            elif name == "EXIT" and i in always:
                break
            else:
                busy = started.union(*groups) & _registers(operands)
                if busy:
                    found[i] = f"{address}: {name} {operands} touches {sorted(busy)}"
            i += 1
    return [found[i] for i in sorted(found)]

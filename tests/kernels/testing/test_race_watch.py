"""Races between the programs of a launch: what Triton's interpreter computes rightly, and a GPU does not."""

import json
import os

import pytest

language = pytest.importorskip("triton.language")

IMPORTS = """
import torch
import triton
import triton.language as tl

from nanovllm.kernels import Inputs, op, triton_support
"""
OP = '''

@op(
    arguments={{"x": "[rows, size]"}},
    inputs=Inputs(lambda t, rows, size: {{"x": t.normal(rows, size)}}, small=[(1, 5), (3, 40)], scales=()),
)
def {name}(x: torch.Tensor) -> torch.Tensor:
    """The sum of each column."""
    return x.sum(0)


@triton.jit
def _{name}(x, y, counter, rows, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < size
    value = tl.load(x + row * size + col, inside).to(tl.float32)
{body}


@{name}.provider("mine", support=triton_support)
def mine(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.zeros(len(x) + 1, x.shape[1], device=x.device)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    _{name}[(len(x),)](x, y, counter, len(x), x.shape[1], BLOCK=64)
    return y[0].to(x.dtype)
'''

ADDS_WITHOUT_ATOMICS = """
    before = tl.load(y + col, inside)
    tl.store(y + col, before + value, inside)
"""
LAST_ONE_WINS = """
    tl.store(y + col, value, inside)
"""
SWEEPS_WHAT_OTHERS_READ = """
    others = tl.load(x + (row + 1) % rows * size + col, inside).to(tl.float32)
    tl.store(x + row * size + col, others.to(x.dtype.element_ty), inside)
"""
ATOMIC = """
    tl.atomic_add(y + col, value, inside)
"""
SAME_VALUE = """
    tl.store(counter, 1)
    tl.atomic_add(y + col, value, inside)
"""
LAST_PROGRAM_ADDS = """
    tl.store(y + (row + 1) * size + col, value, inside)
    if tl.atomic_add(counter, 1) == rows - 1:
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(rows):
            total += tl.load(y + (i + 1) * size + col, inside)
        tl.store(y + col, total, inside)
"""
SAME_VALUE_READ_AGAIN = """
    tl.store(counter, 2)
    tl.atomic_add(y + col, value * tl.load(counter) / 2, inside)
"""
FLAG = """
    tl.atomic_store(counter, row + 1)
    seen = tl.atomic_load(counter) > 0
    tl.atomic_add(y + col, value * seen, inside)
"""

BODIES = {
    "adds": ADDS_WITHOUT_ATOMICS, "last": LAST_ONE_WINS, "sweeps": SWEEPS_WHAT_OTHERS_READ,
    "atomic": ATOMIC, "same_value": SAME_VALUE, "read_again": SAME_VALUE_READ_AGAIN, "last_program": LAST_PROGRAM_ADDS,
}  # fmt: skip
if hasattr(language, "atomic_load"):  # from some version of Triton on
    BODIES["flag"] = FLAG


@pytest.fixture(scope="module")
def failures(tmp_path_factory, warm_python):
    """What `verify` finds in each kernel: its failures, by the name of its body."""
    path = tmp_path_factory.mktemp("races") / "sums.py"
    path.write_text(IMPORTS + "".join(OP.format(name=f"sums_{n}", body=body) for n, body in BODIES.items()))
    command = ["-m", "nanovllm", "kernels", "verify", "sums_", "--kernel-plugin", path]
    options = ["--device", "cpu", "--provider", "mine", "--timeout", "0", "--json", "-"]
    done = warm_python.run(*command, *options, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 1, done.stderr
    return {row["op"].removeprefix("sums_"): row["failures"] for row in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "name, said",
    [
        ("adds", "program (1, 0, 0) reads an element that was changed by program (0, 0, 0), at sums.py:"),
        (
            "last",
            "program (1, 0, 0) writes another value to an element that was written by program (0, 0, 0), at sums.py:",
        ),
        ("sweeps", "program (1, 0, 0) changes an element that was read by another program, at sums.py:"),
    ],
)
def test_a_race_is_named_with_its_line(failures, name, said):
    races = [failure for failure in failures[name] if ": a race: " in failure]
    assert races and all(said in race and "or a second launch" in race for race in races)
    assert not any(race.startswith("1x5") for race in races)  # a single program has no race


@pytest.mark.parametrize("name", [name for name in BODIES if name not in ("adds", "last", "sweeps")])
def test_what_programs_agree_about_is_no_race(failures, name):
    assert failures[name] == []

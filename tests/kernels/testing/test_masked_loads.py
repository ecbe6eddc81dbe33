"""Elements that a masked load leaves out: zeros in Triton's interpreter, anything on a GPU."""

import json
import os

import pytest

pytest.importorskip("triton")

IMPORTS = """
import torch
import triton
import triton.language as tl

from nanovllm.kernels import Inputs, op, triton_support
"""
OP = '''

@op(
    arguments={{"x": "[rows, size]", "index": "[rows]"}},
    inputs=Inputs(
        lambda t, rows, size: {{"x": t.normal(rows, size), "index": t.permutation(rows)}},
        small=[(1, 5), (3, 40)], scales=(),
    ),
)
def {name}(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The sum of each row."""
    return x[index].sum(1)


@triton.jit
def _{name}(x, index, y, rows, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < size
    at = tl.load(index + row)
    values = tl.load(x + at * size + col, inside, other=0.0).to(tl.float32)
{body}


@{name}.provider("mine", support=triton_support)
def mine(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty(len(x), dtype=x.dtype, device=x.device)
    _{name}[(len(x),)](x, index.contiguous(), y, len(x), x.shape[1], BLOCK=64)
    return y
'''

USED = """
    again = tl.load(x + at * size + col, inside).to(tl.float32)
    tl.store(y + row, tl.sum(again, 0) + 0 * tl.sum(values, 0))
"""
USED_INTEGERS = """
    which = tl.load(index + col, col < rows)
    tl.store(y + row, tl.sum(values, 0) + tl.sum(which, 0) - rows * (rows - 1) // 2)
"""
CHOSEN_LATER = """
    again = tl.load(x + at * size + col, inside).to(tl.float32)
    tl.store(y + row, tl.sum(tl.where(inside, again, 0.0), 0))
"""
NOT_STORED = """
    which = tl.load(index + col, col < rows)
    some = tl.load(x + which * size, col < rows).to(tl.float32)
    tl.store(y + which, some, col < -1)
    tl.store(y + row, tl.sum(values, 0))
"""
WRONG_ANYWAY = """
    again = tl.load(x + at * size + col, inside).to(tl.float32)
    tl.store(y + row, tl.sum(again, 0) + 1)
"""
BODIES = {
    "used": USED, "integers": USED_INTEGERS, "chosen": CHOSEN_LATER, "not_stored": NOT_STORED, "wrong": WRONG_ANYWAY,
}  # fmt: skip


@pytest.fixture(scope="module")
def failures(tmp_path_factory, warm_python):
    """What `verify` finds in each kernel: its failures, by the name of its body."""
    path = tmp_path_factory.mktemp("loads") / "row_sums.py"
    path.write_text(IMPORTS + "".join(OP.format(name=f"row_sums_{n}", body=body) for n, body in BODIES.items()))
    command = ["-m", "nanovllm", "kernels", "verify", "row_sums_", "--kernel-plugin", path]
    options = ["--device", "cpu", "--provider", "mine", "--timeout", "0", "--json", "-"]
    done = warm_python.run(*command, *options, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 1, done.stderr
    return {row["op"].removeprefix("row_sums_"): row["failures"] for row in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "name, line",
    [("used", "again = tl.load(x + at * size + col, inside).to(tl.float32)"),
     ("integers", "which = tl.load(index + col, col < rows)")],
)  # fmt: skip
def test_a_sum_over_elements_that_a_load_leaves_out_is_named_with_its_line(failures, name, line):
    assert failures[name] and not any("nan instead of" in failure for failure in failures[name])
    said = ": used elements that a masked load leaves out, at row_sums.py:"
    assert all(said in failure and f"`{line}`" in failure and "`other=`" in failure for failure in failures[name])


@pytest.mark.parametrize("name", ["chosen", "not_stored"])
def test_a_kernel_that_does_not_use_them_is_right(failures, name):
    assert failures[name] == []


def test_another_mistake_is_reported_as_it_is_with_zeros(failures):
    assert failures["wrong"] and all("times the tolerance" in failure for failure in failures["wrong"])
    assert not any("nan" in failure or "other=" in failure for failure in failures["wrong"])

"""How a kernel failed, in words: the line of the kernel, not of what it calls, and what to do."""

import os

import pytest

from nanovllm.kernels.testing.crash_report import what_failed

NARROW = """
import torch, triton
import triton.language as tl

@triton.jit
def act(x):
    return x * tl.sigmoid(x)

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    narrow = tl.load(x + i, i < n)
    tl.store(y + i, {how}, i < n)
"""
INTERPRETED = """
from nanovllm.kernels.testing.crash_report import what_failed
try:
    kernel[(1,)](torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16), 4, 8)
except Exception as error:
    print(what_failed(error))
"""
COMPILED = """
from nanovllm.kernels.testing.crash_report import what_failed
from nanovllm.kernels.triton.offline_compiler import Pointer, Scalar, compile_kernel
try:
    compile_kernel(kernel, {"x": Pointer("bf16"), "y": Pointer("bf16"), "n": Scalar("i32"), "BLOCK": 8}, 90)
except Exception as error:
    print(what_failed(error))
"""


class InterpreterError(Exception):
    """As Triton's: the cause is what the kernel's code raised."""


def test_an_error_within_a_function_of_triton_is_of_the_line_that_calls_it():
    space = {}
    library = compile("def sigmoid(x):\n    raise ValueError(x)", "/site-packages/triton/language/standard.py", "exec")
    exec(library, space)

    def call(fn, *args):
        try:
            fn(*args)
        except Exception as e:
            raise InterpreterError(repr(e)) from e

    def kernel():
        call(space["sigmoid"], "Expected dtype ['fp32', 'fp64'] but got bf16")

    with pytest.raises(InterpreterError) as error:
        call(kernel)
    said = what_failed(error.value)
    assert said.startswith("ValueError: Expected dtype ['fp32', 'fp64'] but got bf16, at test_crash_report.py:")
    assert said.endswith("; convert to float32 first: x.to(tl.float32)")


def said_of(expressions, runs, folder, python):
    """What is said of a kernel with each of these expressions: all by one process."""
    pytest.importorskip("triton")
    for i, how in enumerate(expressions):
        (folder / f"it{i}.py").write_text(NARROW.format(how=how) + runs)
    program = (
        f"import runpy\nfor i in range({len(expressions)}):\n    runpy.run_path(f'it{{i}}.py')\n    print('end')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": str(int(runs is INTERPRETED))}
    done = python.run("-c", program, cwd=folder, env=environment)
    *said, last = done.stdout.split("end\n")
    assert len(said) == len(expressions) and not last, done.stdout + done.stderr
    return said


@pytest.mark.slow
@pytest.mark.parametrize("runs, begin", [(INTERPRETED, "ValueError: Expected dtype ['fp32', 'fp64'] but got bf16, at "),
                                         (COMPILED, "the kernel does not compile: ")])  # fmt: skip
def test_a_dtype_that_a_function_of_triton_does_not_take(runs, begin, tmp_path, warm_python):
    lines = {
        "tl.exp(narrow)": "tl.store(y + i, tl.exp(narrow), i < n)",
        "tl.sigmoid(narrow)": "tl.store(y + i, tl.sigmoid(narrow), i < n)", "act(narrow)": "return x * tl.sigmoid(x)",
    }  # fmt: skip
    for said, line in zip(said_of(lines, runs, tmp_path, warm_python), lines.values(), strict=True):
        assert said.startswith(begin) and f"`{line}`" in said, said
        assert said.endswith("; convert to float32 first: x.to(tl.float32)\n")


@pytest.mark.slow
def test_a_function_that_triton_does_not_have(tmp_path, warm_python):
    remedies = {
        "tl.sigmoidd(tl.load(x + i))": "did you mean 'sigmoid'?",
        "torch.sigmoid(tl.load(x + i))":
            "a kernel calls functions of triton.language, such as tl.sigmoid, not of torch",
    }  # fmt: skip
    for said, (how, remedy) in zip(
        said_of(remedies, INTERPRETED, tmp_path, warm_python), remedies.items(), strict=True
    ):
        assert f"`tl.store(y + i, {how}, i < n)`; {remedy}\n" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["i = ", "i = tl.program_id(0) * BLOCK + "])
def test_a_launch_without_its_grid(begin, tmp_path, warm_python):
    pytest.importorskip("triton")
    text = NARROW.format(how="narrow").replace("i = ", begin) + INTERPRETED.replace("kernel[(1,)](", "kernel(")
    (tmp_path / "no_grid.py").write_text(text)
    said = warm_python.run(tmp_path / "no_grid.py", env={**os.environ, "TRITON_INTERPRET": "1"}).stdout
    assert said.endswith("; was the kernel launched without its grid, _kernel[grid](...)?\n"), said
    assert ", at no_grid.py:" in said

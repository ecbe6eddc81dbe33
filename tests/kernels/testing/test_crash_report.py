"""How a kernel failed, in words: the line of the kernel, not of what it calls, and what to do."""

import os
import subprocess
import sys

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


@pytest.mark.slow
@pytest.mark.parametrize("how, line", [("tl.exp(narrow)", "tl.store(y + i, tl.exp(narrow), i < n)"),
                                       ("tl.sigmoid(narrow)", "tl.store(y + i, tl.sigmoid(narrow), i < n)"),
                                       ("act(narrow)", "return x * tl.sigmoid(x)")])  # fmt: skip
@pytest.mark.parametrize("runs, begin", [(INTERPRETED, "ValueError: Expected dtype ['fp32', 'fp64'] but got bf16, at "),
                                         (COMPILED, "the kernel does not compile: ")])  # fmt: skip
def test_a_dtype_that_a_function_of_triton_does_not_take(how, line, runs, begin, tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "it.py").write_text(NARROW.format(how=how) + runs)
    environment = {**os.environ, "TRITON_INTERPRET": str(int(runs is INTERPRETED))}
    done = subprocess.run([sys.executable, "it.py"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(begin) and f"`{line}`" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("; convert to float32 first: x.to(tl.float32)\n")


@pytest.mark.slow
@pytest.mark.parametrize("how, remedy", [
    ("tl.sigmoidd(tl.load(x + i))", "did you mean 'sigmoid'?"),
    ("torch.sigmoid(tl.load(x + i))", "a kernel calls functions of triton.language, such as tl.sigmoid, not of torch"),
])  # fmt: skip
def test_a_function_that_triton_does_not_have(how, remedy, tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "it.py").write_text(NARROW.format(how=how) + INTERPRETED)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "it.py"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert f"`tl.store(y + i, {how}, i < n)`; {remedy}\n" in done.stdout, done.stdout + done.stderr

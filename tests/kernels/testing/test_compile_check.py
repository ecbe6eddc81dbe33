"""Kernels that Triton's interpreter runs and Triton's compiler refuses: found by `verify` without a GPU."""

import json
import os

import pytest

pytest.importorskip("triton")

from nanovllm.kernels import Provider, triton_support
from nanovllm.kernels.testing.compile_check import may_launch_triton

PLUGIN = '''
import torch
import triton
import triton.language as tl

from nanovllm.kernels import Cost, Inputs, nbytes, op, triton_support


@op(
    arguments={"x": "[..., n]"},
    inputs=Inputs(lambda t, rows, n: {"x": t.normal(rows, n)}, small=[(1, 1), (3, 40), (0, 7)], scales=()),
    cost=lambda x: Cost(2 * nbytes(x)),
)
def soft(x: torch.Tensor) -> torch.Tensor:
    """The softmax of each row."""
    return torch.softmax(x, -1)


@triton.jit
def helper(x, flag):
    if x > flag:
        x = x + 0.0
    return x

'''
KERNEL = """
{above}
@triton.jit
def _{name}(x, y, n, row_stride, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * row_stride + col, col < n, other=float("-inf")).to(tl.float32)
    {line}
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + tl.program_id(0) * n + col, (e / tl.sum(e, 0)).to(y.dtype.element_ty), col < n)


@soft.provider("{name}", support=triton_support)
def {name}(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    rows = x.reshape(-1, n).contiguous()
    y = torch.empty_like(rows)
    _{name}[(len(rows),)](rows, y, n, n, {block})
    return y.view(x.shape)

"""
TUNED = "@triton.autotune([triton.Config({'BLOCK': 64}), triton.Config({'BLOCK': 128})], key=['n'])"
FIXED = "BLOCK=64"
BRANCH = "if v > 0:\n        v = v + 0.0"
KERNELS = {
    "fine": ("", "v = tl.where(v > 0, v + 0.0, v)", FIXED),
    "branch": ("", BRANCH, FIXED),
    "in_helper": ("", "v = helper(v, v)", FIXED),
    "wrong_too": ("", f"v = v * 2\n    {BRANCH}", FIXED),
}
CHECK = """
import sys

from nanovllm.kernels import all_ops, load_plugins
from nanovllm.kernels.testing.compile_check import failures_to_compile
from nanovllm.kernels.testing.verify import cases

load_plugins(sys.argv[1:])
soft = all_ops()["soft"]
chosen = [case for case in cases(soft, False, quick=True) if 0 not in case.shape][:3]
for name in ("tuned", "tuned_branch"):
    print(name, len(failures_to_compile(soft, soft.providers[name], chosen)), "of", len(chosen))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory, warm_python):
    """The rows of `verify`, by provider."""
    path = tmp_path_factory.mktemp("compile") / "soft.py"
    path.write_text(
        PLUGIN + "".join(KERNEL.format(name=n, above=a, line=i, block=b) for n, (a, i, b) in KERNELS.items())
    )
    options = [o for name in KERNELS for o in ("--provider", name)]
    command = "-m", "nanovllm", "kernels", "verify", "soft", "--kernel-plugin", path, "--device", "cpu", *options
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm_python.run(*command, "--quick", "--json", "-", env=environment)
    assert done.returncode == 1, done.stderr
    return {row["provider"]: row for row in json.loads(done.stdout)}


@pytest.mark.slow
def test_a_kernel_that_compiles_is_right(rows):
    assert rows["fine"]["failures"] == [] and rows["fine"]["cases"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("name, source", [("branch", "if v > 0:"), ("in_helper", "if x > flag:")])
def test_a_kernel_that_does_not_compile_has_failed_with_the_line(rows, name, source):
    failures = rows[name]["failures"]
    line_of_helper = PLUGIN.splitlines().index("    if x > flag:") + 1
    assert len(failures) == rows[name]["raised"] == rows[name]["cases"] and rows[name]["cases"] > 5
    assert failures[0].startswith("1x1 float32: ")
    for failure in failures:
        assert ": cannot be compiled for a GPU, at soft.py:" in failure
        assert f", `{source}`: Boolean value of Tensor" in failure and "use tl.where" in failure
        assert name == "branch" or f"soft.py:{line_of_helper}," in failure


@pytest.mark.slow
def test_a_wrong_result_stays_the_failure(rows):
    failures = rows["wrong_too"]["failures"]
    assert any("times the tolerance" in failure for failure in failures)


@pytest.mark.slow
def test_an_autotuned_kernel_is_compiled_with_its_first_configuration(tmp_path, warm_python):
    """In a process that compiles: Triton's interpreter runs no autotuned kernel with several configurations."""
    text = PLUGIN + "".join(
        KERNEL.format(name=name, above=TUNED, line=line, block="")
        for name, line in (("tuned", "v = v + 0.0"), ("tuned_branch", BRANCH))
    )
    (tmp_path / "soft.py").write_text(text)
    (tmp_path / "check.py").write_text(CHECK)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm_python.run(tmp_path / "check.py", tmp_path / "soft.py", env=environment)
    assert done.returncode == 0 and done.stdout.splitlines() == ["tuned 0 of 3", "tuned_branch 3 of 3"], done.stderr


@pytest.mark.parametrize("text, may", [("kernel = None", False), ("kernel = InterpretedFunction(1)", True)])
def test_which_providers_are_compiled(text, may):
    """Those that say that they need Triton, and those beside a kernel."""
    space = {"InterpretedFunction": type("InterpretedFunction", (int,), {})}
    exec(f"{text}\ndef it(x):\n    return x", space)
    assert may_launch_triton(Provider("it", space["it"])) == may
    assert may_launch_triton(Provider("it", space["it"], triton_support))


@pytest.mark.slow
def test_what_the_interpreter_says_is_not_said_again_and_a_hang_is_explained(tmp_path, warm_python):
    lines = {"raises": "v = v.astype(tl.float32)", "hangs": "while v > 0:\n        v = v - 1"}
    text = "".join(KERNEL.format(name=name, above="", line=line, block=FIXED) for name, line in lines.items())
    (tmp_path / "soft.py").write_text(PLUGIN + text)
    command = "-m", "nanovllm", "kernels", "verify", "soft", "--kernel-plugin", tmp_path / "soft.py", "--device", "cpu"
    options = "--provider", "raises", "--provider", "hangs", "--quick", "--timeout", "12", "--json", "-"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm_python.run(*command, *options, env=environment)
    raises, hangs = (row["failures"] for row in json.loads(done.stdout))
    assert raises and not any("compiled" in failure for failure in raises)
    (hang,) = hangs
    assert ": hung" in hang and "; it cannot be compiled for a GPU, at soft.py:" in hang and "`while v > 0:`" in hang

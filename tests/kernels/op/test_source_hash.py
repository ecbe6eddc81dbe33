"""What a kernel's hash depends on, and what not."""

import importlib.util

import pytest

pytest.importorskip("triton")
from nanovllm.kernels.op.source_hash import is_kernel, source_hash


def _kernel_of(text, tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text("import triton\nimport triton.language as tl\n" + text)
    spec = importlib.util.spec_from_file_location("hashed_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def test_the_hash_is_of_what_the_kernel_computes(tmp_path):
    base = "K = tl.constexpr(3)\n@triton.jit\ndef helper(v):\n    return v + 1\n"
    base += "@triton.jit\ndef kernel(x, B: tl.constexpr):\n    v = helper(tl.load(x))\n    tl.store(x, v * K)\n"
    same = base.replace("    v = ", '    """What it does."""\n    # why\n\n    v =    ')
    same = same.replace("tl.store(x, v * K)", "tl.store(\n        x, v * K\n    )")
    others = [
        base.replace("+ 1", "+ 2"),
        base.replace("(3)", "(4)"),
        base.replace("v * K", "v + K"),
        base.replace("B: tl", "C: tl"),
    ]
    first = source_hash([_kernel_of(base, tmp_path, "a")])
    assert source_hash([_kernel_of(same, tmp_path, "b")]) == first
    found = {source_hash([_kernel_of(text, tmp_path, f"c{i}")]) for i, text in enumerate(others)}
    assert len(found) == len(others) and first not in found


def test_the_hash_does_not_depend_on_tritons_own_source(tmp_path):
    text = "from triton.language import sum, cdiv\n@triton.jit\ndef kernel(x):\n"
    text += "    tl.store(x, sum(tl.arange(0, 8), 0) + cdiv(9, 2))\n"
    kernel = _kernel_of(text, tmp_path, "a")
    before = source_hash([kernel])
    own = kernel.fn.__globals__["sum"]
    assert is_kernel(own) and own.fn.__module__.startswith("triton.")
    kernel.fn.__globals__["sum"] = kernel.fn.__globals__["cdiv"]  # as if it were another function
    assert source_hash([kernel]) == before

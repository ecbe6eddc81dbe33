"""Compiling without launching, several kernels at a time."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("nothing is compiled under TRITON_INTERPRET", allow_module_level=True)

from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from nanovllm.kernels.triton.parallel_compile import compiling_only
from nanovllm.kernels.triton.rows.activation import activation_kernel


def test_launches_only_compile_inside_the_block(monkeypatch):
    seen = []

    def run(self, *args, grid, warmup, **kwargs):
        seen.append((self, args, warmup, _async_compile.active_mode.get() is not None))

    monkeypatch.setattr(JITFunction, "run", run)
    x = torch.zeros(4)
    with compiling_only(2):
        activation_kernel[(1,)](x)
    activation_kernel[(1,)](x)
    assert [(kernel, args, *rest) for kernel, args, *rest in seen] == [
        (activation_kernel, (x,), True, True), (activation_kernel, (x,), False, False),
    ]  # fmt: skip
    assert JITFunction.run is run


def test_a_kernel_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        JITFunction, "_do_compile", lambda self, key, signature, device, *rest, **more: asked.append((key, device))
    )
    before = JITFunction._do_compile
    with compiling_only(1):
        for key, device in (("a", 0), ("a", 0), ("b", 0), ("a", 1), ("b", 0)):
            assert activation_kernel._do_compile(key, {}, device, [], None, {}, warmup=True) is None
        assert asked == [("a", 0), ("b", 0), ("a", 1)]
    assert JITFunction._do_compile is before
    with compiling_only(1):  # not what an earlier block asked for: its kernels may have been evicted, or failed
        activation_kernel._do_compile("a", {}, 0, [], None, {}, warmup=True)
    assert asked[3:] == [("a", 0)]


def test_launches_run_again_after_an_error(monkeypatch):
    before = JITFunction.run
    with pytest.raises(RuntimeError, match="no such thing"), compiling_only(1):
        raise RuntimeError("no such thing")
    assert JITFunction.run is before and _async_compile.active_mode.get() is None


def test_a_kernel_that_does_not_compile_leaves_no_mode_behind(monkeypatch):
    """Triton 3.6 raises before it leaves its mode; no kernel would be compiled after that."""

    def leave(self, *error):
        raise RuntimeError("ptxas was killed")

    monkeypatch.setattr(_async_compile.AsyncCompileMode, "__exit__", leave)
    before = JITFunction.run
    with pytest.raises(RuntimeError, match="ptxas was killed"), compiling_only(1):
        pass
    assert _async_compile.active_mode.get() is None and JITFunction.run is before


def test_threads_that_overlap_compile_their_own_launches_and_put_back_what_was(monkeypatch):
    """One begins first and ends first; a third serves meanwhile."""
    seen, name = [], ContextVar("name")

    def run(self, *args, grid, warmup, **kwargs):
        seen.append((name.get(), warmup))
        return "launched"

    monkeypatch.setattr(JITFunction, "run", run)
    x = torch.zeros(4)
    began, both, ended = threading.Event(), threading.Event(), threading.Event()

    def first():
        name.set("first")
        with compiling_only(1):
            began.set()
            assert both.wait(60)
            assert activation_kernel[(1,)](x) is None
        ended.set()

    def second():
        name.set("second")
        assert began.wait(60)
        with compiling_only(1):
            both.set()
            assert ended.wait(60)
            assert activation_kernel[(1,)](x) is None

    def third():
        name.set("third")
        assert both.wait(60)
        assert activation_kernel[(1,)](x) == "launched"

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(call) for call in (first, second, third)]:
            done.result(60)
    assert sorted(seen) == [("first", True), ("second", True), ("third", False)]
    assert JITFunction.run is run


COLD = """
import time, torch, triton
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs["repr"])
import nanovllm.kernels.triton.rows as ops
from nanovllm.kernels.triton.parallel_compile import compiling_only
x = torch.randn(8, 1024, device="cuda").bfloat16()
w = torch.ones(1024, device="cuda").bfloat16()
calls = [lambda: ops.rms_norm(x, w, 1e-6), lambda: ops.softmax(x), lambda: ops.silu_and_mul(x),
lambda: ops.fused_add_gelu(x, x)]
with compiling_only():
    for call in calls:
        call()
torch.cuda.synchronize()
n = len(compiled)
for call in calls:
    assert call().isfinite().all()
assert n >= 4 and len(compiled) == n, compiled
"""


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_not_compiled_again(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COLD], env=env, check=True, timeout=900)

"""Launching in clusters what Triton compiles for single blocks, up to what its launcher is given."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("nothing is compiled under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton import cluster_launch
from nanovllm.kernels.triton.parallel_compile import compiling_only
from nanovllm.kernels.triton.rows.activation import activation_kernel
from nanovllm.tune.launches import recorded


@pytest.fixture
def launcher(monkeypatch):
    """What the launcher of a compiled kernel is given, and the compiled kernel."""
    seen = []
    compiled = SimpleNamespace(
        packed_metadata=(4, 1, 1000), function="function", launch_metadata=lambda *args: ("metadata", *args),
        run=lambda *args: seen.append(args),
    )  # fmt: skip
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **options: compiled)
    return seen, compiled


def test_this_triton_is_known():
    """As are the versions that the kernels are tested with."""
    if triton.__version__.startswith(("3.6.", "3.9.")):
        assert cluster_launch.launches_clusters()


def test_other_launchers_are_not(monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    for pack in (
        lambda self, m: (m.num_warps, m.num_ctas, m.shared, *m.cluster_dims),
        lambda self, m: (m.num_warps, m.shared),
    ):
        monkeypatch.setattr(CUDABackend, "pack_metadata", pack)
        cluster_launch.launches_clusters.cache_clear()
        assert not cluster_launch.launches_clusters()
    cluster_launch.launches_clusters.cache_clear()


@pytest.mark.parametrize("later", [False, True], ids=["compiled", "being compiled"])
def test_the_launcher_gets_the_cluster(launcher, monkeypatch, later):
    seen, compiled = launcher
    if later:
        future = SimpleNamespace(result=lambda: compiled)
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **options: future)
    names = activation_kernel.arg_names
    constants = dict(zip(names[2:], range(len(names))))
    cluster_launch.launch_clusters(activation_kernel, (1, 2, 3), 8, "x", "y", num_warps=4, launch_pdl=True, **constants)
    values = ("x", "y", *range(len(names) - 2))
    ((*given,),) = seen
    assert given[:6] == [1, 2, 3, "stream of 3", "function", (4, 8, 1000)]
    assert given[6] == ("metadata", (1, 2, 3), "stream of 3", *values) and tuple(given[9:]) == values
    assert compiled.packed_metadata == (4, 1, 1000)  # of any other launch


def test_nothing_is_launched_where_launches_are_recorded_or_only_compiled(launcher):
    seen, _ = launcher
    x, constants = torch.zeros(4), dict.fromkeys(activation_kernel.arg_names[1:])
    with recorded() as launches:
        cluster_launch.launch_clusters(activation_kernel, (1, 1, 1), 2, x, **constants)
    with recorded(compile=True):
        cluster_launch.launch_clusters(activation_kernel, (1, 1, 1), 2, x, **constants)
    with compiling_only(1):
        cluster_launch.launch_clusters(activation_kernel, (1, 1, 1), 2, x, **constants)
    assert not seen and launches[0].kernel is activation_kernel
    cluster_launch.launch_clusters(activation_kernel, (1, 1, 1), 2, x, **constants)
    assert len(seen) == 1

"""Launches in thread block clusters of kernels that Triton compiles for single blocks.

With `num_ctas` Triton makes a cluster one program. A kernel whose blocks are programs of their own, and which reads
or writes another block's shared memory in inline PTX, is compiled with one block a program; only its launch says that
there are clusters.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any


@functools.cache
def launches_clusters() -> bool:
    """Whether Triton's launcher is one that `launch_clusters` knows: Triton 3.6 to 3.9.

    It gets (warps, blocks a cluster, bytes of shared memory), multiplies the grid's x by the second and makes
    clusters along x.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    try:
        return CUDABackend.pack_metadata(None, SimpleNamespace(num_warps=2, num_ctas=3, shared=5)) == (2, 3, 5)
    except AttributeError:  # older ones want a cluster's three dimensions
        return False


def launch_clusters(kernel: Any, grid: tuple[int, int, int], cluster: int, *args: Any, **options: Any) -> None:
    """`kernel[cluster * grid[0], *grid[1:]](*args, **options)`, each `cluster` blocks along x a cluster, of at most 16.

    The compiled kernel stays as it is: what others launch has no clusters.

    Args:
        options: the kernel's parameters that are not in `args`, and the compiler's options.
    """
    from triton import knobs
    from triton.runtime import driver

    compiled = kernel.run(*args, grid=grid, warmup=True, **options)
    if compiled is None:  # launches are recorded, or only compiled
        return
    if hasattr(compiled, "result"):
        compiled = compiled.result()
    values = args + tuple(options[name] for name in kernel.arg_names[len(args) :])
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    warps, _, shared = compiled.packed_metadata
    compiled.run(
        *grid, stream, compiled.function, (warps, cluster, shared), compiled.launch_metadata(grid, stream, *values),
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *values,
    )  # fmt: skip

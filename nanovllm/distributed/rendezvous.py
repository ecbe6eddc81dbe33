"""Forms the group of processes that share a model, on one machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from nanovllm.distributed.group import Group

_COLLECTIVE_SECONDS = 600.0
"""A GPU may wait for so long: a rank may compile a kernel while another has it."""


def join(
    directory: Path, rank: int, size: int, device: torch.device, timeout: float, barrier: Callable[[str], None]
) -> Group:
    """This rank's group, once all ranks have called this. It is no part of torch.distributed's default group.

    Args:
        directory: an empty directory that all ranks share, which only this user can enter.
        device: the rank's own; NCCL connects GPUs, Gloo CPUs.
        timeout: seconds to wait for the others; on CPUs in each collective as well.
        barrier: as in `Group`.

    Raises:
        RuntimeError: a rank did not come, or this PyTorch lacks the backend.
    """
    distributed: Any = torch.distributed
    kind = "NCCL" if device.type == "cuda" else "Gloo"
    if not distributed.is_available() or not getattr(distributed, f"is_{kind.lower()}_available")():
        raise RuntimeError(f"tensor_parallel_size={size} on {device.type} needs a PyTorch with {kind}")
    store = distributed.FileStore(str(directory / "store"), size)
    store.set_timeout(timedelta(seconds=timeout))
    if kind == "NCCL":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_COLLECTIVE_SECONDS)
        backend = distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)
        backend_type = distributed.ProcessGroup.BackendType.NCCL
    else:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        # All ranks are here: nothing listens to the network.
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, options)
        backend_type = distributed.ProcessGroup.BackendType.GLOO
    process_group = distributed.ProcessGroup(store, rank, size)
    process_group._set_default_backend(backend_type)
    process_group._register_backend(torch.device(device.type), backend_type, backend)
    group = Group(rank, size, process_group, distributed.PrefixStore("buffers", store), barrier)
    group.smallest(0, device)  # connects the ranks, or says why they cannot be
    return group

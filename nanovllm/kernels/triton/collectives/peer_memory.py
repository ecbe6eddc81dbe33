"""Memory of each rank of a group that the kernels of all ranks can write to."""

from __future__ import annotations

import ast
import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from nanovllm.kernels.ops.all_reduce import RankGroup
from nanovllm.kernels.triton.device_math import INTERPRETED

logger = logging.getLogger(__name__)

EMPTY = {2: -(1 << 15), 4: -(1 << 31)}
"""The bits of -0.0 as an integer, by the bytes of an element: what a place holds that awaits a value."""
INTEGERS = {2: (torch.int16, tl.int16), 4: (torch.int32, tl.int32)}
"""Integers of an element's bytes, of PyTorch and of Triton."""
PLACES = {2: INTEGERS[4 if INTERPRETED else 2], 4: INTEGERS[4]}
"""Bytes of an element -> the integers of the place that it is written to.

A GPU reads and writes an element in one access. Triton's interpreter copies 2 bytes in two accesses and 4 in one, so a
rank could read half of a value in a place of 2 bytes.
"""
_NOTHING = "nothing"


@dataclass(frozen=True)
class PeerMemory:
    """Buffers of one size, one on each rank."""

    own: torch.Tensor
    """This rank's buffer."""
    addresses: torch.Tensor
    """[ranks] int64 on the device: the address of each rank's buffer in this process."""
    opened: tuple[Any, ...]
    """What keeps the buffers of the others mapped."""


def peer_memory(
    group: RankGroup, name: str, numel: int, dtype: torch.dtype, fill: int, device: torch.device
) -> PeerMemory | None:
    """A `PeerMemory` of `numel` elements on each rank, all equal to `fill`; every rank calls this.

    None, on all ranks, if one of them cannot map the memory of the others: it logs why.

    Args:
        name: of the buffers, unique within the group.
    """
    made: PeerMemory | None = None
    with ExitStack() as until_mapped:
        try:
            if device.type == "cuda":
                made = _on_gpus(group, name, numel, dtype, device)
            else:
                made = _on_cpus(group, name, numel, dtype, until_mapped)
            made.own.fill_(fill)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as e:
            logger.warning("torch.distributed sums and gathers, since ranks cannot map each other's memory: %s", e)
        # No rank goes on, and writes to another's memory, before all are filled.
        return made if group.smallest(int(made is not None), device) else None


def _exchanged(group: RankGroup, name: str, share: Callable[[], str]) -> list[str]:
    """What `share` returns on each rank: how the others reach its buffer.

    A rank where it raises says so to the others, which would wait for it. Raises RuntimeError: another rank did.
    """
    handle = ""
    try:
        handle = share()
    finally:
        group.store.set(f"{name}/{group.rank}", handle or _NOTHING)
    handles = [group.store.get(f"{name}/{rank}").decode() for rank in range(group.size)]
    if _NOTHING in handles:
        raise RuntimeError(f"rank {handles.index(_NOTHING)} has no memory for it")
    return handles


def _on_gpus(group: RankGroup, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> PeerMemory:
    made: list[torch.Tensor] = []

    def share() -> str:
        made.append(torch.empty(numel, dtype=dtype, device=device))
        storage: Any = made[0].untyped_storage()
        return repr(storage._share_cuda_()[:7])

    opened, addresses = [], []
    for rank, handle in enumerate(_exchanged(group, name, share)):
        if rank == group.rank:
            addresses.append(made[0].data_ptr())
            continue
        # Mapped for this rank's GPU, which then has access to the other's (CUDA IPC). All ranks wait for the fill.
        of_rank = ast.literal_eval(handle)[1:]
        peer = torch.UntypedStorage._new_shared_cuda(device.index, *of_rank, False)  # type: ignore[attr-defined]
        opened.append(peer)
        addresses.append(peer.data_ptr())
    return PeerMemory(made[0], torch.tensor(addresses, dtype=torch.int64, device=device), tuple(opened))


def _on_cpus(group: RankGroup, name: str, numel: int, dtype: torch.dtype, until_mapped: ExitStack) -> PeerMemory:
    """For Triton's interpreter: files that all ranks map."""

    def share() -> str:
        file = until_mapped.enter_context(tempfile.NamedTemporaryFile())
        file.truncate(numel * dtype.itemsize)
        return file.name

    paths = _exchanged(group, name, share)
    buffers = [torch.from_file(path, shared=True, size=numel, dtype=dtype) for path in paths]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
    return PeerMemory(buffers[group.rank], addresses, tuple(buffers))

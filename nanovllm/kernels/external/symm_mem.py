"""Sums over ranks by PyTorch's symmetric memory: one-shot, or inside of the NVLink switch (multimem)."""

from __future__ import annotations

import os
from typing import Any

import torch

from nanovllm.kernels.ops.all_reduce import RankGroup

_MOST_BYTES = 1 << 20
"""The most bytes of a call. torch.distributed sums larger tensors."""
_NAME = "nanovllm symmetric memory"


def support(device: torch.device) -> str | None:
    """Why symmetric memory cannot be used on a device, or None."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA devices, this is {device}"
    count, index = torch.cuda.device_count(), device.index or 0
    if not any(torch.cuda.can_device_access_peer(index, other) for other in range(count) if other != index):
        return "symmetric memory needs a second GPU whose memory this one can access"
    return None


def multimem_support(device: torch.device) -> str | None:
    """Why the switch cannot sum for a device, or None."""
    reason = support(device)
    if reason is not None:
        return reason
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        return "multicast is switched off by TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
        return "the GPUs have no NVLink switch with multicast"
    return None


def all_reduce(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The op `all_reduce`, one-shot: each rank reads the values of all."""
    buffer = _buffer(x, group)
    if buffer is None:
        return group.all_reduce(x)
    sums = torch.ops.symm_mem.one_shot_all_reduce(_filled(buffer, x), "sum", _group_name(group))
    return sums.view(x.shape)


def all_reduce_multimem(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The op `all_reduce`, by the NVLink switch."""
    buffer = _buffer(x, group)
    if buffer is None:
        return group.all_reduce(x)
    values = _filled(buffer, x)
    torch.ops.symm_mem.multimem_all_reduce_(values, "sum", _group_name(group))
    return values.view(x.shape).clone()


def _filled(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return buffer.view(x.dtype)[: x.numel()].copy_(x.reshape(-1))


def _group_name(group: RankGroup) -> str:
    return group.provider_state[_NAME][0]


def _buffer(x: torch.Tensor, group: RankGroup) -> torch.Tensor | None:
    """Bytes that all ranks can read; made at the first call. None: x is not for it."""
    if group.size == 1 or not 0 < x.nbytes <= _MOST_BYTES or x.nbytes % 16:
        return None
    state: Any = group.provider_state.get(_NAME)
    if state is None:
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        name: Any = f"{_NAME} {id(group)}"
        group.process_group._set_group_name(name)
        _register_process_group(name, group.process_group)
        _SymmetricMemory.set_group_info(name, group.rank, group.size, group.store)
        buffer = _SymmetricMemory.empty_strided_p2p((_MOST_BYTES,), (1,), torch.uint8, x.device, name)
        state = group.provider_state[_NAME] = name, buffer, _SymmetricMemory.rendezvous(buffer, name)
    return state[1]

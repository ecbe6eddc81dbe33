"""The paged KV cache's memory: its size, and the tensors."""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

import torch

from nanovllm.arguments import full_dtype
from nanovllm.hardware.control_groups import available_memory
from nanovllm.layers.attention import LayerCache
from nanovllm.model_config import ModelConfig
from nanovllm.wording import counted

# The share of the available memory that a cache on a CPU takes, unless the user names its size.
_CPU_SHARE = 0.25
_MIB = 2**20

_FP8 = ("fp8", "fp8_e4m3")


class OutOfCacheMemory(ValueError):
    """The KV cache does not fit into the device's memory."""


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a `kv_cache_dtype`, one of `config.KV_CACHE_DTYPES`; "auto" is the model's."""
    if name == "auto":
        return model_dtype
    return torch.float8_e4m3fn if name in _FP8 else getattr(torch, full_dtype(name))


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, num_kv_heads: int) -> int:
    """Bytes of one block of `block_size` tokens, over all layers, K and V. num_kv_heads: of this rank."""
    return 2 * config.num_hidden_layers * block_size * num_kv_heads * config.head_dim * dtype.itemsize


def kv_slot(block: Any, position: Any, block_size: int) -> Any:
    """The place of a token in the cache; integers, NumPy arrays or tensors.

    Args:
        block: entry `position // block_size` of the sequence's block table.
        position: the token's position in its sequence.
    """
    return block * block_size + position % block_size


def allocate(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_kv_heads: int,
) -> list[LayerCache]:
    """Zeroed caches of `num_blocks` blocks and the padding block, whose number is `num_blocks`.

    num_kv_heads: the KV heads of this rank.

    Raises:
        OutOfCacheMemory: the operating system refuses the memory: of a CPU, where free memory is not all that counts.
    """
    shape = (num_blocks + 1, block_size, num_kv_heads, config.head_dim)
    return [LayerCache(*(_zeros(shape, dtype, device) for _ in range(2))) for _ in range(config.num_hidden_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The operating system clears pages when they are first touched, so unused blocks take none. `numpy.zeros` would ask
    # for pages of 2 MiB: each tensor, two a layer, would then take about 1 MiB more than its tokens.
    nbytes = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except (OSError, OverflowError) as error:
        raise OutOfCacheMemory(
            f"the operating system refuses {nbytes / _MIB:.1f} MiB for a layer's keys or values in the KV cache"
            f" ({error}); raise the limit of this process's memory (ulimit -v), or set num_kvcache_blocks or"
            " max_model_len lower"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def num_blocks_that_fit(available: int, per_block: int, wanted: int | None, most_useful: int, remedy: str) -> int:
    """How many blocks to allocate.

    Args:
        available: bytes that the cache may take.
        per_block: bytes of a block.
        wanted: the user's number of blocks, or None.
        most_useful: the most blocks that sequences can use.
        remedy: what the error message advises.

    Raises:
        OutOfCacheMemory: not even one block fits, or not the `wanted` ones.
    """
    needed = 1 if wanted is None else wanted
    fits = available // per_block - 1  # one is the padding block
    if fits < needed:
        missing = (needed + 1) * per_block - available
        raise OutOfCacheMemory(
            f"the KV cache needs {(needed + 1) * per_block / _MIB:.1f} MiB for {counted(needed, 'block', ',')} and a"
            f" padding block, but only {max(available, 0) / _MIB:.1f} MiB are left beside weights and activations:"
            f" {missing / _MIB:.1f} MiB are missing; {remedy}"
        )
    return wanted if wanted is not None else min(fits, most_useful)


def available_bytes_cpu(whole: bool) -> int:
    """Bytes for the cache: all that this process can still take if `whole`, else a share of it."""
    free = available_memory()
    return free if whole else int(_CPU_SHARE * free)


def available_bytes_cuda(device: torch.device, utilization: float, peak_allocated: int) -> int:
    """Bytes of the GPU's memory, times `utilization`, that are free beside other processes and `peak_allocated` bytes:
    PyTorch's peak over the largest steps, weights included.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside - peak_allocated

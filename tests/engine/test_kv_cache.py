"""How large the KV cache is, and what is said where there is no room for it."""

import resource
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.config import KV_CACHE_DTYPES, EngineConfig
from nanovllm.engine import kv_cache
from nanovllm.engine.kv_cache import OutOfCacheMemory, num_blocks_that_fit
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import preset

MIB = 2**20


def test_bytes_of_a_block():
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    assert kv_cache.block_bytes(qwen, 1, torch.bfloat16, 8) == 114_688
    assert kv_cache.block_bytes(qwen, 256, torch.float32, 8) == 2 * 256 * 114_688
    assert kv_cache.block_bytes(qwen, 1, torch.bfloat16, 1) == 114_688 // 8


def test_a_float8_cache_takes_half_of_the_bytes():
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    assert kv_cache.block_bytes(qwen, 256, torch.float8_e4m3fn, 8) == 256 * 114_688 // 2
    cache = kv_cache.allocate(qwen, 1, 16, torch.float8_e4m3fn, torch.device("cpu"), 8)[0]
    assert cache.k.dtype == torch.float8_e4m3fn and not cache.k.float().any() and cache.k_scale is cache.v_scale is None


def test_names_of_cache_dtypes():
    names = {name: kv_cache.cache_dtype(name, torch.float16) for name in KV_CACHE_DTYPES}
    assert names == {
        "auto": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn,
        "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
        "float32": torch.float32, "fp32": torch.float32,
    }  # fmt: skip
    with pytest.raises(ValueError, match="kv_cache_dtype='fp4': must be one of auto, fp8, .*bf16"):
        EngineConfig("model", kv_cache_dtype="fp4")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cpu_cache_takes_memory_where_it_is_used():
    qwen, before = ModelConfig.from_dict(preset("qwen3-0.6b")), resident()
    caches = kv_cache.allocate(qwen, 200, 256, torch.bfloat16, torch.device("cpu"), 8)
    caches[5].v[150, 3] = 1
    assert caches[5].v[150, :5].sum() == 8 * 128 and not caches[27].k[200].any()
    assert sum(t.nbytes for cache in caches for t in (cache.k, cache.v)) > 5e9
    assert resident() - before < 200 * MIB


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(), reason="all memory has huge pages")
def test_a_cpu_cache_takes_the_bytes_of_its_tokens_and_no_huge_pages():
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    caches = kv_cache.allocate(qwen, 100, 16, torch.float32, torch.device("cpu"), 8)
    before, tokens = resident(), 520
    for cache in caches:
        for side in (cache.k, cache.v):
            side.view(-1, 8, 128)[:tokens] = 1
    needed = kv_cache.block_bytes(qwen, tokens, torch.float32, 8)
    assert 0.99 * needed < resident() - before < 1.05 * needed


@pytest.mark.parametrize("blocks", [2**34, 2**60])
def test_memory_that_the_system_refuses_is_named(blocks):
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    with pytest.raises(OutOfCacheMemory, match="refuses .* MiB for a layer's keys .*; raise the limit .*ulimit -v"):
        kv_cache.allocate(qwen, blocks, 16, torch.float32, torch.device("cpu"), 8)


def test_allocated_bytes_are_those_of_the_blocks_and_the_padding_block():
    config = ModelConfig.from_dict(preset("smollm2-135m"))
    caches = kv_cache.allocate(config, 3, 16, torch.float16, torch.device("cpu"), 3)
    assert len(caches) == 30
    for cache in caches:
        assert cache.k.shape == cache.v.shape == (4, 16, 3, 64) and cache.k.dtype == torch.float16
        assert not cache.k.any() and cache.k.data_ptr() != cache.v.data_ptr()
    allocated = sum(t.nbytes for cache in caches for t in (cache.k, cache.v))
    assert allocated == 4 * kv_cache.block_bytes(config, 16, torch.float16, 3)


@pytest.mark.parametrize(
    "available, wanted, useful, expected",
    [
        (11 * MIB, None, 100, 10),  # one of the eleven is the padding block
        (11 * MIB, None, 4, 4),
        (2 * MIB, None, 100, 1),
        (11 * MIB, 3, 100, 3),
        (11 * MIB, 10, 4, 10),  # what the user asks for is not bounded by what is useful
    ],
)
def test_blocks_that_fit(available, wanted, useful, expected):
    assert num_blocks_that_fit(available, MIB, wanted, useful, "") == expected


@pytest.mark.parametrize(
    "available, wanted, said",
    [
        (2 * MIB - 1, None, ["2.0 MiB for 1 block and"]),
        (-3 * MIB, None, ["0.0 MiB are left", "5.0 MiB are missing"]),
        (5 * MIB, 5, ["6.0 MiB for 5 blocks and", "1.0 MiB are missing"]),
    ],
)
def test_too_little_memory_says_how_much_is_missing_and_what_helps(available, wanted, said):
    with pytest.raises(OutOfCacheMemory) as error:
        num_blocks_that_fit(available, MIB, wanted, 100, "raise gpu_memory_utilization")
    for words in [*said, "raise gpu_memory_utilization"]:
        assert words in str(error.value)


def test_a_cpu_cache_takes_a_share_of_the_free_memory_unless_its_size_is_asked_for():
    assert 0 < kv_cache.available_bytes_cpu(whole=False) < kv_cache.available_bytes_cpu(whole=True) / 2

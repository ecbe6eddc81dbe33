"""How large the KV cache is, and what is said where there is no room for it."""

import subprocess
import sys

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
    assert kv_cache.block_bytes(qwen, 1, torch.bfloat16) == 114_688
    assert kv_cache.block_bytes(qwen, 256, torch.float32) == 2 * 256 * 114_688
    assert kv_cache.block_bytes(qwen, 1, torch.bfloat16, num_kv_heads=1) == 114_688 // 8


def test_a_float8_cache_takes_half_of_the_bytes():
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    assert kv_cache.block_bytes(qwen, 256, torch.float8_e4m3fn) == 256 * 114_688 // 2
    cache = kv_cache.allocate(qwen, 1, 16, torch.float8_e4m3fn, torch.device("cpu"))[0]
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


MOST_MEMORY = """
import resource, torch
from nanovllm.model_config import ModelConfig
from nanovllm.engine import kv_cache
from nanovllm.models.model_presets import preset

def used(num_blocks):
    qwen = ModelConfig.from_dict(preset("qwen3-0.6b"))
    caches = kv_cache.allocate(qwen, num_blocks, 256, torch.bfloat16, torch.device("cpu"))
    caches[5].v[num_blocks - 50, 3] = 1
    assert caches[5].v[num_blocks - 50, :5].sum() == 8 * 128 and not caches[27].k[num_blocks].any()
    num_bytes = sum(t.nbytes for cache in caches for t in (cache.k, cache.v))
    return num_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

_, before = used(51)  # everything is loaded by now
num_bytes, after = used(200)
print(num_bytes, after - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss has another unit elsewhere")
def test_a_cpu_cache_takes_memory_where_it_is_used():
    """In a process of its own, whose memory nothing else changes."""
    done = subprocess.run([sys.executable, "-c", MOST_MEMORY], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    num_bytes, kib = map(int, done.stdout.split())
    assert num_bytes > 5e9 and kib < 200_000


def test_allocated_bytes_are_those_of_the_blocks_and_the_padding_block():
    config = ModelConfig.from_dict(preset("smollm2-135m"))
    caches = kv_cache.allocate(config, 3, 16, torch.float16, torch.device("cpu"))
    assert len(caches) == 30
    for cache in caches:
        assert cache.k.shape == cache.v.shape == (4, 16, 3, 64) and cache.k.dtype == torch.float16
        assert not cache.k.any() and cache.k.data_ptr() != cache.v.data_ptr()
    allocated = sum(t.nbytes for cache in caches for t in (cache.k, cache.v))
    assert allocated == 4 * kv_cache.block_bytes(config, 16, torch.float16)


@pytest.mark.parametrize(
    "available, wanted, useful, expected",
    [
        (11 * MIB, None, 100, 10),  # one of the eleven is the padding block
        (11 * MIB + 5, None, 100, 10),
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
        (2 * MIB - 1, None, ["2.0 MiB for 1 block(s)"]),
        (MIB // 2, None, ["0.5 MiB are left", "1.5 MiB are missing"]),
        (0, None, ["0.0 MiB are left", "2.0 MiB are missing"]),
        (-3 * MIB, None, ["0.0 MiB are left", "5.0 MiB are missing"]),
        (5 * MIB, 5, ["6.0 MiB for 5 block(s)", "1.0 MiB are missing"]),
    ],
)
def test_too_little_memory_says_how_much_is_missing_and_what_helps(available, wanted, said):
    with pytest.raises(OutOfCacheMemory) as error:
        num_blocks_that_fit(available, MIB, wanted, 100, "raise gpu_memory_utilization")
    for words in [*said, "raise gpu_memory_utilization"]:
        assert words in str(error.value)


def test_a_cpu_cache_takes_a_share_of_the_free_memory_unless_its_size_is_asked_for():
    assert 0 < kv_cache.available_bytes_cpu(asked=False) < kv_cache.available_bytes_cpu(asked=True) / 2

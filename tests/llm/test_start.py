"""Starting an `LLM`: arguments, devices, tokenizers, damaged directories, memory, dtypes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine import kv_cache
from nanovllm.engine.cache_size import CacheSize
from nanovllm.engine.kv_cache import OutOfCacheMemory
from nanovllm.engine.model_setup import kv_cache_remedy
from tests import tiny
from tests.engine.fast.replayed import lengths_on_the_device
from tests.llm.small_llm import GREEDY, MAX_LEN, MESSAGES, TOKENIZER, assert_clean, make, refused

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.any_device


@pytest.mark.parametrize(
    "device, words", [("tpu", ["device='tpu'"]), ("cuda:77", ["device='cuda:77'", "CUDA device"]), ("", ["device=''"])]
)
def test_devices_that_are_not_there(directory, device, words):
    refused(ValueError, directory, *words, "'auto'", "'cpu'", device=device)


def test_kernels_that_are_not_there(directory):
    refused(ValueError, directory, "'rms_nrom'", "rms_norm", kernel_priority={"rms_nrom": ["triton"]})
    refused(ValueError, directory, "'no-such'", "native", kernel_priority={"rms_norm": ["no-such"]})


@pytest.mark.parametrize(
    "in_config, argument, custom", [(None, None, True), (False, None, False), (False, True, True), (None, False, False)]
)
def test_who_decides_about_custom_kernels(tmp_path, in_config, argument, custom):
    tiny.save(tmp_path)
    if in_config is not None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_custom_kernels": in_config}))
    with lengths_on_the_device() as kernels:
        llm = make(tmp_path, skip_tokenizer_init=True, use_custom_kernels=argument, kernel_priority=kernels)
    assert llm.kernels.providers["attention_decode"] == ("reads_lengths" if custom else "native")


def test_a_directory_without_a_tokenizer_serves_token_ids(tmp_path):
    model = tiny.save(tmp_path)
    refused(ValueError, tmp_path, str(tmp_path), "holds no tokenizer", "skip_tokenizer_init=True")
    llm = make(tmp_path, skip_tokenizer_init=True)
    assert llm.tokenizer is None and llm.get_tokenizer() is None
    (out,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert out["text"] == "" and out["token_ids"] == tiny.greedy(model, [1, 2, 3], 24)
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.generate([{"prompt": "text"}]),
        lambda: llm.generate([[1]], SamplingParams(stop="x")),
        lambda: llm.stream([1]),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            call()
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(MESSAGES)
    assert_clean(llm)


def test_a_tokenizer_from_elsewhere(tmp_path, directory):
    tiny.save(tmp_path, vocab_size=len(TOKENIZER))
    llm = make(tmp_path, tokenizer=str(directory))
    assert llm.get_tokenizer() is llm.tokenizer and llm.generate("hello", GREEDY, use_tqdm=False)[0]["text"]
    refused(FileNotFoundError, tmp_path, "/no/such/place", tokenizer="/no/such/place")


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_a_directory_that_lacks_something(tmp_path, spoil):
    tiny.save_with_tokenizer(tmp_path)
    (tmp_path / spoil).unlink()
    refused((FileNotFoundError, ValueError), tmp_path, str(tmp_path), "holds no")


def test_a_failed_start_leaves_nothing_in_the_way(tmp_path, directory):
    tiny.save_with_tokenizer(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(ValueError, tmp_path, "model.safetensors", "truncated")
    assert make(directory).generate("x", GREEDY, use_tqdm=False)[0].finished


def test_a_cache_of_one_block(directory, reference, caplog):
    llm = make(directory, num_kvcache_blocks=1)
    assert llm.engine.runner.max_model_len == 16
    assert "max_model_len=128 is lowered to 16" in caplog.text
    (out,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert out["token_ids"] == tiny.greedy(reference, [1, 2, 3], 13) and out["finish_reason"] == "length"
    with pytest.raises(ValueError, match="16 tokens, but max_model_len=16 allows 15"):
        llm.generate([[1] * 16])
    outs = llm.generate([[1, 2, 3], [4], [5]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert [len(o["token_ids"]) for o in outs] == [13, 15, 15]
    assert_clean(llm)


def test_the_model_bounds_the_length(tmp_path, caplog):
    tiny.save_with_tokenizer(tmp_path, max_position_embeddings=48)
    llm = make(tmp_path)
    assert llm.engine.runner.max_model_len == 48 and "lowered to 48, the model's limit" in caplog.text


def test_a_model_of_many_positions_is_served_as_far_as_the_cache_reaches(tmp_path, caplog, monkeypatch):
    """The rotary table, which is made before the cache, is no longer than the cache could be."""
    tiny.save_with_tokenizer(tmp_path, max_position_embeddings=10**7)
    caplog.set_level("INFO", "nanovllm")
    llm = make(tmp_path, max_model_len="auto", num_kvcache_blocks=4, use_custom_kernels=False)
    assert llm.engine.runner.max_model_len == 64
    tables = [table for name, table in llm.engine.runner.model.named_buffers() if "cos_sin" in name]
    assert tables and {len(table) for table in tables} == {64}
    assert "max_model_len is 64, the KV cache's size; the model's limit is 10000000" in caplog.text
    assert len(llm.generate([[1] * 60], GREEDY, use_tqdm=False)[0]["token_ids"]) == 4
    llm.close()
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100 << 20)  # of which a cache on a CPU takes a quarter
    llm = make(tmp_path, device="cpu", max_model_len=-1, num_kvcache_blocks=None, max_num_seqs=1)
    tokens = (25 << 20) / (2 * 2 * 2 * 16 * 4)  # layers, K and V, heads, their size, bytes
    assert 0.99 * tokens < llm.engine.runner.max_model_len < tokens
    assert len(llm.generate([[1] * 60], GREEDY, use_tqdm=False)[0]["token_ids"]) == 24


def test_the_size_of_the_cache_is_logged(directory, caplog):
    caplog.set_level("INFO", "nanovllm")
    runner = make(directory, num_kvcache_blocks=20).engine.runner
    size = runner.cache_size
    assert size.num_bytes == sum(2 * cache.k[:20].nbytes for cache in runner.paged.caches)
    assert str(size) == "KV cache: 320 tokens (20 x 16, 0.00 GiB), 2.5 sequences of 128 tokens at a time"
    assert str(size) in caplog.text
    size = CacheSize(1234, 256, 36 << 30, 40960, num_devices=2)
    assert str(size) == (
        "KV cache: 315,904 tokens (1,234 x 256, 36.00 GiB on each of 2 devices), 7.7 sequences of 40,960 tokens at a"
        " time"
    )


@pytest.mark.parametrize("given", ["auto", -1])
def test_the_longest_sequence_that_fits(tmp_path, caplog, given):
    """Bounded by the model, or by the cache; without a warning, since nothing else was asked for."""
    tiny.save_with_tokenizer(tmp_path, max_position_embeddings=80)
    caplog.set_level("INFO", "nanovllm")
    for blocks, length, by in (
        (None, 80, "the model's limit"),
        (5, 80, "the model's limit"),
        (2, 32, "the KV cache's"),
    ):
        caplog.clear()
        llm = make(tmp_path, max_model_len=given, num_kvcache_blocks=blocks)
        assert llm.engine.runner.max_model_len == length and f"max_model_len is {length}, {by}" in caplog.text
        assert not [record for record in caplog.records if "lowered" in record.message]
        (out,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert len(out["token_ids"]) == length - 3 and out["finish_reason"] == "length"
        llm.close()


def test_too_little_memory_for_the_cache(directory):
    refused(
        OutOfCacheMemory, directory, "MiB are missing", "for 1,000,000,000 blocks",
        "lower num_kvcache_blocks, max_model_len, max_num_seqs", 'set kv_cache_dtype="fp8", or end other programs',
        device="cpu", num_kvcache_blocks=10**9,
    )  # fmt: skip


def test_the_faq_has_the_remedies_of_the_error():
    remedies = [kv_cache_remedy(EngineConfig("m"), on_gpu) for on_gpu in (False, True)]
    (row,) = [line for line in (ROOT / "docs/faq.md").read_text().splitlines() if "the KV cache needs" in line]
    names = {name for remedy in remedies for name in re.findall(r"\b[a-z]+_[a-z_]+\b", remedy)}
    assert len(names) == 6 and names == set(re.findall(r"\b[a-z]+_[a-z_]+\b", row))


def test_the_cache_is_no_larger_than_useful(directory):
    llm = make(directory, device="cpu", num_kvcache_blocks=None)
    assert llm.engine.runner.num_kvcache_blocks == 8 * MAX_LEN // 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "auto"])
def test_dtypes(directory, dtype):
    llm = make(directory, dtype=dtype)
    assert llm.device_name.endswith("float32" if dtype == "auto" else dtype)
    cache = llm.engine.runner.paged.caches[0]
    assert cache.k.dtype == cache.v.dtype == getattr(torch, "float32" if dtype == "auto" else dtype)
    (out,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert len(out["token_ids"]) == 24


def test_random_weights_for_a_directory_with_only_a_config(tmp_path):
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (make(tmp_path, load_format="dummy").generate([[1, 2]], GREEDY, use_tqdm=False) for _ in range(2))
    assert first[0]["token_ids"] == second[0]["token_ids"]


@pytest.mark.slow
def test_an_interpreted_kernel_that_crashes_the_process_is_named_with_its_line(tmp_path):
    pytest.importorskip("triton")
    tiny.save(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "import ctypes\nfrom nanovllm.kernels import silu_and_mul, triton_support\n"
        "@silu_and_mul.provider('mine', support=triton_support)\n"
        "def mine(gate_up):\n    return ctypes.string_at(0)\n"
    )
    program = (
        "from nanovllm import LLM\n"
        "llm = LLM('model', kernel_plugins=['mine.py'], skip_tokenizer_init=True, max_model_len=64)\n"
        "llm.generate([[1, 2, 3]], use_tqdm=False)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "Segmentation fault" in done.stderr and 'mine.py", line 5 in mine' in done.stderr

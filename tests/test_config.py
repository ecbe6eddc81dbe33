"""Arguments of an engine: what is accepted, what is refused and how that is said."""

import dataclasses
import pydoc
from pathlib import Path

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.config import AUTO, EngineConfig


def test_arguments_of_nano_vllm_are_taken():
    config = EngineConfig(
        "some/model", enforce_eager=True, tensor_parallel_size=1, max_model_len=4096, max_num_seqs=256,
        max_num_batched_tokens=16384, gpu_memory_utilization=0.9, kvcache_block_size=256, num_kvcache_blocks=-1,
    )  # fmt: skip
    assert config.model == "some/model" and config.num_kvcache_blocks is None


def test_is_never_mutated():
    config = EngineConfig("m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


@pytest.mark.parametrize("given", ["auto", -1])
def test_the_most_that_fits_has_two_forms(given):
    assert EngineConfig("some/model", max_model_len=given).max_model_len == AUTO == -1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(model=""), "model=''"),
        (dict(load_format="pickle"), "load_format='pickle': must be one of auto, safetensors, gguf, dummy"),
        (dict(dtype="int8"), "dtype='int8': must be one of auto, float32, float16, bfloat16"),
        (
            dict(max_model_len=-2),
            "max_model_len=-2: must be a positive integer, which is lowered to what the model and the memory allow, or",
        ),
        (dict(max_model_len="8k"), "max_model_len='8k': must be a positive integer, which is lowered"),
        (dict(max_model_len=""), "max_model_len='': must be a positive integer"),
        (dict(max_model_len=True), "max_model_len=True: must be a positive integer"),
        (dict(max_num_seqs=2.0), "max_num_seqs=2.0"),
        (dict(max_num_seqs=-1), "max_num_seqs=-1"),
        (dict(max_num_batched_tokens=0), "max_num_batched_tokens=0"),
        (dict(num_kvcache_blocks=0), "num_kvcache_blocks=0"),
        (dict(max_logprobs=-2), "max_logprobs=-2: must be an integer of at least 0, or -1 for any number"),
        (dict(num_kvcache_blocks=-2), "num_kvcache_blocks=-2"),
        (dict(max_num_batched_tokens=np.array([1, 2])), "=array([1, 2]): must be a positive integer"),
        (dict(gpu_memory_utilization=0), "gpu_memory_utilization=0: must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=90), "gpu_memory_utilization=90"),
        (dict(kvcache_block_size=8), "kvcache_block_size=8: must be a power of two from 16 to 1024"),
        (dict(kvcache_block_size=100), "kvcache_block_size=100"),
        (dict(tensor_parallel_size=0), "tensor_parallel_size=0: must be an integer from 1 to 64"),
        (dict(rank_timeout=0), "rank_timeout=0: must be seconds, above 0"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=2**63), f"seed={2**63}"),
        (dict(seed=True), "seed=True: must be an integer in [0, 2**63), or None"),
        (dict(model=None), "model=None: pass a model directory"),
        (dict(tokenizer=5), "tokenizer=5: must be a directory or a .gguf file that holds a tokenizer, or None"),
        (dict(tokenizer=""), "tokenizer='': must be a directory"),
        (dict(device=0), "device=0: must be a string: 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        (dict(dtype=16), "dtype=16: must be one of auto, float32"),
        (dict(kv_cache_dtype=None), "kv_cache_dtype=None: must be one of auto, fp8"),
        (dict(load_format=np.array(["auto", "gguf"])), "must be one of auto, safetensors, gguf, dummy"),
        (dict(gpu_memory_utilization="0.9"), "gpu_memory_utilization='0.9': must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=True), "gpu_memory_utilization=True: must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=float("nan")), "gpu_memory_utilization=nan"),
        (dict(kernel_priority="rms_norm"), "kernel_priority='rms_norm': must map ops to providers"),
        (dict(kernel_priority=False), "kernel_priority=False: must map ops to providers"),
        (dict(kernel_plugins=None), "kernel_plugins=None: must be a list of Python files or modules"),
        (dict(kernel_plugins=[3]), "kernel_plugins=[3]: must be a list"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(arguments, said):
    with pytest.raises(ValueError) as error:
        EngineConfig(**dict(model="m") | arguments)
    assert said in str(error.value)


def test_a_form_of_weights_may_be_written_as_gguf_does():
    assert EngineConfig("m", quantization="Q4_K_M").quantization == "q4_k_m"


def test_a_dtype_may_have_its_short_name():
    config = EngineConfig("m", dtype="bf16", kv_cache_dtype="fp32")
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "float32")
    for short, full in (("fp16", "float16"), ("fp32", "float32"), ("auto", "auto")):
        assert EngineConfig("m", dtype=short).dtype == full


@pytest.mark.parametrize("value", [0, "False", [], np.True_])
@pytest.mark.parametrize(
    "field", [f for f in dataclasses.fields(EngineConfig) if "bool" in f.type], ids=lambda f: f.name
)
def test_what_is_true_or_false_is_nothing_else(field, value):
    with pytest.raises(ValueError) as error:
        EngineConfig("m", **{field.name: value})
    assert f"{field.name}={value!r}: must be True or False" in str(error.value)
    for given in (True, False, None) if "None" in field.type else (True, False):
        assert getattr(EngineConfig("m", **{field.name: given}), field.name) is given
    if field.name == "enable_prefix_caching":
        assert EngineConfig("m", enable_prefix_caching=None).enable_prefix_caching is True  # as in vLLM
    elif "None" not in field.type:
        with pytest.raises(ValueError, match=f"{field.name}=None: must be True or False"):
            EngineConfig("m", **{field.name: None})


def test_an_older_name_is_taken_alone():
    for value in (True, False, None):
        assert EngineConfig("m", ride_prompts=value).piggyback_prefill is value
    with pytest.raises(TypeError, match="'ride_prompts', an older name of 'piggyback_prefill', and"):
        EngineConfig("m", ride_prompts=True, piggyback_prefill=True)
    with pytest.raises(TypeError, match="unknown argument 'capture_full_steps'; did you mean"):
        EngineConfig("m", capture_full_steps=True)


def test_paths_become_strings():
    config = EngineConfig(Path("some/model"), tokenizer=Path("other"), kernel_plugins=[Path("mine.py"), "module"])
    assert (config.model, config.tokenizer) == ("some/model", "other")


@pytest.mark.parametrize(
    "unknown, nearest",
    [
        ("max_model_length", "max_model_len"),
        ("kv_cache_block_size", "kvcache_block_size"),
        ("Tensor_Parallel_Size", "tensor_parallel_size"),
    ],
)
def test_unknown_arguments_name_the_nearest(unknown, nearest):
    with pytest.raises(TypeError) as error:
        EngineConfig("m", **{unknown: 1})
    assert repr(unknown) in str(error.value) and f"did you mean {nearest!r}?" in str(error.value)


def test_unknown_arguments_far_from_all_list_the_known():
    with pytest.raises(TypeError, match="'zzz'; known are model, tokenizer, "):
        EngineConfig("m", zzz=1)


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_help_describes_every_argument(cls):
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    lines = [line.strip(" |") for line in text.splitlines()]
    for field in dataclasses.fields(cls):
        at = next((i for i, line in enumerate(lines) if line.startswith(f"{field.name}: ")), None)
        assert at is not None and lines[at + 1], field.name
    assert "max_tokens: int | None = 64\n |          Most tokens to generate." in text or cls is EngineConfig

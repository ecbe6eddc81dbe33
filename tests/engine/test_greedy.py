"""Tiny random Qwen3 and Llama models: our greedy tokens equal transformers', whatever the engine does to the batch.

Runs on the GPU, with CUDA graphs and without, where there is one; else on the CPU.
"""

import random

import pytest

from nanovllm import LLM, SamplingParams
from tests import tiny
from tests.devices import DEVICE
from tests.engine.small_engine import check_logits

pytestmark = pytest.mark.any_device

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

MODELS = {
    "qwen3-gqa1": ("qwen3", dict(num_attention_heads=4, num_key_value_heads=4, head_dim=32, tie_word_embeddings=True)),
    "qwen3-gqa2": ("qwen3", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)),
    "qwen3-gqa7": ("qwen3", dict(num_attention_heads=7, num_key_value_heads=1, head_dim=16, vocab_size=331)),
    # As a model card says to do it: max_position_embeddings is not raised, the prompts are longer.
    "qwen3-yarn": (
        "qwen3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rope_parameters=YARN_ROPE,
            max_position_embeddings=48,
        ),
    ),
    "llama-gqa1": ("llama", dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)),
    "llama-gqa3": (
        "llama",
        dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    ),
    "llama-gqa4": ("llama", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=517)),
    "llama-rope3": ("llama", dict(num_attention_heads=4, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE)),
    "llama-bias": ("llama", dict(num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
}


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Lengths around the block size of 16 and beyond, and two groups that share a prefix."""
    rng = random.Random(7)
    draw = lambda n: [rng.randrange(vocab_size) for _ in range(n)]  # noqa: E731
    shared = draw(40)
    lengths = [1, 2, 15, 16, 17, 31, 48, 90]
    return [*(draw(n) for n in lengths), *(shared + draw(n) for n in (1, 5, 20)), shared[:32], shared[:33]]


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """(directory, transformers model, prompts, their expected continuations)"""
    architecture, overrides = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    reference = tiny.save(directory, architecture=architecture, **overrides).to(DEVICE)
    prompts = make_prompts(reference.config.vocab_size)
    reference.generation_config.eos_token_id = None
    return directory, reference, prompts, tiny.greedy_each(reference, prompts, NUM_TOKENS)


def engine(directory, **kwargs) -> LLM:
    defaults = dict(
        dtype="float32", device=DEVICE, skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=200,
        max_num_seqs=16,
        max_model_len=256,
    )  # fmt: skip
    return LLM(directory, **{**defaults, **kwargs})


def tokens(llm: LLM, prompts) -> list[list[int]]:
    outputs = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    return outputs


MODES = {
    "one at a time, eager": dict(enforce_eager=True, max_num_seqs=1),
    "async": dict(async_scheduling=True),
    "chunked": dict(async_scheduling=False, max_num_batched_tokens=7),
    "chunked, async": dict(async_scheduling=True, max_num_batched_tokens=19, max_num_seqs=5),
    "no prefix cache": dict(enable_prefix_caching=False, max_num_seqs=3),
    "preempted": dict(num_kvcache_blocks=9, max_model_len=140),
    "preempted, async": dict(num_kvcache_blocks=9, max_model_len=140, async_scheduling=True),
}


@pytest.mark.parametrize(
    "model, mode",
    [(name, "preempted, async") for name in MODELS]
    + [("qwen3-gqa2", mode) for mode in MODES if mode != "preempted, async"],
    indirect=["model"],
)
def test_greedy_equals_transformers(model, mode):
    directory, _, prompts, expected = model
    llm = engine(directory, **MODES[mode])
    assert tokens(llm, prompts) == expected
    assert (llm.engine.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in MODES[mode])
    assert tokens(llm, list(reversed(prompts))) == list(reversed(expected))  # now with a warm prefix cache


@pytest.mark.gpu  # without one, the interpreter has a test of its own
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_greedy_with_custom_kernels_on_and_off_and_the_logits(model):
    directory, reference, prompts, expected = model
    on, off = engine(directory), engine(directory, use_custom_kernels=False)
    assert set(off.kernels.providers.values()) == {"native"} and "triton" in on.kernels.providers.values()
    assert tokens(on, prompts) == tokens(off, prompts) == expected
    check_logits(on, reference, prompts)


@pytest.mark.skipif(DEVICE != "cpu", reason="test_greedy_with_custom_kernels_on_and_off_and_the_logits has them")
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_logits_equal_transformers(model):
    directory, reference, prompts, _ = model
    check_logits(engine(directory), reference, prompts)

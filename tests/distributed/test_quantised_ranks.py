"""Quantised checkpoints split over two ranks: each reads its part of every tensor, and the tokens are those of one."""

import random

import pytest

from nanovllm import SamplingParams
from nanovllm.distributed.group import SINGLE
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.layers.packed_weight import PackedWeight
from tests import tiny
from tests.distributed.spmd import engine
from tests.weights.quantised_files import FORMATS, write

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# With one KV head both ranks have a copy; with a head of 32 rows no rank has whole fp8 blocks of it.
HEADS = {
    "one kv head": dict(num_key_value_heads=1),
    "two kv heads": dict(),
    "three": dict(num_attention_heads=6, num_key_value_heads=2),
}


def prompts():
    rng = random.Random(7)
    return [[rng.randrange(96) for _ in range(n)] for n in (1, 17, 40, 5)]


def served(group, directory, form=None):
    """(the tokens of a few requests, how many layers have packed weights)."""
    policy = FastPolicy(packed_weights=True)
    made = engine(group, directory, use_custom_kernels=False, fast_policy=policy, quantization=form)
    requests = [made.add_request(prompt, PARAMS) for prompt in prompts()]
    while made.has_unfinished:
        made.step()
    packed = [m for m in made.runner.model.modules() if isinstance(m, PackedWeight)]
    tokens = [seq.seq.output_token_ids for request in requests for seq in request.completions]
    return tokens, len(packed)


@pytest.mark.parametrize(
    "name, heads",
    [
        ("fp8-block", "two kv heads"), ("fp8-tensor", "one kv head"), ("fp8-channel", "two kv heads"),
        ("awq", "one kv head"), ("gptq", "two kv heads"), ("gptq-act-order", "two kv heads"),
        ("gptq-asymmetric", "one kv head"), ("w4a16-asymmetric", "two kv heads"), ("w8a8", "three"),
        ("mixed", "two kv heads"),
    ],
)  # fmt: skip
def test_tokens_of_two_ranks(pool, tmp_path, name, heads):
    reference = write(tmp_path, FORMATS[name], **HEADS[heads])
    tokens, packed = served(SINGLE, tmp_path)
    assert tokens[1] == tiny.greedy(reference, prompts()[1], PARAMS.max_tokens)
    got, packed_too = pool.run(2, served, tmp_path)
    assert got == tokens
    # What a part would cut is dequantised: the columns of down and output projections.
    assert packed_too == packed or (name in ("fp8-block", "gptq-act-order") and packed_too >= packed - 4)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_weights_that_are_quantised_while_they_are_loaded(pool, tmp_path, form):
    heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    tiny.save(tmp_path, "qwen3", hidden_size=128, intermediate_size=512, **heads)
    alone = served(SINGLE, tmp_path, form)
    assert pool.run(2, served, tmp_path, form) == alone and alone[1] == 8


def test_blocks_of_a_gguf_file(pool, tmp_path):
    gguf_files = pytest.importorskip("tests.weights.gguf_files")
    path = gguf_files.tiny(tmp_path, "llama", "Q4_0")
    alone = served(SINGLE, path)
    assert pool.run(2, served, path) == alone and alone[1] == 9


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_a_tensor_of_several_shards_is_cut_for_each_rank(pool, tmp_path, name):
    reference = write(tmp_path, FORMATS[name], "phi3", num_key_value_heads=1, partial_rotary_factor=0.5)
    tokens, _ = served(SINGLE, tmp_path)
    assert tokens[1] == tiny.greedy(reference, prompts()[1], PARAMS.max_tokens)
    assert pool.run(2, served, tmp_path)[0] == tokens

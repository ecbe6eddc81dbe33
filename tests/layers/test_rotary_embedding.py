"""Rotary frequencies of every scaling against transformers', and the table of angles."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.layers.rotary_embedding import RotaryEmbedding, head_order, inverse_frequencies
from nanovllm.model_config import ModelConfig, RopeConfig
from tests.native import NATIVE

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
SCALINGS = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=2.5),
    "llama3": LLAMA3,
    "llama3-32": LLAMA3 | dict(factor=32.0),
    "llama3-short": LLAMA3 | dict(original_max_position_embeddings=64, high_freq_factor=2.0),
    "yarn": YARN,
    "yarn-betas": YARN | dict(beta_fast=16, beta_slow=2, original_max_position_embeddings=512),
    "yarn-not-truncated": YARN | dict(truncate=False),
    "yarn-attention-factor": YARN | dict(attention_factor=0.7),
    "yarn-mscale": YARN | dict(mscale=0.8, mscale_all_dim=1.2),
    "yarn-below-one": YARN | dict(factor=1.0),
    "yarn-ends-before-it-begins": YARN | dict(original_max_position_embeddings=4),
    "yarn-original-length-unsaid": dict(rope_type="yarn", factor=2.0),
}


def configurations(scaling, theta, head_dim):
    """transformers' configuration, and config.json in the form of transformers 5 and of transformers 4."""
    theirs = LlamaConfig(
        hidden_size=8 * head_dim, num_attention_heads=8, head_dim=head_dim, num_hidden_layers=1,
        max_position_embeddings=4096,
        rope_parameters=dict(scaling, rope_theta=theta),
    )  # fmt: skip
    common = theirs.to_dict() | dict(architectures=["LlamaForCausalLM"])
    common.pop("rope_parameters")
    new = common | dict(rope_parameters=dict(scaling, rope_theta=theta))
    old = common | dict(rope_theta=theta, rope_scaling=None if scaling["rope_type"] == "default" else dict(scaling))
    return theirs, ModelConfig.from_dict(new), ModelConfig.from_dict(old)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta, head_dim", [(10000.0, 64), (1e6, 80)])
def test_frequencies_are_those_of_transformers(scaling, theta, head_dim):
    theirs, *ours = configurations(SCALINGS[scaling], theta, head_dim)
    kind = SCALINGS[scaling]["rope_type"]
    init = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    expected, expected_factor = init(theirs, device=torch.device("cpu"))
    for config in ours:
        assert config.rope.scaling_type == kind and config.rope.theta == theta
        inv_freq, factor = inverse_frequencies(config.rope, head_dim)
        assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
        assert factor == pytest.approx(expected_factor, rel=1e-9)


def test_the_scalings_differ():
    """So that the comparison above cannot pass by ignoring them."""
    results = set()
    for scaling in SCALINGS.values():
        inv_freq, factor = inverse_frequencies(configurations(scaling, 10000.0, 64)[1].rope, 64)
        results.add((tuple(inv_freq.tolist()), factor))
    assert len(results) == len(SCALINGS)


def test_old_name_of_the_type():
    config = ModelConfig.from_dict(
        configurations(SCALINGS["default"], 10000.0, 64)[1].raw
        | dict(rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 3.0})
    )
    assert config.rope == RopeConfig(10000.0, "linear", (("factor", 3.0),))


def test_divisors_of_a_gguf_file():
    factors = (1.0, 2.0, 4.0, 8.0)
    plain, _ = inverse_frequencies(RopeConfig(10000.0), 8)
    scaled, factor = inverse_frequencies(RopeConfig(10000.0, "freq_factors", (("factors", factors),)), 8)
    assert torch.equal(scaled, plain / torch.tensor(factors)) and factor == 1.0


@pytest.mark.parametrize("scaling", ["default", "llama3", "yarn"])
def test_the_table_is_cosines_then_sines_of_every_position(scaling):
    _, config, _ = configurations(SCALINGS[scaling], 10000.0, 32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(config.rope, 32, 500, NATIVE)
    finally:
        torch.set_default_dtype(torch.float32)
    table = rotary.cos_sin_cache
    assert table.shape == (500, 32) and table.dtype == torch.float32 and not rotary.state_dict()
    inv_freq, factor = inverse_frequencies(config.rope, 32)
    for position in (0, 1, 17, 499):
        angles = [position * f for f in inv_freq.double().tolist()]
        expected = [math.cos(a) * factor for a in angles] + [math.sin(a) * factor for a in angles]
        assert table[position].tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("head_dim, rotary_dim", [(16, 16), (16, 8), (16, 12), (20, 2), (128, 96)])
def test_the_order_of_a_head_puts_pairs_half_a_head_apart(head_dim, rotary_dim):
    order = head_order(head_dim, rotary_dim)
    assert sorted(order) == list(range(head_dim))
    pairs = set(zip(order[: head_dim // 2], order[head_dim // 2 :]))
    assert {(i, i + rotary_dim // 2) for i in range(rotary_dim // 2)} <= pairs
    assert rotary_dim < head_dim or order == list(range(head_dim))


def test_what_is_not_rotated_stays_as_it_is():
    q, k, positions = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.tensor([0, 3, 99, 7, 50])
    nothing = RotaryEmbedding(None, 16, 100, NATIVE)
    assert all(torch.equal(*pair) for pair in zip(nothing(positions, q, k), (q, k)))
    part = RotaryEmbedding(RopeConfig(rotary_factor=0.5), 16, 100, NATIVE)
    turned = part(positions, q, k)[0]
    rotated = [0, 1, 2, 3, 8, 9, 10, 11]
    still = [i for i in range(16) if i not in rotated]
    assert torch.equal(turned[..., still], q[..., still])
    expected = RotaryEmbedding(RopeConfig(), 8, 100, NATIVE)(positions, q[..., rotated], k[..., rotated])[0]
    torch.testing.assert_close(turned[..., rotated], expected)


@pytest.mark.parametrize("longest, name", [(64, "short_factor"), (65, "long_factor")])
def test_long_rope_has_other_frequencies_beyond_the_context_of_training(longest, name):
    factors = dict(short_factor=(1.0, 1.5), long_factor=(3.0, 7.0))
    scaling = dict(factors, original_max_position_embeddings=64, factor=4.0)
    rope = RopeConfig(100.0, "longrope", tuple(scaling.items()))
    inv_freq, factor = inverse_frequencies(rope, 4, longest)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1]) / torch.tensor(factors[name]))
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))

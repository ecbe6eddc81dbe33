"""Which fused ops a decoder calls for a batch, in which order and with which norms; the values are those without them.

Stubs stand for the providers: each is used for some numbers of tokens, records its calls, and computes the reference.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanovllm.distributed.group import SINGLE, split_over
from nanovllm.layers.attention import AttentionMetadata, LayerCache
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.model_config import ModelConfig
from nanovllm.models.dense import Qwen3ForCausalLM
from tests.layers.stubs import Rank, stubbed

# What begins with a norm takes one token, what a norm may follow two to four.
RANGES = {
    "add_rms_norm_linear": range(1, 2), "add_rms_norm_gate_up": range(1, 2), "linear": range(1, 5),
    "linear_add_rms_norm": range(2, 5), "linear_silu_and_mul": range(2, 5),
}  # fmt: skip
NORMS = ("rms_norm", "add_rms_norm")
LAYERS = 3


RANK = Rank(0, 2)


@pytest.fixture
def stubs():
    return stubbed(RANGES, (*NORMS, "silu_and_mul"))


def decoder(kernels, bias=False, group=SINGLE):
    config = ModelConfig.from_dict(dict(
        architectures=["Qwen3ForCausalLM"], vocab_size=50, hidden_size=24, intermediate_size=20,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=bias,
        max_position_embeddings=64,
    ))  # fmt: skip
    config = replace(config, mlp_bias=bias)
    with split_over(group):
        model = Qwen3ForCausalLM(config, 64, kernels).requires_grad_(False).model
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=g)
        parameter.data.copy_(noise * 0.2 if parameter.dim() > 1 else 1 + 0.2 * noise)
    return model


def hidden(model, tokens):
    """Of one new token for each of `tokens` sequences."""
    g = torch.Generator().manual_seed(1)
    lens = torch.arange(5, 5 + tokens)
    table = torch.arange(tokens, dtype=torch.int32)[:, None]
    metadata = AttentionMetadata(tokens, table[:, 0].long() * 16 + lens - 1, table, lens.int(), 16)
    heads = model.layers[0].self_attn.qkv_proj.num_kv_heads
    caches = [LayerCache(*(torch.randn(tokens, 16, heads, 8, generator=g) for _ in range(2))) for _ in range(LAYERS)]
    return model(torch.arange(tokens) * 7 % 25, lens - 1, caches, metadata)


def described(calls, model):
    """The calls as "op weight norm", by the model's names of them, without the norms of heads."""
    names = {id(p): n.removesuffix(".weight") for n, p in model.named_parameters()}
    told = []
    for op, arguments in calls:
        given = [names[id(arguments[key])] for key in ("weight", "norm_weight") if key in arguments]
        if not any(name.endswith(("q_norm", "k_norm")) for name in given):
            told.append(" ".join((op, *given)))
    return told


FUSED = "linear {qkv}; linear_add_rms_norm {o} {post}; linear_silu_and_mul {gate_up}; linear_add_rms_norm {down} {next}"
PLAIN = "linear {qkv}; linear {o}; add_rms_norm {post}; linear_silu_and_mul {gate_up}; linear {down}"
CASES = {
    # tokens, bias, ranks: the calls before the first layer's product, each layer's calls, the calls after the layers
    "a norm goes with the product before it": ((2, False, SINGLE), "rms_norm {norm}", FUSED, ""),
    "of the most tokens too": ((4, False, SINGLE), "rms_norm {norm}", FUSED, ""),
    "one token has its norms with the products behind them": (
        (1, False, SINGLE), "",
        "add_rms_norm_linear {qkv} {norm}; linear {o}; add_rms_norm_gate_up {gate_up} {post}; linear {down}",
        "add_rms_norm norm",
    ),
    "more tokens than any range has call no fused op": (
        (5, False, SINGLE), "", "{add}rms_norm {norm}; add_rms_norm {post}; silu_and_mul", "add_rms_norm norm",
    ),
    "a norm waits for the sum over the group": (
        (3, False, RANK), "", "{add}rms_norm {norm}; " + PLAIN, "add_rms_norm norm",
    ),
    "linear_silu_and_mul has no bias": (
        (3, True, SINGLE), "rms_norm {norm}",
        FUSED.replace("linear_silu_and_mul {gate_up}", "linear {gate_up}; silu_and_mul"), "",
    ),
    "nor has add_rms_norm_gate_up": (
        (1, True, SINGLE), "",
        "add_rms_norm_linear {qkv} {norm}; linear {o}; add_rms_norm {post}; linear {gate_up}; silu_and_mul;"
        " linear {down}",
        "add_rms_norm norm",
    ),
}  # fmt: skip


def names_in(layer):
    """The names of a layer's parts, for the descriptions of its calls."""
    parts = dict(
        norm="input_layernorm", qkv="self_attn.qkv_proj", o="self_attn.o_proj", post="post_attention_layernorm",
        gate_up="mlp.gate_up_proj", down="mlp.down_proj",
    )  # fmt: skip
    after = f"layers.{layer + 1}.input_layernorm" if layer + 1 < LAYERS else "norm"
    return {key: f"layers.{layer}.{name}" for key, name in parts.items()} | {"next": after, "add": "add_" * (layer > 0)}


@pytest.mark.parametrize("case", CASES)
def test_the_calls_and_values_of_a_decoder(stubs, case):
    (tokens, bias, group), before, each, after = CASES[case]
    fused, native, calls = stubs
    want = hidden(decoder(native, bias, group), tokens)
    assert not calls and want.isfinite().all()
    model = decoder(fused, bias, group)
    torch.testing.assert_close(hidden(model, tokens), want, rtol=1e-6, atol=1e-6)
    every = [before.format(**names_in(0)), *(each.format(**names_in(i)) for i in range(LAYERS)), after]
    assert described(calls, model) == "; ".join(filter(None, every)).split("; ")
    biases = [arguments["bias"] for op, arguments in calls if op == "linear_add_rms_norm"]
    parts = [part for layer in model.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    assert all(b is part.bias and (b is not None) == bias for b, part in zip(biases, parts))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "tokens, group, normed", [(3, SINGLE, True), (1, SINGLE, False), (5, SINGLE, False), (3, RANK, False)]
)
def test_a_projection_before_a_norm(stubs, tokens, group, normed, bias):
    """Whoever does the sum and the norm, they are those of the reference, of the stream as it was before."""
    fused, _, calls = stubs
    with split_over(group):
        layer, norm = RowParallelLinear(12, 6, bias, fused), RMSNorm(6, 1e-3, fused)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.data.normal_()
    x, residual = torch.randn(tokens, 12 // group.size), torch.randn(tokens, 6)
    stream = layer.before_norm(x, residual, norm)
    assert isinstance(stream, ResidualStream) and stream.normed is normed
    assert ("linear_add_rms_norm" in [op for op, _ in calls]) == normed
    y, total = norm.of(stream)
    wanted = residual + group.all_reduce(F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(y, F.rms_norm(wanted, (6,), norm.weight, 1e-3))


def test_a_norm_of_each_kind_of_stream(stubs):
    fused, _, calls = stubs
    norm = RMSNorm(6, 1e-3, fused)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 6).unbind()
    y, total = norm.of(ResidualStream(x))
    assert total is x
    torch.testing.assert_close(y, F.rms_norm(x, (6,), norm.weight, 1e-3))
    y, total = norm.of(ResidualStream(x, residual))
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (6,), norm.weight, 1e-3))
    assert [op for op, _ in calls] == ["rms_norm", "add_rms_norm"]
    y, total = norm.of(ResidualStream(x, residual, normed=True))
    assert y is x and total is residual and len(calls) == 2

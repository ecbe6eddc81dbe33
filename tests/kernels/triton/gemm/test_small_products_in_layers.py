"""Layers call the fused small products for small batches, and models give the same with them and without."""

import functools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import nanovllm.kernels.triton.attention.decode as attention
import nanovllm.kernels.triton.gemm.small_products as decode
from nanovllm.kernels import Kernels, Provider, all_ops
from nanovllm.kernels.ops.add_rms_norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from nanovllm.kernels.ops.linear import linear
from nanovllm.kernels.ops.norm import add_rms_norm, rms_norm
from tests.kernels.triton.common import DEVICE

EPS = 1e-6


def kernels(**functions):
    return Kernels(functions)


def by_native(op):
    return op.providers["native"], op.native


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_layers_call_the_fused_ops_for_small_batches_only(tokens, fused):
    """And give the same as without them; the reference of a fused op is never called."""
    from nanovllm.kernels.ops.activation import silu_and_mul
    from nanovllm.layers.custom_mlp import GatedMLP
    from nanovllm.layers.layernorm import RMSNorm
    from nanovllm.layers.linear import QKVParallelLinear
    from nanovllm.layers.residual_stream import ResidualStream

    calls = []

    def recorded(op):
        def fn(*args):
            calls.append(op.name)
            return op.native(*args)

        return fn

    fused_ops = (add_rms_norm_linear, add_rms_norm_gate_up, linear)
    provider = "test" if fused else "native"
    chosen = kernels(
        rms_norm=by_native(rms_norm),
        add_rms_norm=by_native(add_rms_norm),
        silu_and_mul=by_native(silu_and_mul),
        **{
            op.name: (Provider(provider, fn := recorded(op), num_tokens=lambda weight: range(1, 9)), fn)
            for op in fused_ops
        },
    )
    torch.manual_seed(0)
    qkv = QKVParallelLinear(32, 4, 2, 8, kernels=chosen)
    mlp, norm, next_norm = GatedMLP(32, 48, chosen), RMSNorm(32, EPS, chosen), RMSNorm(32, EPS, chosen)
    for parameter in (*qkv.parameters(), *mlp.parameters(), *norm.parameters(), *next_norm.parameters()):
        parameter.data.normal_()
    x, residual = torch.randn(tokens, 32), torch.randn(tokens, 32)
    normed, total = add_rms_norm.native(x, residual, norm.weight, EPS)
    stream = ResidualStream(x, residual)
    (q, k, v), new = qkv.after_norm(stream, norm)
    assert torch.equal(new, total) and q.shape == (tokens, 4, 8) and k.shape == v.shape == (tokens, 2, 8)
    torch.testing.assert_close(torch.cat((q, k, v), 1).flatten(1), F.linear(normed, qkv.weight))
    y, new, done = mlp.between_norms(stream, norm, next_norm)
    assert torch.equal(new, total) and not done
    gate, up = F.linear(normed, mlp.gate_up_proj.weight).chunk(2, -1)
    torch.testing.assert_close(y, F.linear(F.silu(gate) * up, mlp.down_proj.weight))
    small = fused and tokens <= 8
    assert calls == (["add_rms_norm_linear", "add_rms_norm_gate_up", "linear"] if small else [])
    # What is normed already is not normed again: every product is an op by itself.
    calls.clear()
    stream = ResidualStream(normed, total, normed=True)
    (q, k, v), new = qkv.after_norm(stream, norm)
    assert new is total
    torch.testing.assert_close(torch.cat((q, k, v), 1).flatten(1), F.linear(normed, qkv.weight))
    again, new, done = mlp.between_norms(stream, norm, next_norm)
    assert new is total and not done
    torch.testing.assert_close(again, y)
    assert calls == (["linear"] * 3 if small else [])


@pytest.mark.triton
@pytest.mark.parametrize("tokens, bias", [(1, False), (3, True)])
def test_a_decoder_gives_the_same_with_fused_ops_and_without(tokens, bias):
    """In float32 to 1e-5 (three tokens too: the multiply-add kernel takes up to four), and every fused op is used."""
    from nanovllm.layers.attention import AttentionMetadata, LayerCache
    from nanovllm.model_config import ModelConfig
    from nanovllm.models.dense import Qwen3ForCausalLM

    config = ModelConfig.from_dict(dict(
        architectures=["Qwen3ForCausalLM"], vocab_size=50, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=bias, max_position_embeddings=64,
    ))  # fmt: skip
    calls = set()

    def counted(fused_kernel):
        @functools.wraps(fused_kernel)
        def fn(*args, **kwargs):
            calls.add(fused_kernel.__name__)
            return fused_kernel(*args, **kwargs)

        return fn

    kernels_used = (
        decode.add_rms_norm_linear, decode.add_rms_norm_gate_up, decode.linear, attention.qk_norm_rope_attention,
    )  # fmt: skip
    fused = {fn.__name__: counted(fn) for fn in kernels_used}
    native = {name: by_native(op) for name, op in all_ops().items() if name not in fused}

    def hidden(chosen):
        with torch.device(DEVICE):
            model = Qwen3ForCausalLM(config, 64, kernels(**chosen)).requires_grad_(False)
        g = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=g)
            parameter.data.copy_(noise * 0.2 if parameter.dim() > 1 else 1 + 0.2 * noise)
        lens = torch.arange(5, 5 + tokens, device=DEVICE)
        table = torch.arange(tokens, dtype=torch.int32, device=DEVICE)[:, None]
        metadata = AttentionMetadata(tokens, table[:, 0].long() * 16 + lens - 1, table, lens.int(), 16)
        caches = []
        for _ in range(2):
            k, v = (torch.randn(tokens, 16, 2, 16, generator=g).to(DEVICE) for _ in range(2))
            caches.append(LayerCache(k, v))
        return model(torch.arange(tokens, device=DEVICE) * 7, lens - 1, caches, metadata)

    expected = hidden(native)
    assert not calls
    got = hidden(native | {name: (all_ops()[name].providers["triton"], fn) for name, fn in fused.items()})
    assert calls == set(fused)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

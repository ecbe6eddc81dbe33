"""Which products of packed weights layers combine with what follows, and that the values stay the same."""

from dataclasses import replace

import pytest
import torch

from nanovllm.distributed.group import SINGLE, split_over
from nanovllm.layers.custom_mlp import GatedMLP
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.residual_stream import ResidualStream
from tests.layers.stubs import Rank, stubbed
from tests.layers.test_packed_weight import COLUMNS, MATRICES
from tests.native import NATIVE

SILU, NORM = "linear_packed_silu_and_mul", "linear_packed_add_rms_norm"


@pytest.fixture
def stubs():
    """Kernels whose combined ops take two to four tokens."""
    return stubbed(dict.fromkeys((SILU, NORM, "linear_fp8_dynamic"), range(2, 5)))


def mlp(kernels, gate_up, down, group=SINGLE, **options):
    """An MLP [COLUMNS] -> [rows of gate_up / 2] -> [rows of down] and a norm, with packed weights."""
    with split_over(group):
        made = GatedMLP(COLUMNS, group.size * sum(m.shape[0] for m in gate_up) // 2, kernels, **options)
    for layer, matrices in ((made.gate_up_proj, gate_up), (made.down_proj, down)):
        del layer.weight
        layer.weight = PackedWeight(matrices, torch.float32, kernels)
    norms = [RMSNorm(COLUMNS, 1e-6, kernels).requires_grad_(False) for _ in range(2)]
    for i, p in enumerate([*made.parameters(), *(p for norm in norms for p in norm.parameters())]):
        p.data.normal_(1, 0.1, generator=torch.Generator().manual_seed(i))
    return made, norms


def run(made, tokens):
    layers, norms = made
    x, residual = torch.randn(2, tokens, COLUMNS, generator=torch.Generator().manual_seed(7))
    stream = layers.between_norms(ResidualStream(x, residual), *norms)
    return torch.stack(norms[1].of(stream))


PACKED = [name for name in MATRICES if name not in ("floats", "int4 permuted")]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_every_form_is_combined(name, tokens, stubs):
    kernels, _, calls = stubs
    gate_up, down = [MATRICES[name](COLUMNS) for _ in range(2)], [MATRICES[name](COLUMNS)]
    got = run(mlp(kernels, gate_up, down), tokens)
    assert [op for op, _ in calls] == ([SILU, NORM] if 2 <= tokens <= 4 else [])
    torch.testing.assert_close(got, run(mlp(NATIVE, gate_up, down), tokens), rtol=1e-5, atol=1e-4)


APART = {
    # gate and up, down, options: what is combined all the same
    "two forms": (["int4", "fp8 rows"], ["int4"], {}, [NORM]),
    "permuted columns": (["int4 permuted"] * 2, ["int4 permuted"], {}, []),
    "floats": (["floats"] * 2, ["floats"], {}, []),
    "another activation": (["int4"] * 2, ["int4"], {"activation": "gelu"}, [NORM]),
    "a bias of gate and up": (["int4"] * 2, ["int4"], {"bias": True}, [NORM]),
    "two ranks": (["int4"] * 2, ["int4"], {"group": Rank(0, 2)}, [SILU]),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name, stubs):
    kernels, _, calls = stubs
    gate_up, down, options, combined = APART[name]
    gate_up, down = ([MATRICES[form](COLUMNS) for form in forms] for forms in (gate_up, down))
    got = run(mlp(kernels, gate_up, down, **options), 3)
    assert [op for op, _ in calls] == combined
    torch.testing.assert_close(got, run(mlp(NATIVE, gate_up, down, **options), 3), rtol=1e-5, atol=1e-4)


def test_activations_that_are_quantised_come_first(stubs):
    """Where the op that quantises x and a combined one take the same number of tokens."""
    kernels, _, calls = stubs
    matrices = [replace(MATRICES["fp8 blocks"](COLUMNS), quantises_activations=True) for _ in range(3)]
    run(mlp(kernels, matrices[:2], matrices[2:]), 3)
    assert [op for op, _ in calls] == ["linear_fp8_dynamic"] * 2


PLAIN_SILU, PLAIN_NORM, AFTER_NORM = "linear_silu_and_mul", "linear_add_rms_norm", "add_rms_norm_gate_up"
QUANTISING = "add_rms_norm_linear_fp8_dynamic", "linear_fp8_dynamic"


@pytest.mark.parametrize("tokens", [2, 3])
def test_a_projection_after_a_norm_takes_the_copy(tokens):
    kernels, _, calls = stubbed({"add_rms_norm_linear": range(1, 9)})
    layer = ColumnParallelLinear(COLUMNS, {"": 64}, kernels=kernels)
    del layer.weight
    layer.weight = PackedWeight([MATRICES["int4"](64)], torch.float32, kernels)
    norm = RMSNorm(COLUMNS, 1e-6, kernels).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    x, residual = torch.randn(2, tokens, COLUMNS, generator=torch.Generator().manual_seed(7))
    want, total = layer.after_norm(ResidualStream(x.clone(), residual.clone()), norm)
    layer.weight.expand_for(range(3, 4))
    assert not calls
    got, added = layer.after_norm(ResidualStream(x.clone(), residual.clone()), norm)
    assert [op for op, _ in calls] == ["add_rms_norm_linear"] * (tokens == 3)
    torch.testing.assert_close((got, added), (want, total), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("after_norm", [False, True])
@pytest.mark.parametrize("name", ["int4", "fp8 blocks", "Q6_K planes"])
def test_copies_are_combined_as_plain_weights(name, after_norm):
    """With three tokens by the copy, with two and four by the packed weight, whose ops take as many."""
    plain = dict.fromkeys((PLAIN_SILU, PLAIN_NORM, *[AFTER_NORM] * after_norm), range(1, 9))
    kernels, _, calls = stubbed(plain | dict.fromkeys((SILU, NORM, *QUANTISING), range(1, 9)))
    matrices = [MATRICES[name](COLUMNS) for _ in range(3)]
    if name == "fp8 blocks":
        matrices = [replace(m, quantises_activations=True) for m in matrices]
    made, norms = mlp(kernels, matrices[:2], matrices[2:])
    want = {tokens: run((made, norms), tokens) for tokens in (2, 4)}
    for layer in (made.gate_up_proj, made.down_proj):
        layer.weight.expand_for(range(3, 4))
    for tokens in (2, 3, 4):
        calls.clear()
        got = run((made, norms), tokens)
        packed_ops = list(QUANTISING) if name == "fp8 blocks" else [SILU, NORM]
        plain_ops = [AFTER_NORM if after_norm else PLAIN_SILU, PLAIN_NORM]
        assert [op for op, _ in calls] == (plain_ops if tokens == 3 else packed_ops)
        if tokens != 3:
            assert torch.equal(got, want[tokens])
    floats = mlp(NATIVE, [MATRICES["floats"](COLUMNS)] * 2, [MATRICES["floats"](COLUMNS)])[0]
    for layer, of in ((floats.gate_up_proj, made.gate_up_proj), (floats.down_proj, made.down_proj)):
        del layer.weight
        layer.weight = torch.nn.Parameter(of.weight.dequantised(), requires_grad=False)
    torch.testing.assert_close(run((made, norms), 3), run((floats, norms), 3), rtol=1e-5, atol=1e-4)

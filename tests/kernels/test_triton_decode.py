"""The small-batch products against float64 and against the ops that they fuse; what they compile to.

With a GPU they run there at real shapes, else in Triton's interpreter on small ones. The interpreter is chosen when Triton
is imported, by an environment variable, so it gets a process of its own: `test_in_the_interpreter`.
"""

import functools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
RUNS_HERE = INTERPRETED or torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

import nanovllm.kernels.triton.attention.decode as attention
import nanovllm.kernels.triton.gemm.small_products as decode
from nanovllm.kernels import Kernels, Provider, all_ops
from nanovllm.kernels.ops.add_rms_norm_linear import add_rms_norm_gate_up, add_rms_norm_linear
from nanovllm.kernels.ops.linear import linear
from nanovllm.kernels.ops.norm import add_rms_norm, rms_norm
from nanovllm.kernels.triton.gemm import hopper_product
from nanovllm.kernels.triton.gemm.small_product_plan import (
    MAX_TOKENS,
    SHARED_BYTES,
    MatrixPlan,
    VectorPlan,
    max_tokens,
    plan_small_product,
)
from tests.interpreter import check_interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
TOKENS = [1, 3, 8]
# (outputs, size): no power of two, one element, several tiles, fewer columns than a tile, rows left over in the last program.
SHAPES = [(1, 1), (19, 1000), (5, 33), (16, 1024), (5, 2100), (3, 3072), (2, 3073), (3, 8200)]
# Qwen3-0.6B, 1.7B and 8B: QKV, output, gate-up and down projections.
REAL = [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (4096, 2048), (6144, 2048), (2048, 6144),
        (6144, 4096), (4096, 4096), (12288, 4096), (4096, 12288)]  # fmt: skip
EPS = 1e-6

needs_kernels = pytest.mark.skipif(not RUNS_HERE, reason="no CUDA device; see test_in_the_interpreter")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that a kernel gets is NaN, and what follows it must stay so."""
    original, allocated = torch.empty, []
    # On its first use in a process `with torch.device(...)` notes which functions make tensors; a patched one would be noted
    # instead of torch's, and the context would have no effect on it ever after.
    with torch.device("cpu"):
        original(0)

    def poisoned(*size, dtype=torch.float32, device=None, **kwargs):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if dtype not in DTYPES:
            return original(shape, dtype=dtype, device=device, **kwargs)
        memory = original(shape.numel() + 64, dtype=dtype, device=device, **kwargs).fill_(float("nan"))
        allocated.append(memory)
        return memory[: shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for memory in allocated:
        assert memory[-64:].isnan().all(), "wrote past the end"


def randn(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def inputs(tokens, outputs, size, dtype, seed=0, scale=1.0):
    return SimpleNamespace(
        x=randn(tokens, size, dtype=dtype, seed=seed, scale=scale),
        residual=randn(tokens, size, dtype=dtype, seed=seed + 1, scale=scale),
        norm=randn(size, dtype=dtype, seed=seed + 2),
        weight=randn(2 * outputs, size, dtype=dtype, seed=seed + 3, scale=size**-0.5),
        bias=randn(2 * outputs, dtype=dtype, seed=seed + 4),
    )


def normed_64(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(got, expected, dtype):
    assert got.dtype == dtype and got.shape == expected.shape and got.is_contiguous()
    tolerance = RELATIVE[dtype] * (expected.abs().amax().clamp(min=1.0).item() if expected.numel() else 1.0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


def like(got, native):
    """The same roundings in the same places: only the order of the sums differs, so few results do, by one rounding or two.

    Where results are few, one that differs is much of the norm. It may differ by four roundings, each at most torch.finfo.eps
    of it: a gate of -3 that is rounded the other way changes silu(gate) by 1.9 times as much, and with it the two roundings
    that follow.
    """
    assert got.dtype == native.dtype and got.shape == native.shape
    wanted = native.double()
    size = wanted.norm().clamp(min=1e-30)
    error = (got.double() - wanted).norm() / size
    many = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}[got.dtype]
    one = 4 * torch.finfo(got.dtype).eps * wanted.abs().amax() / size if wanted.numel() else 0.0
    assert error < max(many, one), f"{error:.1e}, {wanted.numel()} results"


def runs_here(x, weight, gated, norm):
    """Whether a kernel of this package multiplies, not the library's."""
    return decode._plan(x, weight, gated, norm) is not None or (not norm and hopper_product.takes(x, weight, gated))


def check(tokens, outputs, size, dtype, seed=0, scale=1.0, like=like):
    """All three ops, with and without bias and residual.

    Only where a kernel of ours runs with float64 too: the library may add up parts of a long sum in the result's dtype.
    """
    a = inputs(tokens, outputs, size, dtype, seed, scale)

    def close_if_ours(got, expected, gated, norm):
        if runs_here(a.x, a.weight, gated, norm):
            close(got, expected, dtype)

    before = [t.clone() for t in vars(a).values()]
    total = a.residual + a.x
    for residual, stream in ((a.residual, total), (None, a.x)):
        wide = normed_64(stream, a.norm)
        for bias in (a.bias, None):
            got, new = decode.add_rms_norm_linear(a.x, residual, a.norm, EPS, a.weight, bias)
            native, _ = add_rms_norm_linear.native(a.x, residual, a.norm, EPS, a.weight, bias)
            assert torch.equal(new, stream)
            exact = F.linear(wide, a.weight.double(), None if bias is None else bias.double())
            close_if_ours(got, exact, gated=False, norm=True)
            like(got, native)
        got, new = decode.add_rms_norm_gate_up(a.x, residual, a.norm, EPS, a.weight)
        native, _ = add_rms_norm_gate_up.native(a.x, residual, a.norm, EPS, a.weight)
        assert torch.equal(new, stream)
        gate, up = F.linear(wide, a.weight.double()).chunk(2, -1)
        close_if_ours(got, F.silu(gate) * up, gated=True, norm=True)
        like(got, native)
    for bias in (a.bias, None):
        got = decode.linear(a.x, a.weight, bias)
        exact = F.linear(a.x.double(), a.weight.double(), None if bias is None else bias.double())
        close_if_ours(got, exact, gated=False, norm=False)
        like(got, linear.native(a.x, a.weight, bias))
    assert all(torch.equal(t, b) for t, b in zip(vars(a).values(), before)), "an input was changed"


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs, size", SHAPES, ids=str)
def test_small_shapes(outputs, size, dtype):
    for tokens in TOKENS:
        check(tokens, outputs, size, dtype, seed=tokens)


@needs_kernels
@pytest.mark.parametrize("scale", [1e-3, 50.0])
def test_magnitudes(scale):
    for tokens in (1, 8):
        check(tokens, 20, 96, torch.bfloat16, scale=scale)


@needs_kernels
@pytest.mark.parametrize("tokens, cut", [
    (2, MatrixPlan(16, 8, 32, late=True)), (5, MatrixPlan(32, 4, 16, late=True)), (16, MatrixPlan(16, 8, 16, late=True)),
    (29, MatrixPlan(8, 8, 32, late=True)),
])  # fmt: skip
def test_norms_after_the_product(tokens, cut, monkeypatch):
    """Rounded once less than the reference: as near to it as two ways of rounding are, and no farther from the exact result."""

    def near(got, native):
        assert (got.double() - native.double()).norm() < 1e-2 * native.double().norm()

    monkeypatch.setattr(decode, "plan_small_product", lambda *args: cut)
    for outputs, size in ((20, 96), (37, 600))[: 2 if tokens == 5 else 1]:
        check(tokens, outputs, size, torch.bfloat16, seed=tokens, like=near)
        a = inputs(tokens, outputs, size, torch.bfloat16)
        exact = F.linear(normed_64(a.residual + a.x, a.norm), a.weight.double())
        got, native = (
            fn(a.x, a.residual, a.norm, EPS, a.weight)[0].double() - exact
            for fn in (decode.add_rms_norm_linear, add_rms_norm_linear.native)
        )
        assert got.norm() < 1.1 * native.norm()
    check(tokens, 20, 96, torch.bfloat16, scale=50.0, like=near)


@needs_kernels
@pytest.mark.parametrize("tokens", [0, MAX_TOKENS + 1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_numbers_of_tokens_are_the_kernels_that_are_fused(tokens, dtype, monkeypatch):
    a = inputs(tokens, 12, 72, dtype)  # on Hopper a kernel of its own takes multiples of 64
    monkeypatch.setattr(decode, "_launch", lambda *args: pytest.fail("the fused kernel was used"))
    if DEVICE == "cpu":  # the kernels that it calls are tested elsewhere
        monkeypatch.setattr(decode, "rms_norm", rms_norm.native)
        monkeypatch.setattr(decode, "add_rms_norm_out", lambda x, r, w, e, y, n: add_rms_norm.native(x, r, w, e))
        monkeypatch.setattr(decode, "silu_and_mul", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    for residual in (a.residual, None):
        got, new = decode.add_rms_norm_linear(a.x, residual, a.norm, EPS, a.weight, a.bias)
        native, total = add_rms_norm_linear.native(a.x, residual, a.norm, EPS, a.weight, a.bias)
        assert torch.equal(new, total) and got.shape == (tokens, 24)
        close(got, native, dtype)
        got, new = decode.add_rms_norm_gate_up(a.x, residual, a.norm, EPS, a.weight)
        native, total = add_rms_norm_gate_up.native(a.x, residual, a.norm, EPS, a.weight)
        assert torch.equal(new, total) and got.shape == (tokens, 12)
        close(got, native, dtype)
    assert torch.equal(decode.linear(a.x, a.weight), F.linear(a.x, a.weight))


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 4])
def test_strided_inputs_and_leading_dimensions(tokens):
    a = inputs(tokens, 20, 96, torch.float16)

    def strided(t):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), float("nan"), dtype=t.dtype, device=t.device)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]

    expected = decode.add_rms_norm_gate_up(a.x, a.residual, a.norm, EPS, a.weight)
    for x, residual in ((strided(a.x), strided(a.residual)), (a.x[None], a.residual[None])):
        for got, want in zip(decode.add_rms_norm_gate_up(x, residual, a.norm, EPS, a.weight), expected):
            assert torch.equal(got.reshape(want.shape), want)
    padded = strided(a.weight)  # its rows are apart: the library takes them
    like(decode.linear(a.x, padded), F.linear(a.x, a.weight))


@needs_kernels
def test_infinities_and_nan_stay_in_their_rows():
    a = inputs(4, 12, 80, torch.float16)
    a.x[1, 3], a.x[2, 7] = float("nan"), float("inf")
    y, total = decode.add_rms_norm_linear(a.x, a.residual, a.norm, EPS, a.weight)
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()
    assert torch.equal(total.isnan(), (a.x + a.residual).isnan())


def test_plans_are_small_enough_and_made_of_shapes_alone():
    for outputs, size in [*SHAPES, *REAL, (151936, 1024), (8, 200000)]:
        for gated in (False, True):
            for dtype in DTYPES:
                most = max_tokens(outputs, size, gated, dtype)
                for tokens in range(1, MAX_TOKENS + 3):
                    cut = plan_small_product(tokens, outputs, size, gated, dtype)
                    assert (cut is not None) == (tokens <= most)
                    if isinstance(cut, VectorPlan):
                        assert cut.block == cut.warps * 32 * 16 // dtype.itemsize and cut.rows >= (2 if gated else 1)
                        held = cut.rows * -(-size // cut.block) * cut.block * dtype.itemsize / (cut.warps * 32)
                        assert held <= 512, f"{held} bytes of weights a thread for {outputs} x {size}"
                    elif isinstance(cut, MatrixPlan):
                        block = cut.split * cut.depth
                        columns = -(-size // block) * block
                        padded = 1 << (tokens - 1).bit_length()
                        assert cut.depth >= 16 and (cut.rows + padded) * columns * dtype.itemsize <= SHARED_BYTES
    assert plan_small_product(1, 8, 200000, False, torch.bfloat16) is None  # the registers would not hold a row
    assert max_tokens(4096, 1024, False, torch.bfloat16) == MAX_TOKENS
    assert max_tokens(6144, 4096, False, torch.bfloat16) == 1
    assert max_tokens(64, 64, False, torch.float64) == 0


# ---------------------------------------------------------------------------------------------------------------- layers


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


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_decoder_gives_the_same_with_fused_ops_and_without(tokens, bias):
    """In float32 to 1e-5 (three tokens too: the multiply-add kernel takes up to four), and every fused op is used."""
    from nanovllm.layers.attention import AttentionMetadata, LayerCache
    from nanovllm.model_config import ModelConfig
    from nanovllm.models.qwen3 import Qwen3ForCausalLM

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


# ------------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, size", REAL, ids=str)
def test_real_shapes(outputs, size):
    for tokens in (1, 2, 5, 8):
        if tokens <= max_tokens(outputs, size, False, torch.bfloat16):
            check(tokens, outputs, size, torch.bfloat16, seed=tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_ten_thousand_replays_give_the_same_bits(tokens):
    """A chain whose kernels start before their predecessors end: a missing wait would show as another result."""
    hidden, layers, dtype = 1024, 4, torch.bfloat16
    norms = [randn(hidden, dtype=dtype, seed=i) for i in range(2 * layers)]
    qkv, gate_up = ([randn(n, hidden, dtype=dtype, seed=i, scale=0.03) for i in range(layers)] for n in (4096, 6144))
    out, down = ([randn(hidden, n, dtype=dtype, seed=i, scale=0.03) for i in range(layers)] for n in (2048, 3072))
    x, residual = randn(tokens, hidden, dtype=dtype), randn(tokens, hidden, dtype=dtype, seed=1)

    def run(ops):
        h, r = x, residual
        for i in range(layers):
            q, r = ops.add_rms_norm_linear(h, r, norms[2 * i], EPS, qkv[i])
            h = ops.linear(q[:, :2048], out[i])
            g, r = ops.add_rms_norm_gate_up(h, r, norms[2 * i + 1], EPS, gate_up[i])
            h = ops.linear(g, down[i])
        return h, r

    eager = [t.clone() for t in run(decode)]
    native = SimpleNamespace(**{op.name: op.native for op in (add_rms_norm_linear, add_rms_norm_gate_up, linear)})
    for got, want in zip(eager, run(native)):
        assert (got.double() - want.double()).norm() / want.double().norm() < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(decode)
    for i in range(10_000):
        graph.replay()
        if i % 100 == 0 or i == 9_999:
            assert all(torch.equal(a, b) for a, b in zip(results, eager)), f"replay {i} differs"


# --------------------------------------------------------------------------------------------------------------- compile

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def launches(dtype):
    """(name, kernel, arguments by name, warps) of the launches at real shapes, recorded without a GPU."""
    found = []

    def recorder(kernel, name):
        def launch(*args, num_warps, **constants):
            found.append((name, kernel, {**dict(zip(kernel.arg_names, args)), **constants}, num_warps))

        return {None: launch}

    class Anything(dict):
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return recorder(self.kernel, self.name)[None]

    original = decode.vector_kernel, decode.matrix_kernel
    proxies = [Anything(kernel) for kernel in original]
    decode.vector_kernel, decode.matrix_kernel = proxies
    try:
        for tokens in (1, 2, 8):
            for outputs, size in REAL:
                x, weight = torch.empty(tokens, size, dtype=dtype), torch.empty(2 * outputs, size, dtype=dtype)
                for proxy in proxies:
                    proxy.name = f"{tokens} x {size} -> {outputs}"
                if tokens in decode.num_tokens_linear(weight):
                    if outputs in (1024, 2048, 4096) and size != 1024:
                        decode.linear(x, weight[:outputs])
                    if size in (1024, 2048, 4096):
                        decode.add_rms_norm_linear(x, x, weight[0], EPS, weight[:outputs])
                        decode.add_rms_norm_gate_up(x, x, weight[0], EPS, weight)
    finally:
        decode.vector_kernel, decode.matrix_kernel = original
    return found


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles nothing under TRITON_INTERPRET")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_without_spills_and_reads_weights_before_the_wait(capability, tmp_path):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    seen = set()
    for name, kernel, arguments, warps in launches(torch.bfloat16):
        arguments["PDL"] = capability >= 90
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1):
                signature[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, *constants.values(), warps)
        if key in seen:
            continue
        seen.add(key)
        source = ASTSource(kernel, signature, constants, attributes)
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        done = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        )
        registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout).groups())
        # Triton 3.9 keeps 8 bytes on the stack for one shape on sm_80, where it stops at 64 registers of 255.
        assert local == 0 and stack <= (8 if capability == 80 else 0) and registers <= 255, (
            f"{name}: {registers} registers, {stack} stack, {local} local"
        )
        reads = [m.start() for m in re.finditer(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", binary.asm["ptx"])]
        waits = [m.start() for m in re.finditer(r"griddepcontrol\.wait", binary.asm["ptx"])]
        starts = [m.start() for m in re.finditer(r"griddepcontrol\.launch_dependents", binary.asm["ptx"])]
        size, rows = arguments["SIZE"], arguments["ROWS"]
        assert len(waits) == len(starts) == (1 if capability >= 90 else 0), name
        if waits:
            weights = -(-rows * size * 2 // (16 * 32 * warps))  # 16-byte loads that a thread's weights take
            assert starts[0] < reads[0] and sum(r < waits[0] for r in reads) >= weights, name
            every = [m.start() for m in re.finditer(r"ld\.global", binary.asm["ptx"])]
            # Before the wait nothing but weights: those of the product and, of a norm, its own.
            norm = len(every) if arguments["NORM"] else 0
            assert sum(e < waits[0] for e in every) <= weights + norm and any(e > waits[0] for e in every), name
    assert len(seen) >= 8


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter():
    """This file's tests of the kernels, without a GPU."""
    check_interpreted(__file__, skips=True)

"""The ops between a layer's products in C++: as their references, in any layout and with any number of threads."""

import re

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import PagedKV, all_ops, resolve_kernels
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.testing.verify import verify_op
from tests import tiny

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

OPS = (
    "add_rms_norm", "attention_decode", "attention_prefill", "qk_norm_rope", "rms_norm", "rotary_embedding",
    "silu_and_mul", "store_kvcache",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 16


@pytest.mark.parametrize("name", OPS)
def test_every_case_of_the_declaration_is_right(name):
    declared = all_ops()[name]
    verdicts = verify_op(declared, declared.providers["cpu"], "cpu")
    assert len(verdicts) > 20 and not [v for v in verdicts if v.failure or v.skipped]


def by(provider, name, *args, **kwargs):
    """A call with arguments that the provider must take; then its results, and those that it wrote to, in a list."""
    declared = all_ops()[name]
    with declared.use(provider):
        results = declared(*args, **kwargs)
    return [results] if isinstance(results, torch.Tensor) else list(results or ())


def paged(lens, kv_heads, dim, dtype, seed=0):
    """Blocks in any order; slots behind the lengths are NaN."""
    g = torch.Generator().manual_seed(seed)
    width = max(1, -(-max(lens, default=1) // BLOCK))
    table = torch.randperm(len(lens) * width, generator=g).int().view(len(lens), width)
    caches = [torch.randn(table.numel() + 1, BLOCK, kv_heads, dim, generator=g).to(dtype) for _ in range(2)]
    for blocks, length in zip(table, lens):
        for cache in caches:
            for slot in range(length, width * BLOCK):
                cache[blocks[slot // BLOCK], slot % BLOCK] = torch.nan
    return PagedKV(*caches, table, torch.tensor(lens, dtype=torch.int32), max(lens, default=0))


def calls(tokens, dtype=torch.float32, dim=64):
    """Each op's arguments, q, k and v as views of what a projection gives."""
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    q, k, v = normal(tokens, 15, dim).split((9, 3, 3), 1)
    positions, table = torch.arange(tokens) % 50, torch.randn(50, dim, generator=g)
    few, many = paged([tokens, 1, 300], 3, dim, dtype), paged([tokens + 40], 3, dim, dtype)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    caches = many.k_cache.clone(), many.v_cache.clone(), torch.randperm(tokens, generator=g)
    return {
        "rms_norm": (normal(tokens, 577), normal(577), 1e-5),
        "add_rms_norm": (normal(tokens, 576), normal(tokens, 576), normal(576), 1e-5),
        "silu_and_mul": (normal(tokens, 3074),),
        "rotary_embedding": (positions, q, k, table),
        "qk_norm_rope": (positions, q, k, normal(dim), normal(dim), 1e-5, table),
        "store_kvcache": (k, v, *caches),
        "attention_decode": (normal(3, 9, dim), few, 0.2),
        "attention_prefill": (q, many, starts, tokens, 0.2),
    }


def results(provider, name, args):
    """What a call returns, or has written to the caches."""
    if name == "store_kvcache":
        args = (*args[:2], args[2].clone(), args[3].clone(), args[4])
        by(provider, name, *args)
        return [t.nan_to_num(7.0) for t in args[2:4]]
    return by(provider, name, *args)


@pytest.mark.parametrize("name", OPS)
def test_threads_do_not_change_a_bit(name, monkeypatch):
    """300 tokens are more than one thread computes alone."""
    for dtype in DTYPES:
        args, each = calls(300, dtype)[name], {}
        for threads in ("1", "2", "5"):
            monkeypatch.setenv("NANOVLLM_CPU_THREADS", threads)
            each[threads] = results("cpu", name, args)
        for one, *others in zip(*each.values()):
            assert one.isfinite().all() and all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("name", OPS)
def test_a_row_does_not_depend_on_the_others(name):
    """One token, in a batch of its own. Those of a prompt attend to different tokens, and are left out."""
    if name not in ("attention_prefill", "attention_decode", "store_kvcache"):
        args = calls(300)[name]
        rows = [isinstance(a, torch.Tensor) and len(a) == 300 for a in args]
        alone = [a[123:124] if has_rows else a for a, has_rows in zip(args, rows)]
        for every, one in zip(by("cpu", name, *args), by("cpu", name, *alone)):
            assert torch.equal(every[123:124], one)
    elif name == "attention_decode":
        q, kv, scale = calls(20)[name]
        for i in range(3):
            one = by("cpu", name, q[i : i + 1], kv.rows(slice(i, i + 1)), scale)[0]
            assert torch.equal(by("cpu", name, q, kv, scale)[0][i : i + 1], one)


@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize("name", OPS)
def test_layouts(name, tokens):
    """Elements apart, rows apart, heads apart, and more leading dimensions: bit by bit as adjacent ones."""
    if not tokens and name.startswith("attention"):
        return
    args = calls(tokens)[name]
    want = results("cpu", name, args)

    def apart(x):
        is_moved = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() < 4
        return torch.stack((x, x), -1)[..., 0] if is_moved else x

    def in_other_order(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(x, torch.Tensor) and x.dim() == 3 else x

    for change in (apart, in_other_order):
        for got, wanted in zip(results("cpu", name, [change(a) for a in args]), want):
            assert torch.equal(got, wanted)
    if name in ("rms_norm", "add_rms_norm", "silu_and_mul") and tokens == 130:
        led = [a.view(2, 65, -1) if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args]
        for got, wanted in zip(by("cpu", name, *led), want):
            assert torch.equal(got, wanted.view(2, 65, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"window": 33}, {"soft_cap": 3.0}, {"window": 90, "soft_cap": 20.0}]
)
def test_runs_of_every_kind(options, dtype):
    """Few and many query tokens, contexts of several pieces, sequences without tokens; caches of another dtype."""
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for cache_dtype in (dtype, torch.float32):
        for heads, kv_heads, dim in ((1, 1, 16), (5, 1, 48), (8, 4, 128)):
            kv = paged([1, 600, 0, 40], kv_heads, dim, cache_dtype)
            q = torch.randn(80, heads, dim).to(dtype)
            starts = torch.tensor([0, 1, 31, 33, 73], dtype=torch.int32)
            every = [
                ("attention_prefill", q[:73], (starts, 40)),
                *(("attention_decode", q[: 4 * n], ()) for n in (1, 3, 20)),
            ]
            for name, queries, extra in every:
                want = by("native", name, queries.double(), kv, *extra, 0.3, **options)[0]
                got = by("cpu", name, queries, kv, *extra, 0.3, **options)[0]
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_angles_may_be_one_row():
    """As of a layer without rotation, whose table is expanded."""
    _, q, k, table = calls(40)["rotary_embedding"]
    one_row = table[:1].expand(50, -1)
    for got, want in zip(by("cpu", "rotary_embedding", torch.arange(40), q, k, one_row),
                         by("cpu", "rotary_embedding", torch.zeros(40, dtype=torch.int64), q, k, table)):  # fmt: skip
        assert torch.equal(got, want)


def changed(kv, **fields):
    return PagedKV(**{**vars(kv), **fields})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "rotary_embedding": [({0: torch.tensor([0, 49, 50])}, "positions: token 2 has position 50, expected 0 to 49"),
                         ({0: torch.tensor([-1, 0, 0])}, "positions: token 0 has position -1")],
    "store_kvcache": [({4: torch.tensor([0, 64, 1])}, "slot_mapping: token 1 has slot 64"),
                      ({4: torch.tensor([0, 1])}, "slot_mapping: expected")],
    "attention_decode": [({1: lambda kv: changed(kv, context_lens=int32(305, 1, 1))}, "sequence 0 has length 305"),
                         ({1: lambda kv: changed(kv, context_lens=int32(-1, 1, 1))}, "sequence 0 has length -1"),
                         ({1: lambda kv: changed(kv, block_table=kv.block_table - 1)}, "sequence . has block -1"),
                         ({1: lambda kv: changed(kv, block_table=kv.block_table + 9)}, "sequence . has block"),
                         ({0: torch.zeros(4, 9, 64)}, "the same number n of query tokens"),
                         ({0: torch.zeros(0, 9, 64)}, "the same number n of query tokens"),
                         ({2: -1.0}, "scale: expected a positive finite number"),
                         ({0: torch.zeros(3, 8, 64)}, "q: expected a multiple of the cache's 3 heads")],
    "attention_prefill": [({2: int32(0, 2)}, "sequence 0 ends at token 2, expected 3"),
                          ({2: int32(1, 3)}, "expected 0 as the start of the first run"),
                          ({2: int32(0, 3).long()}, "cu_seqlens_q: expected"),
                          ({3: 2}, "max_query_len: expected at least 3"),
                          ({1: lambda kv: changed(kv, context_lens=int32(2))}, "shorter than its 3 query tokens")],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_errors_as_of_the_reference(name):
    for changes, message in WRONG[name]:
        args = list(calls(3)[name])
        for place, change in changes.items():
            args[place] = change(args[place]) if callable(change) else change
        for provider in ("native", "cpu"):
            with pytest.raises(ValueError, match=message):
                by(provider, name, *args)


def test_layers_cannot_read_beyond_a_tensor():
    """Layers call a provider without the op's checks."""
    kernels = resolve_kernels(torch.device("cpu"), priority={name: ["cpu"] for name in OPS})
    positions, q, k, table = calls(3)["rotary_embedding"]
    for name, args in [
        ("rms_norm", (torch.ones(2, 8), torch.ones(7), 1e-5)),
        ("add_rms_norm", (torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5)),
        ("silu_and_mul", (torch.ones(2, 7),)),
        ("rotary_embedding", (positions[:2], q, k, table)),
        ("rotary_embedding", (positions, q, k, table[:, :32])),
        ("qk_norm_rope", (positions, q, k, torch.ones(63), torch.ones(64), 1e-5, table)),
    ]:
        with pytest.raises(ValueError, match="expected"):
            getattr(kernels, name)(*args)


def test_what_the_library_lacks_goes_to_the_reference(caplog):
    _, q, k, table = rotation = calls(3)["rotary_embedding"]
    queries, kv, scale = calls(3)["attention_decode"]

    def with_caches(change):
        return changed(kv, k_cache=change(kv.k_cache), v_cache=change(kv.v_cache))

    fp8, every_other = (
        with_caches(lambda c: c.to(torch.float8_e4m3fn)),
        with_caches(lambda c: torch.stack((c, c), 1)[:, 0]),
    )
    few = with_caches(lambda c: c[..., :24].contiguous())
    for name, args, reason in [
        ("rms_norm", (torch.ones(2, 8).double(), torch.ones(8).double(), 1e-5), "not float64"),
        ("rms_norm", (torch.ones(2, 8), torch.ones(8).bfloat16(), 1e-5), "tensors of float32 and bfloat16"),
        ("rotary_embedding", (*rotation[:3], table.double()), "cos_sin_cache: expected float32, not float64"),
        ("attention_decode", (queries, changed(kv, k_scale=torch.ones(1)), scale), "a cache with k_scale or v_scale"),
        ("attention_decode", (queries, fp8, scale), "k_cache: .*float8_e4m3fn"),
        ("attention_decode", (queries, every_other, scale), "a cache that is not contiguous"),
        ("attention_decode", (queries[..., :24], few, scale), "head_dim=24: expected a multiple of 16"),
    ]:  # fmt: skip
        kernels = resolve_kernels(torch.device("cpu"), priority={name: ["cpu"]})
        caplog.clear()
        got = getattr(kernels, name)(*args)
        wanted = all_ops()[name].native(*args)
        for one, want in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (got, wanted))):
            assert torch.equal(one, want)
        (record,) = caplog.records
        assert re.fullmatch(
            rf"{name}: cpu does not take these arguments \(.*{reason}.*\); using native", record.message
        )


@pytest.mark.parametrize("architecture, overrides", [
    ("llama", {}), ("qwen3", {}), ("gemma2", dict(sliding_window=16, query_pre_attn_scalar=16)),
])  # fmt: skip
def test_an_engine_that_runs_op_by_op_writes_the_same_tokens(architecture, overrides, tmp_path):
    """Prompts, chunks of them beside decodes, windows and soft caps."""
    tiny.save(tmp_path, architecture, **overrides)
    prompts = [[1, 2, 3], list(range(4, 90)), [7], list(range(40, 0, -1))]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for provider in ("native", "cpu"):
        made = LLM(
            tmp_path, device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=60,
            max_model_len=120, max_num_batched_tokens=48,
            kernel_priority={"decoder_step": ["native"], **{name: [provider] for name in OPS}},
        )  # fmt: skip
        assert {made.kernels.providers[name] for name in OPS} == {provider}
        tokens[provider] = [o.outputs[0].token_ids for o in made.generate(prompts, greedy, use_tqdm=False)]
    assert tokens["cpu"] == tokens["native"]

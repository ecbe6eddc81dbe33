"""FlashAttention and FlashInfer as providers of the attention ops.

Without the packages, stand-ins take their places. With a GPU and a package, the real one runs against the reference in
float64.
"""

import inspect
import types

import pytest
import torch

from nanovllm.kernels.external import flash_attn, flashinfer
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from nanovllm.kernels.ops.paged_kv import PagedKV
from tests.kernels.external.examples import CPU, CUDA, HALF, PLANNED, decode_example, example, flat, variant
from tests.kernels.external.stand_ins import STAND_INS, Wrapper, stand_in


@pytest.mark.parametrize("module", [flash_attn, flashinfer])
@pytest.mark.parametrize("declared", [attention_decode, attention_prefill])
def test_signatures(module, declared):
    expected = inspect.signature(declared.native)
    assert inspect.signature(getattr(module, declared.name), eval_str=True) == expected
    planned = declared.providers[module.__name__.rpartition(".")[2]].planned_fn
    assert (planned is not None) == (module is flashinfer)
    assert planned is None or inspect.signature(planned).parameters.keys() == expected.parameters.keys()
    accepts = inspect.signature(getattr(module, declared.name.replace("attention", "accepts")))
    accepts.bind(*expected.parameters)
    accepts.bind(**dict.fromkeys(expected.parameters))


@pytest.mark.parametrize(
    "package, options, change, reason",
    [
        ("flash_attn", dict(HALF, block_size=256), {}, None),
        ("flash_attn", dict(HALF, block_size=128), {}, "block size that is a multiple of 256, got 128"),
        ("vllm3", dict(HALF, block_size=48), {}, None),
        ("vllm3", dict(HALF, block_size=8), {}, "multiple of 16, got 8"),
        ("flash_attn.cute", dict(HALF, block_size=64), {}, "multiple of 128, got 64"),
        ("flash_attn.cute", dict(HALF, block_size=128, dim=256), {}, "head_dim of at most 128"),
        ("flash_attn_interface", dict(HALF, dim=84), {}, "head_dim of at most 256 that is a multiple of 8, got 84"),
        ("flash_attn_interface", {}, {}, "takes float16 and bfloat16, got float32"),
        ("flash_attn_interface", HALF, {"k_scale": torch.ones(1)}, "takes scales only for"),
        (
            "flash_attn_interface",
            HALF,
            {"k_cache": torch.zeros(2, 16, 2, 64).to(torch.float8_e4m3fn)},
            "got float8_e4m3fn beside bfloat16",
        ),
    ],
)
def test_what_flash_attention_refuses(monkeypatch, package, options, change, reason):
    monkeypatch.setattr(flash_attn, "variant", lambda device: variant(package))
    for arguments, accepts, function in (
        (example(**options), flash_attn.accepts_prefill, flash_attn.attention_prefill),
        (decode_example(**options), flash_attn.accepts_decode, flash_attn.attention_decode),
    ):
        got = flat(accepts)(**{**arguments, **change})
        assert got is None if reason is None else reason in got
        if reason is not None:
            with pytest.raises(ValueError) as error:
                flat(function)(**{**arguments, **change})
            assert str(error.value) == got


def test_what_flashinfer_refuses(monkeypatch):
    assert flat(flashinfer.accepts_prefill)(**example(**HALF)) is None
    assert flat(flashinfer.accepts_decode)(**decode_example(**HALF)) is None
    assert "takes float16 and bfloat16" in flat(flashinfer.accepts_prefill)(**example())
    assert "head_dim of 64, 128, 256, got 96" in flat(flashinfer.accepts_decode)(**decode_example(dim=96, **HALF))
    assert "scales" in flat(flashinfer.accepts_decode)(**decode_example(**HALF), v_scale=torch.ones(1))
    few = decode_example(n=3, **HALF)
    assert flat(flashinfer.accepts_decode)(**few) == "FlashInfer's decode takes one query token a sequence, got 3"
    with pytest.raises(ValueError, match="takes one query token a sequence, got 3"):
        flat(flashinfer.attention_decode)(**few)
    strided = example(**HALF)
    strided["k_cache"] = torch.zeros(9, 16, 4, 64, dtype=torch.bfloat16)[:, :, :2]
    assert "contiguous cache" in flat(flashinfer.accepts_prefill)(**strided)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, cache = torch.empty(3, 6, 64, **HALF, device="meta"), torch.empty(4, 16, 2, 64, **HALF, device="meta")
    q_cuda = types.SimpleNamespace(dtype=q.dtype, shape=q.shape, device=CUDA)
    assert "CUDA graph cannot record" in flashinfer.accepts_prefill(
        q_cuda, PagedKV(cache, cache, torch.zeros(3, 2), torch.ones(3), 32)
    )
    assert not any(op.providers["flashinfer"].capturable for op in (attention_decode, attention_prefill))


def test_support_is_needed_first():
    reason = flat(flash_attn.accepts_prefill)(**example(**HALF))
    assert reason is not None and reason == flash_attn.support(CPU)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"soft_cap": 3.0}, {"window": 1, "soft_cap": 3.0}])
@pytest.mark.parametrize("package", STAND_INS)
def test_calls(monkeypatch, package, options):
    name, functions = STAND_INS[package]
    stand_in(monkeypatch, name, **functions)
    module = flashinfer if package == "flashinfer" else flash_attn
    if module is flash_attn:
        monkeypatch.setattr(flash_attn, "variant", lambda device: variant(package))
    shape = dict(HALF, block_size=256)
    for declared, arguments in (
        (attention_prefill, example(**shape)),
        (attention_prefill, example((1, 1), (1, 300), **shape)),
        (attention_prefill, example((2, 3), (0, 40), **shape)),
        (attention_decode, decode_example(**shape)),
        (attention_decode, decode_example((0, 300), **shape)),
        *((attention_decode, decode_example((3, 300), n, **shape)) for n in (2, 5, 20) if module is flash_attn),
    ):
        got = flat(getattr(module, declared.name))(**arguments, **options)
        torch.testing.assert_close(got, flat(declared.native)(**arguments, **options))


@pytest.mark.parametrize("options", [{}, {"window": 7, "soft_cap": 3.0, "scale": 0.3}])
@pytest.mark.parametrize("declared, make, lens, other_lens", PLANNED)
def test_a_plan_is_made_once(monkeypatch, declared, make, lens, other_lens, options):
    """What `planned` gives runs again and again: on other queries and caches, without a look at lengths or blocks,
    beside other plans.
    """
    stand_in(monkeypatch, *STAND_INS["flashinfer"][:1], **STAND_INS["flashinfer"][1])
    whole, planned = declared.providers["flashinfer"].fn, declared.providers["flashinfer"].planned_fn
    arguments, others = ({**make(*n, **HALF), **options} for n in (lens, other_lens))
    q = arguments["q"]
    arguments["q"] = torch.cat([q, q], 1)[:, : q.shape[1]]  # strided: what is made contiguous is read at each call
    run, run_other = flat(planned)(**arguments), flat(planned)(**others)
    expected_other = flat(declared.native)(**others)
    torch.testing.assert_close(flat(whole)(**others), expected_other)
    plans = Wrapper.plans
    for factor in (1.0, -0.5):
        for name in ("q", "k_cache", "v_cache"):
            arguments[name].mul_(factor)
        expected = flat(declared.native)(**arguments)
        kept = {name: arguments[name].clone() for name in ("context_lens", "block_table")}
        for name in kept:
            arguments[name].fill_(1)
        results = [run(), run()]
        for name, value in kept.items():
            arguments[name].copy_(value)
        torch.testing.assert_close(run_other(), expected_other)
        for got in results:
            torch.testing.assert_close(got, expected)
        assert results[0].data_ptr() != results[1].data_ptr()
    assert Wrapper.plans == plans


@pytest.mark.parametrize("declared, arguments", [(attention_prefill, example()), (attention_decode, decode_example())])
def test_a_plan_refuses_what_a_call_does(monkeypatch, declared, arguments):
    stand_in(monkeypatch, "flashinfer")
    planned = declared.providers["flashinfer"].planned_fn
    with pytest.raises(ValueError, match="takes float16 and bfloat16"):
        flat(planned)(**arguments)
    halved = {k: v.bfloat16() if k in ("q", "k_cache", "v_cache") else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match="window: expected None or a whole number"):
        flat(planned)(**halved, window=0)
    none = {**halved, "q": halved["q"][:0]}
    for name in ("block_table", "context_lens"):
        none[name] = none[name][:0]
    if declared is attention_prefill:
        none["cu_seqlens_q"] = none["cu_seqlens_q"][:1]
    assert flat(planned)(**none)().shape == (0, 6, 64)


@pytest.mark.parametrize("package", ["flash_attn", "flashinfer"])
def test_bad_arguments(monkeypatch, package):
    """Are those of the ops; and there may be no query."""
    stand_in(monkeypatch, package)
    monkeypatch.setattr(flash_attn, "variant", lambda device: variant("flash_attn"))
    module = flashinfer if package == "flashinfer" else flash_attn
    shape = dict(HALF, block_size=256)
    assert flat(module.attention_prefill)(**example((0,), (3,), **shape)).shape == (0, 6, 64)  # no queries
    decode, prefill = decode_example(**shape), example(**shape)
    for fn, arguments in ((module.attention_decode, decode), (module.attention_prefill, prefill)):
        with pytest.raises(ValueError, match="window: expected None or a whole number of tokens from 1 to .*, got 0"):
            flat(fn)(**arguments, window=0)
        with pytest.raises(ValueError, match="context_lens: sequence 0 has length 3000"):
            flat(fn)(**{**arguments, "context_lens": torch.full_like(arguments["context_lens"], 3000)})
    with pytest.raises(
        ValueError, match=r"q: expected \[n \* 3, num_heads, head_dim\], .* 3 sequences .* got \[2, 6, 64\]"
    ):
        flat(module.attention_decode)(**{**decode, "q": decode["q"][:2]})
    with pytest.raises(ValueError, match="max_query_len: expected at least 9, the query tokens of sequence 2, got 8"):
        flat(module.attention_prefill)(**{**prefill, "max_query_len": 8})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [dict(heads=16, kv_heads=8, dim=128, block_size=256), dict(heads=14, kv_heads=2, dim=64, block_size=256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"soft_cap": 20.0}])
@pytest.mark.parametrize("module", [flash_attn, flashinfer])
def test_against_float64(module, options, shape, dtype):
    if (reason := module.support(CUDA)) is not None:
        pytest.skip(reason)
    for declared, arguments in (
        (attention_prefill, example((300, 1, 129), (300, 700, 1000), **shape, dtype=dtype, device=CUDA)),
        (attention_decode, decode_example((300, 1, 1000), **shape, dtype=dtype, device=CUDA)),
        *(
            (attention_decode, decode_example((300, 1, 1000), n, **shape, dtype=dtype, device=CUDA))
            for n in (2, 8, 40)
            if module is flash_attn
        ),
    ):
        reason = flat(getattr(module, declared.name.replace("attention", "accepts")))(**arguments, **options)
        if reason is not None:
            pytest.skip(reason)
        got = flat(getattr(module, declared.name))(**arguments, **options).double()
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()
        }
        expected = flat(declared.native)(**wide, **options)
        assert (got - expected).norm() / expected.norm() < (1e-3 if dtype == torch.float16 else 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("declared, make, lens, other_lens", PLANNED)
@pytest.mark.parametrize("heads", [dict(heads=16, kv_heads=8), dict(heads=32, kv_heads=8)])
def test_a_plan_in_a_graph(declared, make, lens, other_lens, heads):
    """Of the real FlashInfer: replays see new queries and caches, and other plans beside it do not matter."""
    if (reason := flashinfer.support(CUDA)) is not None:
        pytest.skip(reason)
    planned = declared.providers["flashinfer"].planned_fn
    arguments, others = (make(*n, **heads, **HALF, dim=128, block_size=256, device=CUDA) for n in (lens, other_lens))
    run, run_other = flat(planned)(**arguments), flat(planned)(**others)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(), run_other()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got, got_other = run(), run_other()
    for factor in (1.0, -0.5):
        for name in ("q", "k_cache", "v_cache"):
            arguments[name].mul_(factor)
        graph.replay()
        torch.testing.assert_close(got, flat(declared.native)(**arguments), rtol=3e-2, atol=1e-2)
        torch.testing.assert_close(got_other, flat(declared.native)(**others), rtol=3e-2, atol=1e-2)

"""vLLM's attention with our decode kernel, on stand-ins of vLLM's interfaces; benchmarks/vllm_tokens.py is on a GPU."""

import importlib
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.adapters import vllm as plugin
from nanovllm.kernels import attention_decode
from nanovllm.kernels.ops import PagedKV
from nanovllm.kernels.triton.counters import buffers
from tests.adapters import vllm_stand_in

NAME = "nanovllm.adapters.vllm_attention"
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 64
SCALE = DIM**-0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
pytestmark = pytest.mark.triton


@pytest.fixture
def attention(monkeypatch):
    """The module, whose kernel takes whatever the one for Hopper would; the interpreter runs the one for any GPU."""
    monkeypatch.setenv(plugin.VARIABLE, "")
    vllm_stand_in.install(monkeypatch)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    assert plugin.serve(["attention_decode"]) == ["attention_decode"]
    module = importlib.import_module(NAME)
    from nanovllm.kernels.triton.attention.decode_hopper import refused

    monkeypatch.setattr(module, "takes", lambda call: refused(call) is None)
    yield module
    sys.modules.pop(NAME, None)


def step(lens, **changes):
    """What vLLM tells of a step with one token of each request, and a cache with blocks in a random order."""
    generator = torch.Generator().manual_seed(len(lens))
    num_blocks, width = 12, 4
    table = torch.stack([torch.randperm(num_blocks, generator=generator)[:width] for _ in lens]).int()
    layout = num_blocks, BLOCK, KV_HEADS, 2 * DIM  # in memory; vLLM's view of it has the heads first
    cache = torch.randn(layout, generator=generator).half().to(DEVICE).transpose(1, 2)
    lengths = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    given = {"num_actual_tokens": len(lens), "max_query_len": 1, "causal": True, "block_table": table.to(DEVICE),
             "seq_lens": lengths, "max_seq_len": max(lens)} | changes  # fmt: skip
    return SimpleNamespace(**given), cache, torch.randn(len(lens), HEADS, DIM, generator=generator).half().to(DEVICE)


def run(attention, given, cache, q, **options):
    metadata = attention.Builder().build(options.pop("common", 0), given)
    impl = attention.Impl(HEADS, DIM, SCALE, KV_HEADS, **options)
    out = torch.full_like(q, 7)
    return impl.forward(None, q, None, None, cache, metadata, out), metadata


@pytest.mark.parametrize("soft_cap", [0, 20.0])
@pytest.mark.parametrize("lens", [[1], [250, 3, 64, 65, 0]], ids=str)
def test_a_decode_step(attention, lens, soft_cap):
    given, cache, q = step(lens)
    out, metadata = run(attention, given, cache, q, logits_soft_cap=soft_cap)
    assert metadata.unscheduled  # FlashAttention is not asked for a schedule
    torch.testing.assert_close(out, expected(given, cache, q, soft_cap or None), rtol=0, atol=2e-2)


def expected(given, cache, q, soft_cap=None):
    keys, values = (x.transpose(1, 2).contiguous() for x in (cache[..., :DIM], cache[..., DIM:]))
    kv = PagedKV(keys, values, given.block_table, given.seq_lens, 256)
    return attention_decode.native(q, kv, SCALE, None, soft_cap)


@pytest.mark.gpu
def test_a_graph_as_vllm_captures_it(attention):
    """Warmed up with the shortest sequences, captured on the stream that `torch.cuda.graph` makes, then replayed.

    Padding has a length of 0.
    """
    given, cache, q = step([1] * 5)
    metadata, impl = attention.Builder().build(0, given), attention.Impl(HEADS, DIM, SCALE, KV_HEADS)
    out = torch.full_like(q, 7)
    with torch.inference_mode():
        impl.forward(None, q, None, None, cache, metadata, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            impl.forward(None, q, None, None, cache, metadata, out)
            stream = torch.cuda.current_stream().cuda_stream
    assert (q.device, stream) in buffers  # whose zeros were not written by the capture
    for lens in ([250, 3, 64, 65, 0], [1, 256, 0, 2, 127]):
        given.seq_lens.copy_(torch.tensor(lens))
        q.copy_(torch.randn_like(q))
        graph.replay()
        torch.testing.assert_close(out, expected(given, cache, q), rtol=0, atol=2e-2)


def test_a_graph_is_replayed_with_longer_sequences(attention, monkeypatch):
    """What is launched follows from the width of the block table, not from the longest sequence at the capture."""
    seen, own = [], attention.attention_decode
    monkeypatch.setattr(attention, "attention_decode", lambda *args, **kw: (seen.append(args[1]), own(*args, **kw))[1])
    run(attention, *step([1, 1]))
    assert seen[0].max_context_len == 4 * BLOCK


@pytest.mark.parametrize(
    "changes, options",
    [
        ({"max_query_len": 2}, {}),
        (
            {"num_actual_tokens": 40, "seq_lens": torch.ones(40, dtype=torch.int32, device=DEVICE)},
            {},
        ),  # larger than any graph
        ({"num_actual_tokens": 1}, {}),  # a request without a token
        ({"causal": False}, {}),
        ({"mm_prefix_range_tensor": torch.zeros(2, 1, 2)}, {}),
        ({"rswa_prefix_lens": torch.zeros(2)}, {}),
        ({}, {"sliding_window": (31, 0)}),
        ({}, {"common": 64}),
    ],
    ids=str,
)
def test_other_steps_and_layers_are_flash_attentions(attention, changes, options):
    given, cache, q = step([5, 9], **changes)
    assert run(attention, given, cache, q, **options)[0] == "FlashAttention"


def test_other_caches_are_flash_attentions(attention, monkeypatch):
    given, cache, q = step([5, 9])
    for other in (cache.bfloat16(), cache.contiguous(), cache[..., :DIM], cache[None]):
        assert run(attention, given, other, q)[0] == "FlashAttention"
    monkeypatch.setattr(attention.Builder, "use_full_cuda_graph", False)  # a launch costs the host more than it saves
    assert run(attention, given, cache, q)[0] == "FlashAttention"


def test_it_is_registered_and_taken_back(attention, caplog):
    flash = vllm_stand_in.AttentionBackendEnum.FLASH_ATTN
    assert flash.get_path() == f"{NAME}.Backend"
    assert attention.Backend.get_impl_cls() is attention.Impl and attention.Backend.get_builder_cls().build
    assert [attention.Backend.get_preferred_block_size(n) for n in (16, 64, 128, 48)] == [64, 64, 128, 48]
    assert attention.Builder._cudagraph_support == "uniform"  # no graph of a step with prompts
    plugin.take_back()
    assert not flash.is_overridden()
    vllm_stand_in.OVERRIDES[flash] = "theirs.Backend"
    with caplog.at_level(logging.WARNING, "vllm.plugins.nanovllm"):
        assert plugin.serve(["attention_decode"]) == []
    assert "FLASH_ATTN is replaced already, by theirs.Backend" in caplog.text


def test_it_must_be_named(attention):
    assert "attention_decode" not in plugin.ops_asked_for("1", "")
    assert plugin.ops_asked_for("attention_decode,rms_norm", "") == ("rms_norm", "attention_decode")


def test_a_vllm_that_keeps_keys_and_values_apart(attention, monkeypatch, caplog):
    shape = staticmethod(lambda blocks, size, heads, dim: (blocks, 2, size, heads, dim))
    monkeypatch.setattr(vllm_stand_in.FlashAttentionBackend, "get_kv_cache_shape", shape)
    assert plugin.serve(["attention_decode"]) == [] and "vLLM 0.26 does not" in caplog.text

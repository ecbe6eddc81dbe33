"""What the ops of attention say of arguments that do not fit, on a CPU always and on a GPU on request."""

import pytest
import torch

from nanovllm.kernels.ops.checks import values_checked
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.store_kvcache import store_kvcache
from tests.kernels.flat import NATIVE as FLAT
from tests.layers.paged_batch import BLOCK, DIM, KV_HEADS, LENS, batch, slots


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def call(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k_cache": cache.k, "v_cache": cache.v, "block_table": table,
        "context_lens": torch.tensor(LENS, dtype=torch.int32), "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_decode(**{**arguments, **changes})


WIDE = torch.zeros(10, BLOCK, KV_HEADS, DIM)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"q": torch.zeros(3, 3, DIM)}, "q: expected a multiple of the cache's 2 heads, got 3"),
        (
            {"v_cache": torch.zeros(10, BLOCK, KV_HEADS, DIM).half()},
            "v_cache: expected shape, dtype and strides of k_cache",
        ),
        ({"k_cache": torch.zeros(10, KV_HEADS, DIM)}, "k_cache: expected .num_blocks, block_size"),
        ({"k_cache": WIDE.int(), "v_cache": WIDE.int()}, "k_cache: expected float8_e4m3fn, .* got torch.int32"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int64)}, "block_table: expected int32"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, r"block_table: expected int32 \[3, max_blocks\]"),
        ({"context_lens": torch.tensor(LENS)}, "context_lens: expected contiguous int32"),
        ({"window": 0}, "window: expected None or a whole number of tokens from 1 to .*, got 0"),
        ({"window": 2.5}, "window: expected None or a whole number of tokens .*, got 2.5"),
        ({"scale": 0.0}, "scale: expected a positive finite number, got 0.0"),
        ({"scale": float("nan")}, "scale: .* got nan"),
        ({"k_cache": WIDE[:, :, :0], "v_cache": WIDE[:, :, :0]}, "k_cache: expected at least one KV head"),
        ({"v_scale": torch.tensor([1.0, -2.0])}, r"v_scale: expected positive numbers, got \[1.0, -2.0\]"),
        ({"soft_cap": -1.0}, "soft_cap: expected None or a positive finite number, got -1.0"),
        ({"soft_cap": float("inf")}, "soft_cap: expected None or a positive finite number, got inf"),
        (
            {"k_scale": torch.ones(3)},
            r"k_scale: expected contiguous float32 of shape \[1\] or \[2\], got float32 \[3\]",
        ),
    ],
)
def test_wrong_layouts_are_always_named(changes, said):
    with pytest.raises(ValueError, match=said):
        call(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"context_lens": int32(1, 99, 40)},
            r"sequence 1 has length 99, expected 0 to 48 \(3 blocks of 16 in block_table\)",
        ),
        ({"context_lens": int32(1, 9, -4)}, "sequence 2 has length -4"),
        ({"max_context_len": 39}, r"sequence 2 has length 40, expected 0 to 39 \(max_context_len=39\)"),
    ],
)
def test_wrong_lengths_are_named(changes, said):
    call()
    call(context_lens=int32(0, 17, 0))  # padding
    with pytest.raises(ValueError, match=said):
        call(**changes)


def test_wrong_blocks_and_slots_are_named():
    q, k, v, cache, table = batch(torch.float32)
    bad, negative = table.clone(), table.clone()
    bad[2, 1], negative[1, 0] = 10, -1
    unused = table.clone()
    unused[0, 1:] = 99  # past the sequence's only block
    where = slots(table)
    where[5] = 160
    call(block_table=unused)
    with pytest.raises(
        ValueError, match=r"sequence 2 has block 10 in column 1, expected 0 to 9 \(tokens 16 to 31 of 40\)"
    ):
        call(block_table=bad)
    with pytest.raises(ValueError, match="sequence 1 has block -1 in column 0, expected 0 to 9"):
        call(block_table=negative)
    with pytest.raises(ValueError, match=r"slot_mapping: token 5 has slot 160 \(block 10\), expected 0 to 159"):
        store_kvcache.native(k, v, cache.k, cache.v, where)
    where[5] = -1
    with pytest.raises(ValueError, match=r"slot_mapping: token 5 has slot -1 \(block -1\), expected 0 to 159"):
        store_kvcache.native(k, v, cache.k, cache.v, where)
    assert cache.k.isnan().all()


def prefill(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:12], "k_cache": cache.k, "v_cache": cache.v, "block_table": table, "cu_seqlens_q": int32(0, 1, 5, 12),
        "context_lens": int32(*LENS), "max_context_len": 48, "max_query_len": 7, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_prefill(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"cu_seqlens_q": int32(1, 2, 5, 12)}, "cu_seqlens_q: expected 0 as the start of the first run, got 1"),
        (
            {"cu_seqlens_q": int32(0, 6, 5, 12)},
            "cu_seqlens_q: sequence 1 ends at token 5, expected at least 6, where it starts",
        ),
        (
            {"cu_seqlens_q": int32(0, 1, 5, 11)},
            "cu_seqlens_q: sequence 2 ends at token 11, expected 12, the tokens of q",
        ),
        (
            {"cu_seqlens_q": torch.zeros(8).int()[::2]},
            r"cu_seqlens_q: expected contiguous int32 \[4\], got torch.int32 \[4\]",
        ),
        ({"max_query_len": 6}, "max_query_len: expected at least 7, the query tokens of sequence 2, got 6"),
        ({"context_lens": int32(1, 3, 40)}, "context_lens: sequence 1 has length 3, shorter than its 4 query tokens"),
        ({"context_lens": int32(1, -17, 40)}, "context_lens: sequence 1 has length -17"),
    ],
)
def test_runs_that_do_not_fit_are_named(changes, said):
    prefill()
    prefill(context_lens=int32(0, 17, 0))  # padding
    prefill(cu_seqlens_q=int32(0, 0, 5, 12))
    with pytest.raises(ValueError, match=said):
        prefill(**changes)


def test_as_many_queries_for_each_sequence():
    q, _, _, _, _ = batch(torch.float32)
    for wrong in (q[:2], q[:4], q[:0]):
        said = rf"q: expected \[n \* 3, .* of the 3 sequences .* got \[{len(wrong)}, 4, 8\]"
        with pytest.raises(ValueError, match=said):
            call(q=wrong)
    for wrong in (q[:2], q[:6]):  # the other ops take one query token a sequence
        said = rf"q: expected \[3, .* a query token for each .* got \[{len(wrong)}, 4, 8\]"
        for op in (fused, shared):
            with pytest.raises(ValueError, match=said):
                op(q=wrong)


def fused(lens=LENS, rows=48, **changes):
    q, k, v, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k": k[:3], "v": v[:3], "cos_sin_cache": torch.zeros(rows, DIM), "k_cache": cache.k,
        "v_cache": cache.v,
        "block_table": table, "context_lens": int32(*lens), "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.qk_norm_rope_attention(**{**arguments, **changes})


def shared(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k_cache": cache.k, "v_cache": cache.v, "block_table": table, "context_lens": int32(*LENS),
        "groups": torch.zeros(1, 3, dtype=torch.int32), "group_rows": int32(0, 1, 2), "shared_lens": int32(0, 0, 0),
        "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_decode_shared(**{**arguments, **changes})


def test_wrong_positions_are_named():
    q, k, v, cache, table = batch(torch.float32)
    angles, weight, where = torch.zeros(48, DIM), torch.ones(DIM), slots(table)
    for bad in (48, -1):
        positions = torch.zeros(len(q), dtype=torch.int64)
        positions[4] = bad
        said = f"positions: token 4 has position {bad}, expected 0 to 47, the rows of cos_sin_cache"
        with pytest.raises(ValueError, match=said):
            rotary_embedding.native(positions, q, k, angles)
        with pytest.raises(ValueError, match=said):
            qk_norm_rope.native(positions, q, k, weight, weight, 1e-6, angles)
        with pytest.raises(ValueError, match=said):
            qk_norm_rope_store.native(positions, q, k, v, angles, cache.k, cache.v, where)
    assert cache.k.isnan().all()
    fused(rows=40)
    with pytest.raises(
        ValueError, match=r"sequence 2 has length 40, expected 1 to 39 \(39 positions in cos_sin_cache\)"
    ):
        fused(rows=39)
    with pytest.raises(ValueError, match=r"context_lens: sequence 1 has length 0, expected 1 to 48"):
        fused(lens=(1, 0, 40))  # the new token counts
    with pytest.raises(ValueError, match=r"q: expected \[3, num_heads, head_dim\]"):
        fused(q=q[:2], k=k[:2], v=v[:2])


def test_on_a_gpu_values_are_checked_on_request(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cuda = torch.device("cuda", 0)
    for value, expected in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv("NANOVLLM_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("NANOVLLM_CHECK", value)
        assert values_checked(cuda) is expected and values_checked(torch.device("cpu"))
    capturing = True
    assert not values_checked(cuda)

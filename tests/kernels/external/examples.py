"""Arguments of the attention ops."""

import torch

from nanovllm.kernels.external import flash_attn
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from tests.kernels.paged_cache import paged

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
HALF = dict(dtype=torch.bfloat16)
flat = attention_prefill.records.taking_fields  # arguments by name, the fields of the cache one by one


def variant(package):
    return next(v for v in flash_attn.VARIANTS if v.package == package)


def example(
    query_lens=(5, 1, 9),
    lens=(5, 40, 30),
    *,
    heads=6,
    kv_heads=2,
    dim=64,
    block_size=16,
    dtype=torch.float32,
    device=CPU,
):
    """Arguments of attention_prefill; the cache's unused slots hold NaN."""
    k_cache, v_cache, table = paged(lens, kv_heads, dim, block_size, dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(query_lens), heads + 1, dim, generator=generator)[:, :heads]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return dict(
        q=q.to(dtype).to(device), k_cache=k_cache, v_cache=v_cache, block_table=table,
        cu_seqlens_q=starts.to(device),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device), max_query_len=max(query_lens),
        scale=dim**-0.5,
        max_context_len=table.shape[1] * block_size,
    )  # fmt: skip


def decode_example(lens=(5, 40, 30), n=1, **options):
    """n: query tokens a sequence."""
    arguments = example((n,) * len(lens), lens, **options)
    del arguments["cu_seqlens_q"], arguments["max_query_len"]
    return {**arguments, "max_context_len": max(lens)}


PLANNED = [
    (attention_prefill, example, ((2, 3), (0, 40)), ((7,), (30,))),
    (attention_prefill, example, ((5, 1, 9), (5, 40, 30)), ((1, 1), (0, 3))),
    (attention_decode, decode_example, ((0, 300),), ((5, 7, 0),)),
    (attention_decode, decode_example, ((5, 40, 30),), ((90,),)),
]
"""(op, arguments, lengths of the calls that a plan is for, lengths of others)"""

"""Attention over dense caches, compiled for GPUs: in blocks of one token and of 64, without spills."""

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.attention.dense import attention_dense
from tests.kernels.triton.compiled import compiled, launches_of, resources


def call(queries, length, padded, dtype=torch.bfloat16):
    q, k = torch.zeros(2, 16, queries, 128, dtype=dtype), torch.zeros(2, 8, length, 128, dtype=dtype)
    visible = torch.full((2, queries), queries, dtype=torch.int32)
    tokens = torch.arange(length, dtype=torch.int32).repeat(2, 1) if padded else None
    return lambda: attention_dense(q, k, k, visible, 0.1, tokens)


CASES = [
    (f"{queries} queries, length {length}, {'padded' if padded else 'full'}", call(queries, length, padded))
    for queries in (1, 128)
    for length, padded in ((192, False), (192, True), (200, False))
]


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spilling(capability, tmp_path):
    for name, kernel, args, options in launches_of(CASES):
        registers, stack, local = resources(compiled(kernel, args, options, capability), tmp_path)
        assert registers <= 255 and stack <= 64 and local == 0, (name, kernel.__name__, registers, stack, local)

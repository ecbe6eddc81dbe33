"""The compiled prefill kernel for Hopper, run on the CPU from its PTX: its roles against each other, the result
against float64.
"""

import dataclasses
import random
import re

import pytest
import torch

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.triton.attention.launch_helpers import LOG2E
from nanovllm.kernels.triton.attention.prefill_plan import plan_hopper_prefill
from tests.kernels.ptx_arithmetic import UnknownInstruction
from tests.kernels.ptx_emulator import BASE, Machine
from tests.kernels.ptx_launch import Memory, unknown
from tests.kernels.triton.attention.cases import paged, queries, reference
from tests.kernels.triton.attention.hopper_calls import compile_hopper_prefill

WARPS = 12
BEHIND = 4096
"""Bytes behind the output, which nobody may write."""


def emulate(
    query_lens, lens, heads, kv_heads, dim, block_size, programs, seed, plan=None, change=lambda ptx: ptx, **options
):
    """One launch -> (what it wrote, what it should have).

    Args:
        plan: fields of a HopperPrefillPlan that are not the wrapper's. change: of the compiled code. options: of the
            kernel, or `window`, `soft_cap`.
    """
    plan = dataclasses.replace(plan_hopper_prefill(heads // kv_heads, dim, block_size), **(plan or {}))
    binary = compile_hopper_prefill(plan, heads, kv_heads, dim, block_size, **options)
    q = queries(sum(query_lens), heads, dim, torch.bfloat16, seed).contiguous().cpu()
    k, v, table = (x.cpu() for x in paged(lens, kv_heads, dim, block_size, torch.bfloat16, seed))
    starts = torch.tensor([sum(query_lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)
    memory = Memory()
    count = sum(query_lens)
    out = memory.place("out", b"\xff" * (q.numel() * 2 + BEHIND))
    at = [
        memory.place(n, x)
        for n, x in (("table", table), ("starts", starts), ("lens", torch.tensor(lens, dtype=torch.int32)))
    ]
    for name, x in (("q", q), ("k", k), ("v", v)):
        memory.place(name, x)
    counters = memory.place("counters", bytes(8))
    array = memory.finish()
    slots, part = k.shape[0] * block_size, min(block_size, plan.tile)
    descriptors = {1: (memory.words("q", q.numel()).reshape(count, heads, dim), (64 // plan.pack, plan.pack, 64))}
    for i, name in ((8, "k"), (15, "v")):
        descriptors[i] = memory.words(name, k.numel()).reshape(slots, kv_heads, dim), (part, 1, 64)
    items_per_head = count // (128 // plan.pack) + len(lens)
    num_items = items_per_head * (heads // plan.pack)
    parameters = [
        out,
        *[0] * 21,
        *at,
        counters,
        len(lens),
        table.stride(0),
        items_per_head,
        num_items,
        float(dim**-0.5 * LOG2E),
        0,
        0,
    ]
    machine = Machine(change(binary.asm["ptx"]), WARPS, parameters, array, descriptors, binary.metadata.shared)
    programs = min(programs, num_items)
    try:
        for i in range(programs):
            machine.run((i, 0, 0), (programs, 1, 1), random.Random(seed * 100 + i))
    except UnknownInstruction as error:
        unknown(error)
    assert not array[counters - BASE :][:8].any(), "counters"
    assert (array[out - BASE + q.numel() * 2 :][:BEHIND] == 0xFF).all(), "behind the output"
    got = memory.read("out", torch.bfloat16, q.shape)
    given = {n: options[n] for n in ("window", "soft_cap") if n in options}
    return got, reference(q, k, v, table, lens, query_lens, **given)


def check(*case, **options):
    got, expected = emulate(*case, **options)
    assert not got.isnan().any()
    rows = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(0.1)
    assert (got.double() - expected).norm() < 6e-3 * expected.norm() and rows.max() < 2.4e-2


ITEMS = [70, 1, 40], [160, 1, 140], 8, 2, 64, 32
"""Of two heads: sequences of several items, of which one is not needed. With tiles of 64 tokens: of several tiles."""
SMALL = dict(tile=64, stages=2)


@pytest.mark.parametrize("programs, wide", [(1, True), (1, False), (3, True)])
def test_items_of_several_tiles(programs, wide):
    check(*ITEMS, programs, 1, plan=SMALL, WIDE=wide)


@pytest.mark.parametrize("case, options", [
    (([50, 0, 33], [200, 0, 33], 4, 2, 64, 16, 2, 2), dict(plan=dict(tile=64, stages=3), window=70)),
    (([33, 5], [200, 140], 8, 2, 96, 64, 2, 3), dict(window=100)),
    # One buffer of queries; the window is longer than the sequences.
    (([40, 3], [130, 3], 4, 2, 256, 256, 1, 4), dict(window=4096, soft_cap=50.0)),
])  # fmt: skip
def test_options(case, options):
    check(*case, **options)


@pytest.mark.parametrize("fault", ["no arrival", "no wait"])
def test_faults_are_seen(fault):
    """A consumer that never releases its first keys, and consumers that release what their products still read."""

    def change(ptx):
        first, wait, rest = ptx.partition("wgmma.wait_group.sync.aligned")
        if fault == "no arrival":
            before, _, after = rest.partition("mbarrier.arrive.shared")
            before, _, _ = before.rpartition("\n")
            return first + wait + before + "\n" + after.partition("\n")[2]
        return re.sub(r"wgmma.wait_group.sync.aligned \d", "wgmma.wait_group.sync.aligned 9", ptx)

    message = {"no arrival": "wait forever", "no wait": "a copy to where a product reads"}[fault]
    with pytest.raises(AssertionError, match=message):
        emulate(*ITEMS, 1, 1, plan=SMALL, change=change)

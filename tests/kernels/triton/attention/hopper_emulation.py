"""One launch of the decode kernel for Hopper, as `ptx_emulator.py` runs it on the CPU."""

import random

import numpy as np
import torch

from nanovllm.kernels.triton.attention.launch_helpers import LOG2E
from tests.kernels.ptx_emulator import Machine
from tests.kernels.ptx_launch import Memory
from tests.kernels.triton.attention.decode_calls import make
from tests.kernels.triton.attention.hopper_calls import compile_hopper_decode


def emulate(
    lens, plan, group=2, kv_heads=2, head_dim=128, block_size=256, dtype=torch.bfloat16, norm=True, new=True,
    scales=None, window=None, soft_cap=None, ptx=lambda ptx: ptx,
):  # fmt: skip
    """One launch: (arguments, memory, what runs a program or a cluster of them, (heads, programs of a head or
    clusters)).

    Args:
        ptx: changes the compiled code.
    """
    options = dict(scales=scales, window=window, soft_cap=soft_cap)
    given = make(lens, group, kv_heads, head_dim, block_size, dtype, norm, "cpu", new=new, **options)
    binary = compile_hopper_decode(plan, len(lens), group, head_dim, block_size, dtype, new, norm, **options)
    pieces = plan.programs(len(lens), max(*lens, 1))
    clusters = pieces // max(1, plan.cluster)
    num_slots, slot = given["k_cache"].shape[0] * block_size, kv_heads * head_dim
    memory = Memory()
    at = {n: memory.place(n, given[n]) for n in ("q", "k_cache", "v_cache", "block_table", "context_lens")}
    optional = ("k", "v", "cos_sin_cache", "q_weight", "k_weight", "k_scale", "v_scale")
    at |= {n: memory.place(n, given[n]) if n in given else at["q"] for n in optional}
    partials = pieces * kv_heads * group
    sizes = {"out": len(lens) * kv_heads * group * head_dim * 2, "acc": partials * head_dim * 4, "ml": partials * 8}
    at |= {n: memory.place(n, b"\xff" * size) for n, size in sizes.items()}
    at["counters"] = memory.place("counters", bytes(4 * len(lens) * kv_heads))
    array = memory.finish()

    parameters, descriptors = [at[n] for n in ("out", "q", "k", "v")], {}
    # In words of 16 bits.
    head, row = (n * given["k_cache"].element_size() // 2 for n in (head_dim, slot))
    line = min(64, head)
    shape = (num_slots // plan.box, head // line, plan.box, kv_heads, line)
    strides = (plan.box * row, line, row, head, 1)
    for boxes in (plan.tile // plan.box, 1):
        for cache in ("k_cache", "v_cache"):
            words = memory.words(cache, num_slots * row)
            view = np.lib.stride_tricks.as_strided(words, shape, [2 * s for s in strides])
            descriptors[len(parameters)] = view, (boxes, head // line, plan.box, 1, line)
            parameters += [0, *shape, *strides]
    parameters += [
        at[n]
        for n in ("k_cache", "v_cache", "block_table", "context_lens", "k_scale", "v_scale", "acc", "ml", "counters")
    ]
    parameters += [at[n] for n in ("cos_sin_cache", "q_weight", "k_weight")]
    rows = [group * slot, head_dim, slot, head_dim, slot, head_dim]  # strides of q, k and v
    parameters += [
        len(lens),
        *rows,
        head_dim,
        1e-6,
        slot,
        head_dim,
        given["block_table"].stride(0),
        given["scale"] * LOG2E,
    ]
    parameters += [plan.pieces, plan.least, 0, 0]
    arrays = memory.arrays()
    # With a new token the kernel before is the projection, and nobody writes the lengths, the table, angles and
    # weights; else it may be any.
    late = {"q", "k", "v", "k_cache", "v_cache", "out", "acc", "ml", "counters"} if new else set(arrays)
    machine = Machine(
        ptx(binary.asm["ptx"]),
        plan.warps,
        parameters,
        array,
        descriptors,
        binary.metadata.shared,
        arrays,
        late,
        {"k_cache", "v_cache"},
    )

    def program(head, piece):
        """Or a tuple of pieces, whose programs run together."""
        if not plan.cluster:
            programs = [(head, n, 0) for n in (piece if isinstance(piece, tuple) else [piece])]
            return machine.run_cluster(programs, (kv_heads, pieces, 1), random.Random(str(piece)))
        blocks = [(rank, head, piece) for rank in range(plan.cluster)]
        return machine.run_cluster(blocks, (plan.cluster, kv_heads, clusters), random.Random(str(piece)))

    return given, memory, program, (kv_heads, clusters)

"""The compiled products of experts for Hopper, run on the CPU from their PTX: the warps that load against those that
multiply, and the result against float64.
"""

import random
import re

import pytest
import torch
import torch.nn.functional as F

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.triton.moe.hopper_experts import HopperExpertPlan, hopper_experts
from nanovllm.kernels.triton.moe.sort import SortedPairs
from tests.kernels.ptx_arithmetic import UnknownInstruction
from tests.kernels.ptx_emulator import Machine
from tests.kernels.ptx_launch import Memory, unknown
from tests.kernels.triton.compiled import compiled, launches_of

BF16 = torch.bfloat16
WARPS = 12
TOP_K = 3


def sorted_pairs(counts, num_pairs, block, generator):
    """Pairs in any order, of which each expert has `counts`, and others none; two blocks more than are needed."""
    order = torch.randperm(num_pairs, generator=generator).int()
    starts = [sum(counts[:e]) for e in range(len(counts))]
    rows = [
        (e, at, first + n) for e, (first, n) in enumerate(zip(starts, counts)) for at in range(first, first + n, block)
    ]
    order[sum(counts) :] = -1
    return SortedPairs(order, torch.tensor(rows + [(-1, 0, 0)] * 2, dtype=torch.int32).T.contiguous())


def expected(x, weight, pairs, counts, gated):
    """Float64 [pairs, outputs], NaN where nothing is to be written."""
    num_pairs = len(pairs.order)
    outputs = weight.shape[1] // (2 if gated else 1)
    want = torch.full((num_pairs, outputs), float("nan"), dtype=torch.double)
    for place, expert in enumerate(np.repeat(range(len(counts)), counts).tolist()):
        pair = int(pairs.order[place])
        sums = weight[expert].double() @ x[pair // TOP_K if gated else place].double()
        if gated:
            gate, up = sums.chunk(2)
            want[place] = F.silu(gate) * up
        else:
            want[pair] = sums
    return want


def emulate(gated, outputs, size, plan, programs, counts=(70, 0, 130), tokens=100, seed=0, change=lambda ptx: ptx):
    """One launch -> (what it wrote, what it should have)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens if gated else tokens * TOP_K, size, generator=generator).to(BF16)
    weight = torch.randn(len(counts), outputs * (2 if gated else 1), size, generator=generator)
    weight = (weight * size**-0.5).to(BF16)
    pairs = sorted_pairs(counts, tokens * TOP_K, plan.tokens, generator)
    ((_, kernel, args, options),) = launches_of([("", lambda: hopper_experts(x, weight, pairs, TOP_K, gated, plan))])
    named = dict(zip(kernel.arg_names, args)) | {"PDL": True}
    binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, 90)
    memory = Memory()
    placed = {"x": x, "weight": weight, "order": pairs.order, "blocks": pairs.blocks}
    at = {name: memory.place(name, tensor) for name, tensor in placed.items()}
    at["y"] = memory.place("y", b"\xff" * (2 * len(pairs.order) * outputs))
    array = memory.finish()
    parameters, descriptors = [], {}
    for parameter, value in zip(kernel.params, named.values()):
        if parameter.is_constexpr or (type(value) is int and value == 1):
            continue
        if hasattr(value, "block_shape"):
            words = memory.words(parameter.name, placed[parameter.name].numel())
            view = np.lib.stride_tricks.as_strided(words, value.shape, [2 * s for s in value.strides])
            descriptors[len(parameters)] = view, tuple(value.block_shape)
            parameters += [0, *value.shape, *value.strides]
        else:
            parameters.append(at.get(parameter.name, value))
    parameters += [0, 0]
    ptx = change(binary.asm["ptx"])
    late = ("x", "order", "blocks", "y")
    machine = Machine(ptx, WARPS, parameters, array, descriptors, binary.metadata.shared, memory.arrays(), late)
    try:
        for i in range(programs):
            machine.run((i, 0, 0), (programs, 1, 1), random.Random(seed * 100 + i))
    except UnknownInstruction as error:
        unknown(error)
    return memory.read("y", BF16, (len(pairs.order), outputs)), expected(x, weight, pairs, counts, gated)


@pytest.mark.parametrize("case", [
    # Tiles with rows and columns that there are not, an expert without pairs, a half of a block without pairs.
    dict(gated=True, outputs=200, size=192, plan=HopperExpertPlan(slots=3), programs=2),
    dict(gated=False, outputs=320, size=192, plan=HopperExpertPlan(slots=3), programs=2),
    dict(gated=True, outputs=72, size=64, plan=HopperExpertPlan(slots=2), programs=1, counts=(1, 140), seed=1),
    # More programs than tiles.
    dict(gated=False, outputs=40, size=320, plan=HopperExpertPlan(slots=4), programs=7, counts=(129,), seed=2),
])  # fmt: skip
def test_against_float64(case):
    got, want = emulate(**case)
    written = ~want.isnan()
    assert torch.equal(~got.isnan(), written)
    assert (got.double() - want)[written].norm() < 6e-3 * want[written].norm()


@pytest.mark.parametrize("fault", ["no arrival", "no wait"])
def test_faults_are_seen(fault):
    """Warps that never release what they have multiplied, and warps that release what products still read."""

    def change(ptx):
        if fault == "no arrival":
            return re.sub(r"@%p\d+ mbarrier.arrive.shared::cta.b64 _, [^;]*;", "", ptx)
        return re.sub(r"wgmma.wait_group.sync.aligned \d", "wgmma.wait_group.sync.aligned 9", ptx)

    message = {"no arrival": "wait forever", "no wait": "a copy to where a product reads"}[fault]
    with pytest.raises(AssertionError, match=message):
        emulate(False, 320, 192, HopperExpertPlan(slots=3), 1, change=change)

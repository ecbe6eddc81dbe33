"""The compiled decode kernel for Hopper, run on the CPU from its PTX: against float64, with everything poisoned that
nobody may use.
"""

import re
from dataclasses import replace

import pytest
import torch

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan as Plan
from nanovllm.kernels.triton.attention.decode_hopper_plan import plan_hopper_decode
from tests.kernels.ptx_arithmetic import UnknownInstruction
from tests.kernels.ptx_launch import unknown
from tests.kernels.triton.attention.cases import BF16, F16
from tests.kernels.triton.attention.decode_calls import check_caches, expected
from tests.kernels.triton.attention.hopper_emulation import emulate

ERROR = {BF16: 1e-2, F16: 1.5e-3}


def check(lens, plan, order=None, dtype=BF16, **options):
    """The output's bits. order: of the pieces or clusters, first to last unless given."""
    given, memory, program, (kv_heads, pieces) = emulate(lens, plan, dtype=dtype, **options)
    try:
        for piece in order or range(pieces):
            for head in range(kv_heads):
                program(head, piece)
    except UnknownInstruction as e:
        unknown(e)
    got = memory.read("out", dtype, given["q"].shape)
    after = {n: memory.read(n, given[n].dtype, given[n].shape) for n in ("k_cache", "v_cache")}
    want, stored = expected(given, after if options.get("scales") else None)
    error = ((got.double() - want).norm() / (want.norm() + 1e-30)).item()
    assert not got.isnan().any() and error < ERROR[dtype], error
    assert not memory.read("counters", torch.int32, (len(lens) * kv_heads,)).any(), "counters are not left zero"
    check_caches(given | after, given, stored)
    return got


# What a cluster's cases have, which run without clusters, too, is not here again.
CASES = {
    "several pieces, none, and edges of tiles": dict(lens=[300, 1, 0, 65, 130], plan=Plan(3), kv_heads=1),
    "one slot, whole tiles": dict(lens=[70, 2, 129, 16, 17, 255, 256, 257], plan=Plan(6, slots=1, box=64), group=8,
    kv_heads=1),
    "lengths through shared memory": dict(lens=[200, *[1] * 60, 0, 70, 33, 2], plan=Plan(9, warps=2, box=8,
    empty_last=True), kv_heads=1),
    "cached, one sequence": dict(lens=[449], plan=Plan(5, least=2, slots=3, box=16, chunk=8, empty_last=True),
    kv_heads=2, new=False),
    "float8, group 7, fp16, no norm": dict(
        lens=[64, 66], plan=Plan(5, slots=3, box=32), group=7, kv_heads=2, dtype=F16, norm=False, scales=(2, 0)
    ),
    "float8, head_dim 64": dict(lens=[130, 40, 3], plan=Plan(4, slots=3, box=8), group=5, kv_heads=2, head_dim=64,
    block_size=64, scales=(2, 1)),
}  # fmt: skip


# Windows of one token and more, shorter than a tile and longer, that begin within a tile and at its edge.
OPTIONS = {
    "window 66": dict(lens=[300, 1, 0, 65, 130], plan=Plan(4), kv_heads=1, window=66),
    "window and soft cap, float8": dict(
        lens=[130], plan=Plan(4, slots=1), group=5, kv_heads=1, scales=(1, 2), window=97, soft_cap=0.5
    ),
}  # fmt: skip
MORE_OPTIONS = {
    "window 1": dict(lens=[300, 1, 0, 65, 130], plan=Plan(4), kv_heads=1, window=1),
    "window, clusters": dict(lens=[449], plan=Plan(8, chunk=2, cluster=8), kv_heads=1, window=200, new=False),
    "window, cached": dict(lens=[300, 1, 0, 64, 130, 257], plan=Plan(5), kv_heads=2, window=70, new=False),
    "soft cap, head_dim 64, fp16, cached": dict(
        lens=[130, 65], plan=Plan(4, warps=2, slots=4, box=32), group=8, kv_heads=1, head_dim=64, block_size=64,
        dtype=F16, new=False, soft_cap=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_kernel(name):
    check(**CASES[name])


@pytest.mark.parametrize("name", [*OPTIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_OPTIONS)])
def test_windows_and_soft_caps(name):
    check(**(OPTIONS | MORE_OPTIONS)[name])


# Sequences with all pieces in a cluster, across two, of one piece, without tokens; programs without a piece.
CLUSTERS = {
    "one sequence": dict(lens=[449], plan=Plan(8, chunk=8, cluster=8), kv_heads=2, new=False),
    "fewer pieces than programs": dict(lens=[130], plan=Plan(8, chunk=2, empty_last=True, cluster=8), kv_heads=1),
    "sixteen": dict(lens=[513], plan=Plan(16, warps=2, slots=4, box=32, chunk=8, cluster=16), kv_heads=1, new=False),
    "more than a cluster has": dict(lens=[560], plan=Plan(6, warps=1, chunk=1, cluster=2), kv_heads=1),
    "built in for eight": dict(
        lens=[300, 1, 0, 65, 130, 256, 64, 520], plan=plan_hopper_decode(8, 8, 128, 132, new=False), group=4,
        kv_heads=1, new=False
    ),
    "inside and across": dict(lens=[300, 1, 0, 65, 130], plan=Plan(4, cluster=4), kv_heads=1),
    "one warp, group 7, fp16, no norm": dict(
        lens=[64, 40, 30], plan=Plan(6, warps=1, slots=3, cluster=2), group=7, kv_heads=2, dtype=F16, norm=False
    ),
    "eight warps": dict(lens=[300, 200, 140], plan=Plan(4, warps=8, slots=1, box=32, cluster=4), group=1, kv_heads=1),
    "float8": dict(lens=[300, 1, 0, 65, 130], plan=Plan(4, chunk=2, cluster=4), kv_heads=2, scales=(1, 2)),
    "float8, cached, head_dim 64": dict(
        lens=[130, 64], plan=Plan(3, warps=2, slots=4, box=32, cluster=2), group=8, kv_heads=1, head_dim=64, new=False,
        scales=(0, 0)
    ),
}  # fmt: skip


# Those of which the merge in a cluster has no case of its own above: they are compared with float64 alone.
OF_OTHER_ROWS = ("eight warps", "float8", "float8, cached, head_dim 64")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_merges_to_the_same_bits(name):
    case = CLUSTERS[name]
    shape = case.get("head_dim", 128), case.get("block_size", 256), 1 if "scales" in case else 2, case.get("group", 2)
    assert case["plan"].refused(*shape) is None
    plan = case["plan"]
    if (
        len(case["lens"]) == 1 and case["lens"][0] <= 16 * plan.tile * plan.cluster
    ):  # cut into as many pieces as a cluster merges
        plan = replace(plan, pieces=min(plan.pieces, plan.cluster))
    got = check(**case)
    assert name in OF_OTHER_ROWS or torch.equal(got, check(**case | {"plan": replace(plan, cluster=0)}))


@pytest.mark.parametrize("plan", [Plan(6, warps=2, cluster=4), Plan(5, warps=2)], ids=["clusters", "pieces"])
def test_other_batches_on_the_same_counters(plan):
    """As a graph is replayed: other lengths, so that other sequences are cut, or lie in a cluster or across two."""
    given, memory, program, (_, clusters) = emulate([200, 130, 70], plan, kv_heads=1, new=False)
    at = memory.words("context_lens", 6).view(np.int32)
    for lens in ([200, 130, 70], [20, 130, 70], [200, 0, 0], [70, 100, 60], [200, 130, 70]):
        at[:] = lens
        memory.words("out", given["q"].numel())[:] = 0xFFFF
        try:
            for piece in range(clusters):
                program(0, piece)
        except UnknownInstruction as e:
            unknown(e)
        got = memory.read("out", torch.bfloat16, given["q"].shape).double()
        want, _ = expected(given | {"context_lens": torch.tensor(lens, dtype=torch.int32)})
        assert (got - want).norm() < 1e-2 * want.norm(), lens
        assert not memory.read("counters", torch.int32, (3,)).any()


@pytest.mark.parametrize("name", ["two queries", "eight", "one warp", "eight warps, float8"])
def test_programs_that_run_together(name):
    """Each may be the last to arrive, and merges; the bits are those of one program after the other."""
    case = {
        "two queries": dict(lens=[520], plan=Plan(9, slots=1, chunk=2)),
        "eight": dict(lens=[449, 70], plan=Plan(8, warps=2, chunk=1), group=8, new=False),
        "one warp": dict(lens=[150, 40], plan=Plan(12, warps=1, slots=3), group=1),
        "eight warps, float8": dict(lens=[600], plan=Plan(5, warps=8, slots=1, box=32), scales=(1, 2)),
    }[name] | {"kv_heads": 1}
    programs = range(case["plan"].programs(len(case["lens"]), max(case["lens"])))
    assert torch.equal(check(**case, order=[tuple(programs)]), check(**case))


@pytest.mark.parametrize("plan, new", [(Plan(3), False), (Plan(6, cluster=2), True)], ids=["pieces", "clusters"])
def test_bits_do_not_depend_on_the_order_of_the_programs(plan, new):
    case = dict(lens=[330] if plan.cluster else [330, 70], plan=plan, group=3, kv_heads=1, new=new)
    first = check(**case)
    programs = range(plan.programs(len(case["lens"]), 330) // max(1, plan.cluster))
    for order in (programs[::-1], [*programs[1:], 0]):
        assert torch.equal(check(**case, order=order), first)


def _without_barriers(ptx):
    """Those of the loop: a slot's tile is read, asked for anew, and what was read multiplied."""
    begin = ptx.rindex("$L__", 0, ptx.index("cp.async.bulk.tensor", ptx.index("griddepcontrol.wait")))
    end = ptx.index("griddepcontrol.launch_dependents")
    assert begin < ptx.index("ldmatrix") < end
    return ptx[:begin] + ptx[begin:end].replace("bar.sync", "bar.warp.sync") + ptx[end:]


ONE = dict(lens=[700, 3], plan=Plan(1, slots=1), group=2)
MASKED = dict(lens=[300, 0, 130], plan=Plan(2, slots=1), group=3)
CLUSTER = dict(lens=[449], plan=Plan(8, chunk=8, cluster=8), new=False)


def replaced(old, new):
    def change(ptx):
        assert old in ptx
        return ptx.replace(old, new)

    return change


@pytest.mark.parametrize(
    "case, change, said",
    [
        (ONE, _without_barriers, None),  # between reading a slot and filling it again
        (ONE, replaced("and.b32 ", "or.b32 "), None),  # no mask of values that no token has
        (ONE, replaced("movmatrix.sync.aligned.m8n8.trans.b16", "mov.b32"), None),  # weights in another order
        (MASKED, lambda ptx: re.sub(r"griddepcontrol\.wait\s*;", "", ptx), "before the wait for the kernel before"),
        (
            MASKED,
            lambda ptx: re.sub(r"(griddepcontrol)(\.wait\s*;)", r"\1\2\n\1.launch_dependents;", ptx),
            "after the next kernel",
        ),
        (
            MASKED,
            lambda ptx: re.sub(r"@%p\d+ (st\.global)", r"\1", ptx),
            "outside of every array|after the next kernel",
        ),
        (MASKED, lambda ptx: re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx), "outside of every array"),
        (CLUSTER, replaced(", 1040;", ", 1048;"), "wait forever"),  # bytes of a partial result, times how many
        # A wait for nothing.
        (CLUSTER, replaced("], 0;\n        @!there", "], 1;\n        @!there"), "a store to a block that has ended"),
        (
            CLUSTER,
            replaced("barrier.cluster.wait.acquire.aligned;", ""),
            "may not have begun|ends without having waited",
        ),
        (CLUSTER, replaced("barrier.cluster.arrive.relaxed.aligned;", ""), "waits without having arrived"),
        (CLUSTER, replaced("exchange[9216]", "exchange[8336]"), "swizzled lines start at multiples of eight"),
        (CLUSTER, replaced("@first mbarrier.init", "// @first mbarrier.init"), "no barrier there"),
        (CLUSTER, replaced("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32", "// "), "wait forever"),
    ],
)
def test_the_emulator_finds_what_is_missing(case, change, said):
    """A test that could not fail would be none. said: by the emulator; None: the result is wrong, or that."""
    given, memory, program, (_, pieces) = emulate(**case, kv_heads=1, ptx=change)
    try:
        for piece in range(pieces):
            program(0, piece)
    except AssertionError as e:
        assert said is None or re.search(said, str(e)), e
        return
    except UnknownInstruction as e:
        unknown(e)
    assert said is None
    want, _ = expected(given)
    got = memory.read("out", torch.bfloat16, given["q"].shape).double()
    assert got.isnan().any() or (got - want).norm() > 0.05 * want.norm()

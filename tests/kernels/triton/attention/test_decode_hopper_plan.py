"""Decode attention for Hopper without a GPU: what is taken, the plans, which kernel is launched, and what the kernel
compiles to.
"""

import itertools
import re
from dataclasses import replace
from random import Random

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV
from nanovllm.kernels.triton.attention import decode, decode_hopper, decode_hopper_plan
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan as Plan
from nanovllm.kernels.triton.attention.decode_hopper_plan import plan_hopper_decode
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan
from tests.kernels.triton.attention.cases import BF16, F16, attention_decode, qk_norm_rope_attention
from tests.kernels.triton.attention.decode_calls import make, run
from tests.kernels.triton.attention.hopper_calls import compile_hopper_decode, dims_apart, heads_apart
from tests.kernels.triton.compiled import resources


def given_for(lens=(40, 3), group=2, kv_heads=2, head_dim=128, block_size=64, dtype=BF16, **options):
    given = make(list(lens), group, kv_heads, head_dim, block_size, dtype, device="cpu", **options)
    return given["q"], given["k_cache"], given["v_cache"], NewTokens(given["k"], given["v"], given["cos_sin_cache"])


def call_of(q, k_cache, v_cache, new, window=None, soft_cap=None, scales=(None, None), queries=1):
    lens = torch.ones(len(q) // queries, dtype=torch.int32)
    kv = PagedKV(k_cache, v_cache, lens[:, None], lens, 1, *scales)
    return DecodeCall.of(q, kv, 1.0, window, soft_cap, new, queries=queries)


def refused(*given, **options):
    return decode_hopper.refused(call_of(*given, **options))


def takes(*given, **options):
    return decode_hopper.takes(call_of(*given, **options))


def test_what_is_read_early():
    """Not what may just have been written: a weight that is no parameter, or a copy of anything strided."""
    k, table = torch.randn(2, 2, 64), torch.randn(5, 64)
    vector, columns = torch.randn(64), torch.randn(64, 2)
    parameter, column = (torch.nn.Parameter(w, requires_grad=False) for w in (vector, columns[:, 0]))
    for q_weight, k_weight, angles, early in (
        (None, None, table, True),
        (parameter, parameter, table, True),
        (parameter, vector, table, False),
        (parameter, column, table, False),
        (None, None, torch.randn(64, 5).mT, False),
    ):
        strided = NewTokens(k, k.transpose(1, 2).contiguous().transpose(1, 2), angles, q_weight, k_weight, 1e-6)
        call = DecodeCall.of(k, PagedKV(k, k, k, k, 1), 1.0, None, None, strided)
        assert call.early == early
        new = call.new
        given = [w for w in (new.k, new.v, new.cos_sin_cache, new.q_weight, new.k_weight) if w is not None]
        assert (
            all(w.stride(-1) == 1 for w in given) and torch.equal(new.v, k) and torch.equal(new.cos_sin_cache, angles)
        )


def test_what_is_taken(monkeypatch):
    taken = given_for()
    assert not takes(*taken)  # no GPU
    monkeypatch.setattr(decode_hopper, "has_hopper_kernels", lambda device: True)
    q, k_cache, v_cache, new = taken
    for q_like, new_like in ((q, new), (q, None), (heads_apart(q), new), (dims_apart(q), None)):
        assert takes(q_like, k_cache, v_cache, new_like)
    for shape in (
        {"group": 8},
        {"group": 7, "kv_heads": 1},
        {"head_dim": 64, "dtype": F16},
        {"block_size": 256},
        {"lens": [5] * 512},
        {"scales": (0, 0)},
        {"scales": (1, 2), "dtype": F16},
    ):
        assert takes(*given_for(**shape))
    assert takes(q[:0], k_cache, v_cache, None)
    assert not takes(q, k_cache, v_cache, None, queries=2)


def strided(cache, step):
    """The same numbers; rows `step` elements longer."""
    wide = torch.zeros(*cache.shape[:3], cache.shape[3] + step, dtype=cache.dtype)
    wide[..., : cache.shape[3]] = cache
    return wide[..., : cache.shape[3]]


def test_what_is_not_taken_is_said():
    q, k_cache, v_cache, new = given_for()
    scale = torch.ones(1)
    for options in ({"window": 5}, {"soft_cap": 1.0}):
        assert refused(q, k_cache, v_cache, new, **options) is None
    for options in ({"scales": (scale, None)}, {"scales": (None, scale)}):
        assert "expected none of them" in refused(q, k_cache, v_cache, new, **options)
    assert refused(q, k_cache, v_cache, None, queries=2) == "q: expected one query token a sequence, got 2"
    float8 = given_for(scales=(0, 0))
    assert refused(*float8, scales=(scale, scale)) is None
    apart = [strided(c.view(torch.uint8), 8).view(c.dtype) for c in float8[1:3]]
    assert "multiples of 16 bytes" in refused(float8[0], *apart, None)
    for shape, said in (
        ({"dtype": torch.float32}, "the same 16-bit dtype"), ({"head_dim": 80}, "head_dim 64 or 128"),
        ({"head_dim": 256}, "head_dim"),
        ({"group": 9}, "up to 8 query heads a KV head, got 9"), ({"block_size": 32}, "blocks of a multiple of 64"),
        ({"block_size": 96}, "blocks of"), ({"lens": [5] * 513}, "up to 512 sequences, got 513"),
    ):  # fmt: skip
        assert said in refused(*given_for(**shape)), shape
    other = replace(new, v=new.v.to(F16))
    assert "k, v: expected torch.bfloat16" in refused(q, k_cache, v_cache, other)
    assert "16-bit dtype" in refused(q, k_cache.to(F16), v_cache.to(F16), None)
    assert "1 to 2147483647 slots" in refused(q, k_cache[:0], v_cache[:0], None)
    for caches, said in (
        ([c[::2] for c in (k_cache, v_cache)], "blocks one after the other"),
        ([c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k_cache, v_cache)], "blocks one after the other"),
        ([strided(c, 4) for c in (k_cache, v_cache)], "multiples of 16 bytes"),
        ([strided(c, 8)[..., 1:65] for c in (k_cache, v_cache)], "multiples of 16 bytes"),
    ):
        queries = q[..., : caches[0].shape[3]]
        assert said in refused(queries, *caches, None), said
    assert refused(q, *(strided(c, 8) for c in (k_cache, v_cache)), new) is None


def test_a_plan_that_cannot_be_launched_is_said():
    for plan, said in (
        (Plan(0), "pieces: expected 1 to 16383, not 0"), (Plan(2**14), "pieces: "), (Plan(5, least=0),
        "least, slots: expected at least 1"),
        (Plan(5, slots=0), "least, slots: "), (Plan(5, warps=3), "warps: expected 1, 2, 4 or 8"), (Plan(5, warps=8),
        "to divide blocks of 64"),
        (Plan(5, box=128), "box: expected 8, 16, ... up to a tile, 64"), (Plan(5, box=24), "box: "), (Plan(5, warps=1,
        box=32), "box: "),
        (Plan(5, chunk=3), "chunk: "), (Plan(5, slots=7), "slots: 229376 bytes of tiles, more than"),
        (Plan(5, cluster=6), "cluster: expected 0, 2, 4, 8 or 16, not 6"), (Plan(5, warps=1, slots=5, cluster=8),
        "the 48 KiB that need no asking"),
        (Plan(5, warps=2, slots=13, cluster=16), "slots: 212992 bytes of tiles, more than 210944 of"),
    ):  # fmt: skip
        given = make([40, 3], 2, 2, 128, 64, BF16, device="cpu")
        with pytest.raises(ValueError, match=r"^plan\..*" + re.escape(said)):
            qk_norm_rope_attention(**given, plan=plan)
        assert said in plan.refused(128, 64, 2, 2)
    assert Plan(5, slots=13).refused(128, 64, 1) is None and "slots: " in Plan(5, slots=14).refused(128, 64, 1)
    assert Plan(5, slots=6).refused(128, 64) is None and Plan(5, slots=13).refused(64, 64) is None
    assert "cluster: 33792 bytes of partial results" in Plan(5, cluster=8).refused(128, 64, 2, 8)
    assert (
        Plan(5, cluster=8).refused(128, 64, 2, 4) is None and Plan(5, slots=3, cluster=16).refused(64, 64, 2, 4) is None
    )
    given = make([40, 3], 2, 2, 80, 64, BF16, device="cpu", new=False)
    with pytest.raises(ValueError, match="head_dim 64 or 128, got 80; a HopperDecodePlan is for its kernel only"):
        attention_decode(**given, plan=Plan(5))


def test_a_plan_says_which_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(decode_hopper, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(
        decode, "launch_hopper_decode", lambda *args: calls.append(("hopper", args[0].new is None, args[1]))
    )
    monkeypatch.setattr(decode, "launch_decode", lambda call, plan, **_: calls.append(("any", call.new is None, plan)))
    plans = DecodePlan(7, 32, 4, 1, 16, False), Plan(5)
    for new in (True, False):
        given = make([40, 3], 2, 2, 128, 64, BF16, device="cpu", new=new)
        for plan in (None, *plans):
            run(given, plan)
        run(given | {"window": 9})
        assert calls == [
            ("hopper", not new, None),
            ("any", not new, plans[0]),
            ("hopper", not new, plans[1]),
            ("hopper", not new, None),
        ]
        calls.clear()
    few = given | {"q": given["q"].repeat_interleave(3, 0)}
    for plan in (None, plans[0]):
        run(few, plan)
    assert calls == [("any", True, None), ("any", True, plans[0])]
    with pytest.raises(
        ValueError, match="q: expected one query token a sequence, got 3; a HopperDecodePlan is for its kernel only"
    ):
        run(few, plans[1])


def test_built_in_plans_can_be_launched_and_use_the_gpu():
    for num_seqs, kv_heads, dim, sms in itertools.product(
        (*range(1, 513, 7), 512), (1, 2, 3, 8, 32), (64, 128), (78, 114, 132)
    ):
        for itemsize, new, group in itertools.product((2, 1), (True, False), (1, 2, 8)):
            plan = plan_hopper_decode(num_seqs, kv_heads, dim, sms, itemsize, new, group)
            assert plan.refused(dim, 64, itemsize, group) is None
            if 2 * plan.shared_memory(dim, itemsize) > decode_hopper_plan._SHARED and kv_heads * num_seqs <= sms:
                assert (
                    plan.pieces + num_seqs - 1
                ) * kv_heads <= sms  # however the lengths fall, no program waits for another
    most = [row[0] for row in decode_hopper_plan._CACHED]
    assert most == sorted(set(most)) and most[-1] < 9
    for table in (decode_hopper_plan._MEASURED, decode_hopper_plan._FLOAT8):
        most = [row[0] for row in table]
        assert most[-1] is None and most[:-1] == sorted(set(most[:-1]))
    one = plan_hopper_decode(1, 8, 128, 132)
    assert (
        one.least * one.tile <= 256 and 0.9 * 132 <= one.pieces * 8 <= 2 * 132
    )  # about a program a multiprocessor for a long one
    assert plan_hopper_decode(64, 2, 128, 132).tile == plan_hopper_decode(16, 8, 128, 132).tile  # as many programs


def test_there_is_a_program_for_each_piece_whatever_the_lengths():
    random = Random(1)
    for _ in range(3000):
        num_seqs, most = random.choice([1, 2, 5, 30]), random.choice([1, 64, 65, 700])
        plan = Plan(random.choice([1, 2, 7, 40]), random.choice([1, 2, 5]))
        tiles = [max(1, -(-random.randint(0, most) // plan.tile)) for _ in range(num_seqs)]
        share = max(-(-sum(tiles) // plan.pieces), plan.least)  # whole tiles, as the kernel cuts
        assert sum(-(-n // share) for n in tiles) <= plan.programs(num_seqs, most)


# name: (plan, sequences, options)
COMPILED = {
    "1": (plan_hopper_decode(1, 8, 128, 132), 1, {}),
    "8": (plan_hopper_decode(8, 8, 128, 132), 8, {}),
    "64, group 8, fp16": (plan_hopper_decode(64, 8, 128, 132), 64, {"group": 8, "dtype": F16, "norm": False,
    "release": False}),
    "256": (plan_hopper_decode(256, 8, 128, 132), 256, {}),
    "8 warps": (Plan(33, 1, 8, 1, 32), 8, {}),
    "cached 1": (plan_hopper_decode(1, 8, 128, 132, new=False), 1, {"new": False}),
    "float8 32, scales, group 8, fp16": (plan_hopper_decode(32, 8, 128, 132, 1), 32, {"scales": (1, 2), "group": 8,
    "dtype": F16}),
    "float8 dim 64": (plan_hopper_decode(32, 8, 64, 132, 1), 32, {"scales": (2, 1), "head_dim": 64, "block_size": 64}),
    "cached, cluster of 16": (Plan(16, 1, chunk=8, cluster=16), 1, {"new": False}),
    "cached, cluster of 8, group 4": (replace(plan_hopper_decode(8, 8, 128, 132, new=False), cluster=8), 8,
    {"new": False, "group": 4}),
    "float8, cluster of 8": (replace(plan_hopper_decode(8, 8, 128, 132, 1), cluster=8), 8, {"scales": (1, 2)}),
    "dim 64, cluster of 4, group 7": (Plan(33, 1, 1, 4, cluster=4), 8, {"head_dim": 64, "group": 7, "block_size": 64,
    "dtype": F16}),
    "window and soft cap, cached": (plan_hopper_decode(64, 8, 128, 132, new=False), 64,
    {"window": 4096, "soft_cap": 50.0, "new": False}),
    "window and soft cap, float8": (plan_hopper_decode(32, 8, 128, 132, 1), 32,
    {"window": 4096, "soft_cap": 50.0, "scales": (1, 2)}),
}  # fmt: skip


# One of each kind of code; the others differ from them by their plans, dtypes and head dims.
QUICK = ("8", "cached, cluster of 8, group 4", "float8 32, scales, group 8, fp16", "window and soft cap, cached")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMPILED]
)
def test_compiles_without_spills(name, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    plan, count, options = COMPILED[name]
    binary = compile_hopper_decode(plan, count, **options)
    registers, stack, local = resources(binary, tmp_path)
    assert stack == local == 0 and registers <= 176, (registers, stack, local)
    head_dim, new = options.get("head_dim", 128), options.get("new", True)
    itemsize = 1 if "scales" in options else 2
    assert 0 < binary.metadata.shared - plan.shared_memory(head_dim, itemsize) <= 4096
    ptx = binary.asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")

    def count_of(pattern, text=ptx):
        return len(re.findall(pattern, text))

    # A whole tile of keys and of values, or the boxes of a part of one.
    each = 2 + (2 * plan.tile // plan.box if plan.tile > plan.box else 0)
    # Before the wait the ring is asked for, and read what the projection does not write; without a new token nothing
    # is.
    requests, loads = r"cp\.async\.bulk\.tensor", r"ld\.global"
    assert count_of(requests) == (plan.slots + 1) * each
    assert count_of(requests, ptx[:wait]) == (plan.slots * each if new else 0)
    assert (count_of(loads, ptx[:wait]) > plan.slots) if new else not count_of(loads, ptx[:wait])
    assert count_of(r"st\.global|red\.(global|async)|atom\.", ptx[:wait]) == 0
    # A product for 16 dims of the scores, and one for 16 dims of the output; no operand is moved through shared memory.
    assert count_of(r"mma\.sync") == head_dim // 8
    assert count_of(r"ldmatrix[^\n]*x4\.trans") == head_dim * itemsize // 32 and count_of("movmatrix") == 2
    assert count_of(r"griddepcontrol\.launch_dependents") == (
        0 if not options.get("release", True) else 4 if new else 2
    )
    # Of a cluster: one variable, whose size keeps dynamic shared memory at a multiple of 1,024, and nothing where there
    # is none.
    group = options.get("group", 2)
    exchanged = [plan.exchange(head_dim, group)] if plan.cluster else []
    assert [int(n) for n in re.findall(r"\.shared \.align 1024 \.b8 exchange\[(\d+)\]", ptx)] == exchanged
    assert all(n % 1024 == 0 for n in exchanged)
    for once in (
        r"mapa\.shared::cluster",
        r"barrier\.cluster\.arrive",
        r"barrier\.cluster\.wait",
        r"fence\.mbarrier_init",
        r"try_wait\.parity\.acquire\.cluster",
    ):
        assert count_of(once) == bool(plan.cluster), once
    # Of a thread 16 bytes at a time, of a row its maximum and sum; less than four warps have several rows each.
    turns = max(1, 4 // plan.warps) if plan.cluster else 0
    assert count_of(r"st\.async[^\n]*\.v4\.b32") == turns * head_dim // 64
    assert count_of(r"st\.async[^\n]*\.v2\.b32") == turns and count_of(r"st\.async") == turns * (1 + head_dim // 64)


def test_clusters_are_launched_where_the_launcher_is_known(monkeypatch):
    """One grid of clusters, and the plan without them for any other launcher."""
    pytest.importorskip("triton.experimental.gluon")
    given = make([300, 40, 3], 2, 2, 128, 64, BF16, device="cpu", new=False)
    launched = []
    monkeypatch.setattr(decode_hopper, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(
        decode_hopper, "launch_clusters", lambda *args, **options: launched.append((args[1:3], options["CLUSTER"]))
    )

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, options["CLUSTER"]))

    monkeypatch.setattr(decode_hopper, "gluon_kernel", lambda name: (Kernel(), lambda *args: args))
    for known in (True, False):
        monkeypatch.setattr(decode_hopper, "launches_clusters", lambda known=known: known)
        for plan in (Plan(5, cluster=4), Plan(5)):
            run(given, plan)
    # 300 tokens are at most 5 pieces, so there are 7 programs, 8 in clusters of 4.
    assert launched == [(((1, 2, 2), 4), 4), ((2, 7), 0), ((2, 7), 0), ((2, 7), 0)]


def test_a_plan_has_a_cluster_only_where_it_can_exchange():
    table = (1, (1.0, 1, 4, 2, 32, 8, False, 16)), (8, (4.0, 4, 4, 3, 32, 8, True, 8)), (None, (1.0, 1, 4, 2, 16, 4))
    found = {}
    for count, group, new in itertools.product((1, 8, 64), (2, 4, 8), (True, False)):
        plan = plan_hopper_decode(count, 8, 128, 132, 2, new, group, table)
        assert plan.refused(128, 64, 2, group) is None
        found[count, group] = plan.cluster
    clusters = [found[count, group] for count in (1, 8, 64) for group in (2, 4, 8)]
    assert clusters == [16, 0, 0, 8, 8, 0, 0, 0, 0]

"""Decode attention on a Hopper GPU: against float64, in graphs, and again and again. Without a GPU:
`test_decode_hopper_plan.py`, and `test_decode_hopper_ptx.py`, which runs the compiled kernel.
"""

import functools
import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.triton import counters
from nanovllm.kernels.triton.attention import decode
from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan as Plan
from nanovllm.kernels.triton.gemm import hopper_product
from tests.kernels.triton.attention.cases import BF16, F16, attention_decode, mixed, qk_norm_rope_attention
from tests.kernels.triton.attention.decode_calls import check_call, copied, make, run
from tests.kernels.triton.attention.hopper_calls import dims_apart, heads_apart, tokens_apart
from tests.kernels.triton.common import graph_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]
ERROR = {BF16: 1e-2, F16: 1.5e-3}
EDGES = [0, 1, 2, 16, 17, 63, 64, 65, 66, 129, 255, 256, 257, 258, 4000]


# name: (lens, group, kv_heads, head_dim, block_size, dtype, norm, plan[, scales of a float8 cache[, options]])
SHAPES = {
    **{f"group {g}": (EDGES + mixed(10, 700), g, h, 128, 256, BF16, True, None) for g, h in ((1, 8), (2, 8), (3, 3), (4,
    8), (7, 2), (8, 4))},
    "fp16, no norm": (EDGES, 2, 8, 128, 256, F16, False, None),
    "dim 64, blocks of 64": (EDGES, 3, 3, 64, 64, BF16, True, None),
    "dim 64, fp16": (EDGES, 7, 2, 64, 128, F16, True, None),
    "blocks of 64": (EDGES, 4, 2, 128, 64, BF16, True, None),
    **{f"{n} sequences": (mixed(n, 900, n), 2, 8, 128, 256, BF16, True, None) for n in (1, 2, 3, 8, 9, 33, 64, 65, 128,
    256, 300, 512)},
    "one of 1": ([1], 2, 8, 128, 256, BF16, True, None),
    "one of 4000": ([4000], 2, 8, 128, 256, BF16, True, None),
    "one of 0": ([0], 2, 8, 128, 256, BF16, True, None),
    **{f"one of {n} in a cluster": ([n], 2, 8, 128, 256, BF16, True, Plan(16, 1, chunk=8, cluster=16)) for n in (1, 100,
    513, 4000)},
    "one of 4000 in a cluster of 8, group 4": ([4000], 4, 8, 128, 256, BF16, True, Plan(8, 1, chunk=8, cluster=8)),
    "dim 64, group 7, fp16, in clusters": ([500] * 8 + [90, 0], 7, 2, 64, 128, F16, False, Plan(20, 1, cluster=4)),
    "long beside short": ([4000] + [5] * 40, 2, 8, 128, 256, BF16, True, None),
    **{f"window {n}": (EDGES + mixed(30, 900), 2, 8, 128, 256, BF16, True, None, None, dict(window=n))
       for n in (1, 64, 100, 512)},
    "soft cap": (EDGES, 4, 8, 128, 256, BF16, True, None, None, dict(soft_cap=0.5)),
    "window and soft cap, float8": (EDGES, 4, 8, 128, 256, BF16, True, None, (1, 2), dict(window=100, soft_cap=0.5)),
    "one of 4000, window": ([4000], 2, 8, 128, 256, BF16, True, None, None, dict(window=512)),
}  # fmt: skip
PLANS = [
    Plan(1), Plan(33, 999), Plan(200, 1), Plan(33, 2, slots=3, box=32), Plan(33, 1, slots=1, box=64), Plan(5, 3,
    slots=6, box=16),
    Plan(66, 1, warps=2, slots=4), Plan(66, 2, warps=1, slots=3), Plan(20, 1, warps=8, slots=1, box=128), Plan(20, 1,
    warps=8, slots=3, box=16),
    Plan(40, 1, slots=2, box=8, chunk=1), Plan(400, 1, slots=2, chunk=8), Plan(66, 4, slots=3, box=32, empty_last=True),
    Plan(33, 1, cluster=8), Plan(33, 1, chunk=8, empty_last=True, cluster=16), Plan(66, 2, warps=1, slots=3, cluster=2),
    Plan(40, 1, warps=8, slots=1, box=32, chunk=2, cluster=4),
]  # fmt: skip
for _plan in PLANS:
    SHAPES[str(_plan)] = EDGES + mixed(20, 600, 5), 2, 8, 128, 256, BF16, True, _plan
    if _plan.refused(128, 256, 1, 2) is None:
        SHAPES[f"float8 {_plan}"] = EDGES + mixed(20, 600, 5), 2, 8, 128, 256, BF16, True, _plan, (0, 0)
SHAPES |= {
    **{f"float8, group {g}": (EDGES + mixed(10, 700), g, h, 128, 256, BF16, True, None, s)
       for g, h, s in ((1, 8, (0, 0)), (2, 8, (1, 2)), (3, 3, (2, 1)), (4, 8, (0, 1)), (5, 2, (1, 0)), (7, 2, (2, 2)),
       (8, 4, (1, 1)))},
    "float8, fp16, no norm": (EDGES, 2, 8, 128, 256, F16, False, None, (2, 2)),
    "float8, dim 64, blocks of 64": (EDGES, 3, 3, 64, 64, BF16, True, None, (2, 0)),
    "float8, dim 64, box 8": (EDGES + mixed(20, 600, 5), 7, 2, 64, 256, F16, True, Plan(40, 1, slots=2, box=8, chunk=1),
    (0, 2)),
    **{f"float8, {n} sequences": (mixed(n, 900, n), 2, 8, 128, 256, BF16, True, None, (0, 0)) for n in (1, 2, 8, 33, 64,
    128, 256, 512)},
    "float8, one of 4000": ([4000], 2, 8, 128, 256, BF16, True, None, (1, 2)),
    "float8, one of 0": ([0], 2, 8, 128, 256, BF16, True, None, (0, 0)),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """Which kernels the ops launch."""
    seen = []
    for name in ("launch_hopper_decode", "launch_decode"):
        original = getattr(decode, name)
        monkeypatch.setattr(decode, name, lambda *a, n=name, f=original, **k: seen.append(n) or f(*a, **k))
    return seen


def of_turns():
    """(name, whether with new tokens): both, but of a plan and of other float8 caches one by turns. With a float8 cache
    a plan has what it has not without.
    """
    for i, name in enumerate(SHAPES):
        plan, float8 = SHAPES[name][7], name.startswith("float8")
        turn = PLANS.index(plan) + float8 if plan in PLANS else i
        for new in (turn % 2 == 0,) if float8 or plan in PLANS else (True, False):
            yield pytest.param(name, new, id=f"{name}-{'new' if new else 'cached'}")


@pytest.mark.parametrize("name, new", list(of_turns()))
def test_shapes(name, new, poison, launches):
    *shape, plan, scales, options = *SHAPES[name], *(None, {})[len(SHAPES[name]) - 8 :]
    given = make(*shape, new=new, scales=scales, **options)
    check_call(given, plan, error=ERROR[given["q"].dtype])
    assert set(launches) == {"launch_hopper_decode"}


@pytest.mark.parametrize("new", [True, False], ids=["new", "cached"])
def test_any_strides(new, poison, launches):
    """Heads of q, k and v apart, or dims that are; caches of some of the heads, or with room between tokens; tables
    in wider ones.
    """
    given = make(EDGES, 2, 4, 128, 256, BF16, new=new)
    wanted = run(copied(given))
    for name, turn in itertools.product("qkv" if new else "q", (heads_apart, tokens_apart, dims_apart)):
        turned = copied(given) | {name: turn(given[name])}
        assert turned[name].stride() != given[name].stride() and torch.equal(run(turned), wanted)
    wide = given["block_table"].new_full((len(EDGES), 40), 2**30)
    wide[:, 3 : 3 + given["block_table"].shape[1]] = given["block_table"]
    assert torch.equal(run(copied(given) | {"block_table": wide[:, 3:]}), wanted)
    for shape, part in (((0, 0, 8, 0), (..., slice(2, 6), slice(None))), ((0, 0, 0, 64), (..., slice(128)))):
        used = dict(given)
        for name in ("k_cache", "v_cache"):
            cache = torch.full(
                [n + more for n, more in zip(given[name].shape, shape)], float("nan"), dtype=BF16, device="cuda"
            )
            used[name] = cache[part]
            used[name].copy_(given[name])
        assert torch.equal(run(used), wanted)
    assert set(launches) == {"launch_hopper_decode"}


def test_what_the_kernel_does_not_take_has_the_other_one(launches):
    given = make([300, 17], 2, 8, 128, 256, BF16)
    calls = [given | {"k_scale": torch.ones(1, device="cuda")}]
    calls.append(make([300, 17], 9, 2, 128, 256, BF16, norm=False))
    calls.append(make([300, 17], 2, 2, 128, 32, BF16, new=False))
    calls.append(make([5] * 513, 1, 2, 128, 64, BF16, new=False))
    one = make([300, 17], 2, 8, 128, 256, BF16, new=False)
    calls.append(one | {"q": one["q"].repeat_interleave(2, 0)})
    for call in calls:
        run(copied(call))
    assert launches == ["launch_decode"] * len(calls)
    with pytest.raises(ValueError, match="k_scale, v_scale: expected none of them but with a cache of"):
        run(copied(calls[0]), Plan(33))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_cached_tokens_that_the_kernel_before_stored(count):
    """`store_kvcache` and then `attention_decode`, as layers without the fused op call them, many times in a graph."""
    from nanovllm.kernels import all_ops

    store = all_ops()["store_kvcache"].providers["triton"].fn
    given = make([230 + 11 * i for i in range(count)], 2, 8, 128, 256, BF16, spare=1, new=False)
    given["max_context_len"] = 2048
    at = (given["context_lens"] - 1).long()
    rows = torch.arange(count, device="cuda")
    slots = given["block_table"][rows, at // 256].long() * 256 + at % 256
    tokens = [torch.randn(2, count, 8, 128, device="cuda").to(BF16) for _ in range(20)]

    def steps(wait=False):
        out = []
        for k, v in tokens:
            store(k, v, given["k_cache"], given["v_cache"], slots)
            if wait:
                torch.cuda.synchronize()
            out.append(attention_decode(**given))
            if wait:
                torch.cuda.synchronize()
        return out

    want = steps(wait=True)
    graph, out = graph_of(steps)
    for replay in range(50):
        graph.replay()
        wrong = [i for i, (a, b) in enumerate(zip(out, want)) if not torch.equal(a, b)]
        assert not wrong, (replay, wrong)


def layers(x, given, qkv_weight, out_weight):
    kept = []
    for _ in range(6):
        q, k, v = hopper_product.product(x, qkv_weight).view(len(x), 32, 128).split((16, 8, 8), 1)
        kept.append(qk_norm_rope_attention(**given | {"q": q, "k": k, "v": v}))
        x = hopper_product.product(kept[-1].flatten(1), out_weight)
    return kept


@pytest.mark.parametrize("count, longest", [(1, 4000), (8, 900), (32, 400), (64, 900), (256, 300)])
def test_a_thousand_replays(count, longest):
    """Behind a product that it overlaps with, and before one that overlaps with it: the same bits a thousand times."""
    given = make(mixed(count, longest, 3), 2, 8, 128, 256, BF16)
    qkv_weight = (torch.randn(4096, 1024, device="cuda") / 32).to(BF16)
    out_weight = (torch.randn(1024, 2048, device="cuda") / 45).to(BF16)
    x = torch.randn(count, 1024, device="cuda").to(BF16)
    graph, out = graph_of(functools.partial(layers, x, given, qkv_weight, out_weight))
    graph.replay()
    first = [o.clone() for o in out]
    assert not any(o.isnan().any() for o in first)
    for _ in range(50):
        for _ in range(20):
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, first))
    assert all((c == 0).all() for c in counters.buffers.values()), "counters are not left zero"

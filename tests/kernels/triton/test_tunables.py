"""What can be tuned: every declaration, the plans that some refuse, and that the launched kernel has what was tuned."""

import dataclasses
import functools

import pytest
import torch

triton = pytest.importorskip("triton")
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.source_hash import is_kernel
from nanovllm.kernels.op.tunable import imported
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm.product_plan import plan_product
from nanovllm.kernels.triton.gemm.small_product_plan import MatrixPlan
from nanovllm.tune.launches import recorded
from tests.kernels.config_files import BF16, CPU, entry, write

if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)


def test_every_declaration_is_complete():
    for name, tunable in tunables.ALL.items():
        assert len(tunable.source) == 16 and tunable.name == name and set(tunable.batch) <= set(tunable.key)
        for plan in tunable.classes.values():
            assert plan.__dataclass_params__.frozen and all(f.type in ("int", "bool") for f in dataclasses.fields(plan))
        assert all(is_kernel(imported(kernel)) for kernel in tunable.kernels)


def test_what_a_prefill_may_depend_on_counts_no_batch():
    """The code promises a sequence the same bits whatever is beside it."""
    counts = {"rows", "elements", "tokens", "m", "num_seqs", "num_tokens"}
    for tunable in (tunables.ATTENTION_PREFILL, tunables.ATTENTION_PREFILL_HOPPER):
        assert not tunable.batch and not counts & set(tunable.key)
    for tunable in tunables.ALL.values():
        assert counts & set(tunable.key) <= set(tunable.batch), tunable.name


HOPPER = {"tokens": 128, "outputs": 4096, "size": 1024, "dtype": BF16, "gated": False, "split": True}


@pytest.mark.parametrize(
    "plan, differ, said",
    [
        ((1, 4, 1, 4), {}, "slots: one that is filled again needs another"),
        ((2, 4, 2, 1), {"split": False}, "splits: nothing adds the sums"),
        ((1, 4, 3, 1), {}, "splits, chunks, slots, rounds: 1 x 768 columns of 1024, the others are left out"),
        ((3, 1, 5, 1), {}, "3 x 320 columns of 1024"),
        ((3, 4, 2, 1), {}, "splits: programs without columns"),
        ((2, 2, 4, 2), {}, "splits: programs without columns"),
        ((1, 3, 2, 3), {}, "chunks: expected a power of two"),
        ((1, 2, 5, 2), {}, "chunks, slots: more than the 227 KiB of shared memory"),  # 240 KiB
        ((1, 1, 10, 2), {"tokens": 256}, "chunks, slots: more than the 227 KiB of shared memory"),
        ((1, 1, 6, 3, 256), {"tokens": 256}, "chunks, slots: more than the 227 KiB of shared memory"),
        ((1, 1, 4, 4, 64), {}, "block: expected 128 or 256 tokens, not 64"),
        ((1, 4, 4, 1), {"gated": True, "split": False, "outputs": 4100}, "outputs: 4100 are not groups of eight"),
        ((1, 4, 4, 1), {"dtype": torch.float32}, "dtype, size: only rows of whole tiles of 64 16-bit numbers"),
        ((1, 4, 4, 1), {"dtype": torch.int16}, "dtype, size: "),
        ((1, 4, 5, 1), {"size": 1080}, "dtype, size: "),
    ],
)  # fmt: skip
def test_a_product_for_hopper_refuses_what_cannot_work(plan, differ, said):
    tunable = tunables.HOPPER_PRODUCT
    key = tuple({**HOPPER, **differ}.values())
    with pytest.raises(ValueError, match=said):
        tunable.plan_from_json(dict(zip(("splits", "chunks", "slots", "rounds", "block"), (*plan, 128)[:5])), key)


@pytest.mark.parametrize(
    "plan, differ",
    [
        ((1, 4, 2, 2), {}), ((16, 1, 1, 1), {}), ((2, 1, 9, 1), {}), ((4, 4, 1, 1), {}), ((1, 1, 9, 2),
        {"tokens": 256}),
        ((1, 8, 3, 1), {"tokens": 8, "size": 1536}), ((1, 2, 4, 2), {"gated": True, "split": False, "outputs": 4104}),
        ((1, 1, 25, 1), {"tokens": 8, "dtype": torch.float16, "size": 1600, "split": False}),
    ],
)  # fmt: skip
def test_a_product_for_hopper_takes_what_can(plan, differ):
    """Up to 25 tiles of 8 tokens: 225 KiB."""
    tunable = tunables.HOPPER_PRODUCT
    made = tunable.classes["HopperProductPlan"](*plan)
    key = tuple({**HOPPER, **differ}.values())
    assert tunable.plan_from_json(tunable.plan_to_json(made), key) == made


HOPPER_DECODE = {
    "num_seqs": 64, "kv_heads": 8, "group": 2, "head_dim": 128, "dtype": BF16, "cache_dtype": BF16, "block_size": 64,
    "new": True,
}  # fmt: skip


def test_decode_attention_for_hopper_refuses_what_its_launch_does():
    tunable = tunables.ATTENTION_DECODE_HOPPER
    key, plan = (
        tuple(HOPPER_DECODE.values()),
        {"pieces": 33, "least": 2, "warps": 4, "slots": 3, "box": 16, "chunk": 4, "empty_last": True, "cluster": 8},
    )
    made = tunable.plan_from_json(plan, key)
    assert tunable.plan_to_json(made) == plan and made.refused(128, 64, 2, 2) is None
    for change, said in (
        ({"box": 128}, "box: expected 8, 16"), ({"slots": 7}, "slots: 229376 bytes"), ({"least": 0}, "least"),
        ({"cluster": -2}, "cluster: expected a whole number from 0 on"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            tunable.plan_from_json(plan | change, key)
    key = tuple((HOPPER_DECODE | {"group": 8}).values())
    with pytest.raises(ValueError, match="cluster: 33792 bytes of partial results, more than 20480"):
        tunable.plan_from_json(plan, key)


# --------------------------------------------------------------------------------------------------- reaching the
# launch


def launched(call):
    with recorded() as launches:
        call()
    return launches[0]


def tensors(*shapes, dtype=BF16):
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def attention(num_seqs=4, heads=8, kv_heads=4, dim=64, block=32, prefill=0):
    q, cache = (
        torch.empty((num_seqs * max(1, prefill), heads, dim), dtype=BF16),
        torch.empty((9, block, kv_heads, dim), dtype=BF16),
    )
    table, lens = torch.zeros((num_seqs, 4), dtype=torch.int32), torch.full((num_seqs,), 32, dtype=torch.int32)
    kv = PagedKV(cache, cache, table, lens, 64)
    if prefill:
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * prefill
        return all_ops()["attention_prefill"].providers["triton"].fn(q, kv, starts, prefill, 1.0)
    return all_ops()["attention_decode"].providers["triton"].fn(q, kv, 1.0)


def hopper_attention():
    """As on a Hopper GPU, up to the launch."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.attention.call import DecodeCall
    from nanovllm.kernels.triton.attention.decode_hopper import launch_hopper_decode

    q, cache, table, lens = _kept_for_attention()
    return launch_hopper_decode(DecodeCall(q, PagedKV(cache, cache, table, lens, 64), 1.0))


@functools.cache
def _kept_for_attention():
    lens = torch.full((4,), 32, dtype=torch.int32)
    return *tensors((4, 8, 64), (9, 64, 4, 64)), torch.zeros((4, 4), dtype=torch.int32), lens


def small_product(norm, tokens=2):
    x, residual, weight, scale = tensors((tokens, 64), (tokens, 64), (96, 64), (64,))
    providers = {name: all_ops()[name].providers["triton"].fn for name in ("linear", "add_rms_norm_linear")}
    return (
        providers["add_rms_norm_linear"](x, residual, scale, 1e-6, weight) if norm else providers["linear"](x, weight)
    )


def hopper_product(**options):
    """As on a Hopper GPU, up to the launch.

    The tensors stay, since descriptors of them are told apart by their addresses.
    """
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton.gemm import hopper_product

    return hopper_product.product(*_kept(), **options)


@functools.cache
def _kept():
    return tensors((20, 1024), (96, 1024))


def packed(name, num_bytes, groups):
    """A product with a packed weight [96, 1024]."""
    scale = torch.ones(96, groups, dtype=torch.float16)
    return op(name)(*tensors((3, 1024)), torch.zeros(96, num_bytes, dtype=torch.uint8), scale)


def op(name):
    return all_ops()[name].providers["triton"].fn


def rotary(store, tokens=4):
    q, k, v = tensors((tokens, 8, 64), (tokens, 2, 64), (tokens, 2, 64))
    table, positions, weight = torch.empty(16, 64), torch.zeros(tokens, dtype=torch.int64), torch.empty(64, dtype=BF16)
    if not store:
        return op("rotary_embedding")(positions, q, k, table)
    caches = tensors((4, 16, 2, 64), (4, 16, 2, 64))
    return op("qk_norm_rope_store")(positions, q, k, v, table, *caches, positions, weight, weight, 1e-6)


# tunable, a call, the plan's fields, and the same as constants of the kernel (num_warps, num_stages: options)
CALLS = [
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((4, 64), (64,)), 1e-6), {"rows": 2, "warps": 2}, {"ROWS": 2,
    "num_warps": 2}),
    (tunables.ADD_RMS_NORM, lambda: op("add_rms_norm")(*tensors((4, 64), (4, 64), (64,)), 1e-6), {"warps": 16},
    {"num_warps": 16}),
    (tunables.LAYER_NORM, lambda: op("layer_norm")(*tensors((4, 64), (64,), (64,)), 1e-6), {"warps": 16},
    {"num_warps": 16}),
    # Of many rows or tokens the kernel follows from the plan and the shape.
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((2048, 3072), (3072,)), 1e-6), {"rows": 1, "warps": 2},
    {"PIECES": 6, "BLOCK": 512, "num_warps": 2}),
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((2048, 3072), (3072,)), 1e-6), {"rows": 2, "warps": 4},
    {"ROWS": 2, "BLOCK": 4096, "num_warps": 4}),
    (tunables.LAYER_NORM, lambda: op("layer_norm")(*tensors((2048, 3072), (3072,), (3072,)), 1e-6), {"warps": 8},
    {"BLOCK": 4096, "num_warps": 8}),
    (tunables.ROTARY, lambda: rotary(False, 2048), {"heads": 2, "warps": 8}, {"HEADS": 2, "TOKENS": 1, "num_warps": 8}),
    (tunables.ROTARY, lambda: rotary(False, 2048), {"heads": 4, "warps": 1}, {"HEADS": 4, "num_warps": 1}),
    (tunables.SOFTMAX, lambda: op("softmax")(*tensors((4, 64))), {"rows": 2, "warps": 2}, {"ROWS": 2, "num_warps": 2}),
    (tunables.ACTIVATE_AND_MUL, lambda: op("silu_and_mul")(*tensors((4, 128))), {"block": 32, "warps": 2},
    {"BLOCK": 32, "num_warps": 2}),
    (tunables.ACTIVATION, lambda: op("fused_activation")(*tensors((4, 64)), "silu"), {"block": 64, "warps": 4},
    {"BLOCK": 64, "num_warps": 4}),
    (tunables.ADD_ACTIVATION, lambda: op("fused_add_gelu")(*tensors((4, 64), (64,))), {"block": 32, "warps": 4},
    {"BLOCK": 32, "num_warps": 4}),
    (tunables.MUL_ADD, lambda: op("element_wise_mul_add")(*tensors((4, 64), (64,), (4, 64))), {"block": 32,
    "warps": 4}, {"BLOCK": 32, "num_warps": 4}),
    (tunables.EMBEDDING, lambda: op("embedding")(torch.zeros(3, dtype=torch.int64), *tensors((9, 64))), {"block": 32,
    "warps": 4}, {"BLOCK": 32, "num_warps": 4}),
    (tunables.ROTARY, lambda: rotary(False), {"heads": 2, "warps": 8}, {"HEADS": 2, "num_warps": 8}),
    (tunables.ROTARY_STORE, lambda: rotary(True), {"heads": 2, "warps": 8}, {"HEADS": 2, "num_warps": 8}),
    (tunables.PRODUCT, lambda: op("linear_bias_act")(*tensors((40, 64), (96, 64))),
     {"plan": "StreamPlan", "tokens": 64, "rows": 32, "block_k": 16, "splits": 2, "warps": 2, "stages": 5},
     {"TOKENS": 64, "ROWS": 32, "BLOCK_K": 16, "SPLIT": True, "num_warps": 2, "num_stages": 5}),
    (tunables.PRODUCT, lambda: op("gated_mlp")(*tensors((300, 64), (256, 64), (64, 128))),
     {"plan": "TilePlan", "block_m": 32, "block_n": 16, "block_k": 32, "group_m": 3, "splits": 1, "warps": 2,
     "stages": 5, "tma": False, "flatten": False},
     {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 3, "GATED": True, "num_warps": 2, "num_stages": 5}),
    (tunables.SMALL_PRODUCT, lambda: small_product(True), {"plan": "VectorPlan", "rows": 2, "block": 16, "warps": 1},
     {"ROWS": 2, "BLOCK": 16, "TOKENS": 2, "num_warps": 1}),
    (tunables.SMALL_PRODUCT, lambda: small_product(False), tunables.SMALL_PRODUCT.plan_to_json(MatrixPlan(64, 2, 32)),
     {"ROWS": 64, "SPLIT": 2, "DEPTH": 32, "num_warps": 2}),
    (tunables.HOPPER_PRODUCT, hopper_product, {"splits": 1, "chunks": 2, "slots": 3, "rounds": 3, "block": 128},
     {"CHUNKS": 2, "SLOTS": 3, "ROUNDS": 3, "SPLITS": 1, "TOKENS": 32, "MORE": 0}),
    (tunables.HOPPER_PRODUCT, lambda: hopper_product(split=True), {"splits": 3, "chunks": 1, "slots": 6, "rounds": 1,
    "block": 256},
     {"CHUNKS": 1, "SLOTS": 6, "ROUNDS": 1, "SPLITS": 3}),
    (tunables.PACKED_PRODUCT, lambda: packed("linear_int4", 512, 8), {"rows": 16, "warps": 1, "stages": 2, "splits": 4},
     {"ROWS": 16, "STAGES": 2, "SPLIT": True, "split_words": 64, "num_warps": 1}),
    (tunables.PACKED_PRODUCT, lambda: packed("linear_int8", 1024, 32), {"rows": 16, "warps": 1, "stages": 2,
    "splits": 1}, {"ROWS": 16, "STAGES": 2, "SPLIT": False, "split_words": 512, "num_warps": 1}),
    (tunables.ATTENTION_DECODE, attention, {"pieces": 5, "tile": 16, "warps": 8, "stages": 5, "merge_registers": 2,
    "early": False, "least": 2},
     {"PIECES": 5, "TILE": 16, "STAGES": 5, "num_warps": 8, "num_stages": 5}),
    (tunables.ATTENTION_DECODE_HOPPER, hopper_attention, {"pieces": 7, "least": 3, "warps": 2, "slots": 5, "box": 8,
    "chunk": 2, "empty_last": True, "cluster": 4},
     {"WARPS": 2, "SLOTS": 5, "BOX": 8, "CHUNK": 2, "EMPTY_LAST": True, "CLUSTER": 4, "most_pieces": 7, "least": 3,
     "num_warps": 2}),
    (tunables.ATTENTION_PREFILL, lambda: attention(prefill=8), {"rows": 32, "tile": 16, "warps": 2, "stages": 4},
     {"ROWS": 32, "TILE": 16, "STAGES": 4, "num_warps": 2, "num_stages": 4}),
]  # fmt: skip


@pytest.mark.parametrize("tunable, call, config, expected", CALLS, ids=lambda v: getattr(v, "name", ""))
def test_a_tuned_configuration_reaches_the_launched_kernel(config_folder, tunable, call, config, expected):
    """And without its file the launch is as before."""
    before = launched(call)
    with tunable.using(CPU, (), None) as asked:
        launched(call)
    key = asked[0]
    tuned = entry(tunable, tunable.key_to_json(key), config)
    write(config_folder, tuned)
    after = launched(call)

    def constants(launch):
        return {k: v for k, v in {**launch.arguments, **launch.options}.items() if not isinstance(v, torch.Tensor)}

    assert constants(after) | expected == constants(after)
    assert any(constants(before).get(name) != value for name, value in expected.items())
    # An entry for other versions changes nothing.
    write(config_folder, tuned | {"versions": {}})
    again = launched(call)
    assert again.kernel is before.kernel and constants(again) == constants(before)


def test_products_that_cannot_be_configured_do_not_ask(config_folder):
    with tunables.PRODUCT.using(CPU, (), None) as asked:
        launched(lambda: op("linear_bias_act")(*tensors((4, 64), (96, 64), dtype=torch.float32)))
        launched(lambda: op("linear_bias_act")(torch.empty(4, 64, dtype=BF16), torch.empty(64, 96, dtype=BF16).T))
    assert not asked
    assert plan_product(4, 96, 64, 4, False, True, False, 132).tokens == 16  # as ever

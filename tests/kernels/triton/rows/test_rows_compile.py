"""Every launch that the wrappers of row kernels make, compiled for sm_80, sm_90 and sm_100 without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

import nanovllm.kernels.triton.rows as ops
from nanovllm.hardware import probe_kernels as copying
from nanovllm.kernels.triton import early_start
from nanovllm.kernels.triton.sampling.advance import advance_rows
from nanovllm.kernels.triton.sampling.sample import sample
from tests.kernels.triton.compiled import compiled, in_turn, launches_of, parameter, resources, tensors, wide


def half_wide(ptx, what):
    """As `wide`, of 8 bytes."""
    return len(re.findall(rf"{what}\.global[a-zA-Z0-9_.:]*\.(?:v2\.b32|b64|v2\.f32|v4\.b16)", ptx))


def norm_cases(t):
    yield "rms_norm", lambda: ops.rms_norm(t(8, 4096), t(4096), 1e-6)
    yield "rms_norm of 5120", lambda: ops.rms_norm(t(2048, 5120), t(5120), 1e-6)
    for size in (1024, 3072, 7168, 12288):
        yield f"rms_norm of {size}", lambda n=size: ops.rms_norm(t(2048, n), t(n), 1e-6)
        yield f"layer_norm of {size}", lambda n=size: ops.layer_norm(t(2048, n), t(n), t(n), 1e-6)
    yield "rms_norm of heads", lambda: ops.rms_norm(t(64, 32, 128)[:, :16], t(128), 1e-6)
    yield "rms_norm of a long row", lambda: ops.rms_norm(t(2, 65536), t(65536), 1e-6)
    yield "add_rms_norm", lambda: ops.add_rms_norm(t(8, 1024), t(8, 1024), t(1024), 1e-6)
    yield "add_rms_norm of many", lambda: ops.add_rms_norm(t(4096, 4096), t(4096, 4096), t(4096), 1e-6)
    yield "layer_norm", lambda: ops.layer_norm(t(64, 4096), t(4096), t(4096), 1e-5)
    yield "softmax", lambda: ops.softmax(t(64, 16384))
    yield "shared softmax", lambda: ops.softmax(t(2, 151936))
    yield "long softmax", lambda: ops.softmax(t(1, 151936).expand(1000, -1))
    for p in (0.0, 0.1):
        for rows, size in ((64, 4096), (2048, 4096), (2048, 1280)):
            yield (
                f"chain of {rows}x{size}, p={p}",
                lambda r=rows, n=size, p=p: ops.layernorm_residual_dropout_gelu(
                    t(r, n), t(r, n), t(n), t(n), 1e-5, p, 3
                ),
            )


def elementwise_cases(t):
    yield "silu_and_mul", lambda: ops.silu_and_mul(t(8, 6144))
    yield "silu_and_mul of many", lambda: ops.silu_and_mul(t(4096, 2 * 12288))
    yield "gelu_and_mul", lambda: ops.gelu_and_mul(t(8, 6144), "tanh")
    for kind in ("gelu", "gelu_tanh", "silu", "mish", "relu"):
        yield kind, lambda kind=kind: ops.fused_activation(t(4096, 4096), kind)
    for approximate in ("none", "tanh"):
        yield f"fused_add_gelu, {approximate}", lambda a=approximate: ops.fused_add_gelu(t(16, 128, 4096), t(4096), a)
    yield "fused_add_gelu, full", lambda: ops.fused_add_gelu(t(16, 128, 4096), t(16, 128, 4096))
    yield "mul_add", lambda: ops.element_wise_mul_add(t(16, 128, 4096), t(16, 128, 4096), t(16, 128, 4096))
    yield "mul_add of rows", lambda: ops.element_wise_mul_add(t(16, 128, 4096), t(4096), t(4096))


def attention_cases(t):
    def qkv(tokens, heads=16):
        return t(tokens, heads + 16, 128).split((heads, 8, 8), 1)

    def rotary(tokens, norm, heads=16):
        q, k, _ = qkv(tokens, heads)
        positions, table = torch.zeros(tokens, dtype=torch.int64), torch.empty(4096, 128)
        return (
            ops.qk_norm_rope(positions, q, k, t(128), t(128), 1e-6, table)
            if norm
            else ops.rotary_embedding(positions, q, k, table)
        )

    for tokens in (1, 4096):
        yield f"rotary_embedding of {tokens}", lambda n=tokens: rotary(n, False)
        yield f"qk_norm_rope of {tokens}", lambda n=tokens: rotary(n, True)
    yield "qk_norm_rope of 32 heads", lambda: rotary(4096, True, 32)
    yield "qk_norm_rope of 28 heads and many tokens", lambda: rotary(4096, True, 28)

    def store(tokens, heads, cache_dtype, scales):
        q, k, v = qkv(tokens, heads)
        caches = [torch.empty(9, 16, 8, 128, dtype=cache_dtype)] * 2
        zeros = torch.zeros(tokens, dtype=torch.int64)
        scale = torch.ones(8) if scales else None
        table = torch.empty(4096, 128)
        return ops.qk_norm_rope_store(zeros, q, k, v, table, *caches, zeros, t(128), t(128), 1e-6, scale, scale)

    yield "store", lambda: store(1, 16, t(1).dtype, False)
    for heads in (16, 32):
        yield f"store of many tokens, {heads} heads", lambda h=heads: store(4096, h, t(1).dtype, False)
    yield "float8 store of many tokens", lambda: store(4096, 16, torch.float8_e4m3fn, True)
    slots = torch.zeros(64, dtype=torch.int64)
    yield "store_kvcache", lambda: ops.store_kvcache(*qkv(64)[1:], t(9, 16, 8, 128), t(9, 16, 8, 128), slots)
    yield "embedding", lambda: ops.embedding(slots, t(1000, 1024))


# Every kernel; of bfloat16 half of the launches on sm_90. Elsewhere they take turns.
BF16, F32 = torch.bfloat16, torch.float32
TURNS = {
    (BF16, 90): slice(0, None, 2), (BF16, 80): slice(0, None, 7), (BF16, 100): slice(1, None, 7),
    (F32, 90): slice(2, None, 5), (F32, 80): slice(3, None, 7),
}  # fmt: skip


@pytest.mark.parametrize("dtype, capability", TURNS, ids=str)
@pytest.mark.parametrize("cases", [norm_cases, elementwise_cases, attention_cases])
def test_no_spills_and_wide_accesses(cases, dtype, capability, tmp_path):
    for name, kernel, args, options in in_turn(launches_of(cases(tensors(dtype))), TURNS[dtype, capability]):
        binary = compiled(kernel, args, options, capability)
        registers, stack, local = resources(binary, tmp_path)
        assert stack == local == 0 and registers <= 255, f"{name}: {registers} registers, {stack} stack, {local} local"
        ptx = binary.asm["ptx"]
        assert wide(ptx, "ld"), f"{name}: no 16-byte load"
        # What the programs of a row tell each other is two numbers each; a thread has 4 elements of a token's tile.
        stores = kernel.__name__ == "rotary_tokens_kernel" and "store" in name
        narrow = kernel.__name__ == "_softmax_parts_kernel" or stores
        # Of few tokens a thread of the heads' kernels has 4 elements side by side: more threads, and each has less to
        # norm and rotate.
        few = name in ("rotary_embedding of 1", "qk_norm_rope of 1", "store") and half_wide(ptx, "st")
        assert wide(ptx, "st") or narrow or few, f"{name}: no 16-byte store"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_moves_nothing_between_threads(dtype):
    """It has its random words where it needs them, and draws a counter (19 products) for eight elements."""
    t = tensors(dtype)
    for rows, size in ((64, 4096), (2048, 4096), (2048, 5120)):
        found = []
        for p in (0.0, 0.1):

            def call(r=rows, n=size, p=p):
                return ops.layernorm_residual_dropout_gelu(t(r, n), t(r, n), t(n), t(n), 1e-5, p, 3)

            ((_, kernel, args, options),) = launches_of([("chain", call)])
            ptx = compiled(kernel, args, options, 90).asm["ptx"]
            found.append([len(re.findall(what, ptx)) for what in (r"\.shared", "shfl", "bar.sync", r"mul\.wide\.u32")])
        (*moves, _), (*with_dropout, products) = found
        assert moves == with_dropout, f"{rows}x{size}"
        counters = size / (32 * options["num_warps"]) / (4 if dtype == torch.float32 else 8)
        assert products <= 19 * counters + 4, f"{rows}x{size}: {products} products"


def small_cases(t):
    for size in (1, 2):
        yield f"silu_and_mul of {size}", lambda n=size: ops.silu_and_mul(t(1, 2 * n))
        yield f"gelu of {size}", lambda n=size: ops.fused_activation(t(1, n), "gelu_tanh")
        for approximate in ("none", "tanh"):
            yield f"fused_add_gelu of {size}", lambda n=size, a=approximate: ops.fused_add_gelu(t(1, n), t(n), a)
        yield f"norms of {size}", lambda n=size: ops.layer_norm(ops.rms_norm(t(1, n), t(n), 1e-6), t(n), t(n), 1e-6)
        for p in (0.0, 0.1):
            yield (
                f"chain of {size}, p={p}",
                lambda n=size, p=p: ops.layernorm_residual_dropout_gelu(t(1, n), t(1, n), t(n), t(n), 1e-5, p, 3),
            )


def test_tiles_of_a_few_elements_compile():
    """Arithmetic on pairs of elements must not need a pair."""
    for name, kernel, args, options in launches_of(small_cases(tensors(torch.bfloat16))):
        assert compiled(kernel, args, options, 90).asm["cubin"], name


def dependent_cases(tensor):
    """With parameters as weights: any other is not read early, and its kernel not launched so."""

    def t(*shape):
        return parameter(tensor(*shape)) if len(shape) == 1 else tensor(*shape)

    yield "rms_norm", True, lambda: ops.rms_norm(t(8, 1024), t(1024), 1e-6)
    yield "rms_norm of heads", True, lambda: ops.rms_norm(t(4, 8, 128), t(128), 1e-6)
    yield "rms_norm of many rows in pieces", False, lambda: ops.rms_norm(t(2048, 5120), t(5120), 1e-6)
    yield "add_rms_norm", True, lambda: ops.add_rms_norm(t(32, 4096), t(32, 4096), t(4096), 1e-6)
    yield "add_rms_norm of many rows", True, lambda: ops.add_rms_norm(t(2048, 5120), t(2048, 5120), t(5120), 1e-6)
    yield "layer_norm of many rows", True, lambda: ops.layer_norm(t(2048, 4096), t(4096), t(4096), 1e-6)
    yield "layer_norm of many rows in pieces", False, lambda: ops.layer_norm(t(2048, 5120), t(5120), t(5120), 1e-6)
    for size, early in ((1100, True), (5120, False)):
        yield (
            f"chain of many rows of {size}", early,
            lambda n=size: ops.layernorm_residual_dropout_gelu(t(2048, n), t(2048, n), t(n), t(n), p=0.1),
        )  # fmt: skip
    yield "layer_norm", True, lambda: ops.layer_norm(t(8, 4096), t(4096), t(4096), 1e-6)
    yield "chain", True, lambda: ops.layernorm_residual_dropout_gelu(t(8, 1024), t(8, 1024), t(1024), t(1024))
    yield "softmax", False, lambda: ops.softmax(t(256, 4096))
    yield "softmax of one row by many", False, lambda: ops.softmax(t(1, 65536))
    yield "silu_and_mul", False, lambda: ops.silu_and_mul(t(8, 6144))
    yield "fused_activation", False, lambda: ops.fused_activation(t(256, 4096), "gelu")
    yield "fused_add_gelu", False, lambda: ops.fused_add_gelu(t(64, 3072), t(3072))
    yield "element_wise_mul_add", False, lambda: ops.element_wise_mul_add(t(64, 1024), t(64, 1024), t(1024))
    yield "embedding", False, lambda: ops.embedding(torch.zeros(200, dtype=torch.int64), t(1000, 1024))
    yield (
        "sample",
        False,
        lambda: sample(
            torch.empty(1, 151936, dtype=torch.bfloat16), torch.ones(1), None, None, None, *torch.ones(2, 1).long()
        ),
    )
    yield "advance_rows", False, advance


def test_a_copy_loads_and_stores_16_bytes_at_a_time():
    """Of odd sizes too, but for their last bytes; all loads before the first store.

    Early ones wait before they load.
    """
    plans = copying.copy_plans(dependent_launch=True)
    assert len({plan.early for plan in plans}) == 2
    for plan in plans:
        for num_bytes in (1 << 20, (1 << 20) + 3):
            a, b = (torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
            ((_, kernel, args, options),) = launches_of(
                [(str(plan), lambda a=a, b=b, plan=plan: copying.copy(b, a, plan))]
            )
            assert options["launch_pdl"] == plan.early
            ptx = compiled(kernel, args, options, 90).asm["ptx"]
            wide = re.findall(r"(ld|st)\.global\.v4\.b32", ptx)
            assert wide == ["ld"] * plan.loads + ["st"] * plan.loads, plan
            assert len(re.findall(r"(?:ld|st)\.global", ptx)) - len(wide) == (2 if num_bytes % 16 else 0), plan
            before = ptx[: ptx.index("ld.global")]
            assert ("griddepcontrol.wait" in before) == ("griddepcontrol.launch_dependents" in before) == plan.early


def advance():
    ints, lens = torch.zeros((7, 8), dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    advance_rows(ints[0], ints, lens, torch.zeros((8, 4), dtype=torch.int32), torch.zeros(9, dtype=torch.int64), 16)


def test_dependent_kernels_wait_before_they_read_what_others_write(monkeypatch):
    """Every program waits, once, before all loads but the norms' weights; only the elementwise ones let dependents
    start, right behind it."""
    monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: True)
    elementwise = "silu_and_mul", "fused_activation", "fused_add_gelu", "element_wise_mul_add"
    for case, early_loads, call in dependent_cases(tensors(torch.bfloat16)):
        for name, kernel, args, options in launches_of([(case, call)]):
            assert options["launch_pdl"], name
            ptx = compiled(kernel, args, options, 90).asm["ptx"]
            before, wait, after = ptx.partition("griddepcontrol.wait")
            assert wait and "griddepcontrol.wait" not in after, name
            assert after.count("griddepcontrol.launch_dependents") == (name in elementwise), name
            assert (
                not re.search(r"ld\.global|st\.global", after.partition("griddepcontrol")[0]) or name not in elementwise
            ), name
            # Nothing but arithmetic comes before, so no program takes a way around the wait.
            assert not re.search(r"\bbra\b|\bret;|st\.global|atom|red\.global", before), name
            # The second kernel of two may read what the first has waited for, but past a cache in which older data
            # may be.
            second = kernel.__name__ == "_softmax_pieces_kernel"
            assert bool(re.search(r"ld\.global", before)) == (early_loads or second) and re.search(
                r"ld\.global", after
            ), name
            assert not second or not re.search(r"ld\.global(?!\.cg)", before), name
    t = tensors(torch.bfloat16)
    for rows, size, early in (
        (128, 64, True),
        (129, 64, False),
        (1024, 2048, False),
        (1024, 4096, True),
        (1025, 64, True),
    ):
        weight = parameter(t(size))
        for *_, options in launches_of(
            [("", lambda n=rows, w=weight: ops.add_rms_norm(t(n, len(w)), t(n, len(w)), w, 1e-6))]
        ):
            assert options["launch_pdl"] == early, (rows, size)

    def column(size):
        return parameter(t(size, 2)[:, 1])

    for name, call in (
        ("rms_norm", lambda: ops.rms_norm(t(8, 1024), t(1024), 1e-6)),
        ("add_rms_norm", lambda: ops.add_rms_norm(t(8, 1024), t(8, 1024), t(1024), 1e-6)),
        ("layer_norm", lambda: ops.layer_norm(t(2048, 5120), t(5120), t(5120), 1e-6)),
        ("chain", lambda: ops.layernorm_residual_dropout_gelu(t(2048, 1024), t(2048, 1024), t(1024), t(1024))),
        # Parameters, of which a kernel has just written a copy.
        ("rms_norm", lambda: ops.rms_norm(t(8, 1024), column(1024), 1e-6)),
        ("add_rms_norm", lambda: ops.add_rms_norm(t(8, 1024), t(8, 1024), column(1024), 1e-6)),
        ("layer_norm", lambda: ops.layer_norm(t(2048, 5120), column(5120), column(5120), 1e-6)),
    ):
        for *_, options in launches_of([(name, call)]):
            assert not options["launch_pdl"], f"{name}: reads a weight early that the kernel before may write"
    for *_, options in launches_of([("", lambda: ops.silu_and_mul(t(4096, 6144)))]):
        assert not options["launch_pdl"]

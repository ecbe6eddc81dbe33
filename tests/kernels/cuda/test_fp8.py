"""Products with 8-bit floats in CUDA C++: values on a GPU, the machine code where nvcc is, plans anywhere."""

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.fp8 import linear_fp8
from nanovllm.kernels.cuda.fp8.fp8_cuda_plan import (
    BUFFERS,
    CHUNK,
    LEAST_COLUMNS,
    MAX_TOKENS,
    MAX_WARPS,
    OCTET,
    SHARED_BYTES,
    STAGES,
    WARP_SUMS,
    Fp8CudaPlan,
    blocks_of_a_multiprocessor,
    most_columns,
    most_turns,
    plan_fp8_cuda,
    shared_bytes,
)
from nanovllm.kernels.cuda.packed import linear_packed, product_libraries
from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from tests.kernels.cuda.checks import (
    check_fused,
    check_machine_code,
    replayed,
    resources_of_kernels,
    views_of_1024_columns,
)

BF16, FP16 = torch.bfloat16, torch.float16


SUPPORT = product_libraries.fp8_support


def make(rows, size, kind, device):
    """(weight, scale, their product in float64); the weight has the largest numbers, one scale is 0."""
    weight = torch.randint(0, 256, (rows, size), dtype=torch.uint8, device=device)
    weight[(weight & 0x7F) == 0x7F] ^= 1  # no NaN
    weight = weight.view(torch.float8_e4m3fn)
    blocks = [-(-n // 128) for n in (rows, size)]
    shape = {"row": (rows, 1), "all": (1, 1), "block": blocks, "row of a block": (rows, blocks[1])}[kind]
    scale = torch.rand(shape, device=device) + 0.5
    if scale.numel() > 1:
        scale[-1, -1] = 0
    return weight, scale, dequantise_fp8(weight, scale, torch.float64)


def check(got, x, values, bias=None):
    """Sums are of float32: they are off by a small part of the sum of magnitudes."""
    exact = x.double() @ values.t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ values.abs().t()
    epsilon = torch.finfo(got.dtype).eps
    assert not got.isnan().any() and ((got.double() - exact).abs() <= size * 2**-16 + exact.abs() * epsilon).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "all", "block", "row of a block"])
@pytest.mark.parametrize(
    "rows, size",
    [(1000, 1024), (70, 576), (33, 64), (520, 3904), (24576, 4096), (520, 4160), (1000, 8192), (4096, 12288)],
)
def test_values(rows, size, kind, device, launches):
    weight, scale, values = make(rows, size, kind, device)
    for tokens in (1, 5, 8, 9, 16):
        for dtype in (BF16, FP16):
            x = torch.randn(tokens, size, dtype=dtype, device=device) * 1e-3
            bias = torch.randn(rows, dtype=dtype, device=device)
            first = linear_fp8.fp8_product(x, weight, scale, bias)
            check(first, x, values, bias)
            assert all(torch.equal(first, linear_fp8.fp8_product(x, weight, scale, bias)) for _ in range(3))
            sums = linear_fp8.fp8_product(x, weight, scale, sums=True)
            check(sums.sum(0), x, values)
    assert len(launches) == 50


@pytest.mark.gpu
@pytest.mark.parametrize("rows, size", [(1000, 1024), (4096, 4096), (72, 5120)])
def test_other_plans_give_the_same(rows, size, device):
    """Two chunks a warp where one is usual, and blocks that share columns where none do."""
    chunks = -(-size // CHUNK)
    weight, scale, values = make(rows, size, "block", device)
    for tokens, plans in ((1, ((1, 2), (2, 1), (3, 2))), (8, ((1, 2), (2, 1), (3, 2))), (13, ((2, 1), (3, 1)))):
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        for splits, turns in plans:
            plan = Fp8CudaPlan(splits, -(-chunks // (splits * turns)), turns)
            check(linear_fp8.fp8_product(x, weight, scale, plan=plan), x, values)
            check(linear_fp8.fp8_product(x, weight, scale, sums=True, plan=plan).sum(0), x, values)


@pytest.mark.gpu
def test_tokens_of_any_magnitude(device):
    weight, scale, values = make(200, 1024, "row", device)
    for scales in ([1e30], [1e-30], [1e30, 1, 1e-30, 0], [1e4] * 8, [1, 1e30, 1e-30, 0] * 4):
        x = torch.randn(len(scales), 1024, dtype=BF16, device=device)
        x[:, 100] *= 1000  # a channel that is larger than the others
        x *= torch.tensor(scales, device=device)[:, None].to(BF16)
        other = Fp8CudaPlan(1, 2, 2) if len(x) <= OCTET else Fp8CudaPlan(2, 2, 1)
        for plan in (None, other):
            check(linear_fp8.fp8_product(x, weight, scale, sums=True, plan=plan).sum(0), x, values)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("size", [1024, 4160, 12288])
def test_fused_products_equal_the_separate_ones(size, kind, device, launches):
    weight, scale, _ = make(2 * 648, size, kind, device)
    scale *= size**-0.5 / 64
    values = dequantise_fp8(weight, scale, torch.float64)
    for tokens in (1, 8, 9, 16):
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        check_fused(x, ("fp8", weight, scale, None), linear_fp8.linear_fp8(x, weight, scale), values)
    # For SiLU a block needs all columns.
    assert len(launches) == {1024: 12, 4160: 10, 12288: 8}[size]


@pytest.mark.gpu
def test_any_strides(device, launches):
    weight, scale, values = make(200, 1024, "row", device)
    wide = torch.randn(4, 3000, dtype=BF16, device=device) * 1e-2
    for x in views_of_1024_columns(wide):
        check(linear_fp8.fp8_product(x, weight, scale).view(4, 200), x.reshape(4, 1024), values)
    rows = torch.zeros(200, 1120, dtype=torch.uint8, device=device)
    rows[:, 16:1040] = weight.view(torch.uint8)
    apart = torch.zeros(200, 3, device=device)
    apart[:, 1:2] = scale
    inside = rows[:, 16:1040].view(torch.float8_e4m3fn)
    x = wide[:, :1024]
    assert torch.equal(linear_fp8.fp8_product(x, inside, apart[:, 1:2]), linear_fp8.fp8_product(x, weight, scale))
    assert len(launches) == 6


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_has_the_other_provider(device, launches):
    for tokens, size in ((17, 4096), (4, 4128), (4, 960)):
        weight, scale, values = make(64, size, "row", device)
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        exact = x.double() @ values.t()
        error = (linear_fp8.linear_fp8(x, weight, scale).double() - exact).norm() / exact.norm()
        assert error < 0.01
    assert not launches


@pytest.mark.gpu
def test_a_graph_replays_it_with_other_tokens(device):
    weight, scale, values = make(512, 1024, "row", device)
    x = torch.randn(2, 1024, dtype=BF16, device=device)
    check(replayed(lambda: linear_fp8.fp8_product(x, weight, scale), x), x, values)


def test_numbers_are_those_of_the_source():
    header = (product_libraries.FP8_FOLDER / "interface.cuh").read_text()
    numbers = {"MAX_TOKENS": MAX_TOKENS, "OCTET": OCTET, "MAX_WARPS": MAX_WARPS, "CHUNK": CHUNK, "STAGES": STAGES}
    for name, value in (numbers | {"BUFFERS": BUFFERS, "WARP_SUMS": WARP_SUMS}).items():
        assert f" {name} = {value};" in header


@pytest.mark.parametrize("size", [64, 576, 1024, 4096, 5120, 8192, 8256, 12288, 32768])
@pytest.mark.parametrize("tiles", [1, 64, 256, 1536])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_plans_have_room_for_all_columns(tokens, tiles, size):
    chunks = -(-size // CHUNK)
    for sums in (False, True):
        plan = plan_fp8_cuda(tokens, tiles, size, sums, 132)
        split_chunks = -(-chunks // plan.splits)
        assert plan.warps <= MAX_WARPS and plan.turns <= most_turns(tokens)
        assert split_chunks <= plan.turns * plan.warps < split_chunks + plan.turns  # no idle warp
        assert sums or plan.splits == 1 or size > most_columns(tokens)
        assert not sums or tiles * plan.splits >= 132 or split_chunks <= 2
        blocks = blocks_of_a_multiprocessor(plan, tokens)
        assert blocks * (shared_bytes(plan, tokens) + 1024) <= SHARED_BYTES + 1024 and blocks * plan.warps <= MAX_WARPS


def test_what_is_taken():
    weight = torch.zeros(32, LEAST_COLUMNS, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(MAX_TOKENS, LEAST_COLUMNS, dtype=BF16)
    assert (
        linear_fp8.takes(x, weight) and linear_fp8.takes(x.half(), weight) and linear_fp8.takes(x, weight, gated=True)
    )
    for tokens, matrix in (
        (x.float(), weight),
        (torch.cat([x, x]), weight),
        (x[:0], weight),
        (x[:, :64], weight[:, :64]),
    ):
        assert not linear_fp8.takes(tokens, matrix)
    assert len(linear_packed.num_tokens_linear_packed_silu_and_mul(weight)) == MAX_TOKENS
    assert not linear_packed.num_tokens_linear_packed_silu_and_mul(weight[:, :64])
    weight = torch.zeros(32, 5120, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(MAX_TOKENS, 5120, dtype=BF16)
    assert len(linear_packed.num_tokens_linear_packed_silu_and_mul(weight)) == OCTET
    assert linear_fp8.takes(x, weight) and not linear_fp8.takes(x, weight, gated=True)
    assert linear_fp8.takes(x[:OCTET], weight, gated=True)
    weight = torch.zeros(32, 12288, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.zeros(1, 12288, dtype=BF16)
    assert linear_fp8.takes(x, weight) and not linear_fp8.takes(x, weight, gated=True)
    assert not linear_packed.num_tokens_linear_packed_silu_and_mul(weight)


def test_a_machine_with_the_other_library_alone_runs_what_triton_has(monkeypatch):
    """As one where the library of integers was built, and that has no compiler any more."""
    weight = torch.zeros(32, LEAST_COLUMNS, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x, scale = torch.zeros(2, LEAST_COLUMNS, dtype=BF16), torch.ones(32, 1)
    assert linear_fp8.takes(x, weight) and product_libraries.fp8_support(x.device) is not None
    of_triton = linear_packed.packed_products
    monkeypatch.setattr(of_triton, "packed_product", lambda x, *_: (x.new_zeros(2, 32), True))
    monkeypatch.setattr(of_triton, "linear_packed_add_rms_norm", lambda x, *_: (x, x))
    monkeypatch.setattr(linear_packed, "silu_and_mul", lambda gate_up: gate_up[:, :16])
    assert linear_packed.linear_packed_silu_and_mul(x, "fp8", weight, scale, None).shape == (2, 16)
    residual = torch.zeros(2, 32, dtype=BF16)
    assert linear_packed.linear_packed_add_rms_norm(x, "fp8", weight, scale, None, residual, residual[0], 1e-6)[0] is x


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_machine_code_multiplies_on_tensor_cores(source):
    instructions = "mma.sync.aligned.m16n8k16", "cvt.rn.f16x2.e4m3x2"
    load = "cp.async.cg.shared.global.L2::128B"
    check_machine_code(product_libraries.FP8_FOLDER / f"{source}.cu", "sm_90", instructions, load, wait=str.index)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_x_stays_in_registers(source, tmp_path):
    usage = resources_of_kernels(product_libraries.FP8_FOLDER / f"{source}.cu", "sm_90", tmp_path)
    assert len(usage) == 8  # scales of rows or of blocks; one chunk a warp, the same for sums, two, or one of 16 tokens
    for registers, stack, spilled in usage.values():
        assert registers <= 128 and stack == spilled == 0
    # Those for sums end with another bound of threads: beside a block of 512 there is room for one of 256 threads with
    # 64 registers.
    lean = [registers for name, (registers, *_) in usage.items() if f"Li{32 * (MAX_WARPS + 4)}EEEv" in name]
    assert len(lean) == 2 and max(lean) <= 96

"""`packed_to_fp8` in CUDA C++: codes on a GPU, the machine code where nvcc is, what it takes anywhere."""

import re

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels import all_ops
from nanovllm.kernels.cuda.packed import packed_to_fp8 as rounding
from nanovllm.kernels.cuda.packed import product_libraries
from nanovllm.kernels.ops.packed_to_fp8 import row_factors
from tests.kernels.cuda.checks import make, ptx_of, resources_of_kernels

SUPPORT = product_libraries.packed_support
NATIVE = all_ops()["packed_to_fp8"].native
FP8 = torch.float8_e4m3fn
SOURCE = product_libraries.FOLDER / "to_fp8.cu"


@pytest.fixture
def roundings(monkeypatch):
    """The codes that the kernel wrote, a tensor for each launch."""
    seen = []
    original = rounding.rounding_kernel

    def kernel(device):
        compiled = original(device)
        return lambda *args: seen.append(args[4]) or compiled(*args)

    monkeypatch.setattr(rounding, "rounding_kernel", kernel)
    return seen


def codes_of(tensor):
    return tensor.view(torch.uint8)


def operands_of(rows, size, device, **options):
    (*operands,), values = make("int4", rows, size, device, **options)
    return *operands, size, row_factors(values.abs().amax(1).float())[0]


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "rows, size, group", [(1, 128, 128), (5, 384, 384), (75, 1024, 256), (33, 4224, 128), (2048, 12288, 128)]
)
def test_equal_to_the_bit(rows, size, group, zeros, scale_dtype, device, roundings):
    """Whole rows of scales, one and several groups, rows that are no multiple of four; nothing around is written."""
    operands = operands_of(rows, size, device, group=group, zeros=zeros, scale_dtype=scale_dtype)
    want = codes_of(NATIVE(*operands))
    buffer = torch.full((rows + 2, size), 77, dtype=torch.uint8, device=device)
    got = rounding.packed_to_fp8(*operands, out=buffer[1:-1].view(FP8))
    assert got.data_ptr() == buffer[1].data_ptr() and torch.equal(codes_of(got), want)
    assert bool((buffer[[0, -1]] == 77).all()) and len(roundings) == 1
    fresh = rounding.packed_to_fp8(*operands)
    assert fresh.dtype == FP8 and torch.equal(codes_of(fresh), want) and len(roundings) == 2
    largest = codes_of(fresh) & 0x7F
    assert largest.max() == 0x7E  # 448, and no NaN


@pytest.mark.gpu
def test_subnormals_ties_and_too_large_ones(device, roundings):
    """Every integer times powers of two, with either sign, down to 0 and beyond 448."""
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    weight = (codes | codes.flip(0) << 4).repeat(60, 4)
    scale = torch.exp2(torch.arange(-30.0, 30.0, device=device))[:, None].bfloat16()
    for sign in (1, -1):
        for factor in (1.0, 0.375):
            operands = "int4", weight, scale * sign, None, 128, torch.full((60,), factor, device=device)
            got, want = codes_of(rounding.packed_to_fp8(*operands)), codes_of(NATIVE(*operands))
            assert torch.equal(got, want) and (got & 0x7F).unique().numel() > 10
    assert len(roundings) == 4


@pytest.mark.gpu
def test_strides(device, roundings):
    kind, weight, scale, zero, size, factor = operands_of(40, 512, device, zeros=True)
    want = codes_of(NATIVE(kind, weight, scale, zero, size, factor))
    wide = torch.zeros(40, 512 // 2 + 24, dtype=torch.uint8, device=device)
    wide[:, 8:264] = weight
    spread = factor.repeat_interleave(2)[::2]
    got = rounding.packed_to_fp8(kind, wide[:, 8:264], scale.t().contiguous().t(), zero, size, spread)
    assert torch.equal(codes_of(got), want) and len(roundings) == 1


@pytest.mark.gpu
def test_in_a_graph_behind_what_reads_the_buffer(device):
    """Two weights take turns in one buffer, as layers do."""
    first, second = (operands_of(6144, 4096, device) for _ in range(2))
    wanted = [codes_of(NATIVE(*operands)) for operands in (first, second)]
    out = torch.empty(6144, 4096, dtype=FP8, device=device)
    rounding.packed_to_fp8(*first, out=out)  # compiles

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = []
        for _ in range(4):
            for operands in (first, second):
                rounding.packed_to_fp8(*operands, out=out)
                copies.append(codes_of(out).clone())
    for copy in copies:
        copy.fill_(77)
    graph.replay()
    for i, copy in enumerate(copies):
        assert torch.equal(copy, wanted[i % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("kind, group", [("int8", 128), ("int4", 32), ("int4", 192), ("Q4_K", 128)])
def test_what_stays_with_triton(kind, group, device, roundings):
    operands, values = make(kind, 24, 768, device, group=group)
    factor = row_factors(values.abs().amax(1).float())[0]
    got = rounding.packed_to_fp8(*operands, 768, factor)
    assert torch.equal(codes_of(got), codes_of(NATIVE(*operands, 768, factor))) and not roundings


def test_what_the_kernel_takes():
    (kind, weight, scale, zero), _ = make("int4", 6, 512, torch.device("cpu"))
    took = rounding.kernel_weight(kind, weight, scale, zero, 512)
    assert took is not None and took.step_shift == 0
    of_four, whole = scale[:, :2], scale[:, :1]
    assert rounding.kernel_weight(kind, weight, of_four, zero, 512).step_shift == 1
    assert rounding.kernel_weight(kind, weight, whole, zero, 512).step_shift == 31
    wide = torch.zeros(6, 264, dtype=torch.uint8)
    assert rounding.kernel_weight(kind, wide[:, 8:], scale, zero, 512) is not None
    for other in (
        ("int8", weight, scale, zero, 256),
        ("Q4_K planes", weight, None, None, 512),
        (kind, weight, scale.float(), zero, 512),
        (kind, wide[:, 4:260], scale, zero, 512),  # not at a multiple of 8 bytes
        (kind, torch.zeros(6, 257, dtype=torch.uint8)[:, :256], scale, zero, 512),
        (kind, weight[:0], scale[:0], zero, 512),
        (kind, weight[:, :48], scale[:, :1], zero, 96),
    ):
        assert rounding.kernel_weight(*other) is None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_machine_code(arch, tmp_path):
    """Nothing is spilled, a thread loads 8 bytes and stores 16, and no kernel in front lets it start early."""
    kernels = re.split(r"\.entry ", ptx_of(SOURCE, arch))[1:]
    assert len(kernels) == 4
    for ptx in kernels:
        assert ptx.count("prmt.b32") >= 4 * 12 and "griddepcontrol" not in ptx
        assert ptx.count("st.global.v4.u32") == 4 and len(re.findall(r"ld\.global\.(nc\.)?v2\.u32", ptx)) == 4
    usage = resources_of_kernels(SOURCE, arch, tmp_path)
    assert all(stack == spilled == 0 and registers <= 42 for registers, stack, spilled in usage.values())

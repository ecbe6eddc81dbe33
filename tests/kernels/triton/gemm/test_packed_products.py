"""Products with packed weights against the references in float64."""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.ops import linear_fp8, linear_gguf, linear_int4, linear_int8
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, gguf_planes
from nanovllm.kernels.triton.gemm import packed_products, sum_norm
from nanovllm.kernels.triton.gemm.packed_plan import MAX_TOKENS, PackedPlan, plan_packed_product
from nanovllm.kernels.triton.rows.norm import add_rms_norm
from tests.kernels.triton.common import DEVICE, randn, strided

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("poison")]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
SIXTEEN = [torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched."""
    names = []

    class Recorded:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(packed_products, name)

        def __getitem__(self, grid):
            names.append(self.name)
            return self.kernel[grid]

    for name in ("group_kernel", "part_kernel"):
        monkeypatch.setattr(packed_products, name, Recorded(name))
    return names


def close(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    if not want.numel():
        return
    allowed = RELATIVE[dtype] * want.abs().amax().clamp(min=2.0**-14)
    assert ((got.double() - want).abs() <= allowed).all(), float(((got.double() - want).abs() / allowed).max())


def wide(arguments):
    return {k: v.double() if isinstance(v, torch.Tensor) and v.dtype in RELATIVE else v for k, v in arguments.items()}


def check(op, dtype, **arguments):
    got = getattr(packed_products, op.name)(**arguments)
    close(got, op.native(**{k: v for k, v in wide(arguments).items() if k != "plan"}), dtype)
    return got


def integers(high, *shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=g, dtype=torch.uint8).to(DEVICE)


def scales(*shape, dtype=torch.float16, seed=0):
    """Some of them zero, some subnormal in float16."""
    g = torch.Generator().manual_seed(seed)
    s = torch.rand(shape, generator=g) * 0.02
    return (s * (s > 2e-3) + 2e-6 * (s > 1.8e-2)).to(dtype).to(DEVICE)


def floats(outputs, size, seed=0):
    """Every code but those of NaN."""
    codes = integers(254, outputs, size, seed=seed)
    return (codes + (codes >= 127).to(torch.uint8)).view(FP8)


def packed_rows(name, rows, size, seed=0):
    of = GGUF_TYPES[name]
    blocks = integers(256, rows, size // of.block_size, of.block_bytes, seed=seed)
    at = 0
    for field, n in of.fields:
        if field in ("d", "m"):
            blocks[..., at : at + n] = scales(rows, size // of.block_size, 1, seed=seed + at).view(torch.uint8)
        at += n
    return blocks.flatten(1)


# ---- what is launched, at sizes that fill no tile


@pytest.mark.parametrize("dtype, rows, columns", [(SIXTEEN[0], 1, 0), (SIXTEEN[1], 128, 128)])
@pytest.mark.parametrize("tokens, outputs, size", [(1, 70, 1024), (5, 24, 160), (17, 33, 96), (70, 9, 256)])
def test_fp8(dtype, rows, columns, tokens, outputs, size, launched):
    shape = [-(-n // block) if block else 1 for n, block in ((outputs, rows), (size, columns))]
    scale = scales(*shape, dtype=torch.float32, seed=3) if max(shape) > 1 else torch.full((1, 1), 0.01, device=DEVICE)
    x, bias = strided(randn(tokens, size, dtype=dtype)), randn(outputs, dtype=dtype, seed=1)
    check(linear_fp8, dtype, x=x, weight=floats(outputs, size), scale=scale, bias=bias)
    assert launched == ["group_kernel"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "tokens, outputs, size, group, kernel",
    [
        (1, 70, 1024, 128, "group_kernel"),
        (3, 33, 1024, 256, "group_kernel"),
        (17, 24, 160, 160, "group_kernel"),
        (1, 70, 1024, 32, "part_kernel"),
        (17, 33, 192, 64, "part_kernel"),
        (9, 16, 160, 16, "part_kernel"),
        (5, 20, 120, 24, None),
    ],
)
@pytest.mark.parametrize("dtype, zeros", [(SIXTEEN[0], False), (SIXTEEN[1], True)])
def test_affine(dtype, zeros, bits, tokens, outputs, size, group, kernel, launched):
    op = linear_int4 if bits == 4 else linear_int8
    check(
        op, dtype, x=randn(tokens, size, dtype=dtype), weight=integers(256, outputs, size * bits // 8),
        scale=scales(outputs, size // group), bias=randn(outputs, dtype=dtype, seed=1),
        zero=integers(2**bits, outputs, size // group, seed=5) if zeros else None,
    )  # fmt: skip
    assert launched == ([kernel] if kernel else [])


@pytest.mark.parametrize("name", GGUF_TYPES)
@pytest.mark.parametrize("dtype, tokens, outputs, blocks", [(SIXTEEN[0], 1, 70, 3), (SIXTEEN[1], 17, 21, 5)])
def test_gguf(dtype, tokens, outputs, blocks, name, launched):
    size = GGUF_TYPES[name].block_size * blocks
    weight, kind = gguf_planes(packed_rows(name, outputs, size), name)
    check(linear_gguf, dtype, x=randn(tokens, size, dtype=dtype), weight=weight, kind=kind)
    assert launched == ["part_kernel"]


# ---- layouts, splits, and what runs without these kernels


@pytest.mark.parametrize("rows, warps, splits", [(16, 1, 3), (128, 8, 2)])
def test_plans(splits, rows, warps, launched):
    x, bias = randn(3, 1000 // 32 * 32, dtype=torch.float16), randn(37, dtype=torch.float16, seed=1)
    plan = PackedPlan(rows, warps, 3, splits)
    size = x.shape[1]
    given = dict(x=x, bias=bias, plan=plan)
    check(linear_fp8, x.dtype, weight=floats(37, size), scale=scales(1, 8, dtype=torch.float32) + 1e-3, **given)
    check(linear_int4, x.dtype, weight=integers(256, 37, size // 2), scale=scales(37, size // 32), **given)
    assert launched == ["group_kernel", "part_kernel"]


def test_plans_keep_the_gpu_reading():
    for outputs in (1024, 4096, 6144, 24576):
        plan = plan_packed_product(8, outputs, 4096, 4, False, 132, True)
        assert -(-outputs // plan.rows) * plan.splits >= 128 or plan.splits == 8
    assert plan_packed_product(8, 4096, 512, 4, False, 132, True).splits == 1


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_what_other_kernels_do_not_take(dtype, launched):
    """float32, many tokens, rows of odd lengths, no token, GGUF's blocks as stored."""
    many = MAX_TOKENS + 1
    for tokens, size in [(2, 96)] if dtype == torch.float32 else [(many, 32), (2, 34), (0, 64)]:
        x = randn(tokens, size, dtype=dtype)
        check(linear_fp8, dtype, x=x, weight=floats(5, size), scale=scales(5, 1, dtype=torch.float32, seed=2))
        check(linear_int4, dtype, x=x, weight=integers(256, 5, size // 2), scale=scales(5, 2), zero=integers(16, 5, 2))
        check(linear_int8, dtype, x=x, weight=integers(256, 5, size), scale=scales(5, 2, dtype=torch.bfloat16))
    x = randn(2, 256, dtype=dtype)
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        check(linear_gguf, dtype, x=x, weight=packed_rows(name, 7, 256), kind=name)
    assert not launched


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_gguf_of_many_tokens(name):
    weight, kind = gguf_planes(packed_rows(name, 11, 512), name)
    check(linear_gguf, torch.float32, x=randn(2, 3, 512, dtype=torch.float32), weight=weight, kind=kind)


def test_any_layout_of_x(launched):
    weight, scale = integers(256, 20, 64), scales(20, 1)
    x = randn(6, 2, 128, dtype=torch.bfloat16)
    wide = randn(3, 131, dtype=torch.bfloat16)
    for view in (x, x[::2], x[:, 0], x.transpose(0, 1), wide[:, 1:129], wide[:, 3:131], x[:1, :1].expand(2, 2, 128)):
        check(linear_int4, x.dtype, x=view, weight=weight, scale=scale)
    assert len(launched) == 7


def test_weights_that_are_parts_of_others(launched):
    """Rows of a fused weight; and every other row."""
    weight, scale, zero = integers(256, 24, 64), scales(24, 4), integers(16, 24, 4)
    x = randn(2, 128, dtype=torch.bfloat16)
    for rows in (slice(4, 20), slice(0, 24, 2)):
        check(linear_int4, x.dtype, x=x, weight=weight[rows], scale=scale[rows], zero=zero[rows].contiguous())
    assert launched == ["part_kernel"] * 2


# ---- with the residual addition and a norm


@pytest.fixture
def sums_are_normed(monkeypatch):
    """As on GPUs with dependent launch, whose instructions the interpreter does not know."""
    if DEVICE == "cpu":
        monkeypatch.setattr(packed_products, "norms_sums", lambda device: True)
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(sum_norm, name, lambda: None)


FORMS = {
    "fp8 blocks": lambda rows, size: (
        "fp8", floats(rows, size), scales(-(-rows // 128), -(-size // 128)).float(), None,
    ),
    "fp8 rows": lambda rows, size: ("fp8", floats(rows, size), scales(rows, 1).float(), None),
    "fp8 tensor": lambda rows, size: ("fp8", floats(rows, size), torch.full((1, 1), 0.01, device=DEVICE), None),
    "int4 128": lambda rows, size: ("int4", integers(256, rows, size // 2), scales(rows, size // 128), None),
    "int4 32 zero": lambda rows, size: (
        "int4", integers(256, rows, size // 2), scales(rows, size // 32), integers(16, rows, size // 32, seed=5),
    ),
    "int4 odd group": lambda rows, size: ("int4", integers(256, rows, size // 2), scales(rows, 4), None),
    "int8 128 zero": lambda rows, size: (
        "int8", integers(256, rows, size), scales(rows, size // 128), integers(256, rows, size // 128, seed=5),
    ),
    **{
        name: lambda rows, size, name=name: (*gguf_planes(packed_rows(name, rows, size), name)[::-1], None, None)
        for name in ("Q4_K", "Q6_K", "Q8_0")
    },
    "Q4_K as stored": lambda rows, size: ("Q4_K", packed_rows("Q4_K", rows, size), None, None),
}  # fmt: skip
"""storage, weight, scale, zero."""


def product_of(x, storage, weight, scale, zero, plan):
    if scale is None:
        return packed_products.linear_gguf(x, weight, storage, plan=plan)
    fn = getattr(packed_products, f"linear_{storage}")
    return fn(x, weight, scale, plan=plan) if storage == "fp8" else fn(x, weight, scale, zero, plan=plan)


QUICK = {
    (torch.bfloat16, 1): ("fp8 blocks", "int4 32 zero", "int4 odd group", "Q6_K"),
    (torch.float16, 2): ("fp8 tensor", "int4 128", "Q4_K"),
}
"""(dtype, splits): the forms that are not `slow`."""


@pytest.mark.parametrize(
    "dtype, splits, form",
    [
        pytest.param(dtype, splits, form, marks=() if form in quick else pytest.mark.slow)
        for (dtype, splits), quick in QUICK.items()
        for form in FORMS
    ],
)
def test_the_op_with_a_norm_rounds_as_the_separate_ones_do(dtype, splits, form, sums_are_normed):
    tokens, outputs, plan = (3, 37, PackedPlan(32, 2, 3, 1)) if splits == 1 else (17, 21, PackedPlan(16, 1, 2, splits))
    size = 480 if form == "int4 odd group" else 512
    x = randn(tokens, size, dtype=dtype, scale=0.02)
    given = FORMS[form](outputs, size)
    residual, norm = randn(tokens, outputs, dtype=dtype, seed=1), randn(outputs, dtype=dtype, seed=2)
    kept = residual.clone()
    got = packed_products.linear_packed_add_rms_norm(x, *given, residual, norm, 1e-6, plan=plan)
    want = add_rms_norm(product_of(x, *given, plan), residual, norm, 1e-6, fresh=True)
    for a, b in zip(got, want, strict=True):
        close(a, b.double(), dtype)
    assert torch.equal(residual, kept)


def test_sums_are_added_by_the_kernel_that_norms(launched, monkeypatch, sums_are_normed):
    """With a bias too; unsplit, and where sums are not normed, a norm runs by itself."""
    x, bias = randn(2, 3, 512, dtype=torch.bfloat16), randn(24, dtype=torch.bfloat16, seed=1)
    given, residual = FORMS["int4 128"](24, 512), randn(2, 3, 24, dtype=x.dtype, seed=2)
    norm, finished = randn(24, dtype=x.dtype, seed=3), []
    finish = packed_products.sum_add_rms_norm
    monkeypatch.setattr(packed_products, "sum_add_rms_norm", lambda p, *a: finished.append(len(p)) or finish(p, *a))
    storage, weight, scale, _ = given
    want = linear_int4.native(x.double(), weight, scale.double(), None, bias.double()) + residual.double()
    for splits, normed in ((2, [2]), (1, [])):
        plan = PackedPlan(16, 1, 2, splits)
        got, total = packed_products.linear_packed_add_rms_norm(x, *given, residual, norm, 1e-6, bias, plan=plan)
        close(total, want, x.dtype)
        close(got, torch.nn.functional.rms_norm(want, (24,), norm.double(), 1e-6), x.dtype)
        assert finished == normed
        finished.clear()
    monkeypatch.setattr(packed_products, "norms_sums", lambda device: False)
    again = packed_products.linear_packed_add_rms_norm(
        x, *given, residual, norm, 1e-6, bias, plan=PackedPlan(16, 1, 2, 2)
    )
    close(again[1], want, x.dtype)
    assert not finished and launched == ["group_kernel"] * 3


# ---- numbers


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_code_is_decoded_exactly(dtype):
    """Multiplied by the columns of the unit matrix, weights come out as they are."""
    unit = torch.eye(256, dtype=dtype, device=DEVICE)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2, 1)
    codes[1] = codes[0].flip(0)
    of_floats = torch.where((codes & 127) == 127, 0, codes).view(FP8)
    one = torch.ones(1, 1, device=DEVICE)
    assert torch.equal(packed_products.linear_fp8(unit, of_floats, one).T.float(), of_floats.float())
    got = packed_products.linear_int8(unit, codes, one.expand(2, 1))
    assert torch.equal(got.T.float(), codes.float() - 128)
    for zero in (0, 255):
        zeros = torch.full((2, 1), zero, dtype=torch.uint8, device=DEVICE)
        got = packed_products.linear_int8(unit, codes, one.expand(2, 1), zeros)
        assert torch.equal(got.T.float(), codes.float() - zero)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    unit = torch.eye(512, dtype=dtype, device=DEVICE)
    got = torch.cat([packed_products.linear_int4(x, codes, one.expand(2, 1)) for x in unit.split(256)])
    assert torch.equal(got.T.float(), nibbles.float() - 8)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_zero_scales_give_the_bias(dtype):
    x, bias = randn(3, 128, dtype=dtype, scale=100.0), randn(9, dtype=dtype)
    zero = torch.zeros(9, 1, device=DEVICE)
    assert torch.equal(packed_products.linear_fp8(x, floats(9, 128), zero, bias), bias.expand(3, 9))
    assert torch.equal(packed_products.linear_int4(x, integers(256, 9, 64), zero, None, bias), bias.expand(3, 9))
    weight, kind = gguf_planes(torch.zeros(9, 17 * 8, dtype=torch.uint8, device=DEVICE), "Q8_0")
    assert torch.equal(packed_products.linear_gguf(x, weight, kind, bias), bias.expand(3, 9))


def test_a_wrong_size_or_dtype_is_an_error():
    x, weight, scale = randn(2, 64, dtype=torch.bfloat16), integers(256, 4, 64), scales(4, 1)
    with pytest.raises(ValueError, match=r"x: expected \[..., 128\], as the weight has, not \[2, 64\]"):
        packed_products.linear_int4(x, weight, scale)
    with pytest.raises(ValueError, match=r"bias: expected torch.bfloat16, as x, not torch.float32"):
        packed_products.linear_int8(x, weight, scale, bias=torch.zeros(4, device=DEVICE))
    with pytest.raises(ValueError, match="scale: 3 groups do not divide 64 columns"):
        packed_products.linear_int8(x, weight, scales(4, 3))
    with pytest.raises(ValueError, match="kind: expected"):
        packed_products.linear_gguf(x, weight, "Q2_K")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 200])
def test_real_sizes(tokens):
    x = randn(tokens, 4096, dtype=torch.bfloat16)
    check(linear_fp8, x.dtype, x=x, weight=floats(6144, 4096), scale=scales(48, 32, dtype=torch.float32) + 1e-4)
    check(linear_int4, x.dtype, x=x, weight=integers(256, 6144, 2048), scale=scales(6144, 32))
    weight, kind = gguf_planes(packed_rows("Q4_K", 4096, 4096), "Q4_K")
    check(linear_gguf, x.dtype, x=x, weight=weight, kind=kind)

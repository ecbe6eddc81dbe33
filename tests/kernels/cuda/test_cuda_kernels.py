"""The CUDA C++ kernels: values on a GPU, the machine code where nvcc is, argument checks anywhere."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import cuda
from nanovllm.kernels.cuda import build
from nanovllm.kernels.testing.memory_guard import MemoryGuard

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
# An exponential's relative error grows with its exponent, so results far below this are less exact; float16 is
# subnormal.
TINY = {torch.float32: 1e-20, torch.bfloat16: 1e-30, torch.float16: 1e-6}
FOLDER = Path(build.__file__).parent
SUPPORT = cuda.cuda_support


def phi_tail(x):
    return torch.special.erfc(-x / 2**0.5) / 2


# In float64, and without the cancellation that F.gelu has there too, far from 0.
EXACT = {
    "gelu": lambda x: x * phi_tail(x),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
    "relu": F.relu,
}


def close(got, expected, dtype, roundings=1):
    assert got.dtype == dtype and got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=roundings * RELATIVE[dtype], atol=TINY[dtype])


@pytest.fixture
def guard():
    """Outputs start as NaN before a guard of NaN, which must stay."""
    with MemoryGuard() as guard:
        yield
    assert guard.check() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXACT)
def test_activation_is_right_at_all_magnitudes(device, dtype, kind):
    spread = torch.linspace(-14, 14, 200_001, device=device)
    tiny_to_huge = torch.logspace(-30, 4.5, 5000, device=device)
    x = torch.cat([spread, tiny_to_huge, -tiny_to_huge]).to(dtype)
    close(cuda.fused_activation(x, kind), EXACT[kind](x.double()), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EXACT)
def test_no_nan_at_the_largest_numbers(device, kind):
    for dtype in DTYPES:
        most = torch.finfo(dtype).max
        x = torch.tensor([most, -most, most / 2, -most / 2, 0.0, -0.0, float("inf"), float("nan")], device=device).to(
            dtype
        )
        y = cuda.fused_activation(x, kind).tolist()
        assert y[0] == pytest.approx(x[0].item(), rel=1e-6) and y[2] == pytest.approx(x[2].item(), rel=1e-6)
        assert y[1] == y[3] == y[4] == y[5] == 0
        assert y[6] == float("inf") and y[7] != y[7]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (1, 1), (3, 96), (0, 64), (5, 0), (7, 33), (2, 3, 130), (2, 33000), (300, 8), (70_000, 4), (64, 5120)],
)
def test_add_gelu_and_silu_and_mul(device, guard, dtype, shape):
    torch.manual_seed(sum(shape))
    x, full = (torch.randn(shape, device=device).mul_(3).to(dtype) for _ in range(2))
    row = full.reshape(-1, shape[-1])[0] if full.numel() else torch.randn(shape[-1], device=device, dtype=dtype)
    for bias in (row, full):
        for approximate, kind in (("tanh", "gelu_tanh"), ("none", "gelu")):
            # The sum is rounded before the GELU, so the reference starts from the rounded sum.
            close(cuda.fused_add_gelu(x, bias, approximate), EXACT[kind]((x + bias).double()), dtype)
    gate_up = torch.cat([x, full], -1)
    silu = EXACT["silu"](x.double()).to(dtype)
    close(cuda.silu_and_mul(gate_up), (silu * full).double(), dtype, roundings=2)
    for kind in EXACT:
        close(cuda.fused_activation(x, kind), EXACT[kind](x.double()), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_unaligned_pointers(device, guard, dtype):
    wide = torch.randn(6, 8, 64, device=device).to(dtype)
    odd = torch.randn(4 * 33 + 1, device=device).to(dtype)
    views = [
        wide[..., :32], wide[:, :5], wide[:, ::2, 8:24], wide[..., 1:33], wide.transpose(0, 1), wide.permute(2, 1, 0),
        wide[0, 0].expand(9, 64), wide[:, :1], wide[..., ::2], odd[1:].view(4, 33)[:, :32], odd[1:],
        odd[:-1].view(4, 33),
    ]  # fmt: skip
    for x in views:
        dense = x.contiguous().clone()
        torch.testing.assert_close(
            cuda.fused_activation(x, "silu"), cuda.fused_activation(dense, "silu"), rtol=0, atol=0
        )
        n = x.shape[-1]
        for bias in (
            torch.randn(n + 1, device=device).to(dtype)[1:],
            torch.randn(2 * n, device=device).to(dtype)[::2],
            x,
        ):
            expected = EXACT["gelu_tanh"]((dense + bias.contiguous()).double())
            close(cuda.fused_add_gelu(x, bias), expected, dtype)
        if n % 2 == 0:
            gate, up = dense.chunk(2, -1)
            expected = (EXACT["silu"](gate.double()).to(dtype) * up).double()
            close(cuda.silu_and_mul(x), expected, dtype, roundings=2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 128, 4096), (256, 6144)])
def test_graph_replay_with_new_data(device, shape):
    """Also a chain of dependent launches: a kernel that starts before its input is ready would read old data.

    y + bias cancels, so what is left may be small beside its error: some 2^-24 of the terms, which reach 18. That error
    comes to the result times what it is multiplied by. In float32 PyTorch on a CPU, whose functions are within two
    ulps, it is up to 6e-7 (|s u| + |s| + |u|) for s = silu(gate) and u = up, over some million results; the hardware's
    reciprocals add an ulp each.
    """
    x, bias = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)

    def chain():
        y = x
        for _ in range(4):
            y = cuda.fused_activation(cuda.fused_add_gelu(y, bias), "silu")
        return cuda.silu_and_mul(y)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for seed in range(5):
        x.copy_(torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)))
        graph.replay()
        z = x.double()
        for _ in range(4):
            z = EXACT["silu"](EXACT["gelu_tanh"](z + bias))
        gate, up = z.chunk(2, -1)
        s = EXACT["silu"](gate)
        error = (y.double() - s * up).abs() / ((s * up).abs() + s.abs() + up.abs())
        assert error.amax() < 2.5e-6  # NaN is not; old data would be off by about 1


@pytest.mark.gpu
def test_more_elements_than_32_bits_number(device):
    size = 2**31 + 1003
    if torch.cuda.mem_get_info()[0] < 5 * size:
        pytest.skip("needs 11 GB of free device memory")
    memory = torch.zeros(size + 1, dtype=torch.bfloat16, device=device)
    x = memory[1:]  # unaligned, so that it is moved by elements
    for i in (0, 2**30, 2**31 - 1, 2**31, size - 1):
        x[i] = 2.0
    y = cuda.fused_activation(x, "relu")
    assert all(y[i] == 2 for i in (0, 2**30, 2**31 - 1, 2**31, size - 1)) and int(y.count_nonzero()) == 5


@pytest.mark.gpu
def test_current_stream(device):
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        y = cuda.fused_activation(x, "relu")
    stream.synchronize()
    assert bool((y == 1).all())


@pytest.mark.gpu
def test_bad_input_is_a_value_error(device):
    x = torch.randn(4, 8, device=device)
    for call, message in (
        (lambda: cuda.fused_add_gelu(x, x[0, :7]), r"bias: expected the shape \[4, 8\] or \[8\], not \[7\]"),
        (
            lambda: cuda.fused_add_gelu(x, x[0].half()),
            "bias: expected torch.float32 on cuda:0, as x, not torch.float16 on cuda:0",
        ),
        (
            lambda: cuda.fused_add_gelu(x, x[0].cpu()),
            "bias: expected torch.float32 on cuda:0, as x, not torch.float32 on cpu",
        ),
        (
            lambda: cuda.fused_activation(x.double(), "silu"),
            "x: expected float16, bfloat16 or float32, not torch.float64",
        ),
        (lambda: cuda.silu_and_mul(x.int()), "gate_up: expected float16, bfloat16 or float32, not torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    operators, y = cuda.compiled_kernels(x.device), torch.empty_like(x)
    for call, message in (
        (lambda: operators.fused_add_gelu(x, x[0, :7], y, "gelu"), "bias: expected the shape of x"),
        (lambda: operators.fused_activation(x, y[0], "gelu"), "y: expected a contiguous tensor of the result's size"),
        (lambda: operators.fused_activation(x, y, "elu"), "kind: expected one of gelu"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_agrees_with_the_reference_to_the_last_bit_or_so(device):
    from nanovllm.kernels import fused_add_gelu, silu_and_mul

    for dtype in (torch.bfloat16, torch.float16):
        x, bias = torch.randn(64, 4096, device=device).to(dtype), torch.randn(4096, device=device).to(dtype)
        for got, expected in (
            (cuda.fused_add_gelu(x, bias), fused_add_gelu.native(x, bias)),
            (cuda.silu_and_mul(x), silu_and_mul.native(x)),
        ):
            assert (got != expected).double().mean() < 0.01


def test_arguments_are_checked_before_anything_is_built():
    x = torch.randn(2, 5)
    with pytest.raises(ValueError, match="approximate: expected 'none' or 'tanh', not 'erf'"):
        cuda.fused_add_gelu(x, x, "erf")
    with pytest.raises(ValueError, match="kind: expected one of gelu, .*, not 'elu'"):
        cuda.fused_activation(x, "elu")
    with pytest.raises(ValueError, match=r"gate_up: .* even size .* not the shape \[2, 5\]"):
        cuda.silu_and_mul(x)
    with pytest.raises(ValueError, match="need a CUDA device, this is cpu"):
        cuda.fused_activation(x, "silu")


@pytest.fixture(scope="module")
def nvcc():
    home = build.cuda_home()
    if home is None:
        pytest.skip("no nvcc here: install the CUDA toolkit, or set CUDA_HOME")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler here, which nvcc calls")
    return home / "bin" / "nvcc"


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, capability",
    [
        *((f"{name}.cu", 90) for name in ("fused_add_gelu", "silu_and_mul", "fused_activation")),
        ("fused_add_gelu.cu", 80), ("silu_and_mul.cu", 100),
    ],
)  # fmt: skip
def test_loads_and_stores_16_bytes_without_spills(nvcc, tmp_path, source, capability):
    release = tuple(map(int, build.nvcc_version(nvcc.parents[1]).split(".")))
    if capability == 100 and release < (12, 8):
        pytest.skip(f"nvcc {release[0]}.{release[1]} does not know sm_100")
    arch = f"-gencode=arch=compute_{capability},code=[sm_{capability},compute_{capability}]"
    command = [nvcc, *build.NVCC_FLAGS, arch, "-Xptxas=-v", "--keep", "--keep-dir", tmp_path]
    done = subprocess.run(
        [*command, "-c", FOLDER / source, "-o", tmp_path / "out.o"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stderr)
    assert spills and set(spills) == {("0", "0")}
    ptx = next(tmp_path.glob("*.ptx")).read_text()
    kernels = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx, re.DOTALL))
    # rowwise_kernel<T, F, inputs, width, unroll, dependent> is mangled to
    # Li<inputs>ELi<width>ELi<unroll>ELb<dependent>E.
    seen = set()
    for name, body in kernels.items():
        inputs, width, _, dependent = map(int, re.search(r"Li(\d)ELi(\d)ELi(\d)ELb(\d)E", name).groups())
        if width > 1:
            wide = r"global(?:\.\w+)*\.(?:v4\.(?:b32|u32|f32)|v2\.(?:b64|u64))"
            assert len(re.findall(rf"ld\.{wide}", body)) == inputs, name
            assert len(re.findall(rf"st\.{wide}", body)) == 1, name
        assert ("griddepcontrol.wait" in body) == bool(dependent), name
        seen.add(width)
    assert seen == {1, 4, 8}
    functions = {"fused_add_gelu.cu": 2, "silu_and_mul.cu": 1, "fused_activation.cu": 5}[source]
    assert len(kernels) == functions * len(DTYPES) * (3 if capability >= 90 else 2)

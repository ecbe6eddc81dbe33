"""The CUDA C++ kernels: values on a GPU; the build, its cache and its reasons anywhere; the machine code where nvcc is."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import cuda
from nanovllm.kernels.cuda import build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
# An exponential's relative error grows with its exponent, so results far below this are less exact; float16 is subnormal.
TINY = {torch.float32: 1e-20, torch.bfloat16: 1e-30, torch.float16: 1e-6}
HOPPER = (9, 0)
FOLDER = Path(build.__file__).parent


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


# --- on a GPU ---


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Builds of this file go to a folder of their own, so the first call compiles."""
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))
    yield
    os.environ.pop("TORCH_EXTENSIONS_DIR")
    if before is not None:
        os.environ["TORCH_EXTENSIONS_DIR"] = before


@pytest.fixture
def gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    reason = cuda.cuda_support(device)
    if reason is not None:
        pytest.skip(reason)
    return device


@pytest.fixture
def poison(monkeypatch):
    """Outputs start as NaN between guards of NaN, which must stay."""
    original, memories = torch.empty, []

    def poisoned(shape, dtype, device):
        shape = torch.Size(shape)
        memory = original(shape.numel() + 128, dtype=dtype, device=device).fill_(float("nan"))
        memories.append((memory, shape.numel()))
        return memory[64 : 64 + shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for memory, size in memories:
        assert memory[:64].isnan().all() and memory[64 + size :].isnan().all(), "wrote outside of its output"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXACT)
def test_activation_is_right_at_all_magnitudes(gpu, dtype, kind):
    spread = torch.linspace(-14, 14, 200_001, device=gpu)
    tiny_to_huge = torch.logspace(-30, 4.5, 5000, device=gpu)
    x = torch.cat([spread, tiny_to_huge, -tiny_to_huge]).to(dtype)
    close(cuda.fused_activation(x, kind), EXACT[kind](x.double()), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EXACT)
def test_no_nan_at_the_largest_numbers(gpu, kind):
    for dtype in DTYPES:
        most = torch.finfo(dtype).max
        x = torch.tensor([most, -most, most / 2, -most / 2, 0.0, -0.0, float("inf"), float("nan")], device=gpu).to(
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
def test_add_gelu_and_silu_and_mul(gpu, poison, dtype, shape):
    torch.manual_seed(sum(shape))
    x, full = (torch.randn(shape, device=gpu).mul_(3).to(dtype) for _ in range(2))
    row = full.reshape(-1, shape[-1])[0] if full.numel() else torch.randn(shape[-1], device=gpu, dtype=dtype)
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
def test_layouts_and_unaligned_pointers(gpu, poison, dtype):
    wide = torch.randn(6, 8, 64, device=gpu).to(dtype)
    odd = torch.randn(4 * 33 + 1, device=gpu).to(dtype)
    views = [
        wide[..., :32], wide[:, :5], wide[:, ::2, 8:24], wide[..., 1:33], wide.transpose(0, 1), wide.permute(2, 1, 0),
        wide[0, 0].expand(9, 64), wide[:, :1], wide[..., ::2], odd[1:].view(4, 33)[:, :32], odd[1:], odd[:-1].view(4, 33),
    ]  # fmt: skip
    for x in views:
        dense = x.contiguous().clone()
        torch.testing.assert_close(
            cuda.fused_activation(x, "silu"), cuda.fused_activation(dense, "silu"), rtol=0, atol=0
        )
        n = x.shape[-1]
        for bias in (torch.randn(n + 1, device=gpu).to(dtype)[1:], torch.randn(2 * n, device=gpu).to(dtype)[::2], x):
            expected = EXACT["gelu_tanh"]((dense + bias.contiguous()).double())
            close(cuda.fused_add_gelu(x, bias), expected, dtype)
        if n % 2 == 0:
            gate, up = dense.chunk(2, -1)
            expected = (EXACT["silu"](gate.double()).to(dtype) * up).double()
            close(cuda.silu_and_mul(x), expected, dtype, roundings=2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 128, 4096), (256, 6144)])
def test_graph_replay_with_new_data(gpu, shape):
    """Also a chain of dependent launches: a kernel that starts before its input is ready would read old data.

    y + bias cancels, so what is left may be small beside its error: some 2^-24 of the terms, which reach 18. That error comes to
    the result times what it is multiplied by. In float32 PyTorch on a CPU, whose functions are within two ulps, it is up to
    6e-7 (|s u| + |s| + |u|) for s = silu(gate) and u = up, over some million results; the hardware's reciprocals add an ulp each.
    """
    x, bias = torch.randn(shape, device=gpu), torch.randn(shape[-1], device=gpu)

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
        x.copy_(torch.randn(shape, device=gpu, generator=torch.Generator(gpu).manual_seed(seed)))
        graph.replay()
        z = x.double()
        for _ in range(4):
            z = EXACT["silu"](EXACT["gelu_tanh"](z + bias))
        gate, up = z.chunk(2, -1)
        s = EXACT["silu"](gate)
        error = (y.double() - s * up).abs() / ((s * up).abs() + s.abs() + up.abs())
        assert error.amax() < 2.5e-6  # NaN is not; old data would be off by about 1


@pytest.mark.gpu
def test_more_elements_than_32_bits_number(gpu):
    size = 2**31 + 1003
    if torch.cuda.mem_get_info()[0] < 5 * size:
        pytest.skip("needs 11 GB of free device memory")
    memory = torch.zeros(size + 1, dtype=torch.bfloat16, device=gpu)
    x = memory[1:]  # unaligned, so that it is moved by elements
    for i in (0, 2**30, 2**31 - 1, 2**31, size - 1):
        x[i] = 2.0
    y = cuda.fused_activation(x, "relu")
    assert all(y[i] == 2 for i in (0, 2**30, 2**31 - 1, 2**31, size - 1)) and int(y.count_nonzero()) == 5


@pytest.mark.gpu
def test_current_stream(gpu):
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device=gpu)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        y = cuda.fused_activation(x, "relu")
    stream.synchronize()
    assert bool((y == 1).all())


@pytest.mark.gpu
def test_bad_input_is_a_value_error(gpu):
    x = torch.randn(4, 8, device=gpu)
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
    operators, y = cuda._kernels(x.device), torch.empty_like(x)
    for call, message in (
        (lambda: operators.fused_add_gelu(x, x[0, :7], y, "gelu"), "bias: expected the shape of x"),
        (lambda: operators.fused_activation(x, y[0], "gelu"), "y: expected a contiguous tensor of the result's size"),
        (lambda: operators.fused_activation(x, y, "elu"), "kind: expected one of gelu"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_agrees_with_the_reference_to_the_last_bit_or_so(gpu):
    from nanovllm.kernels.ops import fused_add_gelu, silu_and_mul

    for dtype in (torch.bfloat16, torch.float16):
        x, bias = torch.randn(64, 4096, device=gpu).to(dtype), torch.randn(4096, device=gpu).to(dtype)
        for got, expected in (
            (cuda.fused_add_gelu(x, bias), fused_add_gelu.native(x, bias)),
            (cuda.silu_and_mul(x), silu_and_mul.native(x)),
        ):
            assert (got != expected).double().mean() < 0.01


# --- anywhere: arguments, reasons, cache ---


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


def tool(folder, name, text="exit 0"):
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A complete toolchain that compiles nothing, for a PyTorch of CUDA 13.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home = tmp_path / "cuda"
    tool(home, "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    for name in ("c++", "ninja"):
        tool(tmp_path, name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / "no_scripts"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    return home


def test_complete_toolchain_has_no_reason_against_it(toolkit):
    assert build.toolchain_reason() is None


def test_missing_nvcc(toolkit, monkeypatch, tmp_path):
    (toolkit / "bin" / "nvcc").unlink()
    reason = build.toolchain_reason()
    assert re.search(rf"nvcc.* is not in CUDA_HOME={toolkit}/bin; install the CUDA toolkit 13.0", reason)
    monkeypatch.delenv("CUDA_HOME")
    if build.cuda_home() is None:  # there is none in /usr/local/cuda either
        assert "is not on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin" in build.toolchain_reason()


def test_nvcc_that_does_not_run_or_does_not_fit(toolkit):
    tool(toolkit, "nvcc", "echo Cuda compilation tools, release 12.4, V12.4.1")
    assert re.search("nvcc is of CUDA 12.4 but PyTorch is built for 13.0; set CUDA_HOME", build.toolchain_reason())
    tool(toolkit, "nvcc", "echo broken; exit 1")
    assert "nvcc does not run" in build.toolchain_reason()


def test_nvcc_on_path(toolkit, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME")
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("PATH", f"{toolkit}/bin:{tmp_path}/bin")
    assert build.cuda_home() == toolkit
    # A script of that name elsewhere, whose dry run tells where the toolkit is.
    tool(tmp_path, "nvcc", f"echo '#$ TOP={toolkit}/bin/..'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert build.cuda_home() == toolkit


def test_missing_compiler_ninja_and_setuptools(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX names 'no-such-compiler', which is not on PATH; install g++" in build.toolchain_reason()
    monkeypatch.delenv("CXX")
    (tmp_path / "bin" / "c++").unlink()
    assert "the C++ compiler is 'c++', which is not on PATH" in build.toolchain_reason()
    tool(tmp_path, "c++")
    (tmp_path / "bin" / "ninja").unlink()
    assert "pip install ninja" in build.toolchain_reason()
    # Beside Python is enough: its environment need not be activated.
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tool(tmp_path / "env", "ninja").parent))
    assert build.toolchain_reason() is None
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert "pip install setuptools" in build.toolchain_reason()


def test_support(toolkit, monkeypatch, tmp_path):
    support, gpu = build.cuda_support.__wrapped__, torch.device("cuda", 0)
    assert "need a CUDA device, this is cpu; use native" in support(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert "need compute capability 7.5 or later, this GPU has 7.0" in support(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert support(gpu) is None
    (toolkit / "bin" / "nvcc").unlink()
    assert "nvcc" in support(gpu)
    # What is built already needs no compiler.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    directory = build.build_directory(build.library_name(HOPPER))
    directory.mkdir(parents=True)
    (directory / "complete").touch()
    assert support(gpu) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is not built for CUDA" in support(gpu)


def test_the_name_changes_with_everything_that_matters(monkeypatch):
    files = {"a.cu": b"x", "b.cuh": b"y"}
    names = {
        build.library_name(HOPPER, files),
        build.library_name((8, 0), files),
        build.library_name(HOPPER, {"a.cu": b"x2", "b.cuh": b"y"}),
        build.library_name(HOPPER, {"a.cu": b"x", "b2.cuh": b"y"}),
        build.library_name(HOPPER, {"a.cu": b"xb.cuh", "": b"y"}),
        build.library_name(HOPPER, {"a.cu": b"x"}),
    }
    assert len(names) == 6 and all(re.fullmatch(r"nanovllm_cuda_sm\d\d_[0-9a-f]{16}", n) for n in names)
    assert build.library_name(HOPPER, files) in names
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    names.add(build.library_name(HOPPER, files))
    monkeypatch.setattr(torch, "__version__", "99.9")
    names.add(build.library_name(HOPPER, files))
    monkeypatch.setattr(build, "NVCC_FLAGS", ("-O0",))
    names.add(build.library_name(HOPPER, files))
    assert len(names) == 9


def test_architecture():
    known = ["sm_80", "sm_90", "sm_120", "compute_120"]
    assert build.arch_flag((9, 0), known) == "-gencode=arch=compute_90,code=sm_90"
    assert build.arch_flag((8, 9), known) == "-gencode=arch=compute_89,code=sm_89"
    assert build.arch_flag((12, 1), known) == "-gencode=arch=compute_120,code=compute_120"


def test_every_source_is_installed_with_the_package():
    project = (FOLDER.parents[2] / "pyproject.toml").read_text()
    suffixes = {Path(name).suffix for name in build.sources()}
    assert suffixes == {".cu", ".cuh", ".cpp"}
    assert all(f'"**/*{suffix}"' in project for suffix in suffixes)


def _load_in_turn(root, turn):
    """In a process of its own: load with a build that only notes that it ran, slowly."""
    os.environ["TORCH_EXTENSIONS_DIR"] = root

    def slow_build(name, directory, capability):
        with open(Path(root) / "builds", "a") as log:
            log.write(f"{turn}\n")
        time.sleep(0.5)
        (directory / "complete").touch()

    build._build = slow_build
    torch.ops.load_library = lambda path: None
    build.load_library(HOPPER)


def test_several_processes_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_load_in_turn, args=(str(tmp_path), i)) for i in range(4)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 4
    assert len((tmp_path / "builds").read_text().splitlines()) == 1


@pytest.fixture
def fake_extension(toolkit, monkeypatch, tmp_path):
    """`torch.utils.cpp_extension.load` that links nothing, and what it was called with."""
    from torch.utils import cpp_extension

    calls = []

    def load(name, files, build_directory, **options):
        calls.append((name, files, options, cpp_extension.CUDA_HOME, (Path(build_directory) / "lock").exists()))
        if options.pop("fail", False) or (tmp_path / "fail").exists():
            raise RuntimeError("a.cu(3): error: identifier is undefined")
        library = Path(build_directory) / f"{name}.so"
        library.touch()
        return str(library)

    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return calls


def test_build_is_cached_and_survives_a_stale_lock(fake_extension, toolkit):
    directory = build.build_directory(build.library_name(HOPPER))
    directory.mkdir(parents=True)
    (directory / "lock").touch()  # of a build that was killed: PyTorch would wait for it forever
    build.load_library(HOPPER)
    build.load_library(HOPPER)
    ((name, files, options, home, locked),) = fake_extension
    assert name == build.library_name(HOPPER) and not locked and home == str(toolkit)
    assert {Path(f).name for f in files} == {
        "bindings.cpp", "fused_activation.cu", "fused_add_gelu.cu", "silu_and_mul.cu"
    }  # fmt: skip
    assert build.arch_flag(HOPPER) in options["extra_cuda_cflags"] and options["is_python_module"] is False


def test_a_library_is_loaded_from_a_private_directory_only(fake_extension, monkeypatch):
    directory = build.build_directory(build.library_name(HOPPER))
    build.load_library(HOPPER)
    assert directory.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    for path, mode, said in (
        (directory, 0o770, f"other users may write to {directory}"),
        (directory, 0o702, f"other users may write to {directory}"),
        (directory.parent, 0o777, f"any user may replace directories in {directory.parent}"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(RuntimeError, match=f"{re.escape(said)}.*; (remove it.*TORCH_EXTENSIONS_DIR|chmod o-w)"):
            build.load_library(HOPPER)
        assert said in build.cuda_support.__wrapped__(torch.device("cuda", 0))
        path.chmod(before)
    directory.parent.chmod(0o1777)  # as /tmp is
    build.load_library(HOPPER)
    monkeypatch.setattr(build.os, "geteuid", lambda: 12345)
    with pytest.raises(RuntimeError, match=f"{directory} belongs to the user with the id .*, not to this one .12345."):
        build.load_library(HOPPER)


def test_failing_build_shows_the_compiler_and_is_tried_again(fake_extension, tmp_path):
    (tmp_path / "fail").touch()
    path = os.environ["PATH"]
    with pytest.raises(
        RuntimeError, match=r"(?s)compiling the CUDA C\+\+ kernels in .* failed.*identifier is undefined"
    ):
        build.load_library(HOPPER)
    assert os.environ["PATH"] == path
    (tmp_path / "fail").unlink()
    build.load_library(HOPPER)
    assert len(fake_extension) == 2


def test_runtime_library_of_a_wheel_is_found(tmp_path):
    (tmp_path / "home" / "lib").mkdir(parents=True)
    (tmp_path / "home" / "lib" / "libcudart.so.13").touch()
    folders = build._runtime_folders(tmp_path / "home", tmp_path)
    assert tmp_path in folders and (tmp_path / "libcudart.so").resolve().name == "libcudart.so.13"


def test_importing_builds_and_loads_nothing():
    code = "import sys, nanovllm.kernels.cuda as c, torch; c.cuda_support(torch.device('cpu')); "
    code += "assert 'torch.utils.cpp_extension' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- where nvcc is: the machine code ---


@pytest.fixture(scope="module")
def nvcc():
    home = build.cuda_home()
    if home is None:
        pytest.skip("no nvcc here: install the CUDA toolkit, or set CUDA_HOME")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler here, which nvcc calls")
    return home / "bin" / "nvcc"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("source", ["fused_add_gelu.cu", "silu_and_mul.cu", "fused_activation.cu"])
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
    # rowwise_kernel<T, F, inputs, width, unroll, dependent>: the mangled name has Li<inputs>ELi<width>ELi<unroll>ELb<dependent>E
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

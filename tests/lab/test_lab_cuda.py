"""The CUDA C++ of the lessons and of the guide is right: compiled for the CPU, a thread for each CUDA thread.

`cuda_on_cpu.hpp` has the part of CUDA that the sources use. `as_cpp` replaces what is not C++: launches, inline PTX,
dynamic shared memory. The tests need a compiler for C++20 and CUDA's headers; the GPU tests need neither.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import rms_norm
from nanovllm.kernels.cuda.build import cuda_home
from nanovllm.lab import cuda_build
from nanovllm.lab.check import compare, difference
from nanovllm.lab.lesson import NAMES, lesson
from nanovllm.lab.ways import Way
from tests.docs.runnable_markdown import REPOSITORY, blocks

LAB = Path(cuda_build.__file__).parent
HERE = Path(__file__).parent
CPU = torch.device("cpu")
SHAPES = {
    "matmul": [(1, 1), (3, 7), (130, 136), (140, 264)],  # ragged; more than a tile and a step; with a ragged tile
    None: [(1, 1), (3, 7), (2, 264), (2, 4097), (2, 8192)],
}

if cuda_home() is None or shutil.which("g++") is None:
    pytest.skip("needs CUDA's headers and g++", allow_module_level=True)


def as_cpp(source: str) -> str:
    """CUDA C++ -> C++."""
    source = re.sub(r"([A-Za-z_]\w*(?:<[^<>;]*>)?)<<<(.*?)>>>\(", r"launched(\1, \2)(", source, flags=re.DOTALL)
    source = re.sub(r"#include <(cuda_pipeline|mma|cuda_bf16|cuda_fp16)\.h>\n", "", source)
    source = re.sub(
        r"  const auto target = static_cast<unsigned>.*?\n  asm volatile.*?\n",
        "  copied_async(to, from, bytes);\n",
        source,
    )
    source = re.sub(r"extern __shared__ __align__\(128\) (.*)\[\];", r"alignas(128) static \1[kSharedBytes];", source)
    source = re.sub(r"  cudaFuncSetAttribute\(.*?\);\n", "", source)
    return re.sub(r"static_cast<int>\(cudaGetLastError\(\)\)", "0", source)


def build(name: str, source: str, folder: Path) -> ctypes.CDLL:
    for header in LAB.glob("*.cuh"):
        (folder / header.name).write_text(as_cpp(header.read_text()))
    (folder / f"{name}.cc").write_text('#include "cuda_on_cpu.hpp"\n' + as_cpp(source))
    home = cuda_home()
    assert home is not None
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread", f"-I{HERE}", f"-I{home / 'include'}"]
    done = subprocess.run(
        [*command, "-o", f"{name}.so", f"{name}.cc"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(folder / f"{name}.so"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lesson(name, tmp_path):
    library, one = build(name, (LAB / f"{name}.cu").read_text(), tmp_path), lesson(name)
    way = Way("cuda", lambda *inputs: one.run_cuda(library, *inputs))
    for dtype in (one.dtypes[0], torch.bfloat16):
        for rows, dim in SHAPES.get(name, SHAPES[None]):
            generator = torch.Generator().manual_seed(torch.seed() % 2**31)
            error, failure = compare(one, way, one.inputs(rows, dim, dtype, CPU, generator))
            assert failure is None and error <= 1, f"{dtype} {rows}x{dim}: {failure}"


@pytest.mark.slow
def test_a_wrong_index_would_show(tmp_path):
    source = (LAB / "softmax.cu").read_text().replace("i += blockDim.x", "i += blockDim.x + 1", 1)
    x = torch.randn(2, 4097)
    y = lesson("softmax").run_cuda(build("softmax", source, tmp_path), x)
    assert difference(y, torch.softmax(x.double(), 1))[1] is not None


@pytest.mark.slow
def test_the_guides_kernels(tmp_path):
    guide = blocks((REPOSITORY / "docs" / "course" / "4-cuda-kernel.md").read_text())
    library = build("rms_norm", next(b.text for b in guide if b.file == "rms_norm.cu"), tmp_path)
    numbers = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
    for dtype, number in numbers.items():
        for tuned in (0, 1):
            # (rows, size, gap): scalar; a vector a thread; not a multiple; a gap that keeps alignment and one that does
            # not; four a thread.
            for rows, size, gap in ((1, 1, 0), (2, 1024, 0), (2, 1025, 0), (3, 96, 8), (2, 96, 3), (2, 8200, 0)):
                x, weight = torch.randn(rows, size + gap).to(dtype)[:, :size], torch.randn(size).to(dtype)
                y = torch.full((rows, size), torch.nan, dtype=dtype)
                pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, weight, y))
                stride, eps = ctypes.c_int64(x.stride(0)), ctypes.c_float(1e-6)
                assert library.rms_norm(*pointers, rows, size, stride, eps, number, tuned, None) == 0
                failure = difference(y, rms_norm.native(x.double(), weight.double(), 1e-6))[1]
                assert failure is None, f"{dtype} tuned={tuned} {rows}x{size}+{gap}: {failure}"

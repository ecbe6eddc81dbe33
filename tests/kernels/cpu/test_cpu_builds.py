"""The C++ with sanitizers, and compiled for processors with fewer instructions than this one."""

import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cpu import build

if (reason := build.cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
HERE = Path(__file__).parent
ON_X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sanitizer, arch",
    [("address,undefined", "native"), ("thread", "native"), *[("address,undefined", "x86-64-v3")] * ON_X86],
)
def test_sanitizers_find_nothing(tmp_path, arch, sanitizer):
    sources, program = Path(build.__file__).parent, tmp_path / "sanitized"
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC")]
    command = [
        build.compiler(), *flags, "-O0", f"-march={arch}", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all",
        "-DNANOVLLM_PARTS=1", "-DNANOVLLM_PART=0", f"-I{sources}", HERE / "sanitized.cpp", "-o", program,
    ]  # fmt: skip
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in compiled.stderr and "san" in compiled.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nothing found\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(not ON_X86, reason="for x86-64")
@pytest.mark.parametrize("arch, needs", [
    ("x86-64", "lm"), ("x86-64-v3", "avx2"), ("alderlake", "avx_vnni"), ("icelake-server", "avx512_vnni"),
])  # fmt: skip
def test_every_kind_of_processor_gives_the_same(arch, needs, tmp_path):
    """Without AVX2, which is the plain C++; with AVX2; with AVX-VNNI; with AVX-512 and without AMX.

    At -O1, which compiles in a third of the time; the library of this processor is tested at -O3.
    """
    if f" {needs} " not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    files = (HERE / f"test_cpu_{name}.py" for name in ("products", "checkpoint_formats", "sample"))
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {build.compiler()} "$@" -O1\n')
    compiler.chmod(0o755)
    environment = {"NANOVLLM_CPU_ARCH": arch, "CXX": str(compiler), "NANOVLLM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *files],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def load_anew(barrier):
    build.load_library.cache_clear()
    barrier.wait(20)
    build.load_library()


def test_of_several_processes_one_compiles(tmp_path, monkeypatch):
    calls, compiler = tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho "$*" >> {calls}\nfor last; do :; done\n'
        f'exec {build.compiler()} -shared -fPIC -x c++ /dev/null -o "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    build.compiler.cache_clear()
    try:
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(3)
        processes = [context.Process(target=load_anew, args=(barrier,)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        build.compiler.cache_clear()
    compiled = [call for call in calls.read_text().splitlines() if " -c " in call]
    assert len(compiled) == 3, compiled  # the parts of the library, each once

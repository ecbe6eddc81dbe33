"""Prebuilt C++ libraries: which one a processor takes, and what is said where there is none."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cpu import build, prebuilt
from nanovllm.kernels.cpu.build import cpu_support, load_library

if sys.platform != "linux":
    pytest.skip("wheels carry libraries for Linux", allow_module_level=True)

KEY, CPU = build.source_key(), torch.device("cpu")
HASWELL = "flags\t\t: fpu sse4_2 movbe f16c abm bmi1 avx2 bmi2 fma"
ALDER_LAKE = f"{HASWELL} avx_vnni"
SKYLAKE_SERVER = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_SERVER} avx512_vnni"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
GRAVITON_2 = "Features\t: fp asimd asimdhp asimddp"
WITH_DOT_PRODUCTS = ("-march=armv8.2-a+dotprod+fp16",)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(prebuilt, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("CXX", "NANOVLLM_CPU_ARCH"):
        monkeypatch.delenv(name, raising=False)
    cached = build.compiler, cpu_support, load_library
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def add(directory, name, content=b"a library", key=KEY):
    variant = next(v for v in prebuilt.VARIANTS if v.name == name)
    path = directory / variant.file_name(key, content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "features, machine, name",
    [
        (HASWELL, "x86_64", "avx2"), (ALDER_LAKE, "x86_64", "avx_vnni"), (SKYLAKE_SERVER, "x86_64", "avx2"),
        (ICE_LAKE, "x86_64", "avx512_vnni"), (f"{ICE_LAKE} avx_vnni", "x86_64", "avx512_vnni"),
        (SAPPHIRE_RAPIDS, "x86_64", "amx"), (GRAVITON_2, "aarch64", "dotprod"),
        ("Features : fp asimd", "aarch64", None),
        ("flags : sse4_2", "x86_64", None), (HASWELL.replace("fma", ""), "x86_64", None), (HASWELL, "riscv64", None),
    ],
)  # fmt: skip
def test_a_processor_takes_the_best_library_that_it_can_run(directory, features, machine, name):
    paths = {v.name: add(directory, v.name) for v in prebuilt.VARIANTS}
    assert prebuilt.library_for(KEY, features, machine) == paths.get(name)
    assert (prebuilt.lacking(KEY, features, machine) is None) == (name is not None or machine == "riscv64")


@pytest.mark.parametrize(
    "features, machine, flags",
    [
        (GRAVITON_2, "aarch64", WITH_DOT_PRODUCTS), ("arm64", "arm64", WITH_DOT_PRODUCTS),  # Linux, macOS
        ("Features : fp asimd", "aarch64", ("-march=native",)), (ICE_LAKE, "x86_64", ("-march=native",)),
    ],
)  # fmt: skip
def test_flags_on_arm64_name_its_dot_products(monkeypatch, features, machine, flags):
    """Compilers leave them out of `native` for some processors."""
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    monkeypatch.delenv("NANOVLLM_CPU_ARCH", raising=False)
    assert build.flags() == (*build.FLAGS, *flags)
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", "armv9-a")
    assert build.flags() == (*build.FLAGS, "-march=armv9-a")


def test_a_library_of_other_sources_is_not_taken(directory):
    add(directory, "avx2", key="0" * 16)
    assert prebuilt.library_for(KEY, HASWELL, "x86_64") is None
    newer = add(directory, "avx2")
    assert prebuilt.library_for(KEY, HASWELL, "x86_64") == newer
    assert prebuilt.library_for(KEY, ICE_LAKE, "x86_64") == newer  # there is no better one
    other = build.source_key({"a.cpp": "int x;"})
    assert other != build.source_key({"a.cpp": "int y;"}) != build.source_key({"b.cpp": "int x;"})


def test_a_processor_without_the_instructions_is_told_which(directory, no_compiler, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert cpu_support(CPU).startswith("the C++ kernels need a C++ compiler; install g++")
    for variant in prebuilt.VARIANTS:
        add(directory, variant.name)
    monkeypatch.setattr(build, "cpu_features", lambda: "flags : fpu sse4_2 movbe abm bmi1 bmi2")
    cpu_support.cache_clear()
    reason = cpu_support(CPU)
    assert "need a processor with avx2; this one lacks avx2, f16c, fma; " in reason and "install g++" in reason
    with pytest.raises(FileNotFoundError, match="install g"):
        load_library()
    monkeypatch.setattr(build, "cpu_features", lambda: HASWELL)
    cpu_support.cache_clear()
    assert cpu_support(CPU) is None
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", "x86-64-v3")  # it asks for a compiler
    cpu_support.cache_clear()
    assert cpu_support(CPU).startswith("the C++ kernels need a C++ compiler")


def test_a_damaged_library_is_named(directory, no_compiler, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "cpu_features", lambda: HASWELL)
    path = add(directory, "avx2", b"\x7fELF" + bytes(5000))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(RuntimeError) as e:
        load_library()
    assert f"{path} is damaged: its 3000 bytes" in str(e.value) and "install nanovllm again" in str(e.value)
    assert "--no-use-custom-kernels" in str(e.value)


PRODUCT = """
import sys, pathlib, torch
from nanovllm.kernels.cpu import build, prebuilt
prebuilt.DIRECTORY = pathlib.Path(sys.argv[1])
from nanovllm.kernels import resolve_kernels
from nanovllm.kernels.cpu.library import PackedMatrix
assert resolve_kernels(torch.device("cpu")).providers["decoder_step"] == "cpu"
weight, x = torch.randn(70, 96), torch.randn(3, 96)
torch.testing.assert_close(PackedMatrix.of(weight).product(x), x @ weight.T)
try:
    print("compiler", build.compiler())
except FileNotFoundError:
    print("took", build.load_library()._name)
"""


def test_without_a_compiler_the_prebuilt_library_is_taken(directory, tmp_path, warm_python):
    if (reason := cpu_support(CPU)) is not None:
        pytest.skip(reason)
    features = build.cpu_features().split()
    runs = [v for v in prebuilt.VARIANTS if v.machine == build.platform.machine() and v.features <= set(features)]
    if not runs:
        pytest.skip("no variant is for this processor")
    load_library()
    library = add(directory, runs[0].name, build.library_path().read_bytes())
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "NANOVLLM_CPU_ARCH")}
    environment |= {"PATH": "", "NANOVLLM_CACHE": str(tmp_path / "cache")}
    done = warm_python.run("-c", PRODUCT, str(tmp_path), env=environment)
    assert (done.returncode, done.stdout) == (0, f"took {library}\n"), done.stderr[-3000:]
    assert not (tmp_path / "cache").exists()


def test_with_a_compiler_the_library_is_compiled_for_this_processor(directory):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    for variant in prebuilt.VARIANTS:
        add(directory, variant.name)
    assert Path(load_library()._name) == build.library_path()

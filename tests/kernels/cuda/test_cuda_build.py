"""Building the CUDA C++ kernels: the toolchain, the library's name, its cache, and who may write there."""

import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cuda import build

HOPPER = (9, 0)
FOLDER = Path(build.__file__).parent
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Builds of this file go to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


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
    names.add(build.library_name(HOPPER, files, ("-O0",)))
    assert len(names) == 9


def test_a_header_that_two_folders_include_is_in_the_names_of_both_libraries(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.cu").write_text('#include "../shared.cuh"\n')
    for text in ("a", "b"):
        (tmp_path / "shared.cuh").write_text(text)
        for folder in ("one", "two"):
            assert build.sources(tmp_path / folder)["../shared.cuh"] == text.encode()
    assert all("../mbarrier.cuh" in build.sources(FOLDER / folder) for folder in ("fp8", "packed"))


def test_architecture():
    known = ["sm_80", "sm_90", "sm_120", "compute_120"]
    assert build.arch_flag((9, 0), known) == "-gencode=arch=compute_90a,code=sm_90a"
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

    def slow_build(name, directory, capability, folder):
        with open(Path(root) / "builds", "a") as log:
            log.write(f"{turn}\n")
        time.sleep(0.5)
        (directory / "complete").touch()

    build.build_library = slow_build
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
    library = directory / f"{directory.name}.so"
    library.chmod(0o777)  # nobody else gets into the directory
    build.load_library(HOPPER)
    directory.chmod(0o755)
    with pytest.raises(RuntimeError, match=f"other users may write to {library}, and .*; remove it"):
        build.load_library(HOPPER)
    library.chmod(0o755)
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
    folders = build.runtime_folders(tmp_path / "home", tmp_path)
    assert tmp_path in folders and (tmp_path / "libcudart.so").resolve().name == "libcudart.so.13"


def test_importing_builds_and_loads_nothing(warm_python):
    code = "import sys, nanovllm.kernels.cuda as c, torch; c.cuda_support(torch.device('cpu')); "
    code += "assert 'torch.utils.cpp_extension' not in sys.modules"
    done = warm_python.run("-c", code)
    assert done.returncode == 0, done.stderr

"""The C++ with sanitizers, and compiled for processors with fewer instructions than this one."""

import multiprocessing
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.kernels.cpu import build
from tests.waiting import wait_until

if (reason := build.cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
HERE = Path(__file__).parent
ON_X86 = platform.machine() in ("x86_64", "AMD64")
MORE_THAN_AVX2 = ON_X86 and bool({"avx512vl", "avx_vnni"} & set(build.cpu_features().split()))
"""Else the library of this processor is one for x86-64-v3."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sanitizer, arch",
    [("address,undefined", "native"), ("thread", "native"), *[("address,undefined", "x86-64-v3")] * MORE_THAN_AVX2],
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
    done = subprocess.run([program, "5" if sanitizer == "thread" else "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nothing found\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(not ON_X86, reason="for x86-64")
@pytest.mark.parametrize("arch, needs", [
    ("x86-64", "lm"), ("x86-64-v3", "avx2"), ("alderlake", "avx_vnni"), ("skylake-avx512", "avx512vl"),
    ("icelake-server", "avx512_vnni"),
])  # fmt: skip
def test_every_kind_of_processor_gives_the_same(arch, needs, tmp_path, warm_python):
    """Without AVX2, which is the plain C++; with AVX2; with AVX-VNNI; with AVX-512 but no AMX, with VNNI and without.

    At -O0, which compiles in a sixth of the time; the library of this processor is tested at -O3.
    """
    if f" {needs} " not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needs}")
    if arch == "x86-64-v3" and not MORE_THAN_AVX2:
        pytest.skip("these are this processor's instructions, with which the same tests run")
    files = (HERE / f"test_cpu_{name}.py" for name in ("products", "checkpoint_formats", "sample"))
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {build.compiler()} "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {"NANOVLLM_CPU_ARCH": arch, "CXX": str(compiler), "NANOVLLM_CACHE": str(tmp_path)}
    done = warm_python.run("-m", "pytest", "-q", "-x", *files, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-3000:]


def load_anew(barrier):
    build.load_library.cache_clear()
    barrier.wait(20)
    build.load_library()


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler of empty libraries, with a cache of its own; the file of its calls."""
    calls, compiler = tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" --version "*) exit;; *" -E "*) exec {build.compiler()} "$@";; esac\n'
        f'echo "$*" >> {calls}\nfor last; do :; done\n'
        f'exec {build.compiler()} -shared -fPIC -x c++ /dev/null -o "$last"\n'
    )
    compiler.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOVLLM_CPU_ARCH", raising=False)
    forget()
    yield calls
    monkeypatch.undo()
    forget()


def forget():
    for function in (build.compiler, build.cpu_support, build.load_library):
        function.cache_clear()


def compiled_parts(calls):
    return sum(" -c " in call for call in calls.read_text().splitlines())


def test_of_several_processes_one_compiles(fake_compiler):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=load_anew, args=(barrier,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert compiled_parts(fake_compiler) == 3  # the parts of the library, each once


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_a_damaged_library_is_compiled_again(fake_compiler, caplog, keep):
    """The dynamic linker maps a truncated file, and the process ends with a bus error."""
    build.load_library()
    path = build.library_path()
    content = path.read_bytes()
    build.load_library.cache_clear()
    build.load_library()
    assert compiled_parts(fake_compiler) == 3 and len(content) > 5000
    path.unlink()  # the file that is mapped stays whole
    path.write_bytes(content[:keep])
    build.load_library.cache_clear()
    build.load_library()
    assert compiled_parts(fake_compiler) == 6 and path.read_bytes() == content
    assert caplog.text.count(f"{path} is damaged: it is compiled again") == 1


def test_what_a_killed_build_has_left_is_removed(fake_compiler):
    left = build.library_path().parent / "tmpkilled"
    left.mkdir(parents=True, mode=0o700)
    (left / "library.cpp0.o").touch()
    build.load_library()
    assert [path.name for path in left.parent.iterdir() if path.is_dir()] == []


def test_a_process_that_waits_for_another_says_so(fake_compiler, caplog):
    directory = build.library_path().parent
    directory.mkdir(parents=True, mode=0o700)
    caplog.set_level("INFO", logger="nanovllm")
    with ThreadPoolExecutor() as pool:
        with build.exclusive(directory):
            waiting = pool.submit(build.load_library)
            wait_until(lambda: f"waiting for another process, which compiles kernels in {directory}" in caplog.text)
        waiting.result(60)


def test_compilers_end_with_a_build_that_fails(fake_compiler, tmp_path):
    """What a compiler has started ends, too; the first part fails when the others are being compiled."""
    compiler = Path(os.environ["CXX"])
    begin = compiler.read_text().partition("for last")[0]
    compiler.write_text(
        f'{begin}cd {tmp_path}\ncase "$*" in *products.cpp*)\n'
        "    sleep 100 & echo $! > $$.new; mv $$.new $$.pid; wait; exit;; esac\n"
        "while [ $(ls *.pid | wc -l) -lt 2 ]; do sleep 0.01; done; echo no such type >&2; exit 1\n"
    )
    with pytest.raises(build.BuildError, match="(?s)the C.. kernels do not compile with .*no such type"):
        build.load_library()
    for process in [int(path.read_text()) for path in tmp_path.glob("*.pid")]:
        wait_until(lambda process=process: not is_running(process))


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_cache_that_cannot_be_written_to_is_named(fake_compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOVLLM_CACHE", str(fake_compiler))  # a file
    reason = build.cpu_support(torch.device("cpu"))
    assert f"cannot be kept in {fake_compiler}/cpu, since {fake_compiler} is a file; set NANOVLLM_CACHE" in reason
    with pytest.raises(FileNotFoundError, match="set NANOVLLM_CACHE to a directory of your own"):
        build.load_library()
    open_to_all = tmp_path / "open"
    (open_to_all / "cpu").mkdir(parents=True)
    (open_to_all / "cpu").chmod(0o777)
    monkeypatch.setenv("NANOVLLM_CACHE", str(open_to_all))
    build.cpu_support.cache_clear()
    reason = build.cpu_support(torch.device("cpu"))
    assert f"other users may write to {open_to_all}/cpu" in reason and "set NANOVLLM_CACHE" in reason


def test_a_full_disk_is_named(fake_compiler, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400_000))
    with pytest.raises(build.BuildError, match="No space left on device; set NANOVLLM_CACHE to .* with 20 MB of space"):
        build.load_library()
    assert compiled_parts(fake_compiler) == 0


def test_a_compiler_that_is_named_and_is_not_there(fake_compiler, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    forget()
    assert build.cpu_support(torch.device("cpu")).startswith("CXX='/nowhere/c++', the compiler of the C++ kernels, is")


@pytest.mark.parametrize(
    "macros, name",
    [("__GNUC__ 9", "GCC 9"), ("__GNUC__ 4\n#define __clang__ 1\n#define __clang_major__ 13", "Clang 13")],
)
def test_a_compiler_that_is_too_old_is_named_before_it_compiles(fake_compiler, tmp_path, monkeypatch, macros, name):
    old = tmp_path / "old-c++"
    listing = "\n".join(f"#define {macros}".splitlines())
    old.write_text(f"#!/bin/sh\nif [ $1 = --version ]; then echo 'old 9.4.0'; else echo '{listing}'; fi\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    forget()
    reason = build.cpu_support(torch.device("cpu"))
    assert reason == (
        f"the C++ kernels need GCC 11, Clang 14 or later, and {old} is {name} (old 9.4.0); set CXX to such a one"
    )
    with pytest.raises(FileNotFoundError, match="set CXX to such a one"):
        build.load_library()


def test_a_compiler_without_the_standard_library_is_named(fake_compiler, tmp_path, monkeypatch):
    bare = tmp_path / "bare-c++"
    bare.write_text(f'#!/bin/sh\nexec {build.compiler()} -nostdinc++ "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("CXX", str(bare))
    forget()
    reason = build.cpu_support(torch.device("cpu"))
    assert reason.startswith(f"{bare} (") and "condition_variable" in reason and "set CXX to GCC 11" in reason


@pytest.mark.skipif(not ON_X86, reason="for x86-64")
def test_a_processor_with_other_instructions_is_refused(fake_compiler, monkeypatch):
    """Its library would end the process with an illegal instruction."""
    if "amx_bf16" in build.cpu_features().split():
        pytest.skip("this processor has the instructions of a Sapphire Rapids")
    arch = "sapphirerapids"
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", arch)
    forget()
    with pytest.raises(
        build.BuildError, match=f"NANOVLLM_CPU_ARCH='{arch}': this processor lacks the instructions .*; unset it"
    ):
        build.load_library()
    assert compiled_parts(fake_compiler) == 0
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", "x86-64")
    forget()
    build.load_library()


def test_an_unknown_processor_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", "pentium9")
    build.load_library.cache_clear()
    try:
        with pytest.raises(build.BuildError, match="'pentium9': unset it.*--no-use-custom-kernels"):
            build.load_library()
    finally:
        build.load_library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++-11", "g++-12", "g++-13", "g++-14", "clang++-14", "clang++-16", "clang++-19"])
def test_older_and_newer_compilers_take_the_sources(compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    for source in ("library.cpp", "products.cpp"):
        command = [
            compiler, *build.flags(), "-DNANOVLLM_PARTS=1", "-DNANOVLLM_PART=0", "-fsyntax-only",
            Path(build.__file__).parent / source,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]

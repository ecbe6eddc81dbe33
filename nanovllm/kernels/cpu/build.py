"""Compiles the C++ kernels for this machine's processor at their first use; says beforehand whether that can work.

The library is built in a few seconds with the system's compiler, and kept in `$NANOVLLM_CACHE` (else ~/.cache/nanovllm)
under a hash of the sources, the flags, the compiler's version and the processor's features: it is never stale. It ends
in a hash of its content, since the dynamic linker would map a truncated file and crash; a damaged one is built again.
Several processes may want it at once, such as a server's replicas: one builds it into a file of its own and moves that
into place, and the others wait. A library is loaded only from a directory that belongs to this user and that others
cannot write to.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from nanovllm.console import announced
from nanovllm.kernels.cpu import prebuilt
from nanovllm.kernels.cpu.compilers import WANTED, lacking_instructions, unfit
from nanovllm.kernels.cuda.build import exclusive, make_private, not_private

FLAGS = (
    "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
    "-pthread", "-w",
)  # fmt: skip
_SOURCES = Path(__file__).parent
_PARTS = 2  # of products.cpp, compiled side by side
_SPACE = 20 << 20  # bytes that a build needs
_DIGEST = 16  # bytes of the hash that a built library ends in

logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The C++ kernels cannot be compiled. The message says what to do."""


@cache
def cpu_support(device: torch.device) -> str | None:
    """Why the C++ kernels cannot run on a device, and what to do about it; None if they can. Compiles nothing."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU, this is {device}; use native"
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64") or os.name != "posix":
        return f"the C++ kernels need Linux or macOS on x86-64 or arm64, this is {platform.machine()}; use native"
    reason = _not_compiled()
    if reason is None or _prebuilt_library() is not None:
        return None
    return "; ".join(filter(None, (prebuilt.lacking(source_key(), cpu_features()), reason)))


def _not_compiled() -> str | None:
    """Why no library can be compiled, or loaded where it would be; None: it can, as far as that is known."""
    try:
        path = library_path()
    except FileNotFoundError as e:
        return str(e)
    directory = path.parent
    if (reason := not_private(directory, "NANOVLLM_CACHE")) is not None:
        return reason
    parent = next(p for p in (directory, *directory.parents) if p.exists())
    if path.exists():
        return None
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return unfit(compiler(), FLAGS)
    return (
        f"the compiled C++ kernels cannot be kept in {directory}, since {parent} "
        f"{'is read-only for this user' if parent.is_dir() else 'is a file'}; "
        "set NANOVLLM_CACHE to a directory of your own"
    )


def _prebuilt_library() -> Path | None:
    """The library of the installed wheel that this processor runs; None: there is none, or another one is asked for."""
    return None if os.environ.get("NANOVLLM_CPU_ARCH") else prebuilt.library_for(source_key(), cpu_features())


@cache
def compiler() -> str:
    """The path of a C++ compiler: $CXX, else c++, g++ or clang++.

    Raises:
        FileNotFoundError: there is none, or CXX names none.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    if named:
        raise FileNotFoundError(
            f"CXX={named!r}, the compiler of the C++ kernels, is not a program; set it to the path of one, or unset it"
        )
    raise FileNotFoundError("the C++ kernels need a C++ compiler; install g++ (apt install g++), or set CXX")


def flags() -> tuple[str, ...]:
    """The compiler's flags. $NANOVLLM_CPU_ARCH names the processor to compile for, such as "x86-64-v3": AVX2 alone."""
    arch = os.environ.get("NANOVLLM_CPU_ARCH")
    return (*FLAGS, *([f"-march={arch}"] if arch else prebuilt.processor_flags(cpu_features())))


def library_path() -> Path:
    """Where this machine's library is, or will be."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    key = _hash([version, " ".join(flags()), cpu_features(), source_key()])
    root = os.environ.get("NANOVLLM_CACHE") or Path.home() / ".cache" / "nanovllm"
    return Path(root) / "cpu" / f"nanovllm_cpu_{key}.so"


def source_key(sources: Mapping[str, str] | None = None) -> str:
    """A hash of C++ sources, file name -> text; None: those of this package."""
    if sources is None:
        sources = {path.name: path.read_text() for path in _SOURCES.iterdir() if path.suffix in (".h", ".cpp")}
    return _hash([part for item in sorted(sources.items()) for part in item])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def cpu_features() -> str:
    """The processor's features, as Linux names them; elsewhere its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@cache
def load_library() -> ctypes.CDLL:
    """The library: compiled for this processor, or if it cannot be compiled the prebuilt one.

    Raises:
        FileNotFoundError: there is neither.
        RuntimeError: it does not compile (the message holds the compiler's last lines), $NANOVLLM_CPU_ARCH names a
            processor with instructions that this one lacks, or the prebuilt library is damaged.
    """
    if (reason := _not_compiled()) is not None:
        if (path_of_wheel := _prebuilt_library()) is None:
            raise FileNotFoundError(reason)
        prebuilt.check_whole(path_of_wheel)
        return ctypes.CDLL(str(path_of_wheel))
    _check_arch()
    path = library_path()
    if not _is_whole(path):
        try:
            make_private(path.parent, "NANOVLLM_CACHE")
            with exclusive(path.parent):
                if not _is_whole(path):  # else another process was faster
                    if path.exists():
                        logger.warning("%s is damaged: it is compiled again", path)
                    _build(path)
        except OSError as e:
            raise BuildError(
                f"the C++ kernels cannot be compiled in {path.parent}: {e.strerror}; "
                f"set NANOVLLM_CACHE to a directory of your own with {_SPACE >> 20} MB of space"
            ) from e
    return ctypes.CDLL(str(path))


def _check_arch() -> None:
    """Raise BuildError if $NANOVLLM_CPU_ARCH allows instructions that would end this process."""
    features = cpu_features()
    if (arch := os.environ.get("NANOVLLM_CPU_ARCH")) and " " in features:  # else the system does not tell
        if lacking := lacking_instructions(compiler(), flags(), features):
            raise BuildError(
                f"NANOVLLM_CPU_ARCH={arch!r}: this processor lacks the instructions {', '.join(lacking)}; unset it, or"
                " set it to an older processor"
            )


def _is_whole(path: Path) -> bool:
    """Whether a library is there and as it was built."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return content[-_DIGEST:] == _digest(content[:-_DIGEST])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _build(path: Path) -> None:
    """Compile into a directory of its own beside the library, under the lock."""
    for left in path.parent.glob("tmp*"):  # by a process that was killed while it compiled
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(path.parent).free < _SPACE:  # compilers fail in strange ways, or write half a file
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    text = "compiling the C++ kernels for this processor, once; it takes 10 s on two idle cores"
    status = "Compiling the C++ kernels, once (10 s on two idle cores) ..."
    with announced(logger, text, status), tempfile.TemporaryDirectory(dir=path.parent) as directory:
        library = compile_library(Path(directory), flags())
        content = library.read_bytes()
        with library.open("ab") as file:  # behind what the dynamic linker maps
            file.write(_digest(content))
        library.replace(path)


def compile_library(directory: Path, flags: Sequence[str], link_flags: Sequence[str] = ()) -> Path:
    """Build the library in a directory; its path."""
    sources = [("library.cpp", 0), *(("products.cpp", part) for part in range(_PARTS))]
    jobs: list[subprocess.Popen[str]] = []
    objects = []
    try:
        for source, part in sources:
            objects.append(str(directory / f"{source}{part}.o"))
            defines = [f"-DNANOVLLM_PARTS={_PARTS}", f"-DNANOVLLM_PART={part}"]
            jobs.append(_start([compiler(), *flags, *defines, "-c", str(_SOURCES / source), "-o", objects[-1]]))
        for job in jobs:
            _finish(job)
        library = directory / "library.so"
        jobs.append(_start([compiler(), "-shared", "-pthread", *link_flags, *objects, "-o", str(library)]))
        _finish(jobs[-1])
    except BaseException:  # an interrupt, or one part does not compile
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()
        raise
    return library


def _start(command: list[str]) -> subprocess.Popen[str]:
    """A compiler in a process group of its own, since it starts processes that must end with it."""
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _finish(job: subprocess.Popen[str]) -> None:
    _, errors = job.communicate()
    if not job.returncode:
        return
    last = "\n".join(errors.splitlines()[-5:])
    if arch := os.environ.get("NANOVLLM_CPU_ARCH"):
        remedy = f"NANOVLLM_CPU_ARCH={arch!r}: unset it, or set it to an -march of that compiler"
    else:
        remedy = f"set CXX to {WANTED}"
    raise BuildError(
        f"the C++ kernels do not compile with {compiler()}; {remedy}; or run without them:"
        " use_custom_kernels=False (--no-use-custom-kernels)"
        f"\n{last}"
    )

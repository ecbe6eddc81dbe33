"""Compiles the C++ kernels for this machine's processor at their first use; says beforehand whether that can work.

The library is built in a few seconds with the system's compiler, and kept in `$NANOVLLM_CACHE` (else ~/.cache/nanovllm)
under a hash of the sources, the flags, the compiler's version and the processor's features: it is never stale. Several
processes may want it at once, such as a server's replicas: one builds it into a file of its own and moves that into
place, and the others wait. A library is loaded only from a directory that belongs to this user and that others cannot
write to.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from nanovllm.kernels.cpu import prebuilt
from nanovllm.kernels.cuda.build import exclusive, make_private, not_private

FLAGS = (
    "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
    "-pthread", "-w",
)  # fmt: skip
_SOURCES = Path(__file__).parent
_PARTS = 2  # of products.cpp, compiled side by side

logger = logging.getLogger(__name__)


@cache
def cpu_support(device: torch.device) -> str | None:
    """Why the C++ kernels cannot run on a device, and what to do about it; None if they can. Compiles nothing."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU, this is {device}; use native"
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64") or os.name != "posix":
        return f"the C++ kernels need Linux or macOS on x86-64 or arm64, this is {platform.machine()}; use native"
    try:
        path = library_path()
    except FileNotFoundError as e:
        if _prebuilt_library() is not None:
            return None
        return "; ".join(filter(None, (prebuilt.lacking(source_key(), cpu_features()), str(e))))
    return not_private(path.parent)


def _prebuilt_library() -> Path | None:
    """The library of the installed wheel that this processor runs; None: there is none, or another one is asked for."""
    return None if os.environ.get("NANOVLLM_CPU_ARCH") else prebuilt.library_for(source_key(), cpu_features())


@cache
def compiler() -> str:
    """The path of a C++ compiler: $CXX, else c++, g++ or clang++.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(
        "the C++ kernels need a C++ compiler; install g++ (apt install g++), or set CXX; use native"
    )


def flags() -> tuple[str, ...]:
    """The compiler's flags. $NANOVLLM_CPU_ARCH names the processor to compile for, such as "x86-64-v3": AVX2 alone."""
    return (*FLAGS, f"-march={os.environ.get('NANOVLLM_CPU_ARCH') or 'native'}")


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
    """The library: compiled for this processor, or without a compiler the prebuilt one.

    Raises:
        FileNotFoundError: there is no compiler, and no prebuilt library.
        RuntimeError: it does not compile (the message holds the compiler's last lines), or the prebuilt one is damaged.
    """
    try:
        path = library_path()
    except FileNotFoundError:
        if (path_of_wheel := _prebuilt_library()) is None:
            raise
        prebuilt.check_whole(path_of_wheel)
        return ctypes.CDLL(str(path_of_wheel))
    make_private(path.parent)
    if not path.exists():
        with exclusive(path.parent):
            if not path.exists():  # else another process was faster
                _build(path)
    return ctypes.CDLL(str(path))


def _build(path: Path) -> None:
    logger.warning("compiling the C++ kernels for this processor: once, in about 10 s")
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        compile_library(Path(directory), flags()).replace(path)


def compile_library(directory: Path, flags: Sequence[str], link_flags: Sequence[str] = ()) -> Path:
    """Build the library in a directory; its path."""
    sources = [("library.cpp", 0), *(("products.cpp", part) for part in range(_PARTS))]
    jobs, objects = [], []
    for source, part in sources:
        objects.append(str(directory / f"{source}{part}.o"))
        defines = [f"-DNANOVLLM_PARTS={_PARTS}", f"-DNANOVLLM_PART={part}"]
        jobs.append(_start([compiler(), *flags, *defines, "-c", str(_SOURCES / source), "-o", objects[-1]]))
    for job in jobs:
        _finish(job)
    library = directory / "library.so"
    _finish(_start([compiler(), "-shared", "-pthread", *link_flags, *objects, "-o", str(library)]))
    return library


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _finish(job: subprocess.Popen[str]) -> None:
    _, errors = job.communicate()
    if job.returncode:
        last = "\n".join(errors.splitlines()[-5:])
        raise RuntimeError(f"the C++ kernels do not compile with {compiler()}; use_custom_kernels=False\n{last}")

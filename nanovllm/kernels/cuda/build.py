"""Compiles the CUDA C++ kernels at their first use and loads them; says beforehand whether that can work.

One shared library holds all kernels for one architecture. It is built by `torch.utils.cpp_extension` in a folder of its
own, `$TORCH_EXTENSIONS_DIR` (else ~/.cache/torch_extensions) / nanovllm_cuda_sm90_<hash>. The hash covers the sources,
the flags, and the versions of PyTorch and CUDA, so a library is never stale: what changes gets another folder.

Several processes may want the library at once. One builds, under a lock that the operating system releases when its
holder dies; the others wait. PyTorch's own lock is a file that outlives a killed build and then blocks every later one.
It is removed here: the process that holds the first lock knows that no other process builds. A finished build is marked
by a file `complete`. A library is loaded only from a directory that belongs to this user and that others cannot write
to.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanovllm.console import announced

logger = logging.getLogger(__name__)

OLDEST_CAPABILITY = (7, 5)  # the oldest that CUDA 13 compiles for
CXX_FLAGS = ("-O2", "-fvisibility=hidden")
NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fvisibility=hidden")
SOURCES = Path(__file__).parent
"""The folder of the kernels that read rows; other folders have libraries of their own."""
_thread_lock = threading.Lock()


@cache
def cuda_support(device: torch.device, folder: Path = SOURCES) -> str | None:
    """Why the CUDA C++ kernels of a folder cannot run on a device, and what to do about it; None if they can.

    Compiles nothing.
    """
    if device.type != "cuda":
        return f"CUDA C++ kernels need a CUDA device, this is {device}; use native"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is not built for CUDA; install one that is, see https://pytorch.org"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        oldest, this = (".".join(map(str, c)) for c in (OLDEST_CAPABILITY, capability))
        return f"CUDA C++ kernels need compute capability {oldest} or later, this GPU has {this}; use native"
    directory = build_directory(library_name(capability, sources(folder)))
    return not_private(directory) or (None if _is_built(directory) else toolchain_reason())


def toolchain_reason() -> str | None:
    """What is missing on this machine to compile CUDA C++ for this PyTorch, and how to get it; None if nothing."""
    if not sys.platform.startswith("linux"):
        return f"CUDA C++ kernels are built on Linux only, this is {sys.platform}; use native"
    wanted = torch.version.cuda or "the version of your driver"
    home = cuda_home()
    if home is None:
        named = next((f"{v}={os.environ[v]}" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)), None)
        where = f"in {named}/bin" if named else "on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin"
        return (
            f"nvcc, the CUDA compiler, is not {where}; install the CUDA toolkit {wanted} "
            "(https://developer.nvidia.com/cuda-downloads) and set CUDA_HOME to its folder"
        )
    version = nvcc_version(home)
    if version is None:
        return f"{home}/bin/nvcc does not run; reinstall the CUDA toolkit {wanted}, or set CUDA_HOME to a working one"
    if torch.version.cuda and version.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"{home}/bin/nvcc is of CUDA {version} but PyTorch is built for {torch.version.cuda}; "
            f"set CUDA_HOME to a toolkit of CUDA {torch.version.cuda.split('.')[0]}"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        named = "CXX names" if "CXX" in os.environ else "the C++ compiler is"
        return f"{named} {compiler!r}, which is not on PATH; install g++ (for example: apt install g++)"
    if find_ninja() is None:
        return "ninja, which runs the build, is not on PATH; pip install ninja"
    if importlib.util.find_spec("setuptools") is None:
        return "setuptools, which torch.utils.cpp_extension imports, is not installed; pip install setuptools"
    return None


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit: $CUDA_HOME or $CUDA_PATH, else that of the nvcc on PATH, else /usr/local/cuda."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            home = Path(os.environ[variable])
            return home if _is_executable(home / "bin" / "nvcc") else None
    found = shutil.which("nvcc")
    if found is None:
        return Path("/usr/local/cuda") if _is_executable(Path("/usr/local/cuda/bin/nvcc")) else None
    home = Path(found).parent.parent
    if (home / "include" / "cuda_runtime.h").exists():
        return home
    # A script or link that stands for an nvcc elsewhere; a dry run prints where that one's toolkit is.
    top = re.search(r"^#\$ TOP=(.+)$", _output([found, "--dryrun", "-x", "cu", "/dev/null"]) or "", re.MULTILINE)
    home = Path(top[1].strip()).resolve() if top else Path(found).resolve().parent.parent
    return home if _is_executable(home / "bin" / "nvcc") else None


def nvcc_version(home: Path) -> str | None:
    """For example "13.0"."""
    found = re.search(r"release (\d+\.\d+)", _output([str(home / "bin" / "nvcc"), "--version"]) or "")
    return found[1] if found else None


def find_ninja() -> str | None:
    """The ninja on PATH, else the one installed beside this Python, whose environment need not be activated."""
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


def sources(folder: Path = SOURCES) -> dict[str, bytes]:
    """Everything that is compiled or included for the library of a folder, by path from there."""
    files = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in (".cu", ".cuh", ".cpp")}
    included = {name.decode() for text in files.values() for name in re.findall(rb'#include "(\.\./[^"]+)"', text)}
    return files | {name: (folder / name).read_bytes() for name in sorted(included)}


def arch_flag(capability: tuple[int, int], known: list[str] | None = None) -> str:
    """nvcc's option to compile for a GPU. One newer than PyTorch's own kernels gets PTX, which its driver compiles.
    Hopper gets its instructions that no later GPU has.

    Args:
        known: what PyTorch was compiled for, for example ["sm_80", "sm_90"]; None: ask PyTorch.
    """
    known = torch.cuda.get_arch_list() if known is None else known
    wanted = 10 * capability[0] + capability[1]
    newest = max((int(found[1]) for a in known if (found := re.match(r"sm_(\d+)", a))), default=wanted)
    if wanted <= newest:
        name = "90a" if wanted == 90 else wanted
        return f"-gencode=arch=compute_{name},code=sm_{name}"
    return f"-gencode=arch=compute_{newest},code=compute_{newest}"


def library_name(
    capability: tuple[int, int], files: Mapping[str, bytes] | None = None, nvcc_flags: tuple[str, ...] = NVCC_FLAGS
) -> str:
    """The name of the library for an architecture: it changes whenever the result of compiling could."""
    digest = hashlib.sha256()
    told = (torch.__version__, str(torch.version.cuda), arch_flag(capability), *CXX_FLAGS, *nvcc_flags)
    for part in (*(t.encode() for t in told), *(b for item in (files or sources()).items() for b in _bytes(*item))):
        # With its length in front, so that no two lists of parts run together into the same bytes.
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"nanovllm_cuda_sm{capability[0]}{capability[1]}_{digest.hexdigest()[:16]}"


def _bytes(name: str, content: bytes) -> tuple[bytes, bytes]:
    return name.encode(), content


def build_directory(name: str) -> Path:
    """Where a library is built and kept."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
    return Path(root).absolute() / name


def not_private(directory: Path, variable: str = "TORCH_EXTENSIONS_DIR") -> str | None:
    """Why nothing may be loaded from a directory: another user could have put a library there. None if it is safe.

    The directory and the files in it must belong to this user, and others must not be able to write to them, nor to
    replace the directory through its parent. A directory that does not exist is private: `make_private` creates it.

    Args:
        variable: the environment variable that names where libraries are.
    """
    remedy = f"remove it, and it is built again, or set {variable} to a directory of your own"
    try:
        files = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        return f"{directory}, which compiled libraries are loaded from, cannot be read: {e.strerror}; {remedy}"
    mode = directory.stat().st_mode
    for path in (directory, *files):
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process has built a library and removed its own folder
            continue
        if status.st_uid != os.geteuid():
            return f"{path} belongs to the user with the id {status.st_uid}, not to this one ({os.geteuid()}); {remedy}"
        if mode & 0o011 and stat.S_ISREG(status.st_mode) and status.st_mode & 0o022:
            return f"other users may write to {path}, and compiled libraries are loaded from there; {remedy}"
    if mode & 0o022:
        return f"other users may write to {directory}, which compiled libraries are loaded from; {remedy}"
    parent = directory.parent
    if parent.stat().st_mode & 0o1002 == 0o002:  # as /tmp, but without the bit that protects each user's files
        return f"any user may replace directories in {parent}, where compiled libraries are; chmod o-w {parent}"
    return None


def make_private(directory: Path, variable: str = "TORCH_EXTENSIONS_DIR") -> None:
    """Create a directory for libraries if there is none. Raises RuntimeError if other users can write to it.

    Args:
        variable: as of `not_private`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = not_private(directory, variable)
    if reason is not None:
        raise RuntimeError(reason)


def load_library(capability: tuple[int, int], folder: Path = SOURCES) -> Any:
    """The operators of a folder's library for an architecture, `torch.ops.<name>`; compiles it if need be.

    Raises:
        RuntimeError: the compiler failed, the message has its output; or other users can write to the library's
            directory.
    """
    name = library_name(capability, sources(folder))
    directory = build_directory(name)
    with _thread_lock:
        make_private(directory)
        if not _is_built(directory):
            with exclusive(directory):
                if not _is_built(directory):  # else another process was faster
                    build_library(name, directory, capability, folder)
        torch.ops.load_library(str(directory / f"{name}.so"))
    return getattr(torch.ops, name)


def _is_built(directory: Path) -> bool:
    return (directory / "complete").exists()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One process at a time; a wait is announced. The system drops the lock with the process that holds it."""
    import fcntl

    with open(directory / "building", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text, status = (
                f"waiting for another process, which compiles kernels in {directory}",
                "Waiting for another process, which compiles kernels ...",
            )
            with announced(logger, text, status):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_library(name: str, directory: Path, capability: tuple[int, int], folder: Path) -> None:
    """Compiles and links into `directory`, under the lock."""
    reason = toolchain_reason()
    home, ninja = cuda_home(), find_ninja()
    if reason is not None or home is None or ninja is None:
        raise RuntimeError(f"the CUDA C++ kernels cannot be compiled: {reason}")
    from torch.utils import cpp_extension

    (directory / "lock").unlink(missing_ok=True)  # PyTorch's: left by a build that was killed
    logger.warning("compiling CUDA C++ kernels into %s: once for this version and GPU, up to two minutes", directory)
    start = time.perf_counter()
    files = [str(folder / f) for f in sources(folder) if not f.endswith(".cuh")]
    path, cpp_home = os.environ.get("PATH", ""), cpp_extension.CUDA_HOME
    os.environ["PATH"] = os.pathsep.join(filter(None, (path, os.path.dirname(ninja))))
    cpp_extension.CUDA_HOME = str(home)  # PyTorch's guess takes a script named nvcc for the real one
    try:
        compiled = _compiled_only(cpp_extension, name, files, directory, home, capability)
    except Exception as error:
        raise RuntimeError(f"compiling the CUDA C++ kernels in {directory} failed:\n{error}") from error
    finally:
        os.environ["PATH"], cpp_extension.CUDA_HOME = path, cpp_home
    assert Path(compiled).samefile(directory / f"{name}.so")
    (directory / "complete").touch()
    logger.info("compiled the CUDA C++ kernels in %.1f s", time.perf_counter() - start)


def _compiled_only(
    cpp_extension: Any, name: str, files: list[str], directory: Path, home: Path, capability: tuple[int, int]
) -> str:
    """Runs the build; the library is loaded as well, which loading it again later does not repeat."""
    return cpp_extension.load(
        name,
        files,
        extra_cflags=list(CXX_FLAGS),
        extra_cuda_cflags=[*NVCC_FLAGS, arch_flag(capability)],
        extra_ldflags=[f"-L{folder}" for folder in runtime_folders(home, directory)],
        build_directory=str(directory),
        with_cuda=True,
        is_python_module=False,
    )


def runtime_folders(home: Path, directory: Path) -> list[Path]:
    """Where the linker finds libcudart.so. Python wheels carry only libcudart.so.<version>, which gets a link."""
    folders = [f for f in (home / "lib64", home / "lib", *home.glob("targets/*/lib")) if f.is_dir()]
    versioned = [p for f in folders for p in f.glob("libcudart.so.*")]
    if versioned and not any((f / "libcudart.so").exists() for f in folders):
        link = directory / "libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to(versioned[0])
        folders.append(directory)
    return folders


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout

"""Compiles the .cu file of a lesson with nvcc, to a library that Python loads or to PTX.

A library is built at its first use in `$TORCH_EXTENSIONS_DIR` (else ~/.cache/torch_extensions) / nanovllm_lab_<hash>.
The hash covers sources, flags and compiler, so no library is stale.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from nanovllm.kernels.cuda.build import (
    NVCC_FLAGS,
    arch_flag,
    build_directory,
    cuda_home,
    make_private,
    nvcc_version,
    toolchain_reason,
)

OLDEST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores, cp.async
_SOURCES = Path(__file__).parent


def cuda_reason(device: torch.device) -> str | None:
    """Why the lessons' CUDA C++ cannot run on a device, and what to do; None if it can."""
    if device.type != "cuda":
        missing = toolchain_reason()
        rest = "nvcc is here, so its PTX can be looked at" if missing is None else missing
        return f"CUDA C++ runs on a GPU, this is {device}; {rest}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"the lessons need compute capability 8.0 or later, this GPU has {'.'.join(map(str, capability))}"
    return toolchain_reason()


@cache
def load(name: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """The library of <name>.cu for an architecture; compiles it if that was not done before.

    Raises:
        RuntimeError: the compiler failed (the message has its output), or other users can write to the directory.
    """
    home = _home()
    flags = [*NVCC_FLAGS, arch_flag(capability), "-shared", "-Xcompiler=-fPIC"]
    digest = hashlib.sha256(repr((name, flags, nvcc_version(home), _source_bytes(name))).encode()).hexdigest()[:16]
    library = build_directory(f"nanovllm_lab_{digest}") / f"{name}.so"
    make_private(library.parent)
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}.so")  # renamed when complete: no process loads half of it
        _run(home / "bin" / "nvcc", *flags, "-o", own, _SOURCES / f"{name}.cu")
        own.replace(library)
    return ctypes.CDLL(str(library))


def ptx_and_report(name: str, capability: tuple[int, int]) -> tuple[str, str]:
    """(the PTX of <name>.cu, the report of `assemble`)."""
    home = _home()
    number = 10 * capability[0] + capability[1]
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory) / "kernel.ptx"
        options = *NVCC_FLAGS, f"-arch=compute_{number}", "-ptx"
        _run(home / "bin" / "nvcc", *options, "-o", ptx, _SOURCES / f"{name}.cu")
        return ptx.read_text(), assemble(home / "bin" / "ptxas", ptx, f"sm_{number}")


def assemble(ptxas: Path, ptx: Path, architecture: str) -> str:
    """What ptxas says about registers, spills and shared memory."""
    return _run(ptxas, "-v", f"-arch={architecture}", "-o", os.devnull, ptx)


def _home() -> Path:
    reason, home = toolchain_reason(), cuda_home()
    if reason is not None or home is None:
        raise RuntimeError(f"the lessons' CUDA C++ cannot be compiled: {reason}")
    return home


def _run(*command: str | Path) -> str:
    """What a command prints. Raises RuntimeError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _source_bytes(name: str) -> bytes:
    """The source and the headers of the lab that it includes."""
    text = (_SOURCES / f"{name}.cu").read_bytes()
    headers = re.findall(rb'^#include "([\w.]+)"', text, re.MULTILINE)
    return b"\0".join([text, *((_SOURCES / h.decode()).read_bytes() for h in headers)])

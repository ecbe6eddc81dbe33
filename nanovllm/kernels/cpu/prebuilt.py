"""Libraries of the C++ kernels that a platform wheel carries, for machines without a compiler.

Which of them a processor can run is read from /proc/cpuinfo when a library is loaded. A library's name holds a hash of
the sources, so that a library of other sources is never loaded, and a hash of its content, since the dynamic linker
would map a truncated file and crash. `wheel.py` makes such wheels.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent / "prebuilt"
"""Where a wheel's libraries are."""
_X86_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_X86_V4 = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True)
class Variant:
    """What a library is compiled for.

    Attributes:
        machine: as `platform.machine` names it on Linux.
        flags: of the compiler.
        features: what the processor must have, as /proc/cpuinfo names it.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    def file_name(self, source_key: str, content: bytes) -> str:
        """The name of the library with this content, compiled from the sources with this hash."""
        return f"{self._prefix(source_key)}{_digest(content)}.so"

    def find(self, directory: Path, source_key: str) -> Path | None:
        """The library in a directory; None: there is none."""
        return next(directory.glob(f"{self._prefix(source_key)}*.so"), None)

    def _prefix(self, source_key: str) -> str:
        return f"nanovllm_cpu_{self.name}_{source_key}_"


VARIANTS = (
    Variant(
        "amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _X86_V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
    ),  # fmt: skip
    Variant("avx512_vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _X86_V4 | {"avx512_vnni"}),
    Variant("avx_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _X86_V3 | {"avx_vnni"}),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), _X86_V3),
    Variant("dotprod", "aarch64", ("-march=armv8.2-a+dotprod+fp16",), frozenset(("asimddp", "asimdhp"))),
)
"""Best first."""


def processor_flags(features: str, machine: str | None = None) -> tuple[str, ...]:
    """The flags with which this processor's library is compiled.

    On arm64 `-march=native` is not all that the processor has: GCC 12 leaves dot products out on a Neoverse V1 or N2,
    and Clang wherever they are an option of the architecture, as on a Neoverse N1. The kernels use no other option.

    Args:
        features: the processor's, separated by spaces, as a line of /proc/cpuinfo.
        machine: as `platform.machine` names it; None: this one.
    """
    variant, machine = VARIANTS[-1], machine or platform.machine()
    # macOS says "arm64", and nothing of the features, which all of its processors have.
    if machine == "arm64" or (machine == variant.machine and variant.features <= set(features.split())):
        return variant.flags
    return ("-march=native",)


def library_for(source_key: str, features: str, machine: str | None = None) -> Path | None:
    """The best library in `DIRECTORY` for a processor; None: there is none that it can run.

    Args:
        features: the processor's, separated by spaces, as a line of /proc/cpuinfo.
        machine: as of `Variant`; None: this one.
    """
    has = set(features.split())
    return next((path for variant, path in _libraries(source_key, machine) if variant.features <= has), None)


def lacking(source_key: str, features: str, machine: str | None = None) -> str | None:
    """Why a processor cannot run any library in `DIRECTORY`; None: it can, or there is none for its kind of machine."""
    found = _libraries(source_key, machine)
    if not found or library_for(source_key, features, machine):
        return None
    variant, _ = found[-1]  # it needs the fewest instructions
    missing = ", ".join(sorted(variant.features - set(features.split())))
    return f"the installed wheel's C++ kernels need a processor with {variant.name}; this one lacks {missing}"


def check_whole(path: Path) -> None:
    """Raise RuntimeError if a library is not what was written when its wheel was made."""
    content = path.read_bytes()
    if path.stem.rpartition("_")[2] != _digest(content):
        raise RuntimeError(
            f"{path} is damaged: its {len(content)} bytes are not those that its name stands for; "
            "install nanovllm again, or pass use_custom_kernels=False (--no-use-custom-kernels)"
        )


def _libraries(source_key: str, machine: str | None) -> list[tuple[Variant, Path]]:
    if sys.platform != "linux":
        return []
    variants = [v for v in VARIANTS if v.machine == (machine or platform.machine())]
    return [(v, path) for v in variants if (path := v.find(DIRECTORY, source_key)) is not None]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()

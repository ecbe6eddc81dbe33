"""Makes platform wheels, which carry compiled libraries of the C++ kernels, of pure ones.

    pip wheel --no-deps --wheel-dir dist .
    python -m nanovllm.kernels.cpu.wheel dist/nanovllm-*-none-any.whl

They hold a library for each processor of `prebuilt.VARIANTS` that the compiler $CXX compiles for.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from nanovllm.kernels.cpu import build, prebuilt

_FOLDER = "nanovllm/kernels/cpu/"
# Linked statically, so that an older C++ library does. Parts of it that nothing calls need a newer C library.
_LINK_FLAGS = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")


def compile_variants(directory: Path) -> list[Path]:
    """Compile the library for every variant that the compiler can compile for.

    Raises:
        FileNotFoundError: there is no compiler.
        ValueError: it compiles for another kind of machine.
        RuntimeError: it fails.
    """
    target = subprocess.run([build.compiler(), "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    machine, _, system = target.strip().partition("-")
    variants = [v for v in prebuilt.VARIANTS if v.machine == machine and "linux" in system]
    if not variants:
        known = ", ".join(sorted({f"{v.machine}-linux" for v in prebuilt.VARIANTS}))
        raise ValueError(f"{build.compiler()} compiles for {target.strip()}; set CXX to a compiler for {known}")
    made = []
    for variant in variants:
        with tempfile.TemporaryDirectory(dir=directory) as parts:
            library = build.compile_library(Path(parts), (*build.FLAGS, *variant.flags), _LINK_FLAGS)
            name = variant.file_name(build.source_key(), library.read_bytes())
            made.append(library.replace(directory / name))
    return made


def platform_wheel(pure: Path, libraries: Sequence[Path]) -> Path:
    """A wheel beside a pure one, with the same files and these libraries, for the platform that they need.

    Raises:
        ValueError: the wheel is not a pure one, or holds other C++ sources than those that were compiled.
    """
    if not pure.name.endswith("-none-any.whl"):
        raise ValueError(f"{pure.name}: expected a wheel for any platform, NAME-VERSION-py3-none-any.whl")
    tag = _platform(libraries)
    path = pure.with_name(pure.name.removesuffix("any.whl") + f"{tag}.whl")
    with zipfile.ZipFile(pure) as old:
        files = {item.filename: old.read(item) for item in old.infolist()}
    sources = {n.removeprefix(_FOLDER): f.decode() for n, f in files.items() if re.match(rf"{_FOLDER}\w+\.(h|cpp)$", n)}
    if build.source_key(sources) != build.source_key():
        raise ValueError(f"{pure.name} holds other C++ sources than {Path(build.__file__).parent}; build it again")
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    wheel = record.removesuffix("RECORD") + "WHEEL"
    text = files[wheel].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[wheel] = re.sub(r"^(Tag: .*)-any$", rf"\1-{tag}", text, flags=re.MULTILINE).encode()
    for library in libraries:
        files[f"{_FOLDER}{prebuilt.DIRECTORY.name}/{library.name}"] = library.read_bytes()
    del files[record]
    lines = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in files.items():
            new.writestr(name, content)
    return path


def _platform(libraries: Sequence[Path]) -> str:
    """The tag of the oldest Linux whose C library has all that the libraries call."""
    found = [re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes()) for library in libraries]
    major, minor = max((int(a), int(b)) for versions in found for a, b in versions)
    variant = next(v for v in prebuilt.VARIANTS if libraries[0].name.startswith(f"nanovllm_cpu_{v.name}_"))
    return f"manylinux_{major}_{minor}_{variant.machine}"


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def main(wheels: Sequence[str]) -> None:
    """Make platform wheels of pure ones."""
    if not wheels or any(wheel.startswith("-") for wheel in wheels):
        sys.exit("usage: python -m nanovllm.kernels.cpu.wheel WHEEL...; CXX names the compiler")
    with tempfile.TemporaryDirectory() as directory:
        try:
            libraries = compile_variants(Path(directory))
            for wheel in wheels:
                print(platform_wheel(Path(wheel), libraries))
        except (OSError, ValueError, RuntimeError, subprocess.CalledProcessError, zipfile.BadZipFile) as e:
            sys.exit(f"error: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])

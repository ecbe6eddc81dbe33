"""What a C++ compiler says about itself: its version, and the instructions that its flags allow it to use."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

GCC, CLANG = 11, 14
"""The first versions that compile the sources."""
WANTED = f"GCC {GCC}, Clang {CLANG} or later"

_INSTRUCTIONS = {
    **{
        f"__{name}__": name.lower()
        for name in (
            "SSE4_1", "SSE4_2", "AVX", "AVX2", "FMA", "F16C", "BMI2", "MOVBE", "GFNI", "VAES", "VPCLMULQDQ", "AVX512F",
            "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL", "AVX512IFMA", "AVX512VBMI", "AMX_TILE", "AMX_BF16",
            "AMX_INT8", "AMX_FP16",
        )
    },
    "__BMI__": "bmi1", "__LZCNT__": "abm", "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16", "__AVX512VBMI2__": "avx512_vbmi2", "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq", "__AVX512VP2INTERSECT__": "avx512_vp2intersect",
    "__AVXVNNI__": "avx_vnni", "__AVXIFMA__": "avx_ifma", "__AVXNECONVERT__": "avx_ne_convert",
    "__AVXVNNIINT8__": "avx_vnni_int8",
    "__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm", "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16", "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}  # fmt: skip
"""A compiler's macro -> the instructions that it stands for, as /proc/cpuinfo names them."""


def unfit(compiler: str, flags: Sequence[str]) -> str | None:
    """Why a compiler cannot compile the C++ kernels, with its version and what to do; None: nothing is known.

    It preprocesses one header of the standard library, in some 50 ms.

    Args:
        flags: without -march.
    """
    source = "#include <condition_variable>\n"
    try:
        done = _preprocess(compiler, flags, source)
    except OSError as e:
        return f"the compiler {compiler} does not start: {e.strerror}; set CXX to {WANTED}"
    known, version = _macros(done.stdout), _first_line(compiler)
    name, number, least = ("GCC", "__GNUC__", GCC) if "__clang__" not in known else ("Clang", "__clang_major__", CLANG)
    if known.get(number, "").isdecimal() and int(known[number]) < least:
        found = f"{name} {known[number]} ({version})"
        return f"the C++ kernels need {WANTED}, and {compiler} is {found}; set CXX to such a one"
    if done.returncode:
        error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        return f"{compiler} ({version}) does not compile C++20: {error}; set CXX to {WANTED}, with its standard library"
    return None


def lacking_instructions(compiler: str, flags: Sequence[str], features: str) -> list[str]:
    """Instructions that the compiler may use with these flags and that a processor lacks.

    Args:
        features: the processor's, separated by spaces, as a line of /proc/cpuinfo.
    """
    has = set(features.split())
    allowed = _macros(_preprocess(compiler, flags, "").stdout)
    return sorted(name for macro, name in _INSTRUCTIONS.items() if macro in allowed and name not in has)


def _preprocess(compiler: str, flags: Sequence[str], source: str) -> subprocess.CompletedProcess[str]:
    command = [compiler, *flags, "-x", "c++", "-E", "-dM", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def _macros(listing: str) -> Mapping[str, str]:
    defined = (line.split(maxsplit=2) for line in listing.splitlines() if line.startswith("#define "))
    return {words[1]: words[2] if len(words) > 2 else "" for words in defined}


def _first_line(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["no version"])[0]

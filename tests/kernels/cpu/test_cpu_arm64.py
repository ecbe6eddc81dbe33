"""The C++ for arm64, by a cross-compiler, and its products, by an emulator: each where it is installed."""

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nanovllm.kernels.cpu import build, prebuilt

gguf = pytest.importorskip("gguf")
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
if COMPILER is None:
    pytest.skip("there is no compiler for arm64 (apt install g++-aarch64-linux-gnu)", allow_module_level=True)

SOURCES = Path(build.__file__).parent
# (number in formats.h, where a block holds its halves)
QUANTISED = {"Q8_0": (3, [0]), "Q4_0": (4, [0]), "Q4_1": (5, [0, 2]), "Q5_0": (6, [0]), "Q5_1": (7, [0, 2]),
             "Q4_K": (8, [0, 2]), "Q5_K": (9, [0, 2]), "Q6_K": (10, [208])}  # fmt: skip
PLAIN = {"F32": 0, "BF16": 1, "F16": 2}
DOT_PRODUCTS = next(v for v in prebuilt.VARIANTS if v.machine == "aarch64").flags


def random_weight(name, rows, columns, rng):
    """(number, bytes as a file has them, the same weights in float32)."""
    kind = gguf.GGMLQuantizationType[name]
    if name in PLAIN:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind)
        return PLAIN[name], raw.tobytes(), gguf.quants.dequantize(raw, kind)
    number, halves = QUANTISED[name]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // width, size), dtype=np.uint8)
    for at in halves:
        scales = rng.standard_normal((rows, columns // width)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    return number, blocks.tobytes(), gguf.quants.dequantize(blocks, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, processors",
    [(DOT_PRODUCTS, ["neoverse-n1", "max"]), (["-march=armv8-a"], ["cortex-a72"])],
    ids=["dot products", "none"],
)
def test_products_are_those_of_the_dequantised_weights(tmp_path, flags, processors):
    """At -O0, which compiles in a sixth of the time."""
    program = tmp_path / "emulated"
    command = [
        COMPILER, *(flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC", "-w")), "-O0", *flags, "-static",
        "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-DNANOVLLM_PARTS=1", "-DNANOVLLM_PART=0",
        f"-I{SOURCES}", Path(__file__).with_name("emulated.cpp"), "-o", program,
    ]  # fmt: skip
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    if EMULATOR is None:
        pytest.skip("compiled, but there is no emulator to run it (apt install qemu-user-static)")
    rng = np.random.default_rng(0)
    cases, asked = [], []
    for name in (*PLAIN, *QUANTISED):
        for rows, columns, tokens in ((37, 512, 1), (50, 256, 7), (20, 768, 19)):
            for parts in (0,) if name in PLAIN else (1, 3):
                number, raw, weight = random_weight(name, rows, columns, rng)
                x = rng.standard_normal((tokens, columns)).astype(np.float32)
                cases.append((name, parts, x.astype(np.float64) @ weight.astype(np.float64).T))
                asked += [struct.pack("6q", number, parts, rows, columns, tokens, len(raw)), raw, x.tobytes()]
    for processor in processors:
        done = subprocess.run([EMULATOR, "-cpu", processor, program], input=b"".join(asked), capture_output=True)
        assert done.returncode == 0, (processor, done.returncode, done.stderr[-1000:])
        got = np.frombuffer(done.stdout, np.float32)
        assert got.size == sum(want.size for _, _, want in cases)
        for name, parts, want in cases:
            result, got = got[: want.size].reshape(want.shape), got[want.size :]
            error = np.linalg.norm(result - want) / np.linalg.norm(want)
            assert error < (2e-2 if parts == 1 else 1e-6), (processor, name, parts, want.shape)
            assert parts != 1 or error > 1e-4, (name, "the activations are not rounded")

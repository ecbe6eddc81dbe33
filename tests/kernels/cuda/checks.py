"""What the tests of both kinds of products in CUDA C++ check."""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import ops
from nanovllm.kernels.cuda import build
from nanovllm.kernels.cuda.packed import linear_packed
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, PLANES, dequantise_gguf
from nanovllm.kernels.ops.linear_int4 import dequantise_affine, unpack_int4

BF16 = torch.bfloat16


def make(kind, rows, size, device, group=128, zeros=False, scale_dtype=BF16):
    """(the operands of the packed ops, the weight in float64)"""
    if kind in GGUF_TYPES:
        of = GGUF_TYPES[kind]
        weight = torch.randint(0, 256, (rows, of.plane_offsets(size)[1]), dtype=torch.uint8, device=device)
        for name in {"d", "m"} & set(of.planes):
            plane = of.plane(weight, name, size).flatten(1).view(torch.float16)
            plane.copy_(torch.randn(plane.shape, device=device) * 0.001)
        values = dequantise_gguf(weight, kind + PLANES, size).to(BF16)  # scaled weights are rounded
        return (kind + PLANES, weight, None, None), values.double()
    bits = int(kind[3:])
    weight = torch.randint(0, 256, (rows, size * bits // 8), dtype=torch.uint8, device=device)
    scale = (torch.randn(rows, size // group, device=device) * 0.01).to(scale_dtype)
    zero = torch.randint(0, 2**bits, scale.shape, dtype=torch.uint8, device=device) if zeros else None
    q = unpack_int4(weight) if bits == 4 else weight
    values = dequantise_affine(q, scale, 2 ** (bits - 1) if zero is None else zero, torch.float64)
    return (kind, weight, scale, zero), values


def check(got, x, values, bias=None):
    """A product in 16 bits, and the one in float64."""
    exact = x.double() @ values.t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ values.abs().t()
    tolerance = size * 2**-8 + exact.abs() * 2**-8 + 1e-6
    assert not got.isnan().any() and ((got.double() - exact).abs() <= tolerance).all()


def check_gated(gated, plain, x, values):
    """A gated product in bfloat16 and the separate ops, where gate and up may be rounded differently by a place each.

    A place is up to 2^-7 of a value. SiLU passes on up to 1 + |gate| times the relative error of the gate; SiLU's
    result and the last product are rounded once more. Both products add float32 numbers, in another order: a gate or
    an up is off by a small part of the sum of magnitudes, which is much of it where most of the sum cancels. SiLU
    passes on up to 1.1 times that of the gate.

    Args:
        gated: [tokens, rows / 2]
        plain: the product, [tokens, rows]
        x: [tokens, columns]
        values: the weight in float64, [rows, columns]
    """
    wanted = ops.silu_and_mul.native(plain).double()
    gate, up = plain.double().chunk(2, dim=1)
    off_gate, off_up = (x.double().abs() @ values.abs().t() * 2**-17).chunk(2, dim=1)
    rounded = wanted.abs() * (2**-5 + gate.abs() * 2**-7)
    summed = 1.25 * (off_gate * (up.abs() + off_up) + torch.nn.functional.silu(gate).abs() * off_up)
    assert not gated.isnan().any() and ((gated.double() - wanted).abs() <= rounded + summed + 1e-30).all()


def check_fused(x, operands, plain, values):
    """The products with what follows them, and the separate ops.

    Args:
        operands: storage, weight, scale and zero of the packed ops.
        plain: the product.
        values: the weight in float64.
    """
    check_gated(linear_packed.linear_packed_silu_and_mul(x, *operands), plain, x, values)
    residual, norm = torch.randn_like(plain), torch.rand_like(plain[0])
    got = linear_packed.linear_packed_add_rms_norm(x, *operands, residual, norm, 1e-6)
    for result, wanted in zip(got, ops.add_rms_norm.native(plain, residual, norm, 1e-6), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2**-6, atol=2e-2)


def views_of_1024_columns(x):
    """Of x [4, 3000]: aligned and not, with one more dimension, and with strided elements."""
    return x[:, 8:1032], x[:, 3:1027], x.view(4, 1, 3000)[..., :1024], x.t()[:1024].t()


def replayed(call, x):
    """The result of a captured call that reads x, replayed with other values of x."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    x.copy_(torch.randn_like(x))
    graph.replay()
    return y


def nvcc(*arguments):
    """What it prints to stderr; the test is skipped without it."""
    if build.toolchain_reason() is not None and build.cuda_home() is None:
        pytest.skip("needs nvcc")
    command = [build.cuda_home() / "bin" / "nvcc", "-std=c++17", *arguments]
    return subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr


@cache
def ptx_of(source, arch):
    """A file's PTX, of which two tests of a file may want something: most of the time goes into it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.ptx"
        nvcc("-O3", f"-arch={arch}", "-ptx", "-o", file, source)
        return file.read_text()


def check_machine_code(source, arch, instructions, load, wait=str.rindex):
    """Every kernel of a file multiplies on tensor cores, and loads weights, which never change, before it waits.

    wait: finds the last wait for the kernel in front, or the first one.
    """
    kernels = re.split(r"\.visible \.entry ", ptx_of(source, arch))[1:]
    assert kernels
    for ptx in kernels:
        assert all(instruction in ptx for instruction in instructions)
        assert ptx.index(load) < wait(ptx, "griddepcontrol.wait")


def resources_of_kernels(source, arch, folder):
    """{mangled name: (registers of a thread, bytes of stack, bytes spilled)} of every kernel of a file."""
    file = folder / "kernels.ptx"
    file.write_text(ptx_of(source, arch))
    said = nvcc(f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", folder / "kernels.cubin", file)
    usage = {}
    for kernel in said.split("Compiling entry function '")[1:]:
        stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", kernel)
        registers = re.findall(r"Used (\d+) registers", kernel)
        assert len(stacks) == len(registers) == 1
        (stack, stored, loaded), name = stacks[0], kernel[: kernel.index("'")]
        usage[name] = int(registers[0]), int(stack), int(stored) + int(loaded)
    assert usage
    return usage

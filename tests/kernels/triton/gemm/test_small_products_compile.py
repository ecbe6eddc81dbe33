"""What the kernels of small products compile to at the shapes of real models, without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.gemm import small_products
from tests.kernels.triton.compiled import compiled, in_turn, launches_of, resources

# Qwen3-0.6B, 1.7B and 8B: QKV, output, gate-up and down projections.
REAL = [
    (4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (4096, 2048), (6144, 2048), (2048, 6144), (6144, 4096),
    (4096, 4096), (12288, 4096), (4096, 12288),
]  # fmt: skip


def cases():
    """(name, call) of all ops at real shapes with up to 8 tokens."""
    for tokens in (1, 2, 8):
        for outputs, size in REAL:
            x, weight = (torch.empty(n, size, dtype=torch.bfloat16) for n in (tokens, 2 * outputs))
            name, norm, half = f"{tokens} x {size} -> {outputs}", weight[0], weight[:outputs]
            if tokens not in small_products.num_tokens_linear(weight):
                continue
            if outputs in (1024, 2048, 4096) and size != 1024:
                yield name, lambda x=x, w=half: small_products.linear(x, w)
            if size in (1024, 2048, 4096):
                yield name, lambda x=x, n=norm, w=half: small_products.add_rms_norm_linear(x, x, n, 1e-6, w)
                yield name, lambda x=x, n=norm, w=weight: small_products.add_rms_norm_gate_up(x, x, n, 1e-6, w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, turn", [(90, slice(0, None, 2)), (80, slice(0, None, 3)), (100, slice(1, None, 3))]
)
def test_compiles_without_spills_and_reads_weights_before_the_wait(capability, turn, tmp_path):
    """Every kernel, and half of the launches on sm_90; elsewhere they take turns."""
    distinct = {}
    for name, kernel, args, options in launches_of(cases()):
        named, warps = dict(zip(kernel.arg_names, args)) | {"PDL": capability >= 90}, options["num_warps"]
        key = (kernel.__name__, *(v for n, v in named.items() if n.isupper()), warps)
        distinct.setdefault(key, (name, kernel, named, warps))
    for name, kernel, named, warps in in_turn(list(distinct.values()), turn):
        binary = compiled(kernel, tuple(named.values()), {"num_warps": warps}, capability)
        registers, stack, local = resources(binary, tmp_path)
        # Triton 3.9 keeps 8 bytes on the stack for one shape on sm_80, where it stops at 64 registers of 255.
        assert local == 0 and stack <= (8 if capability == 80 else 0) and registers <= 255, (
            f"{name}: {registers} registers, {stack} stack, {local} local"
        )
        ptx = binary.asm["ptx"]
        reads = [m.start() for m in re.finditer(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)]
        waits = [m.start() for m in re.finditer(r"griddepcontrol\.wait", ptx)]
        starts = [m.start() for m in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]
        assert len(waits) == len(starts) == (1 if capability >= 90 else 0), name
        if waits:
            # 16-byte loads that a thread's weights take
            weights = -(-named["ROWS"] * named["SIZE"] * 2 // (16 * 32 * warps))
            assert starts[0] < reads[0] and sum(r < waits[0] for r in reads) >= weights, name
            every = [m.start() for m in re.finditer(r"ld\.global", ptx)]
            # Before the wait nothing but weights: those of the product and, of a norm, its own.
            norm = len(every) if named["NORM"] else 0
            assert sum(e < waits[0] for e in every) <= weights + norm and any(e > waits[0] for e in every), name
    assert len(distinct) >= 8

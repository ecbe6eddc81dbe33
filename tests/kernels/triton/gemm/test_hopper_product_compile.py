"""What the product for Hopper compiles to, without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.triton.gemm import hopper_product
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.compiled import compiled, launches_of, resources, tensors

COMPILED = [
    (8, 4096, 1024, {}), (8, 24576, 4096, {"gated": True}), (32, 1024, 3072, {"split": True}),
    (64, 6144, 4096, {"bias": True}), (160, 6144, 1024, {"gated": True}),
    (192, 4096, 12288, {"split": True}), (256, 6144, 1024, {"gated": True}),
]  # fmt: skip


@pytest.mark.parametrize("tokens, rows, size, what", COMPILED, ids=str)
def test_compiles_without_spills(tokens, rows, size, what, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    t = tensors(torch.bfloat16)
    x, weight, options = t(tokens, size), t(rows, size), what | ({"bias": t(rows)} if "bias" in what else {})
    ((_, kernel, args, _),) = launches_of([("product", lambda: hopper_product.product(x, weight, **options))])
    named = dict(zip(kernel.arg_names, args))
    binary = compiled(kernel, args, {"num_warps": 4}, 90)
    assert binary.metadata.shared <= 227 << 10
    ptx = binary.asm["ptx"]
    # The weights are asked for before the wait, the tokens after it; every tile is multiplied where it lies.
    wait = ptx.index("griddepcontrol.wait")
    copies = [m.start() for m in re.finditer("cp.async.bulk.tensor", ptx)]
    slots = named["SLOTS"]
    assert sum(at < wait for at in copies) == slots and sum(at > wait for at in copies) >= slots
    assert ptx.count("wgmma.mma_async") == 4 * named["CHUNKS"] * slots * (2 if named["MORE"] else 1)
    _, stack, local = resources(binary, tmp_path)
    assert stack == local == 0
    assert touched_in_flight(machine_code(binary)) == []

"""What the products of experts for Hopper compile to at Qwen3-30B-A3B's shape, without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.triton.moe.hopper_experts import hopper_experts, plan_hopper_experts
from nanovllm.kernels.triton.moe.sort import SortedPairs
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.compiled import compiled, launches_of, resources, tensors

EXPERTS, TOP_K, HIDDEN = 128, 8, 2048


@pytest.mark.parametrize("dtype, tokens, intermediate, gated, gap", [
    (torch.bfloat16, 16384, 768, True, 0), (torch.bfloat16, 16384, 768, True, 8),
    (torch.bfloat16, 1024, 768, False, 0), (torch.float16, 1024, 384, True, 0), (torch.float16, 16384, 384, False, 0),
])  # fmt: skip
def test_compiles_without_spills(dtype, tokens, intermediate, gated, gap, tmp_path):
    """gap: elements between the rows of x. Each copy of 16 bytes is aligned with eight, too."""
    t = tensors(dtype)
    plan = plan_hopper_experts(tokens * TOP_K, EXPERTS)
    if gated:
        x, weight = t(tokens, HIDDEN + gap)[:, :HIDDEN], t(EXPERTS, 2 * intermediate, HIDDEN)
    else:
        x, weight = t(tokens * TOP_K, intermediate), t(EXPERTS, HIDDEN, intermediate)
    pairs = SortedPairs(torch.empty(tokens * TOP_K, dtype=torch.int32), torch.empty(3, 99, dtype=torch.int32))
    ((_, kernel, args, options),) = launches_of([("", lambda: hopper_experts(x, weight, pairs, TOP_K, gated, plan))])
    named = dict(zip(kernel.arg_names, args)) | {"PDL": True}
    binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, 90)
    assert binary.metadata.shared <= 227 << 10
    ptx = binary.asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == 3  # in all warps that read
    # A step's four products of both groups of warps. Its loads: by the copy engine, and by threads, 16 bytes each. The
    # compiler may unroll the steps of the loads.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8
    by_engine = len(re.findall(r"cp\.async\.bulk\.tensor", ptx))
    by_threads = len(re.findall(r"cp\.async\.cg\.shared\.global[^,]*,[^,]*, 0x10", ptx))
    assert by_engine > 0 and by_threads == (8 * by_engine if gated else 0)
    assert "st.global.v4" in ptx and "st.global.b" not in ptx
    _, stack, local = resources(binary, tmp_path)
    assert stack == local == 0
    assert touched_in_flight(machine_code(binary)) == []

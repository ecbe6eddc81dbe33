"""The launch of `apply_token_bitmask`, compiled without a GPU."""

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.sampling.token_bitmask import apply_token_bitmask
from tests.kernels.triton.compiled import CAPABILITIES, compiled, launches_of, resources, specialised


def call(num_masks):
    words = torch.zeros(num_masks * (151936 // 32) + num_masks, dtype=torch.int32)
    bitmask = words[num_masks:].view(num_masks, -1)  # with any alignment, as the engine packs it
    return lambda: apply_token_bitmask(
        torch.empty(64, 151936, dtype=torch.bfloat16), bitmask, torch.zeros(num_masks, dtype=torch.int64)
    )


def test_one_kernel_for_any_number_of_masks(tmp_path):
    launches = launches_of([(str(n), call(n)) for n in (1, 2, 16, 21)])
    assert len({repr((specialised(kernel, args), options)) for _, kernel, args, options in launches}) == 1
    for capability in CAPABILITIES:
        _, kernel, args, options = launches[0]
        binary = compiled(kernel, args, options, capability)
        assert "st.global" in binary.asm["ptx"] and resources(binary, tmp_path)[1:] == (0, 0)

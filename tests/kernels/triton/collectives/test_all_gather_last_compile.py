"""The launches of gathers over ranks, compiled without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton import early_start
from nanovllm.kernels.triton.collectives.all_gather_last import all_gather_last
from tests.kernels.triton.collectives.test_all_reduce_compile import Alone
from tests.kernels.triton.compiled import CAPABILITIES, compiled, launches_of, resources, wide

SHAPES = [(torch.bfloat16, 75968, 0, True), (torch.float32, 64128, 16, True), (torch.float16, 25129, 1, False)]
"""dtype, columns of a rank, columns of padding, and whether rows begin at multiples of 16 bytes."""


def launches(dtype, n, padding, rows):
    x = torch.empty(rows, n, dtype=dtype)
    return launches_of([(f"{dtype} {n}", lambda: all_gather_last(x, 2 * n - padding, Alone()))])


@pytest.mark.parametrize("dtype, n, padding, aligned", SHAPES)
def test_launches(tmp_path, dtype, n, padding, aligned):
    for name, kernel, args, options in launches(dtype, n, padding, 8):
        for capability in CAPABILITIES if dtype == torch.bfloat16 else [90]:
            binary = compiled(kernel, args, options, capability)
            ptx = binary.asm["ptx"]
            assert resources(binary, tmp_path)[1:] == (0, 0), name
            # Other kernels write what it waits for. These reads, sending and emptying are 16 bytes wide for any shape:
            # two reads of each kind a thread, as a block of 8 KiB has 256 threads.
            assert len(re.findall(r"ld\.volatile\.global\.v4\.b32", ptx)) == 4, name
            assert wide(ptx, "st") == (8 if aligned else 4), name
            assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (2 if aligned else 0), name


@pytest.mark.parametrize("rows, early", [(32, True), (33, False)])
def test_an_early_launch_waits_for_what_it_reads(monkeypatch, rows, early):
    monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: True)
    [(_, kernel, args, options)] = launches(torch.bfloat16, 4096, 0, rows)
    assert options["launch_pdl"] == early
    ptx = compiled(kernel, args, options, 90).asm["ptx"]
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert bool(wait) == ("griddepcontrol.launch_dependents" in before) == early
    if early:
        # Before it waits it reads the address of its own places alone, which never changes.
        assert re.findall(r"(?:ld|st)[a-z.]*\.global[a-z0-9.]*", before) == ["ld.global.b64"]
        assert "ld.volatile.global" in after

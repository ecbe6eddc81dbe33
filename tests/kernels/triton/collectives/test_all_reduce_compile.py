"""The launches of sums over ranks, compiled without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton import early_start
from nanovllm.kernels.triton.collectives.all_reduce import all_reduce, all_reduce_add_rms_norm
from tests.kernels.triton.compiled import CAPABILITIES, compiled, launches_of, resources


class Alone:
    """A group of two ranks of which the other never comes, for launches that are only recorded."""

    rank, size = 0, 2

    def __init__(self):
        self.provider_state, self.store = {}, self

    def smallest(self, number, device):
        return number

    def set(self, key, value):
        self._value = value

    def get(self, key):
        return self._value.encode()


def calls(dtype, width, rows):
    group = Alone()
    x, residual = (torch.empty(rows, width, dtype=dtype) for _ in range(2))
    return [
        (f"sum {dtype} {width}", lambda: all_reduce(x, group)),
        (f"norm {dtype} {width}", lambda: all_reduce_add_rms_norm(x, residual, residual[0], 1e-6, group)),
    ]


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 4096), (torch.float16, 5120), (torch.float32, 1024)])
def test_launches(tmp_path, dtype, width):
    for name, kernel, args, options in launches_of(calls(dtype, width, 8)):
        for capability in CAPABILITIES if dtype == torch.bfloat16 else [90]:
            binary = compiled(kernel, args, options, capability)
            ptx = binary.asm["ptx"]
            assert "ld.volatile.global" in ptx, name  # other kernels write what it waits for
            assert resources(binary, tmp_path)[1:] == (0, 0), name


@pytest.mark.parametrize(
    "rows, width, weight, early",
    [(128, 5120, "parameter", True), (129, 5120, "parameter", True), (129, 1024, "parameter", False),
     (128, 5120, "tensor", False), (128, 5120, None, True)],
)  # fmt: skip
def test_what_an_early_launch_reads_before_its_wait(monkeypatch, tmp_path, rows, width, weight, early):
    """This rank's address and the weight of the norm, which never change. No `turns`, x or residual, and no weight that
    the kernel before may be writing.
    """
    monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: True)
    group, x = Alone(), torch.empty(rows, width, dtype=torch.bfloat16)
    of_norm = torch.nn.Parameter(x[0].clone(), requires_grad=False) if weight == "parameter" else x[0].clone()

    def call():
        return all_reduce_add_rms_norm(x, x.clone(), of_norm, 1e-6, group) if weight else all_reduce(x, group)

    [(_, kernel, args, options)] = launches_of([("sum", call)])
    assert options["launch_pdl"] == early
    binary = compiled(kernel, args, options, 90)
    assert resources(binary, tmp_path)[1:] == (0, 0)
    before, wait, _ = binary.asm["ptx"].partition("griddepcontrol.wait")
    assert bool(wait) == ("griddepcontrol.launch_dependents" in before) == early
    if early:
        pieces = -(-8192 // (8 * 32 * options["num_warps"])) if weight else 0  # of 16 bytes a thread
        reads = re.findall(r"(?:ld|st)[a-z.]*\.global\S*", before)
        assert reads == ["ld.global.b64"] + ["ld.global.v4.b32"] * pieces

"""The launches of sums over ranks, compiled without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.collectives.all_reduce import all_reduce, all_reduce_add_rms_norm
from tests.kernels.triton.compiled import CAPABILITIES, compiled, launches_of, resources


class Alone:
    """A group of two ranks of which the other never comes, for launches that are only recorded."""

    rank, size = 0, 2

    def __init__(self):
        self.kept, self.store = {}, self

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
        for capability in CAPABILITIES:
            binary = compiled(kernel, args, options, capability)
            ptx = binary.asm["ptx"]
            assert "ld.volatile.global" in ptx, name  # other kernels write what it waits for
            assert resources(binary, tmp_path)[1:] == (0, 0), name


def test_what_is_read_before_the_wait(tmp_path):
    """Launched early: this rank's address and the weight of the norm, which never change. No `turns`, x or residual."""
    for name, kernel, args, options in launches_of(calls(torch.bfloat16, 5120, 128)):
        named = dict(zip(kernel.arg_names, args)) | {"EARLY": True}
        binary = compiled(kernel, tuple(named.values()), options, 90)
        assert resources(binary, tmp_path)[1:] == (0, 0), name
        ptx = binary.asm["ptx"]
        start, wait = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
        reads = re.findall(r"ld\.(?:volatile\.)?global\S*", ptx[:wait])
        pieces = -(-8192 // (8 * 32 * options["num_warps"]))  # 16 bytes a thread
        assert start < wait and reads == ["ld.global.b64"] + ["ld.global.v4.b32"] * (pieces if named["NORM"] else 0), (
            name
        )
        assert "st." not in ptx[:wait].replace("st.shared", ""), name

"""`torch.ops.nanovllm`: PyTorch's own checks of an operator, and torch.compile without a graph break."""

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels import all_ops
from nanovllm.kernels.testing.verify import Case
from tests.kernels.op.opcheck import opcheck

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", sorted(name for name, op in all_ops().items() if op.exported))
def test_opcheck(name):
    declared = all_ops()[name]
    # PyTorch's check of a schema cannot copy an empty view of a larger tensor; empty shapes are in test_verify.
    shapes = [s for s in declared.inputs.small if 0 not in s[:1]][:2]
    for shape, variant in zip(shapes, (*declared.inputs.variants, *declared.inputs.variants)):
        arguments = Case(shape, torch.float32, variant).arguments(declared, DEVICE)
        bound = declared.records.flat.bind(**arguments)
        opcheck(getattr(torch.ops.nanovllm, name).default, bound.args, bound.kwargs)


class Block(torch.nn.Module):
    """Ops as a user's module calls them, both ways."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, device=DEVICE), requires_grad=False)

    def forward(self, x, residual):
        y, residual = kernels.add_rms_norm(x, residual, self.weight, 1e-6)
        y = kernels.fused_add_gelu(y, self.weight, "none")
        return torch.ops.nanovllm.silu_and_mul(torch.cat((y, y), -1)), kernels.softmax(residual)


def test_torch_compile_of_a_module_in_one_graph():
    block, x, residual = Block(), *(torch.randn(5, 64, device=DEVICE) for _ in range(2))
    expected = block(x.clone(), residual.clone())
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")  # the default one: the gradients' test
    for got, want in zip(compiled(x, residual), expected):
        torch.testing.assert_close(got, want)


def test_the_operator_leaves_its_arguments_alone_and_checks_them():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    before = x.clone(), residual.clone()
    with all_ops()["add_rms_norm"].use("native"):
        torch.ops.nanovllm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    with pytest.raises(ValueError, match="weight: expected the shape"):
        torch.ops.nanovllm.rms_norm(x, weight[:3], 1e-6)


def test_export():
    block, x = Block(), torch.randn(5, 64, device=DEVICE)
    program = torch.export.export(block, (x, x.clone()))
    assert any("nanovllm.silu_and_mul" in str(node.target) for node in program.graph.nodes)


def test_an_op_of_ones_own_program_is_there_too(caplog):
    """Declared where it is used, not in a plugin; one without annotations works, but not under torch.compile."""

    @kernels.op
    def tripled_here(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @kernels.op
    def bare_here(x):
        return x * 4

    x = torch.randn(5, device=DEVICE)
    assert torch.equal(torch.ops.nanovllm.tripled_here(x), x * 3)
    assert torch.equal(torch.compile(lambda x: tripled_here(x) + 1, fullgraph=True, backend="eager")(x), x * 3 + 1)
    assert torch.equal(bare_here(x), x * 4) and "'bare_here' is not in torch.ops.nanovllm" in caplog.text

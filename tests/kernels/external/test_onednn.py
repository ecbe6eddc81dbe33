"""oneDNN's products and its layout of weights: the dense tensor's numbers, and rows read from blocks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import resolve_kernels
from nanovllm.kernels.external import onednn
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.op.selection import ranked_providers, why_selected
from nanovllm.kernels.ops import linear

CPU = torch.device("cpu")
if (reason := onednn.support(CPU)) is not None:
    pytest.skip(reason, allow_module_level=True)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (3, 70), (64, 16), (65, 1), (300, 257), (1030, 24)]


def weight_of(rows, columns, dtype):
    weight = torch.randn(rows, columns).to(dtype)
    if (reason := onednn.accepts(weight, weight)) is not None:
        pytest.skip(reason)
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_a_prepacked_weight_has_the_numbers_of_the_dense_one(rows, columns, dtype):
    weight = weight_of(rows, columns, dtype)
    packed = onednn.prepack_linear(weight, readable=True)
    assert packed.nbytes >= weight.nbytes and packed.operand.is_mkldnn
    assert packed.operand.shape == weight.shape and packed.operand.dtype == dtype
    index = torch.randint(0, rows, (20,))
    expected, dense = weight[index], weight.clone()
    weight.zero_()  # it is a copy
    assert torch.equal(packed.rows(index), expected) and torch.equal(packed.rows(torch.arange(rows)), dense)
    assert torch.equal(packed.dense(), dense)
    # The bias is strided, and x as well.
    bias = torch.randn(2 * rows).to(dtype)[::2]
    for shape in ((2 * columns,), (0, 2 * columns), (1, 2 * columns), (2, 5, 2 * columns)):
        x = torch.randn(shape).to(dtype)[..., ::2]
        for b in (None, bias):
            want = F.linear(x.double(), dense.double(), None if b is None else b.double())
            got = onednn.linear(x, packed.operand, b)
            assert got.dtype == dtype and got.shape == want.shape
            tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * columns**0.5
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_numbers_of_rows_beyond_a_digit_of_bfloat16(monkeypatch):
    """Rows are numbered by digits that the dtype holds; float32 with as few takes the same path."""

    class Coarse:
        eps = torch.finfo(torch.bfloat16).eps

    weight = weight_of(66_000, 2, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "finfo", lambda dtype: Coarse)
        packed = onednn.prepack_linear(weight, readable=True)
    index = torch.tensor([0, 255, 256, 65_535, 65_536, 65_999])
    assert torch.equal(packed.rows(index), weight[index])


def test_a_layout_that_is_not_understood_is_not_read(monkeypatch):
    """Rows in another order than the one that was found would be wrong tokens."""
    weight, calls = weight_of(130, 24, torch.float32), []
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def other_order_at_first(given):
        calls.append(given)
        return reorder(given.flip(0) if len(calls) == 1 else given)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", other_order_at_first)
    assert onednn.prepack_linear(weight, readable=True) is None
    assert len(calls) == 2 and onednn.prepack_linear(weight, readable=True) is not None


@pytest.mark.parametrize(
    "weight, reason",
    [
        (torch.ones(3, 4, dtype=torch.float64), "weights of float64"),
        (torch.ones(3, 4, dtype=torch.float16), "weights of float16"),
        (torch.ones(0, 4), "which is empty"),
        (torch.ones(4, 0), "which is empty"),
    ],
)
def test_what_it_does_not_take(weight, reason):
    assert reason in onednn.accepts(torch.ones(2, weight.shape[1]), weight)
    assert onednn.prepack_linear(weight) is None


@pytest.fixture
def calls():
    """The calls of oneDNN's product, by plain calls too."""
    calls, product = [], onednn.linear
    recorded = dataclasses.replace(
        linear.providers["onednn"], target=lambda *args: calls.append(args) or product(*args)
    )
    with temporary():
        linear.providers["onednn"] = recorded
        linear.resolved_calls.clear()
        yield calls


def test_a_plain_call_has_prepacked_nothing_and_runs_the_reference(calls, monkeypatch):
    x, weight = torch.ones(1, 8), torch.ones(4, 8)
    assert torch.equal(linear(x, weight), torch.full((1, 4), 8.0)) and not calls
    with linear.use("onednn"):
        assert torch.equal(linear(x, weight), torch.full((1, 4), 8.0)) and len(calls) == 1
    monkeypatch.setenv("NANOVLLM_KERNELS", "linear=onednn")
    assert torch.equal(linear(x, weight), torch.full((1, 4), 8.0)) and len(calls) == 2


def test_where_it_runs(monkeypatch):
    assert resolve_kernels(CPU).providers["linear"] == "onednn" == ranked_providers(linear, CPU)[0].name
    assert "a plain call runs the reference" in why_selected(linear, CPU)
    assert resolve_kernels(CPU, use_custom_kernels=False).providers["linear"] == "native"
    assert "this is cuda" in onednn.support(torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert "without oneDNN" in onednn.support(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(onednn.platform, "machine", lambda: "x86_64")
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert "need AVX2" in onednn.support(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(onednn.platform, "machine", lambda: "aarch64")
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: False)
        assert "Compute Library" in onednn.support(CPU)

"""`embedding_packed` by one kernel: rows of all forms of storage, equal to the bit to the reference's."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, gguf_planes
from nanovllm.kernels.triton.gemm import packed_dequantise
from nanovllm.kernels.triton.gemm.packed_embedding import embedding_packed
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.stored_matrices import Fp8Matrix, GGUFMatrix, IntMatrix
from tests.kernels.triton.common import DEVICE, GPU
from tests.native import NATIVE

pytestmark = pytest.mark.triton
NATIVE_ROWS = all_ops()["embedding_packed"].native
ROWS, FORMS = 300, (*GGUF_TYPES, "fp8", "fp8 rows", "int4", "int4 zeros", "int8", "int8 rows")


def table(form, size, seed=0, rows=ROWS):
    """A matrix in one form of storage; in those of GGUF as planes."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 4 * size), generator=g, dtype=torch.uint8)
    if form in GGUF_TYPES:
        of = GGUF_TYPES[form]
        weight, kind = gguf_planes(codes[:, : of.row_bytes(size)].contiguous(), form)
        for name in {"d", "m"} & set(of.planes):
            plane = of.plane(weight, name, size).flatten(1).view(torch.float16)
            plane.copy_(torch.randn(plane.shape, generator=g) * 0.01)
        return GGUFMatrix(weight.to(DEVICE), kind, size)
    if form.startswith("fp8"):
        weight = (torch.randn(rows, size, generator=g) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        shape = (rows, 1) if form == "fp8 rows" else (-(-rows // 128), -(-size // 128))
        return Fp8Matrix(weight.to(DEVICE), torch.rand(shape, generator=g).to(DEVICE))
    bits = int(form[3])
    groups = (rows, 1 if "rows" in form else size // 32)
    zero = torch.randint(0, 2**bits, groups, generator=g, dtype=torch.uint8).to(DEVICE) if "zeros" in form else None
    scale = torch.rand(groups, generator=g).to(DEVICE, torch.bfloat16 if "zeros" in form else torch.float16)
    return IntMatrix(codes[:, : size * bits // 8].contiguous().to(DEVICE), scale, zero, bits)


def ids(*shape, dtype=torch.int64):
    made = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    if made.numel() > 2:
        made.view(-1)[:2] = torch.tensor([ROWS - 1, 0])
    return made.to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size, dtype", [(512, torch.bfloat16), (256, torch.float16), (768, torch.float32)])
def test_equal_to_the_bit(form, size, dtype, poison):
    matrix = table(form, size)
    operands = *matrix.stored_operands(), size, dtype
    for token_ids in (ids(1), ids(5, dtype=torch.int32), ids(40), ids(2, 3), ids(), ids(0), ids(12)[::3]):
        got = embedding_packed(token_ids, *operands)
        assert got.shape == (*token_ids.shape, size) and got.dtype == dtype
        assert torch.equal(got, NATIVE_ROWS(token_ids, *operands))
    every = matrix.dequantised(dtype)
    assert torch.equal(embedding_packed(torch.arange(ROWS, device=DEVICE), *operands), every)


@pytest.mark.parametrize("form", ["Q4_K", "int8", "fp8"])
def test_strides(form, poison):
    """Rows with a gap between them, as in a larger table, and columns with one between numbers, which are copied."""
    matrix, token_ids = table(form, 512), ids(7)
    storage, weight, scale, zero = matrix.stored_operands()
    want = NATIVE_ROWS(token_ids, storage, weight, scale, zero, 512, torch.bfloat16)
    for gap in (64, 3):
        wide = torch.zeros(ROWS, weight.shape[1] + gap, dtype=torch.uint8, device=DEVICE)
        wide[:, :-gap] = weight.view(torch.uint8)
        rows = wide[:, :-gap].view(weight.dtype)
        assert torch.equal(embedding_packed(token_ids, storage, rows, scale, zero, 512, torch.bfloat16), want)
    if scale is not None:
        spread = scale.repeat_interleave(2, 1)[:, ::2]
        assert torch.equal(embedding_packed(token_ids, storage, weight, spread, zero, 512, torch.bfloat16), want)


def test_blocks_as_stored_and_ids_outside_of_the_table():
    raw = torch.zeros(9, GGUF_TYPES["Q8_0"].row_bytes(64), dtype=torch.uint8, device=DEVICE)
    got = embedding_packed(torch.tensor([8, 0], device=DEVICE), "Q8_0", raw, None, None, 64, torch.bfloat16)
    assert torch.equal(got, torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE))
    if not GPU:  # there, values are checked on request only
        for wrong in (9, -1):
            with pytest.raises(ValueError, match=f"token 1 has id {wrong}, expected 0 to 8"):
                embedding_packed(torch.tensor([0, wrong]), "Q8_0", raw, None, None, 64, torch.bfloat16)


@pytest.mark.parametrize("form", ["Q6_K", "int4 zeros", "fp8"])
def test_a_layer_calls_it_once(form, monkeypatch):
    launched = []
    monkeypatch.setattr(packed_dequantise, "launched_early", lambda x, rows: launched.append(rows) or False)

    class Kernels:
        embedding_packed = staticmethod(embedding_packed)

        def __getattr__(self, name):
            return getattr(NATIVE, name)

    matrix, token_ids = table(form, 512), ids(6)
    rows = PackedWeight([matrix], torch.bfloat16, Kernels()).rows(token_ids)
    assert torch.equal(rows, matrix.take_rows(token_ids).dequantised(torch.bfloat16)) and launched == [6]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_in_a_graph_with_other_ids(form):
    matrix = table(form, 1024)
    operands = *matrix.stored_operands(), 1024, torch.bfloat16
    for n in (1, 8, 33):
        token_ids = ids(n)
        embedding_packed(token_ids, *operands)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token_ids.add_(1).remainder_(ROWS)  # written by the kernel in front
            got = embedding_packed(token_ids, *operands)
        for _ in range(3):
            graph.replay()
            assert torch.equal(got, NATIVE_ROWS(token_ids, *operands))

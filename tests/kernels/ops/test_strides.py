"""Every tensor argument of every op in other layouts: Triton kernels do as the references, or name the argument."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.op.inputs import Tensors, copy_of
from tests.kernels.triton.common import DEVICE

pytestmark = pytest.mark.triton
OPS = [op for op in all_ops().values() if "triton" in op.providers and op.inputs is not None]
NOT_IN_INPUTS = {
    "linear": {"bias": "outputs"},
    "add_rms_norm_linear": {"bias": "outputs"},
    "linear_add_rms_norm": {"bias": "outputs"},
    "linear_bias_act": {"bias": "n"},
    **dict.fromkeys(
        ("linear_fp8", "linear_fp8_dynamic", "linear_int4", "linear_int8", "linear_gguf"), {"bias": "outputs"}
    ),
    "store_kvcache": {"k_scale": "num_kv_heads"},
    "attention_decode": {"k_scale": "num_kv_heads", "v_scale": "num_kv_heads"},
}


def every_other(x):
    gap = float("nan") if x.is_floating_point() else 0
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), gap, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS = {
    "every other element": every_other,
    "expanded": lambda x: x[..., :1].clone().expand_as(x),
    "expanded rows": lambda x: x[:1].clone().expand_as(x),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else torch.stack((x, x), 1)[:, 1],
}


def arguments_of(op):
    """(arguments, dtype): of the second small shape in float32, or the first that the kernels take on this device."""
    shapes = [op.inputs.small[1], *op.inputs.small]
    for dtype, shape in itertools.product([torch.float32, *op.inputs.dtypes], shapes):
        t = Tensors(dtype, torch.device(DEVICE))
        given = op.inputs(t, shape, op.inputs.variants[0])
        sizes = dict(zip(op.inputs.dimensions, shape))
        for name, size in NOT_IN_INPUTS.get(op.name, {}).items():
            given[name] = t.uniform(sizes.get(size) or given["weight"].shape[0], low=0.5)
        if op.refusal(op.providers["triton"], **op.records.group(given)) is None:
            return given, dtype
    raise AssertionError(f"{op.name}: the kernels take no small shape in any dtype")


def results(op, provider, given):
    written = lambda k, v: k in op.mutates or (k in op.reuses and v.is_contiguous())  # noqa: E731
    given = {k: copy_of(v) if written(k, v) else v for k, v in given.items()}
    with op.use(provider):
        got = op(**op.records.group(given))
    got = [] if got is None else [got] if isinstance(got, torch.Tensor) else list(got)
    return [*got, *(given[name] for name in op.mutates)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_any_layout(op):
    """Each argument in two layouts, so that each op sees all of them. All arguments change together, which takes two
    calls of the op. A layout that the kernels refuse is refused for that argument alone, too.
    """
    (given, dtype), names = arguments_of(op), list(LAYOUTS)
    tolerance = 1e-4 if dtype == torch.float32 else op.tolerance[dtype]
    # With equal rows two tokens would have one slot, or sequences would not share what they are said to share.
    fixed = op.mutates or "groups" in given
    varied = {
        name: i
        for i, (name, x) in enumerate(given.items())
        if isinstance(x, torch.Tensor) and name not in op.mutates
        if x.is_floating_point() or name == "positions" or not fixed
    }
    for turn in (0, 2):
        layouts = {name: names[(i + turn) % 4] for name, i in varied.items()}
        while True:
            others = {name: LAYOUTS[layout](given[name]) for name, layout in layouts.items()}
            assert all(x.shape == given[name].shape for name, x in others.items())
            try:
                got = results(op, "triton", given | others)
                break
            except ValueError as e:
                found = re.search(rf"\b({'|'.join(layouts)})\b", str(e))
                assert found, f"{layouts}: {e}"
                refused = found[1]
                layouts.pop(refused)
                with pytest.raises(ValueError, match=rf"\b{refused}\b"):
                    results(op, "triton", {**given, refused: others[refused]})
        if op.compare is not None:
            assert op.compare(got if len(got) > 1 else got[0], given | others, dtype) is None, layouts
            continue
        for j, (a, b) in enumerate(zip(got, results(op, "native", given | others))):
            where = f"{layouts}, result {j}: "
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=where.__add__)

"""Every Triton provider on the cases of `nanovllm kernels verify`."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.testing.verify import cases, verify_case
from tests.kernels.triton.common import DEVICE, GPU

pytestmark = [pytest.mark.triton, pytest.mark.slow]
CASES = 20
"""Of a test on a GPU, at most: processes share the compilation of an op's kernels."""
OPS = [op for op in all_ops().values() if "triton" in op.providers and op.inputs is not None]


def verdicts_of_turns(op):
    """Each small shape in one dtype that the provider takes, by turns; a third of the scaled cases if they are many."""
    every, dtypes, shapes = list(cases(op, full=False, quick=True)), len(op.inputs.dtypes), len(op.inputs.small)
    for i in range(shapes):
        for turn in range(i, i + dtypes):
            verdict = verified(op, every[turn % dtypes * shapes + i])
            if verdict.skipped is None:
                break
        yield verdict
    scaled = [case for case in cases(op, full=False) if case.scale != 1 and case.dtype == torch.float16]
    yield from (verified(op, case) for case in (scaled[::3] if len(scaled) > 5 else scaled))


def verified(op, case):
    return verify_case(op, op.providers["triton"], torch.device(DEVICE), case)


def parts():
    """On a GPU all cases of each op: those of a dtype by some, as kernels are compiled for them. Else the ops."""
    for op in OPS:
        if not GPU:
            yield pytest.param(op, None, id=op.name)
            continue
        for dtype in op.inputs.dtypes:
            chosen = [case for case in cases(op, full=True) if case.dtype == dtype]
            for start in range(0, len(chosen), CASES):
                name = f"{op.name}-{str(dtype).removeprefix('torch.')}-{start // CASES}"
                yield pytest.param(op, chosen[start : start + CASES], id=name)


@pytest.mark.parametrize("op, chosen", list(parts()))
def test_verified(op, chosen):
    verdicts = list(verdicts_of_turns(op)) if chosen is None else [verified(op, case) for case in chosen]
    assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]
    assert chosen is not None or sum(v.skipped is None for v in verdicts) >= 5


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_enough_cases_are_taken(op):
    """Of small shapes. A provider that refuses every case would be verified by none."""

    def taken(case):
        bound = op.bind(case.arguments(op, torch.device(DEVICE)))
        return op.refusal(op.providers["triton"], *bound.args, **bound.kwargs) is None

    assert sum(map(taken, cases(op, full=False))) >= 5

"""Every Triton provider on the cases of `nanovllm kernels verify`."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.testing.verify import cases, verify_case
from tests.kernels.triton.common import DEVICE, GPU

pytestmark = [pytest.mark.triton, pytest.mark.slow]
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


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_verified(op):
    verdicts = [verified(op, case) for case in cases(op, full=True)] if GPU else list(verdicts_of_turns(op))
    assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]
    assert sum(v.skipped is None for v in verdicts) >= 5

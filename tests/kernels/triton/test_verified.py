"""Every Triton provider on the cases of `nanovllm kernels verify`."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.testing.verify import cases, verify_case
from tests.kernels.triton.common import DEVICE, GPU

pytestmark = [pytest.mark.triton, pytest.mark.slow]
OPS = [op for op in all_ops().values() if "triton" in op.providers and op.inputs is not None]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_verified(op):
    chosen = list(cases(op, full=GPU, quick=not GPU))
    if not GPU:  # every dtype and shape once, and large and small values in the dtype that they leave first
        chosen += [case for case in cases(op, full=False) if case.scale != 1 and case.dtype == torch.float16]
    verdicts = [verify_case(op, op.providers["triton"], torch.device(DEVICE), case) for case in chosen]
    assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]
    assert sum(v.skipped is None for v in verdicts) >= 5

"""Every Triton provider on the cases of `nanovllm kernels verify`."""

import time

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels import all_ops
from nanovllm.kernels.testing.verify import Case, Verdict, cases, lacks_memory, verify_case
from tests.kernels.triton.common import DEVICE, GPU

pytestmark = [pytest.mark.triton, pytest.mark.slow]
CASES = 10
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


WAITS = (2, 4, 8, 16, 30)
"""Seconds before each further try of a case that lacks memory: other tests use the GPU at the same time."""


def verified(op, case):
    for seconds in (*WAITS, None):
        verdict = verify_case(op, op.providers["triton"], torch.device(DEVICE), case)
        if not lacks_memory(verdict) or seconds is None:
            return verdict
        torch.cuda.empty_cache()
        time.sleep(seconds)


def cases_of_turns(op, dtype):
    """On a GPU: every second shape, the next dtype the others, with one variant, by turns. Half of the small shapes are
    strided as well, and most of the others scaled. `nanovllm kernels verify` runs every variant of every shape in every
    dtype, for most of which a kernel is compiled.
    """
    inputs, j = op.inputs, op.inputs.dtypes.index(dtype)
    for i, shape in enumerate([*inputs.small, *inputs.decode, *inputs.large]):
        if (i + j) % 2 and len(op.inputs.dtypes) > 1:
            continue
        variant, turn = inputs.variants[(i + j) // 2 % len(inputs.variants)], i // 2 + j
        yield Case(shape, dtype, variant)
        if i < len(inputs.small):
            scale = inputs.scales[(turn + 1) % len(inputs.scales)]
            if turn % 2:
                yield Case(shape, dtype, variant, strided=True, seed=1)
            if scale != 1:
                yield Case(shape, dtype, variant, scale=scale, seed=2)


def parts():
    """On a GPU the cases of each op and dtype, some in each test. Else the ops."""
    for op in OPS:
        if not GPU:
            yield pytest.param(op, None, id=op.name)
            continue
        for dtype in op.inputs.dtypes:
            chosen = list(cases_of_turns(op, dtype))
            for start in range(0, len(chosen), CASES):
                name = f"{op.name}-{str(dtype).removeprefix('torch.')}-{start // CASES}"
                yield pytest.param(op, chosen[start : start + CASES], id=name)


@pytest.mark.parametrize("op, chosen", list(parts()))
def test_verified(op, chosen):
    verdicts = list(verdicts_of_turns(op)) if chosen is None else [verified(op, case) for case in chosen]
    assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]
    assert chosen is not None or sum(v.skipped is None for v in verdicts) >= 5


def test_a_case_that_lacks_memory_is_tried_again(monkeypatch):
    waited, (case, *_) = [], cases(OPS[0], full=False)
    lacking = [Verdict(case, failure="OutOfMemoryError: CUDA out of memory")] * 2
    verdicts = [*lacking, Verdict(case), *lacking * 5]
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setitem(globals(), "verify_case", lambda *_: verdicts.pop(0))
    assert verified(OPS[0], case).failure is None and waited == [2, 4]
    assert lacks_memory(verified(OPS[0], case)) and waited[2:] == list(WAITS) and len(verdicts) == 4


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_enough_cases_are_taken(op):
    """Of small shapes. A provider that refuses every case would be verified by none."""

    def taken(case):
        bound = op.bind(case.arguments(op, torch.device(DEVICE)))
        return op.refusal(op.providers["triton"], *bound.args, **bound.kwargs) is None

    assert sum(map(taken, cases(op, full=False))) >= 5

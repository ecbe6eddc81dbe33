"""The masks of a step: which rows they are for, and what they allow."""

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.token_masks import ConstrainedRow, MaskBuilder
from nanovllm.structured.constraint_maker import ConstraintMaker
from tests.devices import DEVICE

pytestmark = pytest.mark.any_device

MAKER = ConstraintMaker(None, 100, [99])


def row(number, allowed, **params):
    params = SamplingParams(allowed_token_ids=allowed, **params)
    seq = Sequence(number, [5, 6, 7], params, seed=0)
    (seq.constraint,) = MAKER.make(params)
    return ConstrainedRow(number, seq, 3)


def allowed(masks):
    bits = np.unpackbits(masks.bitmask.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    return {int(r): set(np.flatnonzero(line).tolist()) for r, line in zip(masks.rows.cpu(), bits)}


def test_masks_of_some_rows():
    builder = MaskBuilder(torch.device(DEVICE))
    first = builder.make([row(3, [1, 2]), row(0, [98])])
    assert allowed(builder.make([row(1, [4])])) == {1: {4}}
    assert allowed(first) == {3: {1, 2}, 0: {98}}


def test_a_token_that_the_host_does_not_know_yet():
    """It is read from the step before, and moves the constraint on."""
    builder, (_, seq, position) = MaskBuilder(torch.device(DEVICE)), row(1, [4, 7])
    asked = []

    class Step:
        step = property(lambda self: self)
        sampling = [object(), seq]

        def token_ids(self):
            asked.append(True)
            return [5, 7]

    builder.step_launched(Step())
    assert allowed(builder.make([ConstrainedRow(0, seq, position + 1)])) == {0: {4, 7}}
    assert asked and seq.constraint.num_taken == 1

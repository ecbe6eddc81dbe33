"""The buffers of masks: where masks are while the next ones are written."""

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.fast.mask_thread import ThreadedMaskBuilder
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.token_masks import ConstrainedRow, TokenMasks
from nanovllm.structured.constraint_maker import ConstraintMaker
from tests.devices import DEVICE
from tests.engine.test_token_masks import allowed, row

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("in_thread", [False, True])
def test_masks_wait_in_buffers_of_their_own(in_thread):
    """Those of a step may be written while the ones before are on their way."""
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 4)
    first = builder.start([row(3, [1, 2]), row(0, [98])], in_thread)
    second = builder.start([row(1, [4]), row(2, [40])], in_thread)
    there = first.to_device()
    assert allowed(there) == {3: {1, 2}, 0: {98}}
    again = second.to_device()
    assert allowed(again) == {1: {4}, 2: {40}}
    assert again.bitmask.data_ptr() == there.bitmask.data_ptr(), "a captured graph reads the same memory each time"
    assert again.rows.data_ptr() == there.rows.data_ptr()
    for count in (4, 1, 2):  # more masks and fewer, in buffers that held others
        rows = [row(i, [i, 50 + i]) for i in range(count)]
        assert allowed(builder.start(rows, in_thread).to_device()) == {i: {i, 50 + i} for i in range(count)}
    assert again.bitmask.data_ptr() == there.bitmask.data_ptr()


def test_an_odd_number_of_words():
    """An odd number of rows, whose masks are of an odd number of words."""
    params = SamplingParams(allowed_token_ids=[3, 40])
    seq = Sequence(0, [5, 6, 7], params, seed=0)
    (seq.constraint,) = ConstraintMaker(None, 65, [64]).make(params)
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 3)
    for number in (2, 0, 1):  # each buffer, and one of them again
        assert allowed(builder.start([ConstrainedRow(number, seq, 3)]).to_device()) == {number: {3, 40}}


@pytest.mark.gpu
@pytest.mark.parametrize("in_thread", [False, True])
def test_masks_on_their_way_are_not_overwritten(in_thread):
    """The device is behind: it copies the masks of two steps when the host has begun with a third one."""
    builder = ThreadedMaskBuilder(torch.device("cuda"), 4)
    steps = [{3: {1, 2}, 0: {98}}, {1: {4}, 2: {40}}, {2: {7}, 1: {8}}]
    rows = [[row(i, sorted(tokens)) for i, tokens in step.items()] for step in steps]
    behind = torch.cuda.Event()

    def on_device(step):
        return TokenMasks(*(tensor.clone() for tensor in builder.start(rows[step], in_thread).to_device()))

    for step in (0, 1, 2, 0):  # first calls take memory, which may wait for the device
        on_device(step)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second at 2 GHz
    behind.record()
    clones = [on_device(0), on_device(1)]
    assert not behind.query(), "the device was not behind"
    third = builder.start(rows[2], in_thread)
    assert [allowed(masks) for masks in clones] == steps[:2]
    assert allowed(third.to_device()) == steps[2]


def test_what_else_bans_tokens():
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 4)
    rows = [row(0, [1, 2], min_tokens=1, stop_token_ids=[2]), row(1, [3]), row(2, [1, 2], stop_token_ids=[2])]
    for _, seq, _ in rows:
        seq.stop_ids = frozenset(seq.params.stop_token_ids or ())
    assert allowed(builder.start(rows).to_device()) == {0: {1}, 1: {3}, 2: {1, 2}}


class NoTokens:
    """A step whose tokens cannot be read."""

    def __init__(self, seq):
        self.step = self
        self.sampling = [seq]

    def token_ids(self):
        raise RuntimeError("no more fish")


def test_tokens_that_cannot_be_read_fail_the_step_that_needs_them():
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 4)
    number, seq, position = row(0, [1, 2])
    builder.step_launched(NoTokens(seq))
    started = builder.start([ConstrainedRow(number, seq, position + 1)], in_thread=True)
    with pytest.raises(RuntimeError, match="no more fish"):
        started.to_device()
    assert allowed(builder.start([row(1, [3])], in_thread=True).to_device()) == {1: {3}}


def test_what_fails_in_the_thread_fails_the_step():
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 4)
    failing = row(0, [1, 2])
    failing.seq.constraint.fill = lambda mask: 1 / 0
    started = builder.start([failing], in_thread=True)
    with pytest.raises(ZeroDivisionError):
        started.to_device()
    assert allowed(builder.start([row(1, [3])], in_thread=True).to_device()) == {1: {3}}


def test_masks_of_a_step_that_was_given_up_spoil_no_others():
    """They may still be written when the next ones are."""
    builder = ThreadedMaskBuilder(torch.device(DEVICE), 4)
    for count in range(1, 30):
        builder.start([row(i, [i]) for i in range(4)], in_thread=True)
        assert allowed(builder.start([row(1, [count])]).to_device()) == {1: {count}}

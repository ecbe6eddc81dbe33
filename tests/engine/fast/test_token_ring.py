"""The ring in which steps leave their tokens for the host: no cell is written again before it was read."""

import pytest
import torch

from nanovllm.engine.fast.decode_rows import advance_rows
from nanovllm.engine.fast.token_ring import DEPTH, TokenRing
from nanovllm.engine.step import ScheduledStep
from nanovllm.engine.step_result import StepResult
from tests.devices import DEVICES


def advance_on(device):
    if device == "cpu":
        return advance_rows
    from nanovllm.kernels.triton.sampling import advance

    return advance.advance_rows


class Steps:
    """Steps that do nothing but sample given tokens."""

    def __init__(self, device, max_num_seqs=6, make_result=StepResult):
        self.make_result = make_result
        self.ring = TokenRing(max_num_seqs, torch.device(device))
        self._advance = advance_on(device)
        self._state = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in (
            ((7, max_num_seqs), torch.int64), (max_num_seqs, torch.int32), ((max_num_seqs, 3), torch.int32),
            (max_num_seqs + 1, torch.int64),
        )]  # fmt: skip

    def on_device(self, tokens):
        ints, lens, table, last = self._state
        n = len(tokens)
        tokens = torch.tensor(tokens, device=ints.device)
        self._advance(tokens, ints[:, :n], lens[:n], table[:n], last, 4, self.ring.tokens, self.ring.count)

    def launch(self, tokens, order=None):
        self.ring.claim()
        self.on_device(tokens)
        latest = self.ring.latest()[: len(tokens)]
        result = self.make_result(ScheduledStep.of(()), latest, order=order, device=self.ring.count.device)
        self.ring.hold(result)
        return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [0, 1, DEPTH - 1, DEPTH, 3 * DEPTH])
def test_results_may_be_read_as_late_as_one_likes(device, late):
    steps = Steps(device)
    truth = [[10 * i + j for j in range(1 + i % 6)] for i in range(5 * DEPTH)]
    results = []
    for i, tokens in enumerate(truth):
        results.append(steps.launch(tokens))
        if i >= late:
            assert results[i - late].token_ids() == truth[i - late]
    for _ in range(2):
        assert [result.token_ids() for result in results] == truth


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_put_in_the_order_of_the_parts(device):
    order = torch.tensor([2, 0, 1]).numpy()
    assert Steps(device).launch([7, 8, 9], order).token_ids() == [9, 7, 8]


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_reset_the_device_counts_what_the_host_does(device):
    """A step that failed may have run on the device or not; what was launched before it can still be read."""
    steps = Steps(device)
    results = [steps.launch([i]) for i in range(DEPTH - 1)]
    steps.ring.claim()
    steps.on_device([99])  # and the host never hears of it
    steps.ring.reset()
    results += [steps.launch([i]) for i in range(DEPTH - 1, 3 * DEPTH)]
    assert [result.token_ids() for result in results] == [[i] for i in range(3 * DEPTH)]


def test_a_result_that_nobody_wants_is_not_waited_for():
    read = []

    class Watched(StepResult):
        def read(self):
            read.append(self)
            return super().read()

    steps = Steps("cpu", make_result=Watched)
    for i in range(2 * DEPTH):
        steps.launch([i])
    assert not read
    kept = [steps.launch([i]) for i in range(DEPTH + 1)]
    assert read == kept[:1]


def test_a_result_that_is_of_no_use_fails_no_later_step():
    """It may still be referred to, by the traceback of its failure."""

    class Useless(StepResult):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, check=lambda: 1 / 0)

    steps = Steps("cpu", make_result=Useless)
    kept = [steps.launch([i]) for i in range(2 * DEPTH)]
    for i, result in enumerate(kept):
        with pytest.raises(ZeroDivisionError):
            result.token_ids()
        assert result.read() == [i]

"""A capture that failed leaves a GPU that works."""

import pytest
import torch

from nanovllm.engine.cuda_graph import capture
from nanovllm.kernels import failed_capture
from nanovllm.kernels.benchmark import time_in_graph
from nanovllm.kernels.failed_capture import give_up_pool, usable_pool


def wait_for_device():
    torch.cuda.synchronize()


def in_the_benchmark():
    time_in_graph([wait_for_device])


def in_the_engine():
    capture(wait_for_device, torch.cuda.Stream())


@pytest.mark.gpu
@pytest.mark.parametrize("failing", [in_the_benchmark, in_the_engine])
def test_random_numbers_are_drawn_after_a_capture_that_failed(failing):
    torch.manual_seed(3)
    want = torch.randn(5, device="cuda")
    with pytest.raises(RuntimeError):
        failing()
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5, device="cuda"), want)
    graph = capture(lambda: None, torch.cuda.Stream())
    graph.replay()
    torch.cuda.synchronize()


def test_memory_is_replaced_for_good(monkeypatch):
    new = iter([(0, 1000 + i) for i in range(9)])
    monkeypatch.setattr(failed_capture, "_instead", {})
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(new))
    assert usable_pool() == (0, 1000) and usable_pool((0, 7)) == (0, 7)
    for _ in range(2):
        give_up_pool(torch.device("cuda", 0), usable_pool((0, 7)))
    assert usable_pool((0, 7)) == usable_pool((0, 1001)) == usable_pool((0, 1002)) == (0, 1002)
    assert usable_pool((0, 8)) == (0, 8) and usable_pool() == (0, 1003)


@pytest.mark.gpu
def test_others_are_captured_with_the_memory_of_a_capture_that_failed():
    stream, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    first = capture(lambda: x.add_(1), stream)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            capture(wait_for_device, stream, first.pool())
    second = capture(lambda: x.mul_(3), stream, first.pool())
    for graph in (first, second, first):
        graph.replay()
    assert (x == 4).all()

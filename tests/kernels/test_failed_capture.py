"""A capture that failed leaves a GPU that works."""

import pytest
import torch

from nanovllm.engine.cuda_graph import capture
from nanovllm.kernels.benchmark import time_in_graph


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

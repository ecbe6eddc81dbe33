"""A capture that failed leaves a GPU that works."""

import pytest
import torch

from nanovllm.hardware.graph_capture import GraphMemory, capture
from nanovllm.hardware.timing import time_in_graph


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


def test_memory_that_is_given_up_is_not_used_again(monkeypatch):
    new, told = iter([(0, 7), (0, 8), (0, 9)]), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(new))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: told.append(args), raising=False)
    memory = GraphMemory()
    handles = [memory.handle]
    for _ in range(2):
        memory.give_up(torch.device("cuda", 1))
        handles.append(memory.handle)
    assert handles == [(0, 7), (0, 8), (0, 9)] and told == [(1, (0, 7)), (1, (0, 8))]


@pytest.mark.gpu
def test_others_are_captured_after_one_that_failed():
    stream, x, memory = torch.cuda.Stream(), torch.zeros(1000, device="cuda"), GraphMemory()
    first = capture(lambda: x.add_(1), stream, memory)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="capturing"):
            capture(wait_for_device, stream, memory)
    second = capture(lambda: x.mul_(3), stream, memory)
    for graph in (first, second, first):
        graph.replay()
    assert (x == 4).all()

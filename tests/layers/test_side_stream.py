"""A side stream: its work comes after what was launched before and before what is launched after, in graphs too."""

import threading

import pytest
import torch

from nanovllm.layers.side_stream import side_stream


def test_without_streams_all_runs_in_order():
    with side_stream(torch.device("cpu")) as side:
        assert side is None
        with torch.cuda.stream(side):
            x = torch.ones(3)
        y = x + 1
    assert y.tolist() == [2, 2, 2]


def test_what_spoils_a_capture_is_what_is_raised(monkeypatch):
    """After such an error a stream that captures cannot wait: "operation failed due to a previous error"."""

    class Stream:
        spoiled = False

        def wait_stream(self, other):
            if Stream.spoiled:
                raise RuntimeError("previous error during capture")

        def __init__(self, device=None):
            self.device = device

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    with pytest.raises(RuntimeError, match="not permitted"), side_stream(torch.device("cuda")):
        Stream.spoiled = True
        raise RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="previous"):  # without another error, the failed join is raised
        Stream.spoiled = False
        with side_stream(torch.device("cuda")):
            Stream.spoiled = True


def branches(x, out, cycles=3_000_000):
    torch.cuda._sleep(cycles)
    x.add_(1)
    with side_stream(x.device) as side:
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
            torch.mul(x, 2, out=out[0])
        torch.mul(x, 3, out=out[1])
        order = torch.cuda.Event(), torch.cuda.Event()
        order[0].record()
        order[1].record(side)
    out.add_(1)
    return order


@pytest.mark.gpu
@pytest.mark.alone
def test_branches_wait_for_what_was_before_and_are_waited_for():
    device = torch.device("cuda", torch.cuda.current_device())
    x, out = torch.zeros(1000, device=device), torch.zeros(2, 1000, device=device)
    here = torch.cuda.current_stream(device)
    branches(x, out, 1)  # a kernel's first launch loads it, which may wait for others
    torch.cuda.synchronize()
    first, second = branches(x, out, 100_000_000)
    first.synchronize()
    assert not second.query(), "one branch waits for the other"
    assert torch.cuda.current_stream(device) == here
    assert (out[0] == 5).all() and (out[1] == 7).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with side_stream(device) as side:
            with torch.cuda.stream(side):
                torch.mul(x, 2, out=out[0])
            torch.mul(x, 3, out=out[1])
        out.add_(1)
    for _ in range(5):
        graph.replay()
    assert (out[0] == 15).all() and (out[1] == 22).all()


@pytest.mark.gpu
def test_an_error_in_a_branch_leaves_the_stream_as_it_was():
    device = torch.device("cuda", torch.cuda.current_device())
    here = torch.cuda.current_stream(device)
    with pytest.raises(ZeroDivisionError), side_stream(device) as side, torch.cuda.stream(side):
        raise ZeroDivisionError
    assert torch.cuda.current_stream(device) == here


@pytest.mark.gpu
def test_engines_in_threads_share_no_branch():
    device, sides = torch.device("cuda", torch.cuda.current_device()), []

    def branch():
        with torch.cuda.stream(torch.cuda.Stream(device)), side_stream(device) as side:
            sides.append(side)

    for _ in range(2):
        thread = threading.Thread(target=branch)
        thread.start()
        thread.join()
    assert sides[0] != sides[1]

"""The counters that outlive a launch are not where the caller's own allocations go."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.triton.counters import arrival_counters, buffers


def test_they_are_of_no_mode_of_the_caller(monkeypatch):
    """Modes of allocation hold for a thread, as the mode of inference does."""
    monkeypatch.delitem(buffers, (torch.device("cpu"), 0), raising=False)
    with torch.inference_mode():
        counters = arrival_counters(torch.device("cpu"), 8)
        assert torch.zeros(1).is_inference() and not counters.is_inference()
        assert arrival_counters(torch.device("cpu"), 8) is counters and not counters.any()


@pytest.mark.gpu
def test_they_are_in_no_pool_of_the_caller():
    """torch.compile refuses a CUDA graph in whose pool a tensor stays."""
    pool = torch.cuda.MemPool()
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
        own = torch.zeros(8, device=device)
        counters = arrival_counters(device, 8)

    def is_in_it(x):
        return any(s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in pool.snapshot())

    assert is_in_it(own) and not is_in_it(counters) and not counters.any()

"""Memory that ranks share, where one of them has none: no rank waits for what will never come."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.triton.collectives.peer_memory import peer_memory

RANKS = 3


class Rank:
    """A rank that is a thread of this process."""

    size = RANKS

    def __init__(self, rank, store, numbers, barrier):
        self.rank, self.store, self._numbers, self._barrier = rank, store, numbers, barrier

    def smallest(self, number, device):
        self._numbers[self.rank] = number
        self._barrier.wait()
        return min(self._numbers)


@pytest.fixture
def fails_on_one(monkeypatch):
    """Rank 1 gets neither a GPU's memory nor a file; the others' memory of GPUs is this machine's."""
    empty, file, failing = torch.empty, tempfile.NamedTemporaryFile, threading.local()

    def refused(*arguments, **options):
        if getattr(failing, "now", False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (file if not arguments else empty)(*arguments, **options | ({"device": "cpu"} if arguments else {}))

    monkeypatch.setattr(torch, "empty", refused)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: tuple(range(8)), raising=False)
    return failing


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_rank_without_memory_makes_all_do_without(fails_on_one, caplog, device):
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=30))  # a rank that waits says so
    numbers, barrier = [None] * RANKS, threading.Barrier(RANKS, timeout=90)

    def make(rank):
        fails_on_one.now = rank == 1
        group = Rank(rank, store, numbers, barrier)
        return peer_memory(group, "places", 64, torch.int16, 7, torch.device(device))

    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(make, range(RANKS))) == [None] * RANKS
    said = sorted(record.getMessage().partition("memory: ")[2] for record in caplog.records)
    assert said == ["CUDA out of memory", *["rank 1 has no memory for it"] * (RANKS - 1)]

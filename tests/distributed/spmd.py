"""Ranks for tests: processes that run the same functions as this one, so that many cases share their start.

A function takes its group first; it is found in every process by its module and name.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.endings import leave
from nanovllm.distributed.group import SINGLE, split_over
from nanovllm.distributed.processes import Processes, RankConnection
from nanovllm.distributed.rendezvous import join
from nanovllm.early_exit import exit_with_parent
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.ranks.interface import Ranks

DEVICE = "NANOVLLM_TEST_RANKS"
"""The environment variable that tells the processes of a pool where they compute."""
SECONDS = 300
"""A call of a rank, which may wait for one that is gone, ends after that time."""


class SameInputs(Ranks):
    """Ranks whose programs give them the same requests at the same steps."""

    def __init__(self, group):
        self.rank, self._group = group.rank, group

    def make_on_all(self, make):
        with split_over(self._group):
            return make()


def engine(group, directory, **arguments):
    defaults = dict(
        dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=100, max_num_seqs=8,
        max_model_len=128, max_num_batched_tokens=48, seed=0,
    )  # fmt: skip
    device = torch.device("cuda", group.rank) if torch.cuda.is_available() else "cpu"
    return LLMEngine(EngineConfig(str(directory), device=str(device), **defaults | arguments), ranks=SameInputs(group))


def device_of(rank):
    """Where a rank of a pool computes: on a GPU of its own in `Pool(device="cuda")`, else on the CPU."""
    return torch.device("cuda", rank) if os.environ.get(DEVICE) == "cuda" else torch.device("cpu")


def barrier(group, device):
    return lambda place: group[0].smallest(0, device) if group else None


def joined(directory, rank, size):
    group, device = [], device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches there
    made = join(Path(directory), rank, size, device, SECONDS, barrier(group, device))
    group.append(made)
    return made


class Pool:
    """`size` ranks, of which this process is the first, and whose sums are over processors or, with "cuda", GPUs."""

    def __init__(self, size, stuck_seconds=SECONDS, still_seconds=None, device="cpu"):
        os.environ[DEVICE] = device
        environment = {"OMP_NUM_THREADS": "1", "STILL_SECONDS": str(still_seconds or "")}
        self._processes = Processes(
            "tests.distributed.spmd", size, environment, lambda: None, stuck_seconds, still_seconds
        )
        self.pids = self._processes.pids
        self._groups = {1: SINGLE}

    def run(self, size, fn, *args):
        """What fn(group, *args) returns on this rank; it runs on `size` ranks."""
        if size not in self._groups:
            directory = tempfile.mkdtemp()
            self._processes.send((size, "tests.distributed.spmd", "", (directory,)))
            self._groups[size] = joined(directory, 0, size)
            self._processes.receive("done", SECONDS, "joining a group")
        if size > 1:
            self._processes.send((size, fn.__module__, fn.__name__, args))
        self._processes.expect_return(size > 1)  # a kernel that is interpreted would wait for a dead rank for ever
        self._processes.watch(size > 1)
        try:
            result = fn(self._groups[size], *args)
        finally:
            self._processes.watch(False)
            self._processes.expect_return(False)
        if size > 1:
            for rank, other in enumerate(self._processes.receive("done", SECONDS, fn.__name__), 1):
                assert rank >= size or other == result, f"rank {rank} has another result"
        return result

    def close(self):
        leave(self._processes, [group for group in self._groups.values() if group.size > 1])
        os.environ.pop(DEVICE, None)  # another pool may have taken it away


def main():
    exit_with_parent()
    connection, rank = RankConnection(int(sys.argv[1])), int(sys.argv[2])
    connection.tell_moves(float(os.environ["STILL_SECONDS"] or 0) or None)
    groups = {}
    while True:
        size, module, name, args = connection.recv()
        result = None
        too_long = threading.Timer(SECONDS, os._exit, (1,))
        too_long.daemon = True
        too_long.start()
        if rank < size and not name:
            groups[size] = joined(args[0], rank, size)
        elif rank < size:
            result = getattr(importlib.import_module(module), name)(groups[size], *args)
        too_long.cancel()
        connection.send(("done", result))


if __name__ == "__main__":
    try:
        main()
    except EOFError:
        os._exit(0)

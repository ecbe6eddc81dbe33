"""A rank from 1 on, as its own process sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group, split_over
from nanovllm.distributed.rendezvous import join
from nanovllm.engine.ranks.interface import CHECK_VARIABLE, Ranks, ScheduleDigest, T
from nanovllm.engine.step import ScheduledStep


class Follower(Ranks):
    """A rank from 1 on, in a process of its own."""

    def __init__(self, rank: int, config: EngineConfig, connection: Connection, directory: str) -> None:
        self.rank = rank
        self._config, self._connection, self._directory = config, connection, directory
        self._digest = ScheduleDigest() if os.environ.get(CHECK_VARIABLE) == "1" else None
        self._group: Group | None = None
        on_gpu = torch.cuda.is_available() and config.device != "cpu"
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")

    def make_on_all(self, make: Callable[[], T]) -> T:
        config = self._config
        size, directory = config.tensor_parallel_size, Path(self._directory)
        self._connection.send(("started", None))
        group = join(directory, self.rank, size, self.device, config.rank_timeout, self._barrier)
        self._group = group
        with split_over(group):
            made = make()
        self._barrier("the engine has started")
        return made

    def close(self) -> None:
        """Let go of the other ranks' memory, for which they wait when they free it."""
        if self._group is not None:
            self._group.provider_state.clear()

    def _barrier(self, place: str) -> None:
        self._connection.send(("at", place))
        self._connection.recv()

    def compare_schedules(self, step: ScheduledStep | None) -> None:
        if self._digest is not None:
            self._digest.add(step)
            if self._digest.is_due:
                self._connection.send(("digest", self._digest.value))

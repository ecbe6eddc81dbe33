"""A line in the log from time to time: what the engine does, as vLLM's users know it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from nanovllm.async_llm import AsyncLLM
from nanovllm.serve.metrics import Metrics

logger = logging.getLogger("nanovllm.serve.stats")
"""Its level is INFO where others have WARNING (`log_setup.logging_thread`)."""


class StatsLog:
    """Rates between two looks at the statistics of all steps. The steps themselves do nothing for it.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, engine: AsyncLLM, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._last = clock(), *metrics.tokens
        self._worked = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, interval: float) -> None:
        """From now on log a line every `interval` seconds, in the running event loop, while there is work."""
        self._timer = asyncio.get_running_loop().call_later(interval, self._log, interval)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _log(self, interval: float) -> None:
        if (line := self.line()) is not None:
            logger.info(line)
        self.start(interval)

    def line(self) -> str | None:
        """What happened since the last call; None: nothing did, then and before."""
        before, prompt, output = self._last
        self._last = now, new_prompt, new_output = self._clock(), *self._metrics.tokens
        stats, seconds = self._engine.stats, max(now - before, 1e-9)
        works = (new_prompt, new_output) != (prompt, output) or stats.has_work
        worked, self._worked = self._worked, works
        if not works and not worked:  # one line with zeros tells that the work has ended
            return None
        return (
            f"prompt {(new_prompt - prompt) / seconds:,.1f} tokens/s, output {(new_output - output) / seconds:,.1f}"
            f" tokens/s, {stats.num_running} running, {stats.num_waiting} waiting, KV cache {stats.kv_usage:.1%} used"
        )

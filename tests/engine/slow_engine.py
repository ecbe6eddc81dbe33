"""An engine that tests stop, so that a request certainly runs, or has certainly ended, while they look."""

import math
import threading
import time
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.frontend.engine_client import ThreadClient


class SlowEngine(LLMEngine):
    """An engine whose steps take at least 5 ms, and which stands still after those that `hold` allows."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_steps = 0
        self._most = math.inf
        self._changed = threading.Condition()

    def hold(self, steps: int = 20) -> None:
        """Stop after so many more steps. A request that is longer has its first tokens then, and has not ended."""
        self._allow(self.num_steps + steps)

    def go(self) -> None:
        """Undo `hold`."""
        self._allow(math.inf)

    def _allow(self, most: float) -> None:
        with self._changed:
            self._most = most
            self._changed.notify_all()

    def step(self) -> Any:
        time.sleep(0.005)
        with self._changed:
            self._changed.wait_for(lambda: self.num_steps < self._most)
            self.num_steps += 1
        return super().step()


def slow_client(path: Any, **engine: Any) -> ThreadClient:
    config = EngineConfig(str(path), **engine)
    return ThreadClient(config, SlowEngine(config))

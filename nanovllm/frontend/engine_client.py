"""How a front end reaches an engine: in a thread of its own process, or (nanovllm/serve) in another process."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from typing import Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.frontend.core import EngineCore
from nanovllm.frontend.core_messages import AbortRequest, Deliver, Died, EngineInfo, StartRequest, StepOutputs

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0


class EngineClient(Protocol):
    """An engine that serves one front end."""

    @property
    def info(self) -> EngineInfo:
        """What the engine serves; it does not change when the engine is started again."""

    @property
    def alive(self) -> bool:
        """Whether requests can be started now."""

    def listen(self, deliver: Deliver, died: Died) -> None:
        """Begin. deliver: called with what each step brought. died: called when the engine has ended by itself, with
        the reason; every request that was started before is lost then. Both are called by any thread, one at a time.
        """

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called once in an event loop that may read the engine's messages."""

    def start(self, request: StartRequest) -> None:
        """Called from any thread."""

    def abort(self, request: AbortRequest) -> None:
        """Called from any thread; does nothing if the request is not known."""

    def close(self) -> None:
        """End the engine."""


class ThreadClient:
    """An engine in this process, whose steps one thread runs.

    Raises:
        As `LLMEngine`.
    """

    def __init__(self, config: EngineConfig, engine: LLMEngine | None = None) -> None:
        self._core = EngineCore(config, self._deliver_step, engine)
        self._info = self._core.info
        self._deliver: Deliver | None = None
        self._died: Died | None = None
        self._order = threading.Lock()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        weakref.finalize(self, _end, self._core, self._thread)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def engine(self) -> LLMEngine:
        """For tests and for statistics; only its owner runs steps."""
        return self._core.engine

    def listen(self, deliver: Deliver, died: Died) -> None:
        self._deliver, self._died = deliver, died
        self._thread.start()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread of the engine delivers; no event loop is needed."""

    def start(self, request: StartRequest) -> None:
        self._core.start(request)

    def abort(self, request: AbortRequest) -> None:
        self._core.abort(request)

    def close(self) -> None:
        self._core.close()
        if threading.current_thread() is not self._thread:
            if self._thread.is_alive():
                self._thread.join()
            self._core.release()
            self._deliver = self._died = None

    def _deliver_step(self, outputs: StepOutputs) -> None:
        assert self._deliver is not None, "listen comes first"
        with self._order:
            self._deliver(outputs)

    def _run(self) -> None:
        try:
            self._core.run()
        except BaseException as error:  # a fault of the loop itself: a failed step does not end it
            logger.exception("the thread of the engine ended")
            self._failed = True  # before its requests are told, so that none comes after them
            assert self._died is not None
            self._died(f"{type(error).__name__}: {error}")


def _end(core: EngineCore, thread: threading.Thread) -> None:
    """At the end of a program that has not closed the engine: a thread that runs PyTorch when the interpreter ends
    aborts the process.
    """
    core.close()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_EXIT_SECONDS)

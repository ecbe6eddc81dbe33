"""The processes of the other ranks, as rank 0 sees them: started, listened to, and ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from nanovllm.distributed.stillness import Stillness, tell_moves

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
"""A process that was told to end has this long before it is killed."""


class RankError(RuntimeError):
    """A rank has failed, so that the engine has stopped. The message says which, and what it said."""


class Processes:
    """One process for each rank from 1 on, which ends when this object or this process does.

    A thread listens to all of them. A process sends (kind, content). The kind "failed" says why the process ends;
    "moves" and "still" are those of `tell_moves`; any other message waits for `receive`.

    Args:
        module: is run as `python -m module FILE_DESCRIPTOR RANK`; it talks over the connection of that descriptor.
        size: ranks, this one included.
        on_failure: called once, by another thread, when a rank has failed or ended: it frees the threads that wait.
        stuck_seconds: a call that waits for a rank has this long to return after the rank has failed.
        still_seconds: within `watch(True)`, the ranks have failed if none has moved for so long; None: they may wait.
    """

    def __init__(
        self,
        module: str,
        size: int,
        environment: dict[str, str],
        on_failure: Callable[[], None],
        stuck_seconds: float = 60.0,
        still_seconds: float | None = None,
    ) -> None:
        self._state = _State(size, on_failure, stuck_seconds, still_seconds)
        # Where the program found its modules, they find theirs.
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        environment = {**os.environ, **environment, "PYTHONPATH": path}
        self._finalizer = weakref.finalize(self, _end, self._state)
        try:
            for rank in range(1, size):
                self._state.start(module, rank, environment)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=_listen, args=(self._state,), name="ranks", daemon=True).start()

    @property
    def failure(self) -> str | None:
        """What a rank failed of; None: all are well."""
        return self._state.failure

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks from 1 on."""
        return [process.pid for process in self._state.processes]

    def send(self, message: Any) -> None:
        """Send a message to every rank. Raises RankError if one has failed."""
        self.raise_failure()
        try:
            for connection in self._state.connections:
                connection.send(message)
        except OSError:
            self.wait_for_failure()
            raise RankError(self.failure or "a rank does not listen") from None

    def receive(self, kind: str, timeout: float, what: str) -> list[Any]:
        """The oldest message of this kind from each rank.

        Raises:
            RankError: a rank has failed, or did not send one in `timeout` seconds; `what` it did not do.
        """
        state, deadline = self._state, time.monotonic() + timeout
        with state.news:
            while not all(state.inbox.get((rank, kind)) for rank in range(1, state.size)):
                state.stillness.reset()  # this wait has its own end
                left = deadline - time.monotonic()
                if state.failure is None and left <= 0:
                    silent = [rank for rank in range(1, state.size) if not state.inbox.get((rank, kind))]
                    state.fail(f"rank {silent[0]} did not answer for {timeout:g} s: {what}")
                if state.failure is not None:
                    raise RankError(state.failure)
                state.news.wait(max(0.0, min(left, 1.0)))
            return [state.inbox[rank, kind].pop(0) for rank in range(1, state.size)]

    def raise_failure(self) -> None:
        """Raise a RankError if a rank has failed."""
        if self.failure is not None:
            raise RankError(self.failure)

    def fail(self, failure: str) -> None:
        """The ranks have to end, since this one cannot go on."""
        with self._state.news:
            self._state.fail(failure)

    def wait_for_failure(self, timeout: float = 2.0) -> None:
        """Let the listening thread find out what has happened, after a call that a rank's end may have broken."""
        with self._state.news:
            self._state.news.wait_for(lambda: self._state.failure is not None, timeout)

    def expect_return(self, expected: bool) -> None:
        """Whether a call waits for other ranks now. If one of these fails and the call does not return, since a GPU
        waits for a signal that never comes, this process is ended with a message.
        """
        self._state.waiting = expected

    def watch(self, watched: bool) -> None:
        """Whether this thread is in calls that wait for other ranks, and that nothing else ends if these never come.

        The thread moves when it calls this: most steps of an engine wait for the GPU at the same place.
        """
        self._state.stillness.reset()
        self._state.watched = threading.get_ident() if watched else None

    def close(self) -> None:
        """End the processes; after a few seconds by force."""
        self._finalizer()


class _State:
    """What the listening thread and the others share. It does not hold `Processes`, whose end ends the processes."""

    def __init__(
        self, size: int, on_failure: Callable[[], None], stuck_seconds: float, still_seconds: float | None
    ) -> None:
        self.size = size
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.inbox: dict[tuple[int, str], list[Any]] = {}
        self.failure: str | None = None
        self.closing = False
        self.waiting = False
        self.watched: int | None = None
        self.stillness = Stillness()
        self.moved = dict.fromkeys(range(1, size), time.monotonic())
        self.places: dict[int, str] = {}
        self.news = threading.Condition()
        self._on_failure, self._stuck_seconds, self._still_seconds = on_failure, stuck_seconds, still_seconds
        self.seconds_between_looks = min(1.0, (still_seconds or 10.0) / 10)

    def start(self, module: str, rank: int, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno()), str(rank)]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for rank 0
            )  # fmt: skip
        self.connections.append(Connection(ours.detach()))
        self.processes.append(process)

    def fail(self, failure: str) -> None:
        """Called with `news` held."""
        if self.failure is None and not self.closing:
            self.failure = failure
            self.news.notify_all()
            # One thread each: NCCL may wait for a GPU that waits for the rank.
            for target in (self._free_waiters, self._exit_if_stuck):
                threading.Thread(target=target, name="failed rank", daemon=True).start()

    def look(self) -> None:
        """Find out, every second or so, whether all ranks are still."""
        watched, limit = self.watched, self._still_seconds
        if watched is None or limit is None:
            self.stillness.reset()
            return
        self.stillness.look(watched)
        if self.stillness.seconds < limit or time.monotonic() - max(self.moved.values()) < limit:
            return
        places = {0: self.stillness.place} | self.places
        where = ", ".join(f"rank {rank} is in {place}" for rank, place in places.items() if place)
        with self.news:
            self.fail(f"the ranks wait for each other, none has moved for {limit:g} s; {where}")

    def heard(self, rank: int, kind: str, content: Any) -> None:
        """A process has sent a message."""
        with self.news:
            if kind == "failed":
                self.fail(f"rank {rank} of {self.size} {content}")
            elif kind == "moves":
                self.moved[rank] = time.monotonic()
            elif kind == "still":
                self.places[rank] = content
            else:
                self.inbox.setdefault((rank, kind), []).append(content)
                self.news.notify_all()

    def _free_waiters(self) -> None:
        try:
            self._on_failure()
        except Exception:
            logger.debug("the group could not be aborted", exc_info=True)

    def _exit_if_stuck(self) -> None:
        since = time.monotonic()
        while self.waiting and time.monotonic() - since < self._stuck_seconds:
            time.sleep(0.2)
        if self.waiting:
            print(f"nanovllm: {self.failure}; a call that waits for it does not return: exit", file=sys.stderr)
            _end(self)
            os._exit(1)


class RankConnection(Connection):
    """The connection of a rank from 1 on to rank 0. Any thread may send."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._lock = threading.Lock()

    def send(self, obj: Any) -> None:
        with self._lock:
            super().send(obj)

    def tell_moves(self, still_seconds: float | None) -> None:
        """Tell rank 0 whether the main thread moves, if rank 0 wants to know."""
        if still_seconds is not None:
            tell_moves(lambda kind, place: self.send((kind, place)), still_seconds)


def _listen(state: _State) -> None:
    ranks = {connection: rank for rank, connection in enumerate(state.connections, 1)}
    next_look = 0.0
    while ranks and not state.closing:
        try:
            ready = wait(list(ranks), state.seconds_between_looks)
        except OSError:  # closed meanwhile
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                del ranks[connection]
                kind, content = "failed", _exit_of(state.processes[rank - 1])
            state.heard(rank, kind, content)
        if time.monotonic() >= next_look:
            state.look()
            next_look = time.monotonic() + state.seconds_between_looks


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code == -signal.SIGKILL:
        return f"was killed by signal {-code}, which the system sends if its memory runs out"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _end(state: _State) -> None:
    state.closing = True
    for connection in state.connections:
        try:
            connection.close()  # they end when it does
        except OSError:
            pass
    deadline = time.monotonic() + (_GRACE_SECONDS if state.failure is None else 0.5)
    for process in state.processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

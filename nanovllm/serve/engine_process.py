"""The engine in a process of its own. `python -m nanovllm.serve.engine_process FD` is started by `ProcessClient`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from nanovllm.config import EngineConfig
from nanovllm.engine.core import EngineCore
from nanovllm.engine.core_messages import AbortRequest, StartRequest, StepOutputs
from nanovllm.engine.ranks import RankError
from nanovllm.serve.frames import ABORT, CONFIG, FAILED, READY, START, STEP, frame, read_frames

logger = logging.getLogger(__name__)
_EXIT_SECONDS = 10.0
_BUFFER_BYTES = 8 << 20


def main(descriptor: int) -> None:
    """Serve the front end at the other end of a socket until it closes the socket."""
    # The front end decides when the engine ends: signals to the whole group must not cut off a drain.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    frames = read_frames(sock)
    kind, data = next(frames)
    assert kind == CONFIG, kind
    given = msgspec.msgpack.decode(data)
    logging.basicConfig(level=given["log_level"], format="%(levelname)s %(name)s: %(message)s")
    lock = threading.Lock()

    def send(number: int, message: object) -> None:
        data = frame(number, message)
        try:
            with lock:
                sock.sendall(data)
        except OSError:  # the front end has gone; the reader sees it as well
            pass

    def deliver(outputs: StepOutputs) -> None:
        send(STEP, outputs)

    try:
        core = EngineCore(EngineConfig(**given["config"]), deliver)
    except Exception as error:
        user_error = isinstance(error, (ValueError, TypeError, FileNotFoundError))
        if not user_error:
            logger.exception("the engine cannot start")
        send(FAILED, str(error) if user_error else f"{type(error).__name__}: {error}")
        return
    send(READY, core.info)
    threading.Thread(target=_receive, args=(frames, core), name="receive", daemon=True).start()
    try:
        core.run()
    except RankError as error:  # the front end starts another process, whose ranks are new
        send(FAILED, str(error))
        sys.exit(1)


def _receive(frames: object, core: EngineCore) -> None:
    start = msgspec.msgpack.Decoder(StartRequest)
    abort = msgspec.msgpack.Decoder(AbortRequest)
    for kind, data in frames:  # type: ignore[attr-defined]
        if kind == START:
            core.start(start.decode(data))
        elif kind == ABORT:
            core.abort(abort.decode(data))
    core.close()
    # A step that never ends must not keep the GPU.
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main(int(sys.argv[1]))

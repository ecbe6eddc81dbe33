"""The engine in a process of its own, which `ProcessClient` starts."""

from __future__ import annotations

import logging
import signal
import socket
import sys

from nanovllm.early_exit import QuickExit, exit_with_parent

if __name__ == "__main__":
    leaving = QuickExit()  # its server waits for this process
    exit_with_parent()  # a large model is loaded for minutes, and this process looks for its server only after that

import msgspec  # noqa: E402

from nanovllm.config import EngineConfig  # noqa: E402
from nanovllm.engine.ranks.leader import RankError  # noqa: E402
from nanovllm.frontend.core import EngineCore  # noqa: E402
from nanovllm.frontend.core_messages import StepOutputs  # noqa: E402
from nanovllm.log_format import log_to_stderr  # noqa: E402
from nanovllm.serve.frames import CONFIG, FAILED, STEP, read_frames  # noqa: E402
from nanovllm.serve.front_ends import FrontEnds  # noqa: E402
from nanovllm.serve.log_setup import log_start_in_files  # noqa: E402

logger = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 5.0


def main(descriptor: int, listener: int | None = None) -> None:
    """Serve the front end at the other end of a socket until it closes the socket.

    Args:
        listener: a socket where further front ends connect.
    """
    # The front end decides when the engine ends: signals to the whole group must not cut off a drain.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    frames = read_frames(sock)
    kind, data = next(frames)
    assert kind == CONFIG, kind
    given = msgspec.msgpack.decode(data)
    log_to_stderr(given["log_level"], given["log_json"])
    log_start_in_files(given["log_level"])
    front_ends = FrontEnds(sock, frames)

    def deliver(outputs: StepOutputs) -> None:
        front_ends.send(STEP, outputs)

    try:
        core = EngineCore(EngineConfig(**given["config"]), deliver)
    except Exception as error:
        user_error = isinstance(error, (ValueError, TypeError, FileNotFoundError))
        if not user_error:
            logger.exception("the engine cannot start")
        _last_words(front_ends, str(error) if user_error else f"{type(error).__name__}: {error}")
        return
    front_ends.serve(core, None if listener is None else socket.socket(fileno=listener))
    try:
        core.run()
    except RankError as error:  # the front end starts another process, whose ranks are new
        _last_words(front_ends, str(error))
        sys.exit(1)
    finally:
        front_ends.close()
        core.release()


def _last_words(front_ends: FrontEnds, text: str) -> None:
    front_ends.send(FAILED, text)
    front_ends.flush(_LAST_WORDS_SECONDS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    leaving.code = 0

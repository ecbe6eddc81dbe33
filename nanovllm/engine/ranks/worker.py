"""The process of a rank from 1 on: `python -m nanovllm.engine.ranks.worker FILE_DESCRIPTOR RANK`, started by rank 0.

It makes an engine of the same arguments and takes every step that rank 0 takes.
"""

from __future__ import annotations

import logging
import os
import sys
from multiprocessing.connection import Connection
from weakref import WeakValueDictionary

from nanovllm.distributed.processes import RankConnection
from nanovllm.early_exit import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()  # before the imports, which take seconds

from nanovllm.engine.llm_engine import LLMEngine  # noqa: E402
from nanovllm.engine.ranks.follower import Follower  # noqa: E402
from nanovllm.engine.ranks.interface import AbortRecord, still_seconds  # noqa: E402
from nanovllm.engine.requests.request import Request  # noqa: E402
from nanovllm.log_format import log_to_stderr  # noqa: E402


def follow(engine: LLMEngine, connection: Connection) -> None:
    """Take rank 0's steps until it closes the connection, which raises EOFError."""
    requests: WeakValueDictionary[int, Request] = WeakValueDictionary()
    while True:
        order, news = connection.recv()
        if order != "step":
            getattr(engine, order)()
            continue
        for item in news:
            if isinstance(item, AbortRecord):
                if item.request_id in requests:
                    for index in item.indices:
                        engine.abort(requests[item.request_id], index)
                continue
            request = engine.maker.from_checked(
                item.request_id, item.prompt, item.params, item.seed, with_text=item.with_text
            )
            requests[item.request_id] = request
            engine.queue(request, offline=item.offline)
        engine.step()


def main() -> None:
    """Run a rank; ends the process."""
    descriptor, rank = map(int, sys.argv[1:])
    connection = RankConnection(descriptor)
    follower: Follower | None = None
    try:
        config, directory, level, as_json = connection.recv()
        level = level if level <= logging.INFO else logging.ERROR  # rank 0 has the same warnings
        log_to_stderr(level, as_json, f"%(levelname)s rank {rank} %(name)s: %(message)s", rank=rank)
        follower = Follower(rank, config, connection, directory)
        connection.tell_moves(still_seconds(config, follower.device))
        follow(LLMEngine(config, ranks=follower), connection)
    except (EOFError, ConnectionError):  # rank 0 has ended, or does not want this rank any more
        if follower is not None:
            follower.close()
        os._exit(0)
    except BaseException as error:
        logging.getLogger(__name__).debug("failed", exc_info=True)
        try:
            connection.send(("failed", f"failed: {type(error).__name__}: {error}"))
        except OSError:
            pass
        os._exit(1)  # destructors could wait for the other ranks


if __name__ == "__main__":
    main()

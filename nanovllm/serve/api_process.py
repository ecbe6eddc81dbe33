"""A further API process. `ApiServers` starts `python -m nanovllm.serve.api_process CONTROL LISTENING`."""

from __future__ import annotations

import signal
import socket
import sys

import msgspec

from nanovllm.async_llm import AsyncLLM
from nanovllm.serve.api_servers import ApiProcessConfig, FirstServer
from nanovllm.serve.frames import CONFIG, read_one
from nanovllm.serve.log_setup import logging_thread
from nanovllm.serve.server import Listener, Server, run
from nanovllm.serve.socket_client import FurtherClient
from nanovllm.serve.tracing import Tracing


def main(control: int, listening: int) -> None:
    """Serve until the first API process says that it is enough, or has gone.

    Args:
        control: the descriptor of the connection to the first API process.
        listening: the descriptor of the socket where clients connect.
    """
    # The first process tells when to end: a signal may go to it alone, or to all.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    first = socket.socket(fileno=control)
    kind, data = read_one(first)
    if kind != CONFIG:  # the first process has gone
        return
    config = msgspec.msgpack.decode(data, type=ApiProcessConfig)
    endpoint = config.otlp_endpoint
    tracing = None if endpoint is None else Tracing(endpoint, config.options.model_names[0])
    with logging_thread(config.log_level, config.log_json, config.access_log):
        engine = AsyncLLM(client=FurtherClient(config.engine_path, config.number))
        listener = Listener(config.host, tls=config.tls)
        server = Server(engine, config.options, listener, FirstServer(first))
        run(server, socket.socket(fileno=listening), tracing)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

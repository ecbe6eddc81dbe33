"""Runs the application: sockets, signals, and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.serve.api_servers import Siblings
from nanovllm.serve.app import App
from nanovllm.serve.errors import ServerShutdown
from nanovllm.serve.limits import limited_protocol
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.service import Service
from nanovllm.serve.tracing import Tracing
from nanovllm.wording import counted

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_ACCEPTS = 16
"""Connections that an iteration of the event loop may accept. uvloop accepts one from each listening socket, and an
iteration takes milliseconds while hundreds of streams run."""
_KEEP_ALIVE_SECONDS = 75
_DESCRIPTORS = 65536
_AFTER_DRAIN_SECONDS = 4.0
"""Time for the last events of requests that a drain has ended."""


@dataclass(frozen=True)
class Listener:
    """Where a server listens.

    Attributes:
        port: 0: a free one.
        tls: uvicorn's options ssl_certfile, ssl_keyfile, ssl_keyfile_password and ssl_ca_certs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host='': names no address; 127.0.0.1 is this machine, 0.0.0.0 all of its interfaces")
        given = dict(self.tls)
        if given and not given.get("ssl_certfile"):
            raise ValueError(f"{min(given)}: needs a certificate; pass --ssl-certfile as well")
        for name, file in given.items():
            if name != "ssl_keyfile_password" and not Path(file).is_file():
                raise ValueError(f"{name}={str(file)!r}: there is no such file")
        if given:
            self._load_tls(given)

    @staticmethod
    def _load_tls(given: dict[str, Any]) -> None:
        """Load the files as uvicorn does later, when the model is loaded."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate, key = given["ssl_certfile"], given.get("ssl_keyfile")
        try:
            context.load_cert_chain(certificate, key, given.get("ssl_keyfile_password"))
        except OSError as error:  # SSLError is one
            said = f"ssl_certfile={certificate!r}" + ("" if key is None else f", ssl_keyfile={key!r}")
            raise ValueError(f"{said}: no PEM certificate with its key ({_reason(error)})") from None
        if (authorities := given.get("ssl_ca_certs")) is not None:
            try:
                context.load_verify_locations(authorities)
            except OSError as error:
                raise ValueError(f"ssl_ca_certs={authorities!r}: no PEM certificates ({_reason(error)})") from None

    @property
    def uvicorn_tls(self) -> dict[str, Any]:
        """uvicorn's options. A client must have a certificate if there are authorities: uvicorn alone asks for none."""
        given = dict(self.tls)
        return given | {"ssl_cert_reqs": ssl.CERT_REQUIRED} if "ssl_ca_certs" in given else given

    @property
    def is_local(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")

    def open(self, shared: bool = False) -> socket.socket:
        """A listening socket.

        Args:
            shared: other sockets may listen there as well; the kernel deals the connections out.

        Raises:
            ValueError: nothing can listen there.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            both = self.host == "::" and socket.has_dualstack_ipv6()  # every address, of IPv4 too
            return socket.create_server(
                (self.host, self.port), family=family, backlog=_BACKLOG, reuse_port=shared, dualstack_ipv6=both
            )
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0  # of a name that is not found: negative
            why = os.strerror(number) if number > 0 else str(error)
            raise ValueError(
                f"cannot listen at {self.host}:{self.port}: {why}; choose another --host or --port"
            ) from None

    def open_several(self, count: int) -> list[socket.socket]:
        """As `open`, a socket for each of several processes."""
        probe = self.open()  # fails if another server listens there, which sockets that may be shared would not
        if count == 1:
            return [probe]
        here = replace(self, port=probe.getsockname()[1])
        probe.close()
        return [here.open(shared=True) for _ in range(count)]


def _reason(error: OSError) -> str:
    """ "PEM lib" of "[SSL] PEM lib (_ssl.c:3905)", which has no `reason`."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    return error.reason.lower().replace("_", " ") if error.reason else str(error).split("] ")[-1].split(" (_ssl")[0]


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal lets running requests finish and whose second one ends at once.

    Args:
        on_ready: called when the server takes requests.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        options: ServeOptions,
        listener: Listener = Listener(),
        siblings: Siblings | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_ready = on_ready
        self.service = Service(engine, options, siblings)
        self._siblings = siblings
        self._impatient = False
        """Whether a second signal has come, perhaps before `shutdown`."""
        self._sockets: list[socket.socket] = []
        """Where this process listens, each several times."""
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                App(self.service), http=limited_protocol(options), ws="none", lifespan="on", log_config=None,
                access_log=False, server_header=False, backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=options.drain + _AFTER_DRAIN_SECONDS,  # type: ignore[arg-type]
                **listener.uvicorn_tls,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, the handlers stay until `run` replaces them: a signal that comes after the last answer must
        not leave the engine's process behind. A further API process has none of its own.
        """
        self.take_signals()
        yield

    def take_signals(self) -> None:
        leads = self._siblings is None or self._siblings.leads
        if leads and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._impatient = self.should_exit
        if self._impatient and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_now)
        self.should_exit = True
        self.service.admission.draining = True
        if self._siblings is not None:
            self._siblings.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._sockets = [copy for sock in sockets or () for copy in (sock, *(sock.dup() for _ in range(_ACCEPTS - 1)))]
        await super().startup(self._sockets)
        if self._siblings is not None:
            self._siblings.attach(self)
        if not self.should_exit:  # the start may have failed, or a signal has come
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        telling = self._loop.create_task(self._tell())
        timer = self._loop.call_later(0 if self._impatient else self.service.options.drain, self._end_now)
        try:
            await super().shutdown(self._sockets)
            if self._siblings is not None:
                await self._siblings.ended(self.service.options.drain + 2 * _AFTER_DRAIN_SECONDS)
        finally:
            timer.cancel()
            telling.cancel()
            self._loop = None

    async def _tell(self) -> None:
        """Log what the end waits for, in one line for all API processes."""
        leads = self._siblings is None or self._siblings.leads
        if self._impatient or not self.service.options.drain or not leads:
            return
        count = (await self.service.counts()).requests_open
        if count:
            logger.warning(
                "shutting down: %s %s up to %s to finish; a second Ctrl-C or SIGTERM ends %s at once",
                counted(count, "running request"), "has" if count == 1 else "have",
                counted(self.service.options.drain, "second", "g"), "it" if count == 1 else "them",
            )  # fmt: skip

    def _end_now(self) -> None:
        """End the requests that run with an error, and soon after that everything else."""
        self.service.engine.fail_all(ServerShutdown("the server was shut down before the request ended"), for_good=True)
        asyncio.get_running_loop().call_later(_AFTER_DRAIN_SECONDS / 2, self._cut_off)

    def _cut_off(self) -> None:
        """Close the connections, so that handlers end by themselves. What then goes on is cancelled."""
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        asyncio.get_running_loop().call_later(_AFTER_DRAIN_SECONDS / 4, setattr, self, "force_exit", True)


def run(server: Server, sock: socket.socket, tracing: Tracing | None = None) -> None:
    """Serve until a signal ends it, then end the engine. sock: from `Listener.open`."""
    raise_descriptor_limit()
    if tracing is not None:
        server.service.generated = tracing.record
    try:
        server.take_signals()  # uvicorn does so in its event loop, which a signal would cut short before
        server.run(sockets=[sock])
    finally:
        # A further signal must not leave the engine's process behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if server.service.siblings is not None:
            server.service.siblings.close()
        server.service.engine.close()
        if tracing is not None:
            tracing.close()


def raise_descriptor_limit() -> None:
    """A connection is a file descriptor, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

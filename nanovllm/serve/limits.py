"""uvicorn's HTTP protocol with limits on connections and headers, which uvicorn and httptools do not have."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanovllm.serve.options import ServeOptions
from nanovllm.wording import counted

_HEADERS_TOO_LARGE = b"431 Request Header Fields Too Large"
_MOST_PIPELINED = 64
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class _TooLarge(httptools.HttpParserError):
    """The request exceeds a limit."""


class _AnyLength(int):
    """A length that every body has."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection that is one too many, or whose headers are too large or too slow.

    A client may send a request before the answers to earlier ones have ended (pipelining). What refuses such a request
    is written after these answers. When the client goes away, all of its requests end.
    """

    limits: ServeOptions
    open_connections: set[HttpToolsProtocol]
    _in_headers = True
    _in_body = False
    _header_bytes = 0
    _num_headers = 0
    _deadline: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The request whose answer was begun last. uvicorn's `cycle` is the one that was received last."""
    _refusal: bytes | None = None
    """The connection's last answer, maybe none: nothing that comes from the client counts any more."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.open_connections) >= self.limits.max_connections:
            said = f"at most {self.limits.max_connections} connections are allowed; try again later"
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1", said)
            return
        self.open_connections.add(self)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.discard(self)
        self._headers_are_there()
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._is_answering and self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._in_headers:
            self._header_bytes += len(data)
            # The body may come in the same piece as the headers' end.
            if self._header_bytes - len(data) > self.limits.max_header_bytes:
                self._refuse(_HEADERS_TOO_LARGE, f"the headers have more than {self.limits.max_header_bytes} bytes")
                return
        if not self._in_body:
            # httptools stops at an upgrade. A server that offers none may ignore that one was asked for.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-grade:", head) + end + rest
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:  # of a further request on this connection
            self._await_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.limits.max_header_bytes:
            self._refuse(b"414 URI Too Long", f"the URL has more than {self.limits.max_header_bytes} bytes")
            raise _TooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refuse(_HEADERS_TOO_LARGE, f"the request has more than {self.limits.max_headers} headers")
            raise _TooLarge
        if len(name) + len(value) > self.limits.max_header_bytes:
            said = f"the header {name[:80].decode('latin-1')!r} has more than {self.limits.max_header_bytes} bytes"
            self._refuse(_HEADERS_TOO_LARGE, said)
            raise _TooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_are_there()
        if len(self.pipeline) >= _MOST_PIPELINED:
            said = f"more than {_MOST_PIPELINED} requests wait for their answers on this connection"
            self._refuse(b"503 Service Unavailable", said)
            raise _TooLarge
        self._in_body = True
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":  # it has no chunks: a stream ends with its connection
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def _await_headers(self) -> None:
        self._in_headers, self._header_bytes, self._num_headers = True, 0, 0
        self._set_deadline()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receive_timeout, self._too_slow)

    def _headers_are_there(self) -> None:
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # it is this side that waits: for the answers to earlier requests
            self._set_deadline()
            return
        said = f"the headers did not arrive within {counted(self.limits.receive_timeout, 'second', 'g')}"
        self._refuse(b"408 Request Timeout" if self._header_bytes or self.scope else b"", said)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "this is not a valid HTTP/1.1 request")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def on_response_complete(self) -> None:
        if self._refusal is None or self.pipeline:
            super().on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._close()

    def _refuse(self, status: bytes, said: str) -> None:
        """End the connection after the answers that are due. status: empty: without a further answer."""
        if self._refusal is not None:  # the parser says again that the callback refused the request
            return
        self._headers_are_there()
        body = said.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        self._refusal = head % (status, len(body)) + b"connection: close\r\n\r\n" + body if status else b""
        if self._in_body and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # the request of this body is what is refused
        elif self._in_body and self.cycle is self._answered and self._is_answering:
            if not self.cycle.response_started:
                self._close()
                return
            self._refusal = b""  # its answer is there
        if not self._is_answering:
            self._close()

    def _close(self) -> None:
        if self._refusal and not self.transport.is_closing():
            self.transport.write(self._refusal)
        self.transport.close()


def limited_protocol(options: ServeOptions) -> type[LimitedProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`, with these limits and a count of its own connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": options, "open_connections": set()})

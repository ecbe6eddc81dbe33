"""uvicorn's HTTP protocol with limits on connections and headers, which uvicorn and httptools do not have."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanovllm.serve.errors import ApiError
from nanovllm.serve.options import ServeOptions
from nanovllm.wording import counted

access_logger = logging.getLogger("nanovllm.serve.access")

_MOST_PIPELINED = 64
_DROPPED_BODIES, _LEAST_DROPPED = 4, 1 << 20
"""What is read of a body after its answer: as much as this many of the largest bodies, and at least this many bytes."""
_SILENT_SECONDS = 2.0
"""A client that sends nothing for so long has read the answer, or never will."""
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


class _GentleTransport:
    """The transport that an answer writes to. `close` first lets the client send the rest of its body."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.close = protocol.close_after_body

    def is_closing(self) -> bool:
        return self._protocol.ending or self._protocol.transport.is_closing()


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection that is one too many, or whose headers are too large or too slow.

    What a client still sends when it was answered early is read and dropped, within limits. If the connection were
    closed with such data unread, it would be reset, and the client might never see its answer.

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
    ending = False
    """Whether all answers are written and the connection waits for the client to end."""
    _droppable = 0
    """Bytes that may still be dropped."""
    _heard = False
    """Whether something was dropped of late."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.open_connections) >= self.limits.max_connections:
            said = f"at most {self.limits.max_connections} connections are allowed; try again later"
            self._refuse(ApiError(503, said, code="overloaded", retry_after=1))
            return
        self.open_connections.add(self)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.discard(self)
        self._headers_are_there()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._end_answering()

    def data_received(self, data: bytes) -> None:
        if self.ending:
            self._drop(len(data))
            return
        if self._refusal is not None:
            return
        if self._in_headers:
            self._header_bytes += len(data)
            # The body may come in the same piece as the headers' end.
            if self._header_bytes - len(data) > self.limits.max_header_bytes:
                self._refuse(ApiError(431, f"the headers have more than {self.limits.max_header_bytes} bytes"))
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
            self._refuse(ApiError(414, f"the URL has more than {self.limits.max_header_bytes} bytes"))
            raise _TooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refuse(ApiError(431, f"the request has more than {self.limits.max_headers} headers"))
            raise _TooLarge
        if len(name) + len(value) > self.limits.max_header_bytes:
            said = f"the header {name[:80].decode('latin-1')!r} has more than {self.limits.max_header_bytes} bytes"
            self._refuse(ApiError(431, said))
            raise _TooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_are_there()
        if len(self.pipeline) >= _MOST_PIPELINED:
            said = f"more than {_MOST_PIPELINED} requests wait for their answers on this connection"
            self._refuse(ApiError(503, said, code="overloaded"))
            raise _TooLarge
        self._in_body = True
        super().on_headers_complete()
        self.cycle.transport = _GentleTransport(self)  # type: ignore[assignment]
        length = dict(self.headers).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most_dropped:
            self.cycle.keep_alive = False  # its end is not reached
        if self.parser.get_http_version() == "1.0":  # it has no chunks: a stream ends with its connection
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        self._in_body = False
        if self.cycle.response_complete:
            self._stop_deadline()
        super().on_message_complete()

    def _await_headers(self) -> None:
        self._in_headers, self._header_bytes, self._num_headers = True, 0, 0
        self._set_deadline()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receive_timeout, self._too_slow)

    def _headers_are_there(self) -> None:
        self._in_headers = False
        self._stop_deadline()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # it is this side that waits: for the answers to earlier requests
            self._set_deadline()
            return
        said = f"the headers did not arrive within {counted(self.limits.receive_timeout, 'second', 'g')}"
        self._refuse(ApiError(408, said) if self._header_bytes or self.scope else None)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def on_response_complete(self) -> None:
        if self.ending:
            self.server_state.total_requests += 1
        elif self._refusal is None or self.pipeline:
            super().on_response_complete()
            if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
                self._start_dropping()
        else:
            self.server_state.total_requests += 1
            self._close()

    def close_after_body(self) -> None:
        """Close the connection after its last answer."""
        if self._in_body and self.cycle.response_complete:
            self._end()
        else:
            self.transport.close()

    def _refuse(self, error: ApiError | None) -> None:
        """End the connection after the answers that are due. error: a further answer; None: there is none."""
        if self._refusal is not None:  # the parser says again that the callback refused the request
            return
        self._headers_are_there()
        self._refusal = b"" if error is None else self._written(error)
        if self._in_body and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # the request of this body is what is refused
        elif self._in_body and self.cycle is self._answered and self._is_answering:
            if not self.cycle.response_started:
                self._close()
                return
            self._refusal = b""  # its answer is there
        if not self._is_answering:
            self._close()

    def shutdown(self) -> None:
        if self.ending:
            self.transport.close()
        else:
            super().shutdown()

    def _written(self, error: ApiError) -> bytes:
        """A whole answer."""
        request_id, body = secrets.token_hex(12), msgspec.json.encode(error.body())
        client = self.client[0] if self.client else "-"
        access_logger.info("%s - - %d 0.000 s", client, error.status, extra={"request_id": request_id})
        headers = [
            (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode()), (b"connection", b"close"), *error.headers(),
        ]  # fmt: skip
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
        return b"\r\n".join([status, *(b"%b: %b" % header for header in headers), b"", body])

    def _close(self) -> None:
        if self._refusal and not self.transport.is_closing():
            self.transport.write(self._refusal)
        self._end_answering()
        self._end()

    def _end_answering(self) -> None:
        """The client gets no more of the answer that is made."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _end(self) -> None:
        """Nothing more is written. Close when the client has ended, too; at once if there are too many connections."""
        if self.transport.is_closing():
            return
        self.ending = True
        if len(self.open_connections) >= self.limits.max_connections:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_dropping()

    def _start_dropping(self) -> None:
        self._droppable = self._most_dropped
        self._watch_dropping(self.loop.time() + self.limits.receive_timeout)

    @property
    def _most_dropped(self) -> int:
        return max(_DROPPED_BODIES * self.limits.max_body_bytes, _LEAST_DROPPED)

    def _watch_dropping(self, end: float) -> None:
        self._heard = False
        self._stop_deadline()
        self._deadline = self.loop.call_later(_SILENT_SECONDS, self._check_dropping, end)

    def _check_dropping(self, end: float) -> None:
        if self._heard and self.loop.time() < end:
            self._watch_dropping(end)
        else:
            self.transport.close()

    def _drop(self, size: int) -> None:
        """Count bytes that are not used."""
        self._heard = True
        self._droppable -= size
        if self._droppable < 0:
            self.transport.close()


def limited_protocol(options: ServeOptions) -> type[LimitedProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`, with these limits and a count of its own connections."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": options, "open_connections": set()})

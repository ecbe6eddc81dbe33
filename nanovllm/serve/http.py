"""One HTTP exchange over ASGI: the request's parts within limits, and the ways to answer."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cached_property
from typing import Any

import msgspec

from nanovllm.serve.errors import ApiError
from nanovllm.wording import brief, counted

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

_JSON = ((b"content-type", b"application/json"),)
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Disconnected(Exception):
    """The client has disconnected: no answer can be sent."""


class Exchange:
    """A request and its answer.

    Attributes:
        request_id: the client's X-Request-Id if it is a harmless one, else `default_id`.
        status: the status of the answer, once it has begun.
        body_size: bytes of the body, once it was read.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, default_id: str, headers: Headers = ()) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._receive = receive
        self._send = send
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _SAFE_ID.fullmatch(given) else default_id
        self._headers = headers
        self.status: int | None = None
        self.gone = False
        self.body_size = 0

    @cached_property
    def headers(self) -> dict[bytes, bytes]:
        """The last header of each name, in lower case."""
        return dict(self.scope["headers"])

    @property
    def peer(self) -> str:
        """The address at the other end of the connection, without its port."""
        client = self.scope.get("client")
        return "" if client is None else str(client[0])

    async def body(self, max_bytes: int, timeout: float) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is larger than `max_bytes`, or takes longer than `timeout` seconds.
            Disconnected: the client has gone.
        """
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        try:
            return await asyncio.wait_for(self._body(max_bytes), timeout)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {counted(timeout, 'second', 'g')}") from None

    async def _body(self, max_bytes: int) -> bytes:
        pieces = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise Disconnected
            pieces += message.get("body", b"")
            if len(pieces) > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return bytes(pieces)

    async def json(self, max_bytes: int, timeout: float) -> dict[str, Any]:
        """The body, which must be a JSON object."""
        # A page of any origin may send a body without a type, but not one of this type: its browser asks first.
        default = b"" if b"origin" in self.headers else b"application/json"
        kind = self.headers.get(b"content-type", default).split(b";")[0].strip().lower()
        if kind != b"application/json":
            given = kind.decode("latin-1")
            remedy = "must be application/json; with curl add -H 'content-type: application/json'"
            raise ApiError(415, f"content-type={given[:80]!r}: {remedy}")
        if (packed := self.headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            raise ApiError(415, f"content-encoding: {packed.decode('latin-1'):.40}: send the body as it is")
        body = (await self.body(max_bytes, timeout)).removeprefix(codecs.BOM_UTF8)  # which editors of Windows write
        self.body_size = len(body)
        if not body.strip():
            raise ApiError(400, "the body is empty; send a JSON object")
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            remedy = "" if _is_utf8(body) else "; encode it as UTF-8"
            raise ApiError(400, f"the body is not valid JSON: {error}{remedy}") from None
        if not isinstance(decoded, dict):
            raise ApiError(400, "the body must be a JSON object")
        return decoded

    async def wait_for_disconnect(self) -> None:
        """Return when the client has gone or the answer is complete; to be called after `body`."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                return

    def rename(self, request_id: str) -> None:
        """Take the id that a body brings, before the answer begins."""
        if not _SAFE_ID.fullmatch(request_id.encode()):
            said = "must have 1 to 128 letters, digits, dots, colons, dashes and underscores"
            raise ApiError(400, f"request_id={brief(request_id)}: {said}", "request_id")
        self.request_id = request_id

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        own = [(b"x-request-id", self.request_id.encode()), *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, data: bytes, headers: Headers) -> None:
        """A whole answer."""
        await self.start(status, [*headers, (b"content-length", str(len(data)).encode())])
        await self.write(b"" if self.method == "HEAD" else data, more=False)

    async def answer_json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        await self.answer(status, msgspec.json.encode(value), [*_JSON, *headers])


def _is_utf8(text: bytes) -> bool:
    """Whether it is UTF-8 without zeros; UTF-16 has them."""
    try:
        return b"\0" not in text and bool(text.decode())
    except UnicodeDecodeError:
        return False


def _too_large(max_bytes: int) -> ApiError:
    most = f"{max_bytes / 2**20:g} MiB"
    return ApiError(413, f"the body is larger than {most}; send a shorter prompt, or raise the server's --max-body-mib")

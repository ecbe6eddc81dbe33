"""Streamed requests to any server with OpenAI's interface, timed with little work in between.

What arrives is only kept with its time; it is taken apart after the run. So one process can follow hundreds of streams.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import time
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nanovllm.wording import counted

_MOST_SAID = 500
"""Characters of an error."""


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        url: the url of the server, with or without /v1.
        endpoint: "completions" or "chat".
        model: its name in requests.
        api_key: sent as Bearer, if there is one.
        insecure: take any certificate of an https server.
    """

    url: str
    endpoint: str = "completions"
    model: str = ""
    api_key: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.endpoint not in ("completions", "chat"):
            raise ValueError(f"endpoint={self.endpoint!r}: must be completions or chat")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ValueError(f"url={self.url!r}: must be an address such as http://127.0.0.1:8000")
        if urlsplit(self.url).path.rstrip("/").endswith("/completions"):
            raise ValueError(
                f"url={self.url!r}: leave out the route; the endpoint, completions or chat, is an argument of its own"
            )

    def path(self, name: str) -> str:
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{name}"

    @property
    def tls(self) -> ssl.SSLContext | None:
        """None: the server is not asked by https."""
        return tls_context(self.insecure) if urlsplit(self.url).scheme == "https" else None


_OTHER_NAME = 62, 64
"""OpenSSL's codes of a certificate for another name, or for another IP address."""


@functools.cache  # to read the machine's authorities takes as long as a short answer
def tls_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _what_failed(error: Exception) -> str:
    """An error of a connection, with the remedy if the certificate is not trusted."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = f"the server's certificate is refused: {reason.verify_message.rstrip('.')}"
        remedy = "set the environment variable SSL_CERT_FILE to the certificate or to that of its authority"
        if reason.verify_code in _OTHER_NAME:
            remedy = "call the server by a name that the certificate has"
        return f"{why}; {remedy}, or pass --insecure"
    if isinstance(reason, ssl.SSLError) and reason.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"the server does not speak https ({reason.reason}); write http:// in the address"
    return f"{type(error).__name__}: {error}"


@dataclass
class Timed:
    """One request and when its pieces came.

    Attributes:
        start: when it was sent, on the clock `time.perf_counter`.
        times: when each event with text arrived.
        num_prompt, num_output: tokens, as the server counts them; None: it does not.
        num_cached: tokens of the prompt that were in the server's prefix cache.
        error: what went wrong; None: the answer is complete.
    """

    start: float = 0.0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    error: str | None = None


class ResponseRecorder(asyncio.Protocol):
    """Keeps what arrives until the server closes the connection."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def exchange(
    target: Target, method: str, path: str, body: bytes = b"", timeout: float = 600.0
) -> ResponseRecorder:
    """Send one request and wait for its whole answer. `start` of the times is that of sending, not of connecting."""
    parts = urlsplit(target.url)
    secure = target.tls
    port = parts.port or (443 if secure else 80)
    transport, recorder = await asyncio.get_running_loop().create_connection(
        ResponseRecorder, parts.hostname or "", port, ssl=secure
    )
    try:
        key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        recorder.times.append(time.perf_counter())
        recorder.pieces.append(b"")
        transport.write(head.encode() + body)
        await asyncio.wait_for(recorder.closed, timeout)
    finally:
        transport.close()
    return recorder


def request_body(target: Target, prompt: str | list[int], num_output: int, extra: Mapping[str, Any]) -> bytes:
    """A streamed request whose answer has exactly `num_output` tokens where the server has `ignore_eos`."""
    body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    if target.endpoint == "chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": num_output}
    else:
        body |= {"prompt": prompt, "max_tokens": num_output}
    return json.dumps(body | dict(extra)).encode()


async def ask(target: Target, body: bytes, timeout: float) -> tuple[ResponseRecorder | None, str | None]:
    """(what came, what went wrong)"""
    path = target.path("chat/completions" if target.endpoint == "chat" else "completions")
    try:
        return await exchange(target, "POST", path, body, timeout), None
    except asyncio.TimeoutError:
        return None, f"no whole answer within {counted(timeout, 'second', 'g')}"
    except OSError as error:
        return None, _what_failed(error)


def take_apart(recorder: ResponseRecorder | None, error: str | None) -> Timed:
    """The times of a finished exchange."""
    if recorder is None:
        return Timed(error=error)
    found = Timed(start=recorder.times[0])
    ends, total = [], 0
    for piece in recorder.pieces:
        total += len(piece)
        ends.append(total)
    data = b"".join(recorder.pieces)
    head_end = data.find(b"\r\n\r\n")
    status = data[:15].split(b" ")[1:2]
    chunked = b"transfer-encoding: chunked" in data[:head_end].lower()
    if status != [b"200"]:
        said = _error_message(b"\n".join(line for _, line in _lines(data, head_end + 4, chunked)))
        found.error = f"status {b''.join(status).decode() or 'missing'}: {said}"
        return found
    done = False
    for end, text in _lines(data, head_end + 4, chunked):
        when = recorder.times[bisect_left(ends, end)]
        if text == b"data: [DONE]":
            done = True
        elif text.startswith(b"data: "):
            _take_event(found, json.loads(text[6:]), when)
        elif text.startswith(b"{"):
            found.error = f"the server does not stream: {text[:200].decode(errors='replace')}"
        found.end = when
    if found.error is None and not done:
        found.error = "the stream ended without [DONE]"
    elif found.error is None and not found.times:
        found.error = "the stream has no text"
    return found


def _error_message(body: bytes) -> str:
    """What a server says of an error, as OpenAI's interface has it; else the body's beginning."""
    text = body.decode(errors="replace").strip()
    with suppress(ValueError, TypeError, KeyError):
        said = json.loads(text)["error"]
        text = str(said if isinstance(said, str) else said["message"])
    return text[:_MOST_SAID]


def _take_event(found: Timed, event: dict[str, Any], when: float) -> None:
    if event.get("error"):
        found.error = str(event["error"].get("message", event["error"]))[:_MOST_SAID]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        if delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            found.times.append(when)
    if usage := event.get("usage"):
        found.num_prompt, found.num_output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        found.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _lines(data: bytes, start: int, chunked: bool) -> Any:
    """(offset of its end in `data`, line without its end) for the lines of a body."""
    if not chunked:
        at = start
        for line in data[start:].split(b"\n"):
            at += len(line) + 1
            yield min(at, len(data)), line.rstrip(b"\r")
        return
    rest, at = b"", start
    while (size_end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:size_end].split(b";")[0], 16)
        if not size:
            if rest:
                yield at, rest
            return
        chunk_end = size_end + 2 + size
        *lines, rest = (rest + data[size_end + 2 : chunk_end]).split(b"\n")
        for line in lines:
            yield min(chunk_end, len(data)), line.rstrip(b"\r")
        at = chunk_end + 2


def get_json(target: Target, name: str) -> Any:
    """GET /v1/{name}. Raises: ValueError: there is no such answer."""
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    parts = urlsplit(target.url)
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}{target.path(name)}", headers=headers)
    # Straight to the server, as `exchange` goes.
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=target.tls)
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        keyed = error.code in (401, 403)
        remedy = "pass --api-key KEY, or set OPENAI_API_KEY" if keyed else "is it a server with OpenAI's interface?"
        raise ValueError(f"{request.full_url}: HTTP {error.code} {error.reason}; {remedy}") from None
    except (OSError, ValueError) as error:
        said = _what_failed(error)
        if said.startswith(type(error).__name__):
            said += "; is a server there?"
        raise ValueError(f"{request.full_url}: {said}") from None

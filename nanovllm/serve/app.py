"""The ASGI application: routes, keys, request ids, and what is said of an error."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import quote

from nanovllm.serve.chat import chat_completions
from nanovllm.serve.completions import completions
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http import Disconnected, Exchange, Receive, Scope, Send
from nanovllm.serve.info_routes import detokenize, get_model, health, list_models, live, tokenize, version
from nanovllm.serve.messages import count_tokens, error_body, messages
from nanovllm.serve.other_routes import instead_of
from nanovllm.serve.request_params import as_api_error
from nanovllm.serve.responses import responses
from nanovllm.serve.service import Service
from nanovllm.serve.stats_log import StatsLog

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("nanovllm.serve.access")

Handler = Callable[[Service, Exchange, str], Awaitable[None]]
_LAG_SECONDS = 0.25


class Route(NamedTuple):
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    open: bool = False
    """Whether it needs no key."""


async def _metrics(service: Service, exchange: Exchange, key: str) -> None:
    counts = await service.counts()
    if counts.partial:
        raise ApiError(503, f"there are no sums of all processes: {counts.missing[0]}", code="no_sums", retry_after=5)
    text = service.metrics.text(counts)
    await exchange.answer(200, text, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])


async def _page(service: Service, exchange: Exchange, key: str) -> None:
    page = (files("nanovllm.serve") / "page.html").read_bytes()
    policy = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    await exchange.answer(
        200, page, [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", policy)]
    )


_GET = ("GET", "HEAD")
ROUTES: dict[str, Route] = {
    "/v1/completions": Route(completions),
    "/v1/chat/completions": Route(chat_completions),
    "/v1/responses": Route(responses),
    "/v1/messages": Route(messages),
    "/v1/messages/count_tokens": Route(count_tokens),
    "/v1/models": Route(list_models, _GET),
    "/tokenize": Route(tokenize),
    "/detokenize": Route(detokenize),
    "/health": Route(health, _GET, open=True),
    "/health/live": Route(live, _GET, open=True),
    "/metrics": Route(_metrics, _GET),
    "/version": Route(version, _GET),
    "/": Route(_page, _GET, open=True),
}


class App:
    """An ASGI application that serves a `Service`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lag_timer: asyncio.TimerHandle | None = None
        self._stats = StatsLog(service.engine, service.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(Exchange(scope, receive, send, secrets.token_hex(12), self._cors(scope)))
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.to_thread(self.service.warm_up)
        gc.collect()
        gc.freeze()  # a collection need not look at all that importing and loading has made
        self.service.engine.attach()
        self._watch_lag()
        if self.service.leads and self.service.options.stats_interval:
            self._stats.start(self.service.options.stats_interval)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._stats.stop()
        if self._lag_timer is not None:
            self._lag_timer.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_SECONDS

        def measure() -> None:
            self.service.metrics.lagged(max(0.0, loop.time() - due))
            self._watch_lag()

        self._lag_timer = loop.call_at(due, measure)

    async def _serve(self, exchange: Exchange) -> None:
        started = time.perf_counter()
        path = exchange.path.rstrip("/") or "/"
        name, route = _route(path)
        try:
            if exchange.method == "OPTIONS" and self.service.options.cors_origins:
                await exchange.answer(204, b"", [])
            elif route is None:
                instead = instead_of(path[:200], ROUTES)
                raise ApiError(404, f"there is no {exchange.path[:200]!r} here; {instead}", code="not_found")
            elif exchange.method not in route.methods:
                allowed = " or ".join(route.methods)
                said = f"{exchange.method[:40]} is not allowed for {path}; use {allowed}"
                raise ApiError(405, said, code="wrong_method", allow=", ".join(route.methods))
            else:
                key = "" if route.open else self.service.keys.check(exchange.headers)
                await route.handler(self.service, exchange, key)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            _uncancel()
        except Disconnected:
            pass
        except Exception as error:
            await self._tell(exchange, error)
        status = 499 if exchange.gone else exchange.status or 500
        self.service.metrics.answered(exchange.method if route else "-", name, status)
        if access_logger.isEnabledFor(logging.INFO):
            client = exchange.scope.get("client") or ("-",)
            access_logger.info(
                "%s %s %s %d %.3f s", client[0], exchange.method, quote(exchange.path), status,
                time.perf_counter() - started,
                extra={"request_id": exchange.request_id},
            )  # fmt: skip

    async def _tell(self, exchange: Exchange, error: Exception) -> None:
        told = as_api_error(error)
        if told.status == 500:
            extra = {"request_id": exchange.request_id}
            logger.error("request %s failed", exchange.request_id, exc_info=error, extra=extra)
        if exchange.status is None and not exchange.gone:
            await exchange.answer_json(_body(exchange, told), told.status, told.headers())

    def _cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        allowed = self.service.options.cors_origins
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"") if allowed else b""
        if not origin or not ({"*", origin.decode("latin-1")} & set(allowed)):
            return []
        return [
            (b"access-control-allow-origin", origin), (b"vary", b"origin"),
            (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"), (b"access-control-max-age", b"600"),
        ]  # fmt: skip


def _route(path: str) -> tuple[str, Route | None]:
    """(the route's name for statistics, the route)"""
    route = ROUTES.get(path)
    if route is not None:
        return path, route
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}", Route(get_model, _GET)
    return "-", None


def _body(exchange: Exchange, error: ApiError) -> dict[str, object]:
    return error_body(error) if exchange.path.startswith("/v1/messages") else error.body()


def _uncancel() -> None:
    """The cancellation was ours: the task goes on to its end."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):  # since Python 3.11
        task.uncancel()

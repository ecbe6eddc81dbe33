"""Replicas of the server on a Ray cluster: `serve run nanovllm.serve.ray:app model=... replicas=2`.

Ray places the replicas, replaces those that die, and adds and removes them by load. Each is the whole application with
an engine of its own. Ray's HAProxy passes the bytes between a client and its replica; it asks the router here, which
sees the request's body, where to send the request. So no token passes through Python code but the replica's own.

Every node must have the variables of `ENVIRONMENT` before Ray starts there.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.serve.app import App
from nanovllm.serve.http import Receive, Scope, Send
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.prefix_index import PrefixIndex, prompt_text
from nanovllm.serve.process_client import ProcessClient
from nanovllm.serve.ray_options import ReplicaOptions
from nanovllm.serve.service import Service

ENVIRONMENT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1"}
"""HAProxy passes requests, and shows the router their bodies."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # Ray reads them when it is imported

try:
    from ray import serve as _serve
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError:
    raise ImportError('replicas need Ray; run pip install "nanovllm[ray]"') from None

serve: Any = _serve  # its decorators have types that its own documentation does not keep to
_NAME = "nanovllm"
_STATS_SECONDS = 0.5
_HEALTH_SECONDS = 2.0


class Replica:
    """One server, without a socket of its own."""

    def __init__(self, config: dict[str, Any], options: ServeOptions) -> None:
        # Ray replaces the whole replica, elsewhere if it must.
        self._engine = AsyncLLM(client=ProcessClient(EngineConfig(**config), restart=False))
        self._service = Service(self._engine, options)

    def __serve_build_asgi_app__(self) -> App:
        return App(self._service)

    def check_health(self) -> None:
        """Raises: RuntimeError: Ray is to replace this replica."""
        if (reason := self._service.stuck) is not None:
            raise RuntimeError(reason)

    def record_routing_stats(self) -> dict[str, float]:
        """What the router knows of this replica."""
        return {"open": self._service.admission.num_open, "time": time.time()}

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


class PrefixRequestRouter(RequestRouter):
    """Sends a prompt to a replica that has its beginning in the cache. The first argument is the prompt's text."""

    def initialize_state(self, *, slack: float = 32, **_: Any) -> None:
        self._index = PrefixIndex(slack)
        self._sent: dict[str, tuple[float, int]] = {}
        """By replica: the time of its last report, and the requests that were sent there since then."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._index.keep_only({replica.replica_id.to_full_id_str() for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        arguments = () if pending_request is None else pending_request.args
        text = arguments[0] if arguments and isinstance(arguments[0], str) else None
        by_name = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        chosen = self._index.choose(text, {name: self._load(name, replica) for name, replica in by_name.items()})
        reported, sent = self._sent[chosen]
        self._sent[chosen] = reported, sent + 1
        return [[by_name[chosen]]]

    def _load(self, name: str, replica: RunningReplica) -> float:
        stats = replica.routing_stats
        reported = stats.get("time", 0.0)
        if self._sent.get(name, (-1.0, 0))[0] != reported:
            self._sent[name] = reported, 0
        return stats.get("open", 0) + self._sent[name][1]


class RouterApp:
    """Tells HAProxy which replica a request goes to: POST /internal/route with the request's body."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            body = bytearray()
            while (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            status, answer = await self._route(bytes(body))
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _route(self, body: bytes) -> tuple[int, dict[str, Any]]:
        text = prompt_text(body)
        # The replica's own limits hold, so no place is reserved there.
        async with self._replicas.choose_replica(*([] if text is None else [text]), _reserve=False) as selection:
            replica = selection._replica
            endpoint = replica.backend_http_endpoint
            if endpoint is None:
                return 503, {"detail": "the replica does not listen yet"}
            host, port = endpoint
            return 200, {"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()}


class Router:
    """The deployment of the router."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        replicas._init()

    def __serve_build_asgi_app__(self) -> RouterApp:
        return RouterApp(self._replicas)


def application(config: EngineConfig, options: ServeOptions, replicas: ReplicaOptions) -> Any:
    """A Ray Serve application of `replicas` that serve the model of `config`."""
    given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
    # The ranks of a replica are processes on one machine, so that its GPUs are one request to Ray.
    resources = {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus(config)}
    replica = serve.deployment(
        serve.ingress()(Replica), name="nanovllm", max_ongoing_requests=options.max_waiting,
        ray_actor_options=resources, health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.drain,
        request_router_config=serve.config.RequestRouterConfig(
            request_router_class=PrefixRequestRouter, request_router_kwargs={"slack": replicas.slack},
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        **replicas.scaling(config),
    ).bind(given, options)  # fmt: skip
    router = serve.deployment(
        serve.ingress()(Router), name="router", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )
    return replica._with_ingress_request_router(router.bind(replica))


def app(arguments: Mapping[str, Any]) -> Any:
    """The application for `serve run` and for configuration files of Ray Serve.

    Args:
        arguments: fields of `EngineConfig`, `ServeOptions` and `ReplicaOptions` by name. Texts are read as JSON where
            they are JSON.

    Raises:
        ValueError: an argument is not known, or its value is wrong.
    """
    classes = (EngineConfig, ServeOptions, ReplicaOptions)
    given: list[dict[str, Any]] = [{}, {}, {}]
    for name, value in arguments.items():
        place = next((i for i, cls in enumerate(classes) if name in {f.name for f in fields(cls)}), None)
        if place is None:
            raise ValueError(f"{name}={value!r}: there is no such argument; see docs/scaling.md")
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                pass
        given[place][name] = tuple(value) if isinstance(value, list) else value
    if "model" not in given[0]:
        raise ValueError("model: is missing; pass model=path/to/model")
    given[1].setdefault("model_names", (str(given[0]["model"]),))
    return application(EngineConfig(**given[0]), ServeOptions(**given[1]), ReplicaOptions(**given[2]))


def run(application: Any, address: str | None, host: str, port: int, ready: Any = lambda: None) -> None:
    """Serve until a signal comes. address: of a Ray cluster, "auto" for the one of this machine; None: a new one.

    Raises:
        ValueError: there is no cluster at this address.
    """
    import ray

    own: dict[str, Any] = {"address": "local", "include_dashboard": False}  # not one that RAY_ADDRESS names
    try:
        if address is not None and address != "auto":
            _reach(address)
        ray.init(
            **(own if address is None else {"address": address}), log_to_driver=False, configure_logging=False
        )  # fmt: skip
    except OSError as error:  # Ray's is a ConnectionError
        raise ValueError(f"--ray-address {address}: {error}; start a cluster there with ray start --head") from None
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=_NAME, route_prefix="/")
        ready()
        asyncio.run(_signal())
    finally:
        if address is None:
            serve.shutdown()
        else:
            serve.delete(_NAME)  # the cluster may serve other applications
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise an OSError if nothing listens there: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise OSError("it is neither auto nor HOST:PORT")
    socket.create_connection((host, int(port)), 5).close()


async def _signal() -> None:
    import signal

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()

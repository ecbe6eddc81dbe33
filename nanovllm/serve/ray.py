"""Replicas of the server on a Ray cluster: `serve run nanovllm.serve.ray:app model=... replicas=2`.

Ray places the replicas, replaces those that die, and adds and removes them by load. Each is the whole application with
an engine of its own. Ray's HAProxy passes the bytes between a client and its replica; it asks the router here, which
sees the request's body, where to send the request. So no token passes through Python code but the replica's own.

Every node must have the variables of `ENVIRONMENT` before Ray starts there.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import AUTO, EngineConfig
from nanovllm.log_format import say_as_log
from nanovllm.serve.app import App
from nanovllm.serve.http import Receive, Scope, Send
from nanovllm.serve.log_setup import logging_thread
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.prefix_index import PrefixIndex, prompt_text
from nanovllm.serve.process_client import ProcessClient
from nanovllm.serve.ray_logs import write_there
from nanovllm.serve.ray_options import ReplicaOptions
from nanovllm.serve.service import Service
from nanovllm.serve.tracing import Tracing

ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}  # fmt: skip
"""HAProxy passes requests, and shows the router their bodies. It sends a request to another replica if one has ended
before the answer began, or refuses the request since it is overloaded or its engine has died. Ray kills a proxy that is
not ready after that time; the default of 5 s is too short for a busy machine.
"""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # Ray reads them when it is imported

try:
    import ray
    from ray import serve as _serve
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
    from ray.util.placement_group import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise ImportError('replicas need Ray; run pip install "nanovllm[ray]"') from None

logger = logging.getLogger(__name__)
serve: Any = _serve  # its decorators have types that its own documentation does not keep to
_STATS_SECONDS = 0.5
_HEALTH_SECONDS = 2.0
_LOOK_SECONDS = 0.5
"""Between two looks whether the requests of a replica that is to end have ended."""


class Replica:
    """One server, without a socket of its own."""

    def __init__(
        self, config: dict[str, Any], options: ServeOptions, replicas: ReplicaOptions, stderr: str | None
    ) -> None:
        see_gpus_of_bundles()
        if stderr is not None:
            write_there(stderr)
        level = getattr(logging, replicas.log_level.upper())
        self._ends = ExitStack()
        self._ends.enter_context(logging_thread(level, replicas.log_json, replicas.access_log))
        # Ray replaces the whole replica, elsewhere if it must.
        client = ProcessClient(EngineConfig(**config), restart=False, log_level=level, log_json=replicas.log_json)
        info = client.info
        for line in filter(None, (info.sampling_source, f"{info.context}; {info.cache_size}")):
            say_as_log(logger, line)
        self._engine = AsyncLLM(client=client)
        self._ends.callback(self._engine.close)
        self._service = Service(self._engine, options)
        if replicas.otlp_endpoint is not None:
            tracing = Tracing(replicas.otlp_endpoint, options.model_names[0])
            self._service.generated = tracing.record
            self._ends.callback(tracing.close)

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
        if hasattr(self, "_ends"):
            self._ends.close()


def see_gpus_of_bundles() -> None:
    """Show the processes that this actor starts the GPUs of all bundles of its placement group.

    Ray shows an actor the GPUs of its own bundle. The GPUs of a bundle stay the same as long as the group exists.
    """
    group = get_current_placement_group()
    own = ray.get_gpu_ids()
    if group is None or not own:
        return
    others = [
        _gpu_ids.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in range(1, group.bundle_count)
    ]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for ids in (own, *ray.get(others)) for gpu in ids)


@ray.remote(num_cpus=0, num_gpus=1)
def _gpu_ids() -> list[Any]:
    return ray.get_gpu_ids()


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


def application(
    config: EngineConfig,
    options: ServeOptions,
    replicas: ReplicaOptions,
    stderr: str | None = None,
    start_attempts: int = 20,
) -> Any:
    """A Ray Serve application of `replicas` that serve the model of `config`.

    Args:
        stderr: the path of a `shared_stderr`, on the machine of all replicas; None: their logs are in files of Ray.
        start_attempts: the application has failed after this number of failed starts, if no replica could start. Ray
            makes at most three attempts for each replica.
    """
    given = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
    stats: dict[str, Any] = {"request_routing_stats_period_s": _STATS_SECONDS}
    if replicas.routing == "prefix":
        stats |= {"request_router_class": PrefixRequestRouter, "request_router_kwargs": {"slack": replicas.slack}}
    replica = serve.deployment(
        serve.ingress()(Replica), name="nanovllm", max_ongoing_requests=options.max_waiting,
        max_constructor_retry_count=start_attempts, graceful_shutdown_wait_loop_s=_LOOK_SECONDS,
        health_check_period_s=_HEALTH_SECONDS, graceful_shutdown_timeout_s=options.drain,
        request_router_config=serve.config.RequestRouterConfig(**stats),
        **replicas.placement(config), **replicas.scaling(config),
    ).bind(given, options, replicas, stderr)  # fmt: skip
    # A cluster does not outlive its head, so the router is best there: other nodes may be removed.
    head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    router = serve.deployment(
        serve.ingress()(Router), name="router", max_ongoing_requests=10_000, ray_actor_options=head
    )
    return replica._with_ingress_request_router(router.bind(replica))


def app(arguments: Mapping[str, Any]) -> Any:
    """The application for `serve run` and for configuration files of Ray Serve.

    Args:
        arguments: fields of `EngineConfig`, `ServeOptions` and `ReplicaOptions` by name. Texts are read as JSON where
            they are JSON. Without `api_keys` the keys are those in NANOVLLM_API_KEY, as of `nanovllm serve`.

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
    given[0].setdefault("max_model_len", AUTO)  # as `nanovllm serve`
    given[1].setdefault("api_keys", tuple(os.environ.get("NANOVLLM_API_KEY", "").split()))
    given[1].setdefault("model_names", (str(given[0]["model"]),))
    return application(EngineConfig(**given[0]), ServeOptions(**given[1]), ReplicaOptions(**given[2]))

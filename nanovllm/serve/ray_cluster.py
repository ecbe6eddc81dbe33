"""Runs an application of Ray Serve on a Ray cluster, one that exists or one of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from nanovllm.serve.ray import ray, serve
from nanovllm.serve.ray_leftovers import leftovers_ended

logger = logging.getLogger(__name__)
_NAME = "nanovllm"
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def run(
    application: Any,
    needed: Mapping[str, float],
    address: str | None,
    host: str,
    port: int,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes.

    Args:
        needed: what the replicas take of the cluster (`ReplicaOptions.resources`).
        address: of a Ray cluster, "auto" for the one of this machine; None: a new one.
        ready: called when all replicas serve.

    Raises:
        ValueError: there is no cluster at this address, or it cannot serve the replicas.
    """
    with leftovers_ended() if address is None else nullcontext():
        _run(application, needed, address, host, port, ready)


def _run(
    application: Any, needed: Mapping[str, float], address: str | None, host: str, port: int, ready: Callable[[], None]
) -> None:
    # Not a cluster that RAY_ADDRESS names. Its count of CPUs limits no replica.
    cpus = max(os.cpu_count() or 1, math.ceil(needed.get("CPU", 0)))
    own: dict[str, Any] = {"address": "local", "include_dashboard": False, "num_cpus": cpus}
    try:
        if address is not None and address != "auto":
            _reach(address)
        ray.init(
            **(own if address is None else {"address": address}), log_to_driver=False, configure_logging=False
        )  # fmt: skip
    except OSError as error:  # Ray's is a ConnectionError
        raise ValueError(f"--ray-address {address}: {error}; start a cluster there with ray start --head") from None
    try:
        _check_cluster(needed, address, host, port)
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


def _check_cluster(needed: Mapping[str, float], address: str | None, host: str, port: int) -> None:
    """Say what a cluster lacks: Ray would wait for it without a word."""
    has = ray.cluster_resources()
    for name, amount in needed.items():
        if amount <= has.get(name, 0):
            continue
        said = f"the replicas need {amount:g} {name}s, and there are {has.get(name, 0):g}"
        if address is None:
            raise ValueError(f"{said}; pass fewer --replicas, or --device cpu")
        logger.warning("%s: they wait until the cluster has more", said)
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and host in _LOCAL_HOSTS:
        raise ValueError(
            f"--host {host}: replicas on the {nodes} nodes of the cluster cannot be reached there; pass --host 0.0.0.0,"
            " and --api-key"
        )
    if address is not None and (runs := _running_port()) is not None and runs != port:
        raise ValueError(f"--port {port}: Ray Serve runs on this cluster already, at port {runs}; pass --port {runs}")


def _running_port() -> int | None:
    """The port of Ray Serve on this cluster; None: it does not run there."""
    try:
        return ray.get(ray.get_actor("SERVE_CONTROLLER_ACTOR", "serve").get_http_config.remote()).port
    except ValueError:  # there is no such actor
        return None


def _reach(address: str) -> None:
    """Raise an OSError if nothing listens there: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise OSError("it is neither auto nor HOST:PORT")
    socket.create_connection((host, int(port)), 5).close()


async def _signal() -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()

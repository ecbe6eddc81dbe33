"""Runs an application of Ray Serve on a Ray cluster, one that exists or one of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from nanovllm.serve.ray import ray, serve
from nanovllm.serve.ray_leftovers import leftovers_ended
from nanovllm.wording import counted

logger = logging.getLogger(__name__)
_NAME = "nanovllm"
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 4.0
_DELETION_SECONDS = 45.0
"""Ray ends a replica within this time after its requests: on a cluster of others it serves on for 30 s at least, since
proxies elsewhere must hear of it first.
"""
_OWN_ENVIRONMENT = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1", "RAY_SERVE_LOG_TO_STDERR": "0"}
"""For a cluster of this machine alone: HAProxy hears at once of a replica that ends."""
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def run(
    application: Any,
    needed: Mapping[str, float],
    address: str | None,
    host: str,
    port: int,
    drain: float,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal comes, and let running requests finish then. A second signal ends them.

    Args:
        needed: what the replicas take of the cluster (`ReplicaOptions.resources`).
        address: of a Ray cluster, "auto" for the one of this machine; None: a new one.
        drain: seconds that running requests have to finish.
        ready: called when all replicas serve.

    Raises:
        ValueError: there is no cluster at this address, it cannot serve the replicas, or these cannot start.
    """
    with leftovers_ended() if address is None else nullcontext(), _connected(address, needed):
        _check_cluster(needed, address, host, port)
        serve.start(http_options={"host": host, "port": port})
        seconds = 0.0  # replicas that have not started have no requests to finish
        try:
            _deploy(application)
            seconds = drain
            ready()
            asyncio.run(_signal())
        finally:
            _delete(seconds)  # the cluster may serve other applications


@contextmanager
def _connected(address: str | None, needed: Mapping[str, float]) -> Iterator[None]:
    """Within the block this process belongs to the cluster at the address; None: to a new one, ended by the block.

    Raises:
        ValueError: there is no cluster at this address.
    """
    _log_as_this_program()
    if address is None:
        os.environ.update(_OWN_ENVIRONMENT)
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
        yield
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _log_as_this_program() -> None:
    """Ray's own handlers would write beside the handler of this program, which may write JSON."""
    for name in ("ray", "ray.serve"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
    # A new cluster has a token, which is said as a warning.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def _deploy(application: Any) -> None:
    """Start the replicas, and wait until all of them serve.

    Raises:
        ValueError: they do not start; the last of them said why.
    """
    serve.run_many([serve.RunTarget(application, name=_NAME, route_prefix="/")], wait_for_applications_running=False)
    while (status := serve.status().applications[_NAME]).status != "RUNNING":
        if status.status == "DEPLOY_FAILED":
            said = [deployment.message for deployment in status.deployments.values()]
            raise ValueError(f"the replicas cannot start: {_reason(max(said, key=len, default=status.message))}")
        time.sleep(_LOOK_SECONDS)


def _reason(message: str) -> str:
    """The error at the end of a traceback that Ray sends as text."""
    errors = re.split(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b: ", message, flags=re.MULTILINE)
    return errors[-1].strip() if len(errors) > 1 else message


def _delete(drain: float) -> None:
    """End the replicas once their requests have ended."""
    serve.delete(_NAME, _blocking=False)
    begin, told = time.monotonic(), False
    while _NAME in serve.status().applications:
        waited = time.monotonic() - begin
        if waited > drain + _DELETION_SECONDS:  # Ray kills them then
            logger.warning("the replicas have not ended for %.0f s", waited)
            return
        if waited > _TELL_SECONDS and drain and not told:
            told = True
            logger.warning(
                "shutting down: running requests have up to %s to finish; a second Ctrl-C or SIGTERM ends them at once",
                counted(drain, "second", "g"),
            )
        time.sleep(_LOOK_SECONDS)


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

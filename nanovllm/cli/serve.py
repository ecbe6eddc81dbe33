"""`nanovllm serve`: the HTTP server."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanovllm.cli.option_records import takes_records
from nanovllm.cli.serve_options import (
    AccessOptions,
    ChatOptions,
    EngineOptions,
    LimitOptions,
    ModelOptions,
    ProcessOptions,
    ReportOptions,
)
from nanovllm.cli.serve_ray_options import RayOptions
from nanovllm.console import StatusLine, erased_line, import_torch, working
from nanovllm.log_format import JsonFormatter, say_as_log
from nanovllm.weights.model_path import check_model_path, path_of
from nanovllm.wording import counted

if TYPE_CHECKING:
    from socket import socket

    from nanovllm.async_llm import AsyncLLM
    from nanovllm.config import EngineConfig
    from nanovllm.serve.options import ServeOptions
    from nanovllm.serve.server import Listener


@takes_records
def serve(
    model: ModelOptions,
    engine: EngineOptions,
    process: ProcessOptions,
    limits: LimitOptions,
    access: AccessOptions,
    chat: ChatOptions,
    reports: ReportOptions,
    ray: RayOptions,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's interfaces, with a chat page at /.

    After SIGTERM or Ctrl-C, running requests have --drain seconds to finish. A second signal ends the server at once.
    """
    if ray.replicas is not None and (process.in_process or access.ssl_certfile is not None):
        raise ValueError("--replicas goes with neither --in-process nor --ssl-certfile; put a TLS proxy before it")
    if ray.replicas is not None:
        _check_options_of_replicas(process, limits)
    if process.api_servers > 1 and limits.max_per_key is not None:
        raise ValueError("--max-per-key counts in one process; leave it out, or --api-servers")
    path, names = model.located()
    if ray.ray_address is None:  # else only the machines of that cluster need have it
        check_model_path(path)
        _check_name(model, engine.load_format)
    config = engine.config(path)
    _say_if_terminated(reports.log_json)
    try:
        import uvicorn  # noqa: F401

        from nanovllm.serve.server import Listener
    except ImportError as error:
        raise ValueError(f'serve needs the package {error.name!r}; run pip install "nanovllm[serve]"') from None
    listener = Listener(model.host, model.port, access.tls())
    options = _serve_options(names, limits, access, chat, reports)
    if ray.replicas is None:
        if config.device not in ("auto", "cpu"):
            import_torch()
            from nanovllm.hardware.devices import check_device

            check_device(config.device)  # before anything says that the model is being loaded
        _run(config, options, listener, process, reports)
    else:
        _run_replicas(config, options, listener, ray, reports)


def _check_name(model: ModelOptions, load_format: str) -> None:
    """Raise a FileNotFoundError for a MODEL that was probably meant as a second name: `--served-model-name a b`."""
    name = model.positional
    if not name or not model.served_model_name or "/" in name or load_format == "dummy" or path_of(name).exists():
        return
    raise FileNotFoundError(
        f"MODEL {name}: is no local directory, and a hub id has a slash; for several names write --served-model-name"
        f" before each, or name the model first: nanovllm serve MODEL --served-model-name"
        f" {' '.join(model.served_model_name)} {name}"
    )


def _check_options_of_replicas(process: ProcessOptions, limits: LimitOptions) -> None:
    """Options of one server would have no effect, or another one."""
    if process.api_servers > 1:
        raise ValueError(f"--api-servers {process.api_servers} is of one server; leave out --replicas")
    if process.restart != "always":
        raise ValueError(f"--restart {process.restart} is of one server: Ray replaces replicas; leave out --replicas")
    if limits.max_per_key is not None:
        raise ValueError("--max-per-key counts in one process; leave it out, or --replicas")
    if limits.max_connections != LimitOptions.max_connections:
        raise ValueError("--max-connections is of one server; leave it out, or --replicas")


def _serve_options(
    names: tuple[str, ...], limits: LimitOptions, access: AccessOptions, chat: ChatOptions, reports: ReportOptions
) -> ServeOptions:
    from nanovllm.serve.options import ServeOptions

    if limits.max_body_mib < 1:
        raise ValueError(f"--max-body-mib {limits.max_body_mib}: must be at least 1")
    bounds = vars(limits) | {"max_body_bytes": limits.max_body_mib << 20}
    del bounds["max_body_mib"]
    return ServeOptions(
        model_names=names, api_keys=access.keys(), cors_origins=tuple(access.cors_origin or ()),
        metrics_prefix=reports.metrics_prefix, chat_template=chat.template(), chat_template_kwargs=chat.variables(),
        enable_force_include_usage=chat.enable_force_include_usage, strict_max_tokens=chat.strict_max_tokens,
        stats_interval=0.0 if reports.disable_log_stats else ServeOptions.stats_interval, **bounds,
    )  # fmt: skip


def _run(
    config: EngineConfig, options: ServeOptions, listener: Listener, process: ProcessOptions, reports: ReportOptions
) -> None:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.serve.api_servers import ApiProcessConfig, ApiServers
    from nanovllm.serve.log_setup import log_start_in_files, logging_thread
    from nanovllm.serve.process_client import ProcessClient
    from nanovllm.serve.server import Server, run
    from nanovllm.serve.tracing import Tracing

    endpoint = reports.otlp_endpoint
    tracing = None if endpoint is None else Tracing(endpoint, options.model_names[0])
    level = getattr(logging, reports.log_level.upper())
    always, count = process.restart == "always", process.api_servers
    options = replace(options.share(count), engine_restarts=always and not process.in_process)
    with logging_thread(level, reports.log_json, reports.access_log):
        sock, *others = listener.open_several(count)  # before the model is loaded, which takes longer
        client: Any
        siblings = None
        named = os.path.basename(os.path.abspath(config.model)) if os.path.exists(config.model) else config.model
        loading = f"Loading {named} ..."
        if not sys.stderr.isatty():
            _say(loading, reports.log_json)
        with working(loading, timed=True):
            if process.in_process:
                from nanovllm.frontend.engine_client import ThreadClient

                log_start_in_files(level)
                client = ThreadClient(config)
            else:
                client = ProcessClient(config, always, level, count > 1, reports.log_json)
        engine = AsyncLLM(client=client)
        if others:
            given = ApiProcessConfig(
                options, listener.host, listener.tls, client.path, level, reports.log_json, reports.access_log, endpoint
            )
            try:
                siblings = ApiServers(given, others, always)
            except BaseException:
                engine.close()
                raise
        _warn_without_key(listener, options)
        for line in filter(None, (engine.info.sampling_source, str(engine.info.cache_size))):
            _say(line, reports.log_json)
        ready = f"{_said(options, engine, listener, sock)} (Ctrl-C ends it)"
        run(Server(engine, options, listener, siblings, lambda: _say(ready, reports.log_json)), sock, tracing)


def _warn_without_key(listener: Listener, options: ServeOptions) -> None:
    if not listener.is_local and not options.api_keys:
        logging.getLogger("nanovllm.serve").warning(
            "the server listens at %s without a key: every client that reaches it may use it; pass --api-key",
            listener.host,
        )
    if not options.api_keys and "VLLM_API_KEY" in os.environ:
        logging.getLogger("nanovllm.serve").warning(
            "VLLM_API_KEY is not read, so no key is needed; set NANOVLLM_API_KEY"
        )


def _say_if_terminated(as_json: bool) -> None:
    """From now on, until the server has handlers of its own, SIGTERM ends this process with a line."""
    text = "ended by SIGTERM before the server was ready"

    def end(number: int, _frame: Any) -> None:
        # a thread writes the logs, and this process ends at once
        record = logging.LogRecord("nanovllm.serve", logging.WARNING, __file__, 0, text, None, None)
        line = JsonFormatter().format(record) if as_json else f"{erased_line()}nanovllm: {text}"
        print(line, file=sys.stderr, flush=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


def _say(text: str, as_json: bool) -> None:
    if as_json:
        say_as_log(logging.getLogger("nanovllm.serve"), text)
    else:
        print(text, file=sys.stderr, flush=True)


def _said(options: ServeOptions, engine: AsyncLLM, listener: Listener, sock: socket) -> str:
    """What is served, and where."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if listener.tls else "http"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return f"{options.model_names[0]} on {engine.info.device}, {engine.info.context}, at {address}"


def _run_replicas(
    config: EngineConfig, options: ServeOptions, listener: Listener, cluster: RayOptions, reports: ReportOptions
) -> None:
    import torch

    from nanovllm.serve.log_setup import logging_thread
    from nanovllm.serve.ray_logs import shared_stderr

    wanted = cluster.replica_options(reports)
    is_own = cluster.ray_address is None
    if is_own and config.device == "auto" and not torch.cuda.is_available():
        config = replace(config, device="cpu")  # else Ray would wait for GPUs
    try:
        from nanovllm.serve import ray, ray_cluster
    except ImportError as error:
        raise ValueError(str(error)) from None
    port = listener.port
    if is_own:  # an address that is taken is said before Ray starts, which takes long
        with listener.open() as sock:
            port = sock.getsockname()[1]
    loading = StatusLine()
    name, as_json = options.model_names[0], reports.log_json
    text = f"Loading {counted(wanted.replicas, 'replica')} of {name} ..."

    def ready() -> None:
        loading.clear()
        where = f"http://{listener.host}:{port}"
        _say(f"{name}, {counted(wanted.replicas, 'replica')}, at {where} (Ctrl-C ends them)", as_json)

    level = getattr(logging, reports.log_level.upper())
    with logging_thread(level, as_json, reports.access_log), shared_stderr() if is_own else nullcontext() as stderr:
        _warn_without_key(listener, options)
        if not sys.stderr.isatty():
            _say(text, as_json)
        loading.show(text, timed=True)
        try:
            ray_cluster.run(
                ray.application(config, options, wanted, stderr, wanted.replicas), wanted.resources(config),
                cluster.ray_address, listener.host, port, options.drain, ready,
            )  # fmt: skip
        finally:
            loading.clear()

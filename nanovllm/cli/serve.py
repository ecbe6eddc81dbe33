"""`nanovllm serve`: the HTTP server."""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

_ENGINE, _LIMITS, _ACCESS, _RAY = "Engine", "Limits", "Network and access", "Replicas on Ray"


def _option(panel: str, text: str, *names: str, **others: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **others)


def serve(
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face directory, a hub id or a .gguf file; by default SmolLM2-135M-Instruct."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="The model's name in requests; repeatable. By default as --model says.")
    ] = None,
    tokenizer: Annotated[str | None, _option(_ENGINE, "The tokenizer's directory; by default the model's.")] = None,
    load_format: Annotated[str, _option(_ENGINE, "auto, safetensors, gguf, or dummy for random weights.")] = "auto",
    dtype: Annotated[str, _option(_ENGINE, "Weights and activations: auto, bfloat16, float16, float32.")] = "auto",
    quantization: Annotated[
        str | None, _option(_ENGINE, "fp8, int8, int4 or q4_k_m: quantise a floating-point model while it is loaded.")
    ] = None,
    lm_head_quantization: Annotated[str | None, _option(_ENGINE, "fp8 or int8: the same of the LM head.")] = None,
    activation_quantization: Annotated[
        bool, _option(_ENGINE, "Quantise the activations of fp8 layers too, in steps of many tokens.")
    ] = True,
    device: Annotated[str, _option(_ENGINE, "auto, cuda, cuda:N or cpu.")] = "auto",
    max_model_len: Annotated[int, _option(_ENGINE, "Most tokens of a prompt and its output together.")] = 4096,
    max_num_seqs: Annotated[int, _option(_ENGINE, "Most completions in a step.")] = 512,
    max_num_batched_tokens: Annotated[int | None, _option(_ENGINE, "Most tokens in a step.")] = None,
    gpu_memory_utilization: Annotated[float, _option(_ENGINE, "The share of the GPU's memory to use.")] = 0.9,
    kvcache_block_size: Annotated[int, _option(_ENGINE, "Tokens in a block of the KV cache.")] = 256,
    num_kvcache_blocks: Annotated[int | None, _option(_ENGINE, "Blocks of the KV cache; by default what fits.")] = None,
    kv_cache_dtype: Annotated[str, _option(_ENGINE, "auto, or fp8 for half the memory.")] = "auto",
    enable_prefix_caching: Annotated[bool, _option(_ENGINE, "Reuse the KV cache of prompts that begin alike.")] = True,
    enforce_eager: Annotated[bool, _option(_ENGINE, "Do not capture CUDA graphs.")] = False,
    tensor_parallel_size: Annotated[int, _option(_ENGINE, "GPUs that share the model.")] = 1,
    max_logprobs: Annotated[int, _option(_ENGINE, "Most log-probabilities that a request may ask for.")] = 20,
    seed: Annotated[int | None, _option(_ENGINE, "Seed for requests that have none.")] = None,
    use_custom_kernels: Annotated[
        bool | None, _option(_ENGINE, "Custom kernels, or every op's PyTorch reference.")
    ] = None,
    kernel_plugin: Annotated[
        list[str] | None, _option(_ENGINE, "A Python file or module with kernels; repeatable.")
    ] = None,
    in_process: Annotated[bool, _option(_ENGINE, "Run the engine in a thread of the server's process.")] = False,
    restart: Annotated[str, _option(_ENGINE, "always or never: whether a dead engine is started again.")] = "always",
    max_waiting: Annotated[int, _option(_LIMITS, "Most completions that wait for a first token; more get 503.")] = 4096,
    max_waiting_tokens: Annotated[int, _option(_LIMITS, "Most prompt tokens that wait; more get 503.")] = 4_000_000,
    max_per_key: Annotated[int | None, _option(_LIMITS, "Most requests of an API key at a time; more get 429.")] = None,
    queue_timeout: Annotated[float, _option(_LIMITS, "Seconds to wait for a first token; then 503.")] = 600.0,
    max_connections: Annotated[int, _option(_LIMITS, "Most open connections; more get 503.")] = 10_000,
    max_body_mib: Annotated[int, _option(_LIMITS, "Most MiB of a request's body; larger ones get 413.")] = 16,
    stall_timeout: Annotated[
        float, _option(_LIMITS, "Seconds without a step after which /health is 503, if there is work.")
    ] = 120.0,
    drain: Annotated[float, _option(_LIMITS, "Seconds to finish running requests at the end.")] = 30.0,
    api_key: Annotated[
        list[str] | None,
        _option(_ACCESS, "A key that clients must send; repeatable.", envvar="NANOVLLM_API_KEY", show_default=False),
    ] = None,
    api_key_file: Annotated[Path | None, _option(_ACCESS, "A file with one key per line.")] = None,
    cors_origin: Annotated[
        list[str] | None, _option(_ACCESS, "An origin whose pages may call the server; repeatable.")
    ] = None,
    ssl_certfile: Annotated[Path | None, _option(_ACCESS, "A certificate for HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, _option(_ACCESS, "The certificate's key.")] = None,
    ssl_ca_certs: Annotated[
        Path | None, _option(_ACCESS, "The authorities that clients' certificates must be from.")
    ] = None,
    metrics_prefix: Annotated[str, _option(_ACCESS, "The prefix of metrics that vLLM has as well.")] = "vllm:",
    otlp_endpoint: Annotated[str | None, _option(_ACCESS, "Send a trace span of each request to this address.")] = None,
    access_log: Annotated[bool, _option(_ACCESS, "Log every answer.")] = False,
    log_json: Annotated[bool, _option(_ACCESS, "Write logs as JSON.")] = False,
    log_level: Annotated[str, _option(_ACCESS, "debug, info, warning or error.")] = "warning",
    replicas: Annotated[
        int | None, _option(_RAY, "Copies of the server behind this address, each with GPUs of its own.")
    ] = None,
    max_replicas: Annotated[int | None, _option(_RAY, "Under load, Ray adds replicas up to this number.")] = None,
    ray_address: Annotated[
        str | None, _option(_RAY, "The Ray cluster, or auto for this machine's; by default a new one.")
    ] = None,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's interfaces, with a chat page at /.

    After SIGTERM or Ctrl-C, running requests have --drain seconds to finish. A second signal ends the server at once.
    """
    from nanovllm.config import EngineConfig

    arguments = dict(locals())
    _check(log_level, restart)
    if replicas is None and (max_replicas is not None or ray_address is not None):
        raise ValueError("--max-replicas and --ray-address are for replicas on Ray; pass --replicas as well")
    if replicas is not None and (in_process or ssl_certfile is not None):
        raise ValueError("--replicas goes with neither --in-process nor --ssl-certfile; put a TLS proxy before it")
    names, path = _names(served_model_name, model)
    arguments |= {"model": path, "kernel_plugins": tuple(kernel_plugin or ())}
    # A `locals()` that has only what the user can set: every option of the engine is an argument of this name.
    config = EngineConfig(**{f.name: arguments[f.name] for f in fields(EngineConfig) if f.name in arguments})
    try:
        import uvicorn  # noqa: F401

        from nanovllm.serve.options import ServeOptions
        from nanovllm.serve.server import Listener
    except ImportError as error:
        raise ValueError(f'serve needs the package {error.name!r}; run pip install "nanovllm[serve]"') from None
    files = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile, "ssl_ca_certs": ssl_ca_certs}
    listener = Listener(host, port, tuple((name, str(file)) for name, file in files.items() if file is not None))
    options = ServeOptions(
        model_names=names, api_keys=_keys(api_key, api_key_file), max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens, max_per_key=max_per_key, queue_timeout=queue_timeout,
        max_connections=max_connections, max_body_bytes=max_body_mib << 20, stall_timeout=stall_timeout, drain=drain,
        cors_origins=tuple(cors_origin or ()), metrics_prefix=metrics_prefix,
    )  # fmt: skip
    if replicas is not None:
        _run_replicas(config, options, listener, replicas, max_replicas, ray_address)
        return
    from nanovllm.serve.tracing import Tracing

    tracing = None if otlp_endpoint is None else Tracing(otlp_endpoint, names[0])
    _run(config, options, listener, tracing, in_process, restart == "always", (log_level, log_json, access_log))


def _run(
    config: Any,
    options: Any,
    listener: Any,
    tracing: Any,
    in_process: bool,
    restart: bool,
    logs: tuple[str, bool, bool],
) -> None:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.serve.log_setup import logging_thread
    from nanovllm.serve.process_client import ProcessClient
    from nanovllm.serve.server import serve as run_server

    level = getattr(logging, logs[0].upper())
    with logging_thread(level, logs[1], logs[2]):
        sock = listener.open()  # before the model is loaded, which takes longer
        client: Any
        if in_process:
            from nanovllm.engine.engine_client import ThreadClient

            client = ThreadClient(config)
        else:
            client = ProcessClient(config, restart, level)
        engine = AsyncLLM(client=client)
        if not listener.is_local and not options.api_keys:
            logging.getLogger("nanovllm.serve").warning(
                "the server listens at %s without a key: every client that reaches it may use it; pass --api-key",
                listener.host,
            )
        scheme = "https" if listener.tls else "http"
        host, port = sock.getsockname()[:2]
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"{options.model_names[0]} on {engine.info.device}, at {address} (Ctrl-C ends it)", file=sys.stderr)
        run_server(engine, options, listener, sock, tracing)


def _run_replicas(
    config: Any, options: Any, listener: Any, replicas: int, max_replicas: int | None, address: str | None
) -> None:
    from nanovllm.serve.ray_options import ReplicaOptions

    wanted = ReplicaOptions(replicas, max_replicas)
    try:
        from nanovllm.serve import ray
    except ImportError as error:
        raise ValueError(str(error)) from None
    said = (
        f"{options.model_names[0]}, {replicas} replicas, at http://{listener.host}:{listener.port} (Ctrl-C ends them)"
    )
    ray.run(
        ray.application(config, options, wanted), address, listener.host, listener.port,
        lambda: print(said, file=sys.stderr, flush=True),
    )  # fmt: skip


def _check(log_level: str, restart: str) -> None:
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError(f"--log-level {log_level}: must be debug, info, warning or error")
    if restart not in ("always", "never"):
        raise ValueError(f"--restart {restart}: must be always or never")


def _names(served: list[str] | None, model: str | None) -> tuple[tuple[str, ...], str]:
    """(names of the model in requests, where it is)"""
    if model is None:
        from nanovllm.weights.demo_model import demo_model_path

        return tuple(served or ["SmolLM2-135M-Instruct"]), str(demo_model_path())
    return tuple(served or [model]), model


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    keys = list(given or ())
    if file is not None:
        keys += [line.strip() for line in file.read_text().splitlines() if line.strip() and line[0] != "#"]
        if not keys:
            raise ValueError(f"--api-key-file {file}: holds no key; write one in each line")
    return tuple(keys)

"""The options of `nanovllm serve`, by what they are about."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.number_options import MaxNumBatchedTokens, ServedModelLen
from nanovllm.config import AUTO
from nanovllm.wording import brief

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig


_MOST_API_SERVERS = 64
_LOG_LEVEL = (
    "debug, info, warning or error. With warning, the start and the rates are logged as well; --access-log works with"
    " every level."
)
_BLOCK_SIZE = (
    "Tokens in a block of the KV cache. Prompts share whole blocks alone, so no beginning of fewer tokens. Hopper's"
    " decode kernel needs a multiple of 64."
)


def _option(text: str, **others: Any) -> Any:
    return typer.Option(help=text, **others)


def json_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """The object that an option has as JSON; None without the option.

    Raises:
        ValueError: it is no object.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{option} {text}: must be a JSON object, such as {example}, in quotes for the shell")
    return found


@dataclass(frozen=True)
class ModelOptions:
    """The model, its names in requests, and where the server listens."""

    positional: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None
    model: Annotated[
        str | None, _option("A Hugging Face directory, a hub id or a .gguf file; by default SmolLM2-135M-Instruct.")
    ] = None
    host: Annotated[str, _option("The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _option("The port to listen on; 0 takes a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        _option(
            "The model's name in requests; repeatable. By default the hub id, or the last part of a path.",
            metavar="NAME",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: must be 0 to 65535")

    def located(self) -> tuple[str, tuple[str, ...]]:
        """(where the model is, its names in requests)

        Raises:
            ValueError: two models are given.
        """
        if self.model is not None and self.positional is not None:
            raise ValueError(f"MODEL {self.positional} and --model {self.model} are both given; leave one out")
        model = self.model or self.positional
        if model is not None:
            from nanovllm.weights.model_path import path_of

            path = path_of(model)
            # Clients see the name, and a whole path tells of the machine's folders.
            name = os.path.basename(os.path.abspath(path)) if path.exists() else ""
            return model, tuple(self.served_model_name or [name or model])
        from nanovllm.weights.demo_model import demo_model_path

        return str(demo_model_path()), tuple(self.served_model_name or ["SmolLM2-135M-Instruct"])


@dataclass(frozen=True)
class EngineOptions:
    """The arguments of the engine."""

    tokenizer: Annotated[str | None, _option("The tokenizer's directory; by default the model's.")] = None
    load_format: Annotated[str, _option("auto, safetensors, gguf, or dummy for random weights.")] = "auto"
    dtype: Annotated[str, _option("Weights and activations: auto, bfloat16, float16, float32.")] = "auto"
    quantization: Annotated[
        str | None, _option("fp8, int8, int4 or q4_k_m: quantise a floating-point model while it is loaded.")
    ] = None
    lm_head_quantization: Annotated[str | None, _option("fp8 or int8: quantise the LM head while it is loaded.")] = None
    activation_quantization: Annotated[
        bool, _option("Quantise the activations of fp8 layers too, in steps of many tokens.")
    ] = True
    prompt_activations: Annotated[
        str, _option("auto, or fp8: steps of many tokens are faster and less exact with int4, int8 and GGUF weights.")
    ] = "auto"
    expand_small_weights: Annotated[
        str,
        _option(
            "auto: on a Hopper GPU quantised weights of small layers are expanded where that is faster, if this takes"
            " at most 4 % of its memory; or off."
        ),
    ] = "auto"
    cpu_activations: Annotated[str, _option("On a CPU: float32, or faster and less exact, int8 or bfloat16.")] = (
        "float32"
    )
    device: Annotated[str, _option("auto, cuda, cuda:N or cpu.")] = "auto"
    max_model_len: ServedModelLen = AUTO
    max_num_seqs: Annotated[int, _option("Most completions in a step.")] = 512
    max_num_batched_tokens: MaxNumBatchedTokens = None
    gpu_memory_utilization: Annotated[float, _option("The share of the GPU's memory to use.")] = 0.9
    kvcache_block_size: Annotated[int, _option(_BLOCK_SIZE)] = 256
    num_kvcache_blocks: Annotated[int | None, _option("Blocks of the KV cache; by default what fits.")] = None
    kv_cache_dtype: Annotated[str, _option("auto, or fp8 for half the memory.")] = "auto"
    enable_prefix_caching: Annotated[bool, _option("Reuse the KV cache of prompts that begin alike.")] = True
    enforce_eager: Annotated[bool, _option("Do not capture CUDA graphs.")] = False
    tensor_parallel_size: Annotated[int, _option("GPUs that share the model.")] = 1
    rank_timeout: Annotated[float, _option("Seconds for which one GPU's process waits for the others.")] = 60.0
    hf_overrides: Annotated[
        str | None,
        _option(
            "Entries that replace those of the model's config.json, as JSON: its rotary scaling, context or window.",
            metavar="JSON",
        ),
    ] = None
    generation_config: Annotated[
        str,
        _option(
            "Whence requests that do not set temperature, top_p, top_k, min_p, repetition_penalty and max_tokens take"
            " them: auto, the model's generation_config.json or GGUF file; vllm, nowhere; or a directory with such a"
            " file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | None, _option("Such defaults as JSON, which win: '{\"temperature\": 0.6}'.", metavar="JSON")
    ] = None
    max_logprobs: Annotated[int, _option("Most log-probabilities that a request may ask for.")] = 20
    seed: Annotated[int | None, _option("Seed for requests that have none.")] = None
    use_custom_kernels: Annotated[
        bool | None,
        _option("Custom kernels, or every op's PyTorch reference; custom unless config.json turns them off."),
    ] = None
    kernel_plugin: Annotated[
        list[str] | None, _option("A Python file or module with kernels of your own; repeatable.", metavar="FILE")
    ] = None
    kernels: Annotated[
        str | None, _option('Providers of ops, as NANOVLLM_KERNELS has them: "attention_prefill=flash_attn".')
    ] = None

    def config(self, model: str) -> EngineConfig:
        from nanovllm.config import EngineConfig

        arguments = vars(self) | {"model": model, "kernel_plugins": tuple(self.kernel_plugin or ())}
        del arguments["kernel_plugin"]
        if (kernels := arguments.pop("kernels")) is not None:
            from nanovllm.kernels.op.priority import priority_of_option

            arguments["kernel_priority"] = priority_of_option(kernels)
        arguments["hf_overrides"] = json_object("--hf-overrides", self.hf_overrides, '{"rope_scaling": {...}}')
        arguments["override_generation_config"] = json_object(
            "--override-generation-config", self.override_generation_config, '{"temperature": 0.6}'
        )
        return EngineConfig(**arguments)


@dataclass(frozen=True)
class ProcessOptions:
    """The processes of the server."""

    in_process: Annotated[bool, _option("Run the engine in a thread of the server's process.")] = False
    restart: Annotated[str, _option("always or never: whether a dead engine or API process is started again.")] = (
        "always"
    )
    api_servers: Annotated[
        int, _option("Processes that hold connections and tokenize; each has an equal share of the limits.")
    ] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.api_servers <= _MOST_API_SERVERS:
            raise ValueError(f"--api-servers {self.api_servers}: must be from 1 to {_MOST_API_SERVERS}")
        if self.in_process and self.api_servers > 1:
            raise ValueError(f"--api-servers {self.api_servers} shares an engine's process; leave out --in-process")
        if self.restart not in ("always", "never"):
            raise ValueError(f"--restart {self.restart}: must be always or never")


@dataclass(frozen=True)
class LimitOptions:
    """What the server refuses, and when it gives up."""

    max_waiting: Annotated[int, _option("Most completions that wait for a first token; more get 503.")] = 4096
    max_waiting_tokens: Annotated[int, _option("Most prompt tokens that wait; more get 503.")] = 4_000_000
    max_per_key: Annotated[int | None, _option("Most requests of an API key at a time; more get 429.")] = None
    queue_timeout: Annotated[float, _option("Seconds to wait for a first token; then 503.")] = 600.0
    max_connections: Annotated[int, _option("Most open connections; more get 503.")] = 10_000
    max_body_mib: Annotated[int, _option("Most MiB of a request's body; larger ones get 413.")] = 16
    stall_timeout: Annotated[float, _option("Seconds without a step after which /health is 503, if there is work.")] = (
        120.0
    )
    drain: Annotated[float, _option("Seconds to finish running requests at the end.")] = 30.0


@dataclass(frozen=True)
class AccessOptions:
    """Keys, origins and TLS."""

    api_key: Annotated[
        list[str] | None,
        _option(
            "A key of at least 8 characters that clients must send; repeatable. The keys in NANOVLLM_API_KEY, separated"
            " by spaces, count only without this option and --api-key-file.",
            metavar="KEY",
            show_default=False,
        ),
    ] = None
    api_key_file: Annotated[Path | None, _option("A file with one key per line; adds to those of --api-key.")] = None
    cors_origin: Annotated[
        list[str] | None, _option("An origin whose pages may call the server; repeatable.", metavar="ORIGIN")
    ] = None
    ssl_certfile: Annotated[Path | None, _option("A certificate for HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, _option("The certificate's key.")] = None
    ssl_ca_certs: Annotated[Path | None, _option("The authorities that clients' certificates must be from.")] = None

    def keys(self) -> tuple[str, ...]:
        """The keys of the options. Without options, those of the environment variable.

        Raises:
            ValueError: the file cannot be read, or holds no key.
        """
        keys = list(self.api_key or ())
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in self.api_key_file.read_text().splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error  # an OSError would name the file again
                raise ValueError(f"--api-key-file {self.api_key_file}: cannot be read: {why}") from None
            found = [line for line in lines if line and line[0] != "#"]
            if not found:
                raise ValueError(f"--api-key-file {self.api_key_file}: holds no key; write one in each line")
            keys += found
        return tuple(keys or os.environ.get("NANOVLLM_API_KEY", "").split())

    def tls(self) -> tuple[tuple[str, str], ...]:
        """The options of `Listener`."""
        names = "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"
        return tuple((name, str(file)) for name in names if (file := getattr(self, name)) is not None)


@dataclass(frozen=True)
class ChatOptions:
    """The chat template, and what answers have."""

    chat_template: Annotated[
        str | None, _option("A file with a Jinja template, or its text, in place of the model's own.", metavar="FILE")
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        _option(
            "Variables of the template as JSON, for requests that do not set them: '{\"enable_thinking\": false}'.",
            metavar="JSON",
        ),
    ] = None

    enable_force_include_usage: Annotated[
        bool, typer.Option("--enable-force-include-usage", help="Every stream ends with its usage, asked for or not.")
    ] = False
    strict_max_tokens: Annotated[
        bool,
        typer.Option(
            "--strict-max-tokens", help="A max_tokens that does not fit into the context is an error; else lowered."
        ),
    ] = False

    def template(self) -> str | None:
        """The template's text.

        Raises:
            ValueError: the file cannot be read, or holds no template.
        """
        given = self.chat_template
        if given is None:
            return None
        where = f"--chat-template {brief(given)}"
        if not re.search("{[{%]", given):
            try:
                given = Path(given).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise ValueError(f"{where}: cannot be read: {why}; pass a file with a Jinja template") from None
        from nanovllm.weights.bare_tokenizer import check_template

        check_template(given, where)
        return given

    def variables(self) -> dict[str, Any]:
        option = "--default-chat-template-kwargs"
        return json_object(option, self.default_chat_template_kwargs, '{"enable_thinking": false}') or {}


@dataclass(frozen=True)
class ReportOptions:
    """Metrics, traces and logs."""

    metrics_prefix: Annotated[str, _option("The prefix of metrics that vLLM has as well.")] = "vllm:"
    otlp_endpoint: Annotated[str | None, _option("Send a trace span of each request to this address.")] = None
    access_log: Annotated[bool, _option("Log every answer.")] = False
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="No line with rates and the queue every 10 s of work.")
    ] = False
    log_json: Annotated[bool, _option("Write logs as JSON.")] = False
    log_level: Annotated[str, _option(_LOG_LEVEL)] = "warning"

    def __post_init__(self) -> None:
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError(f"--log-level {self.log_level}: must be debug, info, warning or error")


OTHER_RECORDS = ModelOptions, ProcessOptions, LimitOptions, AccessOptions, ChatOptions, ReportOptions
"""Options that are no arguments of `LLM`."""

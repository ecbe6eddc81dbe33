"""Options of vLLM's, SGLang's and llama.cpp's servers, in `nanovllm serve`, `chat` and `generate`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from typer.core import TyperCommand

from nanovllm.console import say
from nanovllm.foreign_arguments import ENGINE_ARGUMENTS, ForeignArgument, table

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-m": "--model",
    "-a": "--alias",
    "-c": "--ctx-size",
    "-n": "--n-predict",
    "-p": "--prompt",
    "-t": "--threads",
    "-ngl": "--n-gpu-layers",
    "-np": "--parallel",
    "-fa": "--flash-attn",
}
"""Short options of vLLM, SGLang and llama.cpp."""

SERVER_ARGUMENTS = table(
    ("tool calls are found by the chat template", None, "enable_auto_tool_choice tool_call_parser tool_parser_plugin"
     " exclude_tools_when_tool_choice_none"),
    ("reasoning is found by the chat template", None, "enable_reasoning reasoning_parser"),
    ("requests are not logged unless --access-log is given", None, "uvicorn_log_level disable_uvicorn_access_log"
     " disable_access_log_for_endpoints max_log_len enable_log_outputs log_level_http"),
    ("there are no such routes", None, "disable_fastapi_docs enable_server_load_tracking enable_offline_docs"),
    ("usage is in every answer; a stream has it if stream_options asks for it", None, "enable_force_include_usage"
     " enable_prompt_tokens_details enable_cache_report"),
    ("every answer has the header X-Request-Id", None, "enable_request_id_headers"),
    ("the chat template is the tokenizer's; edit a copy of it", (), "chat_template"),
    ("use api_servers", (), "api_server_count"),
    ("use cors_origin", (), "allowed_origins"),
    ("use otlp_endpoint", (), "otlp_traces_endpoint"),
    # Options of llama.cpp.
    ("use max_model_len", (), "ctx_size"),
    ("use max_num_seqs", (), "parallel"),
    ("use served_model_name", (), "alias"),
    ("use kv_cache_dtype", (), "cache_type_k cache_type_v"),
    ("use temperature", (), "temp"),
    ("use max_tokens", (), "n_predict predict"),
    ("pass the text without an option: nanovllm generate TEXT", (), "prompt"),
    ("set the environment variable NANOVLLM_CPU_THREADS to the number of threads", (), "threads threads_batch"),
    ("all layers are on one device; use device", (), "n_gpu_layers gpu_layers"),
    ("the engine decides this itself", None, "mlock mmap jinja cont_batching flash_attn"),
)  # fmt: skip
"""Arguments of the servers of vLLM, SGLang and llama.cpp that the engines of the first two do not have."""

_REQUEST_FIELDS = {name: f"the field {name} of each request" for name in ("temperature", "max_tokens")}
"""Options of `generate` and `chat` which `serve` lacks."""

_FLAGS = frozenset(
    "trust_remote_code fully_sharded_loras skip_mm_profiling language_model_only worker_use_ray calculate_kv_scales"
    " ray_workers_use_nsight interleave_mm_strings mm_encoder_only load_in_4bit load_in_8bit"
    " exclude_tools_when_tool_choice_none aggregate_engine_logging kv_cache_metrics cudagraph_metrics numa_bind"
    " scheduler_reserve_full_isl fail_on_environ_validation multi_step_stream_outputs specialize_active_lora"
    " guided_decoding_disable_fallback guided_decoding_disable_any_whitespace kv_sharing_fast_prefill"
    " allow_deprecated_quantization tokens_only async_engine data_parallel_hybrid_lb data_parallel_external_lb"
    " data_parallel_multi_port_external_lb mlock mmap jinja cont_batching".split()
)
_ARE_FLAGS = ("enable_", "disable_", "use_")
_HAVE_VALUES = frozenset(["disable_access_log_for_endpoints"])


class EngineCommand(TyperCommand):
    """A command that knows the options of other engines.

    Those without effect here are taken, with a line on standard error. The others are errors that say why, or what
    the option is called here.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: p for p in self.params for name in (*p.opts, *p.secondary_opts)}
        return super().parse_args(ctx, list(_without_foreign(args, known)))

    def get_help(self, ctx: Any) -> str:
        """The help text. Of an argument that may be repeated it has the type of one value: PROMPT... <str>."""
        text = super().get_help(ctx)
        return re.sub(r"(\w+) <list\[(\w+)\]>", lambda m: f"{m[1]}... <{m[2]}>".ljust(len(m[0])), text)


def _without_foreign(args: list[str], known: Mapping[str, Any]) -> Iterator[str]:
    """The arguments without the options of other engines. As for vLLM, `--max_model_len` is `--max-model-len`.

    Raises:
        ValueError: an option is not supported, has another name here, or only `nanovllm serve` has it.
    """
    rest = iter(range(len(args)))
    for i in rest:
        given, equals, value = args[i].partition("=")
        given = given if given in known else _SHORT.get(given, given)
        if given not in known and given.replace("_", "-") in known:
            given = given.replace("_", "-")
        name = given.removeprefix("--").replace("-", "_")
        off = name.startswith("no_") and name not in SERVER_ARGUMENTS
        argument = _argument(name.removeprefix("no_") if off else name)
        if given == "--":
            yield from args[i:]
            return
        here = any(p.name == name.removeprefix("no_") for p in known.values())
        if given.startswith("--") and not here and name.removeprefix("no_") in _of_serve():
            raise ValueError(f"{given}: this command lacks it; `nanovllm serve` has it, and in Python LLM(...)")
        if given in known or not given.startswith("--") or argument is None:
            yield given + equals + value
            continue
        flag = off or name in _FLAGS or name.startswith(_ARE_FLAGS) and name not in _HAVE_VALUES
        if not equals and not flag and i + 1 < len(args) and not args[i + 1].startswith("-"):
            value = args[next(rest)]
        if not argument.is_harmless(_parsed(value) if value else not off):
            raise ValueError(f"{given}: {_as_options(argument.answer, known)}")
        say(f"{given} has no effect: {_as_options(argument.answer, known)}", sys.stderr)


def _of_serve() -> frozenset[str]:
    """The arguments of `LLM` that `nanovllm serve` has as options."""
    from nanovllm.cli.serve_options import EngineOptions

    return frozenset(field.name for field in fields(EngineOptions))


def _argument(name: str) -> ForeignArgument | None:
    return SERVER_ARGUMENTS.get(name) or ENGINE_ARGUMENTS.get(name)


def _parsed(value: str) -> Any:
    """A number, a JSON value, or the text."""
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _as_options(answer: str, known: Mapping[str, Any]) -> str:
    """The answer with the names of this command's options as they are typed."""
    options = _REQUEST_FIELDS | {p.name: p.opts[0] for p in known.values() if p.opts[0].startswith("--")}
    options |= {f"{p.name}=False": p.secondary_opts[0] for p in known.values() if p.secondary_opts}
    return re.sub(r"(?<=use )\w+(=False)?|\b\w+_\w+\b", lambda word: options.get(word[0], word[0]), answer)

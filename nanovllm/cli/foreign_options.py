"""Options of vLLM, SGLang, TensorRT-LLM and llama.cpp, in `nanovllm serve`, `chat`, `generate` and `bench serve`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand

from nanovllm.cli.command_group import UsageError
from nanovllm.console import say
from nanovllm.foreign_arguments import ENGINE_ARGUMENTS, ForeignArgument, table

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "--ep": "--ep-size",
    "-dcp": "--decode-context-parallel-size",
    "--dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "--pcp": "--prefill-context-parallel-size",
    "-asc": "--api-server-count",
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
    "-f": "--file",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-v": "--verbose",
    "-sys": "--system-prompt",
}
"""Short options of vLLM, SGLang and llama.cpp."""

SERVER_ARGUMENTS = table(
    ("tool calls are found by the chat template", None, "enable_auto_tool_choice tool_call_parser tool_parser_plugin"),
    ('with tool_choice "none" a chat template never sees the tools', None, "exclude_tools_when_tool_choice_none"),
    ("reasoning is found by the chat template", None, "enable_reasoning reasoning_parser"),
    ("requests are not logged unless access_log is given", None, "disable_log_requests enable_log_requests"
     " disable_uvicorn_access_log disable_access_log_for_endpoints"),
    ("prompts and answers are never logged", None, "max_log_len enable_log_outputs"),
    ("the level of the server's own logs is log_level", None, "uvicorn_log_level log_level_http"),
    ("there is one line of statistics every 10 s of work, and disable_log_stats turns it off", None,
     "aggregate_engine_logging enable_logging_iteration_details"),
    ("there are no such routes", None, "disable_fastapi_docs enable_server_load_tracking enable_offline_docs"
     " enable_tokenizer_info_endpoint"),
    ("parts of a message's content are joined, a line each", None, "chat_template_content_format"),
    ("a request cannot contain a chat template", None, "trust_request_chat_template"),
    ("use log_level, log_json or access_log", (), "log_config_file"),
    ("this command needs the tokenizer; in Python use LLM(skip_tokenizer_init=True)", (), "skip_tokenizer_init"),
    ("usage always has the cached tokens of the prompt", None, "enable_prompt_tokens_details enable_cache_report"),
    ("prompts are tokenised by the API process; use api_servers for more of these", None, "tokenizer_pool_size"
     " tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers"),
    ("use drain", (), "shutdown_timeout"),
    ("every answer has the header X-Request-Id", None, "enable_request_id_headers"),
    ("use chat_template", (), "chat_template_file"),
    ("no answer has an absolute link, so a proxy may serve it below any path that it removes", None,
     "root_path api_prefix"),
    ("options are read from the command line alone; write them into a script", (), "config"
     " extra_llm_api_options"),
    ("clients need a certificate if ssl_ca_certs is given", (), "ssl_cert_reqs"),
    ("put a proxy with these options before the server", (), "ssl_ciphers ssl_keyfile_password enable_ssl_refresh"
     " middleware"),
    ("a request may have 128 headers of 64 KiB together; leave it out", (), "h11_max_header_count"
     " h11_max_incomplete_event_size"),
    ("an origin of cors_origin may use every method and header", None, "allowed_methods allowed_headers"
     " allow_credentials"),
    ("answers have the role assistant", ("assistant",), "response_role"),
    ("it is a field of requests; send it with them", (), "return_tokens_as_token_ids"),
    ("it listens at host and port; put a proxy before it", (), "uds"),
    ("the engine's process is started by this command; use api_servers for more processes", (), "headless"),
    ("use api_servers", (), "api_server_count"),
    ("use in_process", (), "disable_frontend_multiprocessing"),
    ("there is no interface for gRPC; use those for HTTP", (), "grpc"),
    ("use cors_origin", (), "allowed_origins"),
    ("use otlp_endpoint", (), "otlp_traces_endpoint"),
    # Options of TensorRT-LLM.
    ("use gpu_memory_utilization", (), "kv_cache_free_gpu_memory_fraction free_gpu_memory_fraction"),
    ("use max_num_batched_tokens", (), "max_num_tokens"),
    ("there is one engine", None, "backend"),
    # Options of llama.cpp.
    ("use max_model_len", (), "ctx_size"),
    ("use max_num_seqs", (), "parallel"),
    ("use served_model_name", (), "alias"),
    ("use kv_cache_dtype", (), "cache_type_k cache_type_v"),
    ("use model", (), "hf_repo hf_file model_url"),
    ("use max_num_batched_tokens", (), "batch_size ubatch_size"),
    ("use log_level", (), "verbose log_verbosity"),
    ("use system", (), "system_prompt"),
    ("the route /metrics is always there", None, "metrics slots props"),
    ("the engine schedules asynchronously on a GPU by itself", None, "async_scheduling"),
    ("the page at / is always there", None, "webui"),
    ("the limits of docs/serving.md are its time limits", (), "timeout"),
    ("LoRA is not supported; merge the adapter into the weights", (), "lora"),
    ("the engine generates text; leave it out: embeddings, scores and rewards are not supported", (), "embedding"
     " embeddings rerank reranking pooling"),
    ("use - as the text, which then comes from standard input: nanovllm generate - < FILE", (), "file"),
    ("use temperature", (), "temp"),
    ("use repetition_penalty", (), "repeat_penalty"),
    ("use max_tokens", (), "n_predict predict"),
    ("pass the text without an option: nanovllm generate TEXT", (), "prompt"),
    ("set the environment variable NANOVLLM_CPU_THREADS to the number of threads", (), "threads threads_batch"),
    ("all layers are on one device; use device", (), "n_gpu_layers gpu_layers"),
    ("the engine decides this itself", None, "mlock mmap jinja cont_batching flash_attn"),
)  # fmt: skip
"""Arguments of the servers of vLLM, SGLang, TensorRT-LLM and llama.cpp that are not in `ENGINE_ARGUMENTS`."""

BENCH_ARGUMENTS = table(
    ("pass the address without an option: nanovllm bench serve http://127.0.0.1:8000", (), "base_url host port"),
    ("use num_requests", (), "num_prompts"),
    ("use concurrency", (), "max_concurrency"),
    ("use rate", (), "request_rate"),
    ("use input_len", (), "random_input_len"),
    ("use output_len", (), "random_output_len sharegpt_output_len custom_output_len"),
    ("prompts are random words; use prompts for a file of texts", ("random",), "dataset_name"),
    ("use prompts, a text file with one prompt per line", (), "dataset_path"),
    ("use endpoint with completions or chat", (), "backend endpoint_type"),
    ("use json_file", (), "save_result save_detailed result_dir result_filename"),
    ("use goal_ttft, goal_tpot or goal_e2e", (), "goodput"),
    ("the table has medians and 99th percentiles; json_file has more", None, "percentile_metrics metric_percentiles"),
    ("prompts are words or token ids; no tokenizer is needed", None, "tokenizer trust_remote_code tokenizer_mode"),
    ("requests arrive at random times", (1, 1.0), "burstiness"),
    ("the bar is shown in a terminal alone", None, "disable_tqdm"),
)  # fmt: skip
"""Options of `vllm bench serve`."""

_SAMPLING = frozenset(
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty max_tokens min_tokens n stop"
    " stop_token_ids ignore_eos logprobs logit_bias bad_words".split()
)
"""Arguments of `SamplingParams`: fields of a request to `serve`, and in part options of `generate` and `chat`."""

_FLAGS = frozenset(
    "trust_remote_code fully_sharded_loras skip_mm_profiling language_model_only worker_use_ray calculate_kv_scales"
    " ray_workers_use_nsight interleave_mm_strings mm_encoder_only load_in_4bit load_in_8bit"
    " exclude_tools_when_tool_choice_none aggregate_engine_logging kv_cache_metrics cudagraph_metrics numa_bind"
    " scheduler_reserve_full_isl fail_on_environ_validation multi_step_stream_outputs specialize_active_lora"
    " guided_decoding_disable_fallback guided_decoding_disable_any_whitespace kv_sharing_fast_prefill"
    " allow_deprecated_quantization tokens_only async_engine data_parallel_hybrid_lb data_parallel_external_lb"
    " data_parallel_multi_port_external_lb mlock mmap jinja cont_batching return_tokens_as_token_ids headless metrics"
    " slots props webui grpc verbose embedding embeddings rerank reranking allow_credentials save_result save_detailed"
    " async_scheduling ignore_eos trust_request_chat_template skip_tokenizer_init".split()
)
_FIELD = "the field {} of each request"
_ARE_FLAGS = ("enable_", "disable_", "use_")
_HAVE_VALUES = frozenset(["disable_access_log_for_endpoints"])
_HAVE_SEVERAL = frozenset(
    "cudagraph_capture_sizes cuda_graph_sizes numa_bind_nodes numa_bind_cpus collect_detailed_traces ignore_patterns"
    " lora_modules lora_target_modules kv_cache_dtype_skip_layers logits_processors allowed_media_domains"
    " device_ids".split()
)
"""Options that take all words up to the next option."""


class EngineCommand(TyperCommand):
    """A command that knows the options of other engines.

    Those without effect here are taken, with a line on standard error. The others are errors that say why, or what
    the option is called here.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: p for p in self.params for name in (*p.opts, *p.secondary_opts)}
        refused: list[str] = []
        if "--served-model-name" in known:
            args = _with_each_name(args)
        taken = list(self._without_foreign(args, known, refused))
        unknown: list[Any] = []
        while True:
            try:
                parsed = super().parse_args(ctx, list(taken))
                break
            except UsageError as error:
                # An unknown option is taken away, to find further ones. What else is wrong may follow from that.
                name = getattr(error, "option_name", None)
                place = next((i for i, arg in enumerate(taken) if arg.partition("=")[0] == name), None)
                if place is None and not refused and not unknown:
                    raise
                if place is None:
                    break
                unknown.append(error)
                del taken[place]
        if len(unknown) == 1 and not refused:
            raise unknown[0]
        if refused or unknown:
            raise ValueError("\n".join([*refused, *(error.format_message() for error in unknown)]))
        return parsed

    def answer_to(self, name: str) -> ForeignArgument | None:
        """What is said of an option that this command lacks; name: as an argument in Python."""
        return SERVER_ARGUMENTS.get(name) or ENGINE_ARGUMENTS.get(name)

    def place_of(self, name: str) -> str:
        """Where an argument belongs that this command lacks; empty if it is another engine's."""
        if name in _of_serve():
            return "this command lacks it; `nanovllm serve` has it, and in Python LLM(...)"
        if name not in _SAMPLING:
            return ""
        if self.name == "serve":
            return f"use {_FIELD.format(name)}"
        return "this command lacks it; in Python SamplingParams has it, and requests to `nanovllm serve`"

    def _without_foreign(self, args: list[str], known: Mapping[str, Any], refused: list[str]) -> Iterator[str]:
        """The arguments without the options of other engines. As for vLLM, `--max_model_len` is `--max-model-len`.

        Args:
            refused: takes a line for each option that is not supported, has another name here, or only another
                command has.
        """
        rest = iter(range(len(args)))
        for i in rest:
            given, equals, value = re.sub(r"^-O(\d)$", r"--optimization-level=\1", args[i]).partition("=")
            given = given if given in known else _SHORT.get(given, given)
            if given not in known and given.replace("_", "-") in known:
                given = given.replace("_", "-")
            name = given.removeprefix("--").replace("-", "_")
            asked = name.partition(".")[0]  # --some-config.entry sets an entry of --some-config
            off = asked.startswith("no_") and self.answer_to(asked) is None
            argument = self.answer_to(asked.removeprefix("no_") if off else asked)
            if given == "--":
                yield from args[i:]
                return
            here = any(p.name == name.removeprefix("no_") for p in known.values())
            elsewhere = "" if here or not given.startswith("--") else self.place_of(name.removeprefix("no_"))
            if given in known or not given.startswith("--") or argument is None and not elsewhere:
                yield given + equals + value
                continue
            flag = off or name in _FLAGS or name.startswith(_ARE_FLAGS) and name not in _HAVE_VALUES
            if not equals and not flag and i + 1 < len(args) and not args[i + 1].startswith("-"):
                value = args[next(rest)]
                if name in _HAVE_SEVERAL:
                    for _ in _further_values(args, i + 2):
                        next(rest)
            if elsewhere or argument is None:
                refused.append(f"{given}: {elsewhere}")
            elif not argument.is_harmless(_parsed(value) if value else not off):
                refused.append(f"{given}: {_as_options(argument.answer, known)}")
            else:
                why = argument.answer.partition("; leave it out")[0]  # a value without effect may stay
                say(f"{given} has no effect: {_as_options(why, known)}", sys.stderr)

    def get_help(self, ctx: Any) -> str:
        """The help text. Of an argument that may be repeated it has the type of one value: PROMPT... <str>."""
        text = super().get_help(ctx)
        return re.sub(r"(\w+) <list\[(\w+)\]>", lambda m: f"{m[1]}... <{m[2]}>".ljust(len(m[0])), text)


class BenchCommand(EngineCommand):
    """`nanovllm bench serve`, which knows the options of `vllm bench serve`."""

    def answer_to(self, name: str) -> ForeignArgument | None:
        return BENCH_ARGUMENTS.get(name)

    def place_of(self, name: str) -> str:
        return ""


def _of_serve() -> frozenset[str]:
    """The arguments of `LLM` that `nanovllm serve` has as options."""
    from nanovllm.cli.serve_options import EngineOptions

    return frozenset(field.name for field in fields(EngineOptions))


def _further_values(args: list[str], begin: int) -> list[str]:
    """The words from `begin` to the next option. A word that may be the model is none, unless the model came first."""
    words = list(takewhile(lambda word: not word.startswith("-"), args[begin:]))
    return (
        words if not args[0].startswith("-") else list(takewhile(lambda word: re.fullmatch(r"[\d,.-]+", word), words))
    )


def _with_each_name(args: list[str]) -> list[str]:
    """`MODEL --served-model-name a b`, as vLLM takes it, with the option before each name."""
    if not (args and not args[0].startswith("-") or {"-m", "--model"} & set(args)):
        return args  # a word without an option may be the model
    found: list[str] = []
    names = 0
    for arg in args:
        given = arg.startswith("-")
        names = int(arg in ("--served-model-name", "--served_model_name")) if given else names and names + 1
        found += ["--served-model-name", arg] if names > 2 else [arg]
    return found


def _parsed(value: str) -> Any:
    """A number, a JSON value, or the text."""
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _as_options(answer: str, known: Mapping[str, Any]) -> str:
    """The answer with the names of this command's options as they are typed.

    It also says where to give an argument for which only `nanovllm serve` has an option.
    """
    from nanovllm.cli import serve_options as serve

    options = {name: _FIELD.format(name) for name in _SAMPLING} | {
        p.name: p.opts[0] for p in known.values() if p.opts[0].startswith("--")
    }
    records = serve.EngineOptions, *serve.OTHER_RECORDS
    names = [f.name for record in records for f in fields(record)]
    elsewhere = {name: f"--{name.replace('_', '-')}" for name in names if name not in options}
    for named in (options, elsewhere):
        if "kernels" in named:
            named["kernel_priority"] = named["kernels"]
    elsewhere |= {f"{name}=False": f"--no-{option[2:]}" for name, option in elsewhere.items()}
    options |= {f"{p.name}=False": p.secondary_opts[0] for p in known.values() if p.secondary_opts}
    lacking: list[str] = []

    def typed(word: re.Match[str]) -> str:
        if word[0] in elsewhere and word[0] not in options:
            lacking.append(word[0])
        return options.get(word[0]) or elsewhere.get(word[0]) or word[0]

    answer = re.sub(r"(?<=use )\w+(=False)?|\b\w+_\w+\b|\bquantization(?==)", typed, answer)
    answer = re.sub(r'--kernels=\{"(\w+)": \["(\w+)"\]\}', r'--kernels "\1=\2"', answer)
    answer = re.sub(r"(--[\w-]+)=(\{.*?\})", r"\1 '\2'", answer)
    answer = re.sub(r'(--[\w-]+)="(\w+)"( or )"(\w+)"', r"\1 \2\3\4", answer)
    answer = re.sub(r'(--[\w-]+)="(\w+)"', r"\1 \2", answer)
    if lacking:
        answer += f" (`nanovllm serve` has {' and '.join(elsewhere[name] for name in dict.fromkeys(lacking))}"
        answer += ", and LLM in Python)" if {name.removesuffix("=False") for name in lacking} <= _of_serve() else ")"
    return answer

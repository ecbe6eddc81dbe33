"""Options of vLLM's and SGLang's servers, given to `nanovllm serve` and to the commands that load a model."""

import re
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from nanovllm.cli import app
from nanovllm.cli.foreign_options import SERVER_ARGUMENTS
from nanovllm.config import EngineConfig
from nanovllm.foreign_arguments import ENGINE_ARGUMENTS

serve = typer.main.get_command(app).get_command(None, "serve")


def parsed(line: str) -> dict:
    """The options that the command gets which are not its defaults."""
    with serve.make_context("serve", line.split()) as given, serve.make_context("serve", []) as default:
        return {name: value for name, value in given.params.items() if value != default.params[name]}


@pytest.mark.parametrize(
    "line, given, said",
    [
        ("MODEL -tp 2", {"positional": "MODEL", "tensor_parallel_size": 2}, ""),
        ("--tp=2 -q fp8", {"tensor_parallel_size": 2, "quantization": "fp8"}, ""),
        ("--swap-space 4 MODEL", {"positional": "MODEL"}, "--swap-space has no effect: a preempted sequence"),
        ("--swap-space=4 --port 1", {"port": 1}, "--swap-space has no effect"),
        ("--trust-remote-code MODEL", {"positional": "MODEL"}, "has no effect: code of a checkpoint is never run"),
        ("--disable-log-requests MODEL", {"positional": "MODEL"}, "--disable-log-requests has no effect"),
        ("--no-enable-lora MODEL", {"positional": "MODEL"}, "--no-enable-lora has no effect: LoRA is not supported"),
        ("--enable-auto-tool-choice --tool-call-parser hermes MODEL", {"positional": "MODEL"}, "by the chat template"),
        ("--reasoning-parser qwen3", {}, "--reasoning-parser has no effect: reasoning is found by the chat template"),
        ("--exclude-tools-when-tool-choice-none MODEL", {"positional": "MODEL"}, "the tools"),
        ("--aggregate-engine-logging MODEL", {"positional": "MODEL"}, "has no effect: there is one line of statistics"),
        ("--stream-interval 10 MODEL", {"positional": "MODEL"}, "has no effect: the engine handles each token as it"),
        (
            "--uvicorn-log-level info MODEL",
            {"positional": "MODEL"},
            "the level of the server's own logs is --log-level",
        ),
        ("--renderer-num-workers 2", {}, "prompts are tokenised by the API process; use --api-servers for more"),
        ("--max-num-partial-prefills 2", {}, "in the order of their arrival, up to --max-num-batched-tokens"),
        ("--disable-custom-all-reduce", {}, "the op all_reduce sums over GPUs, and --kernels chooses its kernel"),
        ("--max-seq-len-to-capture 8192", {}, "has no effect: CUDA graphs are for sequences of every length"),
        ("--kv-cache-metrics", {}, "has no effect: there are no further metrics"),
        ("--enable-prompt-tokens-details", {}, "has no effect: usage always has the cached tokens of the prompt"),
        ("--disable-log-requests", {}, "has no effect: requests are not logged unless --access-log is given"),
        ("--disable-access-log-for-endpoints /health MODEL", {"positional": "MODEL"}, "has no effect: requests"),
        ("-O3 MODEL", {"positional": "MODEL"}, "--optimization-level has no effect: models are not compiled"),
        ("-pp 1 --no-enforce-eager", {}, "--pipeline-parallel-size has no effect"),
        ("--max_model_len 300 --served_model_name=x_y", {"max_model_len": 300, "served_model_name": ["x_y"]}, ""),
        ("--max-model-len 8k --max-num-batched-tokens=2K", {"max_model_len": 8000, "max_num_batched_tokens": 2048}, ""),
        ("--max-model-len auto MODEL", {"positional": "MODEL"}, ""),  # the default
        ("--max-model-len -1", {}, ""),
        ("--root-path /llm MODEL", {"positional": "MODEL"}, "--root-path has no effect: no answer has an absolute"),
        ("-m x.gguf -fa on --no-mmap --jinja", {"model": "x.gguf"}, "--no-mmap has no effect: the engine decides"),
        ("-- --swap-space", {"positional": "--swap-space"}, ""),
        (
            "MODEL --served-model-name a b --port 1",
            {"positional": "MODEL", "served_model_name": ["a", "b"], "port": 1},
            "",
        ),
        ("--served-model-name a MODEL", {"positional": "MODEL", "served_model_name": ["a"]}, ""),
        ("--async-scheduling MODEL", {"positional": "MODEL"}, "asynchronously on a GPU by itself"),
        ("--metrics MODEL", {"positional": "MODEL"}, "--metrics has no effect: the route /metrics is always there"),
        ("--cudagraph-capture-sizes 1 2 --port 1", {"port": 1}, "has no effect: the sizes of CUDA graphs follow"),
        ("--cudagraph-capture-sizes 1 2 MODEL", {"positional": "MODEL"}, "--cudagraph-capture-sizes has no effect"),
        ("MODEL --ignore-patterns a b", {"positional": "MODEL"}, "--ignore-patterns has no effect"),
        ("--ignore-patterns a MODEL", {"positional": "MODEL"}, "--ignore-patterns has no effect"),
        ("--kv-offloading-backend lmcache", {}, "stays on the device; use --kv-cache-dtype fp8 for a smaller one"),
        ("--chat-template-content-format openai MODEL", {"positional": "MODEL"}, "a message's content are joined"),
        ("--enable-tokenizer-info-endpoint MODEL", {"positional": "MODEL"}, "has no effect: there are no such routes"),
        ("--trust-request-chat-template MODEL", {"positional": "MODEL"}, "a request cannot contain a chat template"),
        ("--structured-outputs-config.backend xgrammar", {}, "--structured-outputs-config.backend has no effect: out"),
        ("--code-revision x MODEL", {"positional": "MODEL"}, "has no effect: code of a checkpoint is never run"),
        ("--runner generate", {}, "--runner has no effect: the engine generates text\n"),
        ("--dcp 1 --ep 1", {}, "--decode-context-parallel-size has no effect"),
        ("MODEL --backend pytorch", {"positional": "MODEL"}, "--backend has no effect: there is one engine"),
    ],
)
def test_options_without_effect_are_taken_with_a_line(line, given, said, capsys):
    assert parsed(line) == given
    error = capsys.readouterr().err
    assert said in error and bool(error) == bool(said)


@pytest.mark.parametrize(
    "line, said",
    [
        ("--enable-lora", "--enable-lora: LoRA is not supported; merge the adapter into the weights"),
        ("--nnodes 2 --node-rank 1", "--nnodes: a model runs on one machine"),
        ("-pp 2", "--pipeline-parallel-size: a model is split by --tensor-parallel-size alone"),
        ("--block-size 16", "--block-size: use --kvcache-block-size"),
        ("--context-length=4096", "--context-length: use --max-model-len"),
        ("--disable-radix-cache", "--disable-radix-cache: use --no-enable-prefix-caching"),
        ("--api-server-count 2", "--api-server-count: use --api-servers"),
        ("--model-path X", "--model-path: use --model"),
        ("-c 4096", "--ctx-size: use --max-model-len"),
        ("-np 4", "--parallel: use --max-num-seqs"),
        ("-a name", "--alias: use --served-model-name"),
        ("-t 4", "--threads: set the environment variable NANOVLLM_CPU_THREADS"),
        ("-ngl 99", "--n-gpu-layers: all layers are on one device; use --device"),
        ("--cache-type-k q8_0", "--cache-type-k: use --kv-cache-dtype"),
        ("-n 5", "--n-predict: use the field max_tokens of each request"),
        ("-p hi", "--prompt: pass the text without an option: nanovllm generate TEXT"),
        (
            "--attention-backend X MODEL",
            '--attention-backend: kernels are chosen for each op; use --kernels "attention_prefill=flash_attn", for',
        ),
        ("--hf-config-path x", "--hf-config-path: the model's own config.json is read; use --hf-overrides, or put"),
        (
            "--load-in-4bit",
            "--load-in-4bit: quantised checkpoints need no argument; pass --quantization fp8 or int4 to",
        ),
        ("--rope-scaling {}1", "--rope-scaling: use --hf-overrides '{...}'"),
        ("--no-use-cudagraph", "--no-use-cudagraph: CUDA graphs are captured on a GPU; use --enforce-eager for none"),
        ("--disable-frontend-multiprocessing", "--disable-frontend-multiprocessing: use --in-process"),
        ("--grpc MODEL", "--grpc: there is no interface for gRPC"),
        ("--kv-cache-memory 1G", "--kv-cache-memory: the KV cache is sized by --gpu-memory-utilization or"),
        ("--shutdown-timeout 30", "--shutdown-timeout: use --drain"),
        ("--distributed-timeout-seconds 9", "--distributed-timeout-seconds: use --rank-timeout"),
        ("--h11-max-header-count 200", "--h11-max-header-count: a request may have 128 headers of 64 KiB together"),
        ("-hf org/model", "--hf-repo: use --model"),
        ("--kv-offloading-size 3", "--kv-offloading-size: the KV cache stays on the device; use --kv-cache-dtype fp8"),
        ("--log-config-file x", "--log-config-file: use --log-level, --log-json or --access-log"),
        ("--skip-tokenizer-init", "--skip-tokenizer-init: this command needs the tokenizer; in Python use LLM("),
        ("--speculative-config.model x", "--speculative-config.model: speculative decoding is not supported"),
        ("--dcp 2", "--decode-context-parallel-size: a model is split by --tensor-parallel-size alone"),
        ("--max_num_tokens 4", "--max_num_tokens: use --max-num-batched-tokens"),
        (
            "--kv_cache_free_gpu_memory_fraction 0.8",
            "--kv_cache_free_gpu_memory_fraction: use --gpu-memory-utilization",
        ),
        ("--extra_llm_api_options x", "--extra_llm_api_options: options are read from the command line alone"),
        ("-b 512", "--batch-size: use --max-num-batched-tokens"),
        ("--top-k 3", "--top-k: use the field top_k of each request"),
        ("-n 5 --temp 0", "--n-predict: use the field max_tokens of each request\n--temp: use the field temperature"),
        ("--speculative-config {}1", "--speculative-config: speculative decoding is not supported"),
    ],
)
def test_options_that_are_not_supported_say_why(line, said):
    with pytest.raises(ValueError) as error:
        parsed(line)
    assert str(error.value).startswith(said)


def answers(command, capsys):
    """(the option of another engine, what the command says of it) of all that `LLM` and the servers know."""
    answered = typer.main.get_command(app).get_command(None, command)
    for name in {**ENGINE_ARGUMENTS, **SERVER_ARGUMENTS}:
        option = f"--{name.replace('_', '-')}"
        try:
            answered.make_context(command, ["TEXT", f"{option}=some"], resilient_parsing=True).close()
        except ValueError as error:
            yield option, str(error)
        else:
            yield option, capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_answers_name_options_that_there_are(command, capsys):
    """An argument in Python is the command's option, or one of `nanovllm serve`, which the answer says."""
    params = typer.main.get_command(app).get_command(None, command).params
    has = {name for p in params for name in (*p.opts, *p.secondary_opts)}
    of_serve = {name for p in serve.params for name in (*p.opts, *p.secondary_opts)} - has
    in_python = {p.name for p in serve.params if p.name != "positional"} | {f.name for f in fields(EngineConfig)}
    in_python = {name for name in in_python if "_" in name}
    said = dict(answers(command, capsys))
    assert len(said) > 200
    for text in said.values():
        answer = text.partition(":" if ": " in text else "=")[2]
        assert not in_python & set(re.findall(r"(?<![\w`(])\w+_\w+", answer)), text
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", answer))
        if missing := (named - has) & of_serve:
            assert "`nanovllm serve" in answer, (missing, text)
        assert named <= has | of_serve | {"--profile"}, text


@pytest.mark.parametrize(
    "line, said",
    [
        ("generate -p hi -n 8 --temp 0", "--prompt: pass the text without an option: nanovllm generate TEXT\n"
         "--n-predict: use --max-tokens\n--temp: use --temperature"),
        ("generate -f prompt.txt", "--file: use - as the text, which then comes from standard input"),
        ("generate hi --ignore-eos", "--ignore-eos: this command lacks it; in Python SamplingParams has it"),
        ("chat --repeat-penalty 1.1", "--repeat-penalty: use --repetition-penalty"),
        ("chat --distributed-timeout-seconds 9",
         "--distributed-timeout-seconds: use --rank-timeout (`nanovllm serve` has --rank-timeout, and LLM in Python)"),
        ("bench serve --base-url http://x", "--base-url: pass the address without an option: nanovllm bench serve"),
        ("bench serve URL --num-prompts 4 --request-rate 2",
         "--num-prompts: use --num-requests\n--request-rate: use --rate"),
        ("bench serve URL --save-result", "--save-result: use --json"),
        ("bench serve http://x/v1/chat/completions", "url='http://x/v1/chat/completions': leave out the route"),
    ],
)  # fmt: skip
def test_options_of_other_programs_say_what_to_type(line, said):
    done = CliRunner().invoke(app, line.split())
    assert str(done.exception).startswith(said)


@pytest.mark.parametrize(
    "line, said",
    [
        ("run model.gguf", "No such command 'run'; use nanovllm chat --model MODEL"),
        ("pull model", "No such command 'pull'; --model takes a directory"),
        ("bench latency --model x", "No such command 'bench latency'; use python bench.py in a clone"),
        ("collect-env", "No such command 'collect-env'; docs/faq.md has a command"),
    ],
)
def test_commands_of_other_programs_say_what_to_type(line, said):
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize("command", ["", "generate ", "kernels list "])
def test_a_short_option_shows_the_help(command):
    done = CliRunner().invoke(app, f"{command}-h".split())
    assert done.exit_code == 0 and done.output.startswith("Usage:") and "-h, --help" in done.output


def test_other_unknown_options_name_the_nearest():
    result = CliRunner().invoke(app, ["serve", "--max-num-seq", "3"])
    assert result.exit_code == 2 and "--max-num-seqs" in result.output
    assert not set(SERVER_ARGUMENTS) & {p.name for p in serve.params}


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_an_option_that_the_command_has_is_not_said_to_be_lacking(command):
    result = CliRunner().invoke(app, [command, "--no-max-model-len"])
    assert result.exit_code == 2 and "No such option: --no-max-model-len" in result.output
    result = CliRunner().invoke(app, [command, "--max_model_len=x"])
    assert result.exit_code == 2 and "'--max-model-len': 'x': expected a whole number; write such as" in result.output
    result = CliRunner().invoke(app, [command, "--max-model-len", "25.6K"])
    assert result.exit_code == 2 and "'25.6K': no decimals before K and M" in result.output


def test_generate_and_chat_know_them_too():
    for command in (["generate", "hi"], ["chat"]):
        result = CliRunner().invoke(app, [*command, "--enable-lora"])
        assert str(result.exception) == "--enable-lora: LoRA is not supported; merge the adapter into the weights"


@pytest.mark.parametrize("command", ["generate hello", "chat"])
@pytest.mark.parametrize("option", ["--gpu-memory-utilization 0.5", "--max-num-seqs=3", "--no-enable-prefix-caching"])
def test_an_option_that_serve_alone_has_is_named(command, option):
    done = CliRunner().invoke(app, f"{command} {option}".split())
    name = option.split()[0].partition("=")[0]
    assert str(done.exception) == f"{name}: this command lacks it; `nanovllm serve` has it, and in Python LLM(...)"


def test_all_wrong_options_of_a_line_are_named_at_once():
    """Those of other engines and those that nobody knows; the values of unknown options are not looked at."""
    line = "serve --enable-lora --quantisation fp8 --kv-cache-dtyp=fp8 --data-parallel-size 2 --api-key x"
    said = str(CliRunner().invoke(app, line.split()).exception).splitlines()
    assert [words.split(":")[0] for words in said[:2]] == ["--enable-lora", "--data-parallel-size"]
    assert [re.search("--[a-z-]+", words)[0] for words in said[2:]] == ["--quantisation", "--kv-cache-dtyp"]
    assert "--quantization" in said[2]
    one = CliRunner().invoke(app, "serve MODEL --quantisation fp8 --port many".split())
    assert one.exit_code == 2 and "No such option: --quantisation" in one.output and "Usage: " in one.output

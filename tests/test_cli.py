"""The console command, as a user runs it: in a process of its own, or where that shows nothing more, in this one."""

import io
import json
import re
import signal
import subprocess
import sys

import pytest
import torch

from nanovllm.console import StatusLine
from nanovllm.kernels import all_ops
from nanovllm.outputs import CompletionOutput, RequestOutput
from tests import tiny
from tests.commands import ROOT, Terminal, run, run_here


def test_version_and_help():
    assert run("--version").stdout.startswith("nanovllm 0.")
    listed = re.findall(r"^\W*(\w+) {2,}\w", run_here("--help").stdout.split("Commands")[1], re.MULTILINE)
    expected = "chat generate serve bench kernels plan fuse tune lab device"
    assert [name for name in listed if name.islower()] == expected.split()


def test_generate_and_chat(smollm2_path, monkeypatch):
    done = run("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.startswith(" Paris") and done.stderr == ""
    for stream, greeting, end in ((io.StringIO, "The", "\n"), (Terminal, "Say something.", "\n\n> \n")):
        monkeypatch.setattr("sys.stdin", stream("What is the capital of France?\n"))  # then Ctrl-D
        done = run_here("chat", "--max-tokens", "12", "--temperature", "0", terminal=stream is Terminal)
        assert done.returncode == 0 and "Paris" in done.stdout and done.stdout.startswith(greeting)
        assert done.stdout.endswith(end) and (">" in done.stdout) == (stream is Terminal)


def test_a_prompt_comes_from_standard_input(smollm2_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is\n"))
    done = run_here("generate", "-", "--max-tokens", "4", "--temperature", "0", "--top-k", "5", "--min-p", "0.1")
    assert done.returncode == 0 and done.stdout.startswith(" Paris")
    done = run_here("generate", "x", "--top-k", "-5", "--repetition-penalty", "0")
    assert done.returncode == 1 and "--top-k=-5: must be" in done.stderr


def test_a_prompt_that_is_refused_has_no_heading(smollm2_path):
    done = run_here("generate", "")
    assert done.returncode == 1 and "the prompt is empty" in done.stderr and done.stdout == ""


def test_an_empty_completion_is_explained(smollm2_path):
    full, empty = "The capital of France is", "What is the capital of France?"
    for prompts in ([empty], [full, empty]):
        done = run_here("generate", *prompts, "--max-tokens", "2", "--temperature", "0")
        assert done.returncode == 0 and "a completion is empty" in done.stderr and "`nanovllm chat`" in done.stderr


def test_what_is_missing_or_cannot_be_read_names_the_option_the_value_and_what_is_expected():
    for command, said in [
        ("generate x --max-tokens five", "Invalid value for '--max-tokens': 'five': expected an integer"),
        ("plan gemm --m 1.5", "Invalid value for '--m': '1.5': expected an integer"),
        ("generate x --temperature warm", "Invalid value for '--temperature': 'warm': expected a number"),
        ("kernels verify --jobs 0", "Invalid value for '--jobs': '0': expected at least 1"),
        ("generate", "Missing argument 'PROMPT'. One or more prompts, completed together; - is standard input."),
        ("kernels why", "Missing argument 'OP'. The name of an op; `nanovllm kernels list` shows all."),
        ("plan gemm", "Missing option '--m'. Rows of x: tokens."),
    ]:
        done = run_here(*command.split())
        assert done.returncode == 2 and done.stderr.endswith(f"\nError: {said}\n"), done.stderr


def test_an_op_whose_plugin_was_forgotten_is_told_of_the_option():
    for name, said in [
        ("mine_alone", "unknown op 'mine_alone'; `nanovllm kernels list` shows all ops; an op of yours"),
        ("rmsnorm", "did you mean 'rms_norm'?"),
    ]:
        for command in ("why", "list", "verify", "bench", "show"):
            done = run_here("kernels", command, name)
            assert done.returncode == 1 and said in done.stderr, done.stderr
            proposal = " An" if said.endswith("?") else "; an"
            assert done.stderr.endswith(f"{proposal} op of yours needs --kernel-plugin FILE\n"), done.stderr


def test_an_argument_that_may_be_repeated_has_the_type_of_one_value():
    shown = run_here("generate", "--help").stdout
    assert "  PROMPT... <str>     One or more prompts" in shown and "list[" not in shown


def test_errors_of_the_example_name_its_options():
    for option, value, said in [
        ("--max-tokens", "0", "must be at least 1"),
        ("--model", "./none", "is no local directory"),
    ]:
        done = run_here(option, value, script="example.py")
        assert done.returncode == 1 and done.stderr.startswith(
            f"example.py: {option}={value}".replace("./none", "'./none'")
        )
        assert said in done.stderr and done.stderr.count("\n") == 1 and "None" not in done.stderr


def test_what_a_user_can_mend_is_one_line(tmp_path):
    tiny.save(tmp_path / "tiny")
    for args, said in [
        (("--model", str(tmp_path)), "holds no config.json"),
        (("--model", str(tmp_path / "tiny")), "holds no tokenizer"),
        (("--dtype", "bf"), "--dtype='bf': must be one of auto"),
        (("--prompt-activations", "int8"), "--prompt-activations='int8': must be one of auto, fp8"),
        (
            ("--prompt-activations", "fp8", "--device", "cpu"),
            "--prompt-activations='fp8': needs a GPU with fp8 tensor cores",
        ),
        (("--cpu-activations", "int4"), "--cpu-activations='int4': must be one of float32, int8, bfloat16"),
        (("--expand-small-weights", "on"), "--expand-small-weights='on': must be one of auto, off"),
        (("--max-tokens", "0"), "--max-tokens=0: must be at least 1\n"),
        (("--model", "./none"), "--model='./none' is no local directory or .gguf file; pass"),
        (("--model", "none/such"), "nanovllm: --model='none/such' is no local directory"),
        (("--device", "tpu"), "--device='tpu'"),
        (("--max-model-len", "0"), "--max-model-len=0: must"),
        (("--temperature", "-1"), "--temperature=-1.0: must be at least 0"),
        (("--top-p", "2"), "--top-p=2.0"),
    ]:
        done = run_here("generate", "x", *args)
        assert done.returncode == 1 and done.stderr.startswith("nanovllm: ") and said in done.stderr
        assert "Traceback" not in done.stderr


def test_kernels_list():
    rows = json.loads(run_here("kernels", "list", "--device", "cpu", "--json", "-").stdout)
    assert {r["op"] for r in rows} == set(all_ops())
    for name, op in all_ops().items():
        (chosen,) = [r for r in rows if r["op"] == name and r["chosen"]]
        compiled = (op.providers[p] for p in ("cpu", "onednn") if p in op.providers)
        runs = (p.name for p in compiled if p.preferred != "nowhere" and p.support(torch.device("cpu")) is None)
        assert chosen["provider"] == next(runs, "native") and chosen["reason"] is None
    assert any("need a CUDA device" in (r["reason"] or "") for r in rows if r["provider"] == "triton")


TABLES = {
    "kernels list": "rms_norm",
    "kernels list attention": "native",
    "kernels list --wide": "sm_80+",
    "kernels why attention_decode": "native",
    "kernels verify softmax --provider native --timeout 0 --quick": "right",
    "kernels bench silu_and_mul --device cpu": "native",
    "kernels bench silu_and_mul --device cpu --wide": "p20-p80",
    "device": "nvidia-b200",
    "device --wide": "nvidia-b200",
    "device --gpu h200": "132",
    "plan gemm --m 64 --n 3072 --k 1024": "configuration",
    "plan attention --query 1 --context 1024": "configuration",
    "plan elementwise --elements 1000000": "configuration",
    "plan reduction softmax --rows 64 --size 1024": "configuration",
    "tune rms_norm --dry-run": "rms_norm",
    "tune --list": "rms_norm",
    **{f"{command} --help": "Usage" for command in ("chat", "generate", "serve", "plan", "fuse", "tune")},
    **{"--help": "kernels", "kernels --help": "verify", "kernels verify --help": "--seed", "lab --help": "gelu"},
}  # fmt: skip
"""Commands with tables, and a word that each shows."""


@pytest.mark.parametrize("command", TABLES)
def test_tables_fit_80_columns_and_cut_nothing(command):
    printed = run_here(*command.split()).stdout
    lines = [line for line in printed.splitlines() if not line.endswith(".")]  # a sentence may wrap
    assert len(lines) > 2 and "\u2026" not in printed and TABLES[command] in printed
    assert "--wide" in command or max(map(len, lines)) <= 80, max(lines, key=len)
    assert command != "kernels --help" or not re.search(r"^\W*table\b", printed, re.MULTILINE)  # it is for the docs


def test_a_closed_pipe_and_ctrl_c_leave_no_traceback():
    program = [sys.executable, "-m", "nanovllm", "--help"]
    pipe = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipe.stdout.close()
    assert pipe.stderr.read() == "" and pipe.wait() == 0
    bench = [sys.executable, "-u", "-m", "nanovllm", "kernels", "bench", "--device", "cpu"]
    process = subprocess.Popen(bench, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert "native" in first[3] and "Traceback" not in out + err and "stopped early" in err
    assert process.returncode == 130


@pytest.mark.parametrize("prompts, terminal, out, err", [
    (["x"], True, "\n> x\nsome [cut short]\n", ""),
    (["x"], False, "some\n", "nanovllm: cut short\n"),  # the completion alone
    (["x", "y"], True, "\n> x\nsome [cut short]\n\n> y\nsome [cut short]\n", ""),
    (["x", "y"], False, "> x\nsome [cut short]\n\n> y\nsome [cut short]\n", ""),
])  # fmt: skip
def test_generate_shows_what_there_is_at_ctrl_c_and_ends_as_shells_have_it(prompts, terminal, out, err, monkeypatch):
    class Interrupted:
        def __init__(self, model, **arguments):
            pass

        def generate(self, prompts, params):
            interrupt = KeyboardInterrupt()
            interrupt.outputs = [RequestOutput("0", p, [1], [CompletionOutput(0, "some", [2])], False) for p in prompts]
            raise interrupt

        def stream(self, prompt, params):
            yield "some"
            raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.LLM", Interrupted, raising=False)
    done = run_here("generate", "--model", "it", *prompts, terminal=terminal)
    shown = re.sub(r"\r\x1b\[2K((Loading it|Computing the first token) \.\.\.)?", "", done.stderr)
    assert (done.returncode, done.stdout, shown) == (130, out, err)


def test_generate_leaves_the_status_line_to_the_engine_which_says_what_it_loads(monkeypatch):
    shown = []

    class Loading:
        def __init__(self, model, **arguments):
            shown.append(StatusLine.current)  # an engine shows nothing where a line is shown already

        def stream(self, prompt, params):
            yield "some"

    monkeypatch.setattr("nanovllm.LLM", Loading, raising=False)
    done = run_here("generate", "--model", "it", "x", terminal=True)
    assert shown == [None] and "Loading it ..." in done.stderr and "some" in done.stdout


def test_kernels_list_finds_a_function_that_does_not_exist(monkeypatch, capsys):
    from nanovllm.cli.kernels import list_kernels
    from nanovllm.kernels import Provider, rms_norm

    for name, module in (("lost", "op.availability"), ("nowhere", "nowhere")):
        monkeypatch.setitem(rms_norm.providers, name, Provider(name, f"nanovllm.kernels.{module}:rms_norm"))
    list_kernels("rms_norm", device="cpu", json_file="-")
    reasons = {row["provider"]: row["reason"] for row in json.loads(capsys.readouterr().out)}
    assert reasons["lost"].startswith("nanovllm.kernels.op.availability has no function 'rms_norm'")
    assert reasons["native"] is None and reasons["nowhere"] == "No module named 'nanovllm.kernels.nowhere'"


@pytest.mark.parametrize(
    "command",
    ["kernels list", "kernels why softmax", "kernels verify softmax", "kernels bench softmax", "generate x", "chat"],
)
def test_a_plugin_that_cannot_be_loaded_is_an_error(command):
    done = run_here(*command.split(), "--kernel-plugin", "missing.py")
    said = r"^nanovllm: kernel plugin .*missing.py: there is no such file$"
    assert done.returncode == 1 and re.search(said, done.stderr, re.M)


def test_a_provider_that_raises_is_a_row_of_bench_and_the_exit_code_1(tmp_path):
    plugin, head = tmp_path / "raises.py", "from nanovllm.kernels import softmax\n"
    plugin.write_text(head + "@softmax.provider('raises')\ndef f(x):\n    raise OSError('no')\n")
    done = run_here("kernels", "bench", "softmax", "--shape", "2x8", "--kernel-plugin", str(plugin))
    assert done.returncode == 1 and re.search(r"^ +raises \[\d\]$", done.stdout, re.M) and "OSError: no" in done.stdout


def test_every_command_takes_the_short_names_of_dtypes():
    from nanovllm.cli.kernels_common import dtype_of

    assert [dtype_of(name) for name in ("bf16", "fp16", "fp32")] == [torch.bfloat16, torch.float16, torch.float32]
    for command in (
        "fuse --dtype bf16 --iters 0",
        "lab gelu --dtype fp32 --sizes x",
        "tune --dry-run rms_norm --dtype bf16",
    ):
        assert "--dtype" not in run_here(*command.split()).stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", ["example.py", "test_custom_kernels.py"])
def test_programs_end_without_a_traceback(program, smollm2_path):
    """At Ctrl-C with what there is, and when the reader of a pipe has gone."""
    command = [sys.executable, "-u", str(ROOT / program)]
    command += ["--max-tokens", "2000"] if program == "example.py" else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert first and process.returncode == 130 and err.endswith(f"{program}: interrupted\n"), err
    assert "Traceback" not in out + err and (program != "example.py" or out.count("[cut short]") in (0, 3))
    process = subprocess.Popen(command[:3], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.readline()
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait(timeout=300) == 0


@pytest.mark.parametrize("program", ["example.py", "bench.py", "test_custom_kernels.py"])
def test_the_help_of_a_script_fits_80_columns(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # one of them sets it for its process, which is this one
    done = run_here("--help", script=program)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80

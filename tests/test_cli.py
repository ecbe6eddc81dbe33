"""The console command, as a user runs it: in a process of its own, or where that shows nothing more, in this one."""

import contextlib
import io
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from nanovllm.cli import main
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.registry import temporary
from nanovllm.outputs import CompletionOutput, RequestOutput
from tests import tiny
from tests.providers import registered

ROOT = Path(__file__).resolve().parents[1]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "nanovllm", *args], capture_output=True, text=True, timeout=120)


def run_here(*args: str, script: str | None = None) -> subprocess.CompletedProcess:
    """As `run`, or the script at the root, but for the start of a process, which takes seconds. No plugin stays."""
    before, streams = sys.argv, (io.StringIO(), io.StringIO())
    sys.argv, code = [script or "nanovllm", *args], 0
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]), temporary():
            runpy.run_path(str(ROOT / script), run_name="__main__") if script else main()
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(args, code, *(stream.getvalue() for stream in streams))


def test_version_and_help():
    assert run("--version").stdout.startswith("nanovllm 0.")
    listed = re.findall(r"^\W*(\w+) {2,}\w", run_here("--help").stdout.split("Commands")[1], re.MULTILINE)
    expected = "chat generate serve bench kernels plan fuse tune lab device"
    assert [name for name in listed if name.islower()] == expected.split()


def test_generate_and_chat(smollm2_path, monkeypatch):
    done = run("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0 and "> The capital of France is\n Paris" in done.stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?\n\n"))
    done = run_here("chat", "--max-tokens", "12", "--temperature", "0")
    assert done.returncode == 0 and "Paris" in done.stdout
    monkeypatch.setattr("sys.stdin", io.StringIO())  # Ctrl-D
    assert run_here("chat").stdout.endswith("> \n")


def test_a_prompt_that_is_refused_has_no_heading(smollm2_path):
    done = run_here("generate", "")
    assert done.returncode == 1 and "the prompt is empty" in done.stderr and done.stdout == ""


def test_an_empty_completion_is_explained(smollm2_path):
    full, empty = "The capital of France is", "What is the capital of France?"
    for prompts in ([full], [empty], [full, empty]):
        done = run_here("generate", *prompts, "--max-tokens", "2", "--temperature", "0")
        assert done.returncode == 0
        assert ("a completion is empty" in done.stderr) == ("`nanovllm chat`" in done.stderr) == (empty in prompts)


def test_what_is_missing_or_cannot_be_read_names_the_option_the_value_and_what_is_expected():
    for command, said in [
        ("generate x --max-tokens five", "Invalid value for '--max-tokens': 'five': expected an integer"),
        ("plan gemm --m 1.5", "Invalid value for '--m': '1.5': expected an integer"),
        ("generate x --temperature warm", "Invalid value for '--temperature': 'warm': expected a number"),
        ("kernels verify --jobs 0", "Invalid value for '--jobs': '0': expected at least 1"),
        ("generate", "Missing argument 'PROMPT'. One or more prompts, completed together."),
        ("kernels why", "Missing argument 'OP'. The name of an op; `nanovllm kernels list` shows all."),
        ("plan gemm", "Missing option '--m'. Rows of x: tokens."),
    ]:
        done = run_here(*command.split())
        assert done.returncode == 2 and done.stderr.endswith(f"\nError: {said}\n"), done.stderr


def test_an_op_whose_plugin_was_forgotten_is_told_of_the_option():
    for name, said in [("mine_alone", "unknown op 'mine_alone'; known are"), ("rmsnorm", "did you mean 'rms_norm'?")]:
        for command in ("why", "list", "verify", "bench", "show"):
            done = run_here("kernels", command, name)
            assert done.returncode == 1 and said in done.stderr, done.stderr
            assert done.stderr.endswith("; an op of yours needs --kernel-plugin FILE\n"), done.stderr


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
        (("--cpu-activations", "int4"), "--cpu-activations='int4': must be one of float32, int8, bfloat16"),
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
    for name in set(all_ops()) - {"decoder_step", "linear", "sample"}:  # which have providers for a CPU
        (chosen,) = [r for r in rows if r["op"] == name and r["chosen"]]
        assert chosen["provider"] == "native" and chosen["reason"] is None
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
    program = [sys.executable, "-m", "nanovllm", "kernels", "list"]
    pipe = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipe.stdout.close()
    assert pipe.stderr.read() == "" and pipe.wait() == 0
    bench = [sys.executable, "-u", "-m", "nanovllm", "kernels", "bench", "--device", "cpu"]
    process = subprocess.Popen(bench, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "native" in first[3] and "Traceback" not in out + err and "stopped early" in err
    assert process.returncode == 130


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
def test_generate_shows_what_there_is_at_ctrl_c_and_ends_as_shells_have_it(prompts, monkeypatch):
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
    done = run_here("generate", "--model", "it", *prompts)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == "".join(f"\n> {p}\nsome [cut short]\n" for p in prompts)


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


def test_kernels_why():
    done = run_here("kernels", "why", "rms_norm", "--shape", "32x1024", "--device", "cpu")
    assert "native runs, because on a CPU the reference runs" in done.stdout and "133,120 bytes" in done.stdout
    for args, said in [
        (("why", "rms_nrom"), "did you mean 'rms_norm'?"),
        (("why", "rms_norm", "--shape", "3xa"), "--shape 3xa: expected numbers"),
        (("bench", "rms_norm", "--shape", "1x2x3"), "rms_norm takes ROWSxSIZE"),
        (("bench", "rms_norm", "--dtype", "int8"), "expected one of bfloat16, float16, float32"),
        (("bench", "rms_norm", "--device", "cpu", "--save-table", "x"), "a table of kernels is measured on a GPU"),
    ]:
        done = run_here("kernels", *args)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_kernels_show():
    shown = run_here("kernels", "show", "rms_norm").stdout
    assert shown.startswith("rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor")
    for said in ("arguments    x [..., size], weight [size]", "torch.rsqrt(", "sm_80+  nanovllm.kernels.triton.rows\n"):
        assert said in shown
    assert shown.count("Args:\n") == 1  # the docstring stands above, not again in the reference
    document = json.loads(run_here("kernels", "show", "store_kvcache", "--json", "-").stdout)
    assert document["mutates"] == "k_cache, v_cache" and "slot_mapping" in document["arguments"]
    assert [p["provider"] for p in document["providers"]][:2] == ["native", "triton"]
    shown = (
        run_here("kernels", "show", op).stdout for op in ("silu_and_mul", "layernorm_residual_dropout_gelu", "sample")
    )
    for text, said in zip(
        shown, ("cancels      results may be small", "magnitude    1, of", "compare      a function")
    ):
        assert f"\n{said}" in text
    assert "did you mean 'rms_norm'?" in run_here("kernels", "show", "rms_nrom").stderr
    assert "named by --kernel-plugin my.py" in run_here("kernels", "verify", "my.py").stderr
    for name in ("qk_norm_rope_attention", "linear_packed_add_rms_norm"):
        above, _, rest = run_here("kernels", "show", name).stdout.partition("\nThe reference, ")
        below = rest[rest.index("provider     GPUs") :]
        assert max(map(len, (above + below).splitlines())) <= 80 and "'" not in above.partition("\n\n")[0]
        if name == "qk_norm_rope_attention":
            signature = "qk_norm_rope_attention(\n    q: torch.Tensor,\n    new: NewTokens,\n    kv: PagedKV,"
            assert above.startswith(signature) and re.match(r"nanovllm/kernels/ops/\w+\.py:\d+:", rest)


def test_kernels_show_of_an_op_within_a_block(tmp_path):
    """Its text is indented, which is no module that Python could parse."""
    (tmp_path / "plugin.py").write_text(
        "import torch\nfrom nanovllm.kernels import op\n\nif True:\n\n    @op(arguments={'x': '[n]'})\n"
        '    def doubled(x: torch.Tensor) -> torch.Tensor:\n        """Twice x."""\n        return 2 * x\n'
    )
    done = run_here("kernels", "show", "doubled", "--kernel-plugin", str(tmp_path / "plugin.py"))
    assert done.stdout.count("Twice x.") == 1 and "        return 2 * x\n" in done.stdout, done.stderr
    assert f" {tmp_path / 'plugin.py'}\n" in done.stdout  # where the user put it


def test_kernels_verify_finds_a_wrong_kernel(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from nanovllm.kernels import softmax\n\n"
        "@softmax.provider('right')\ndef right(x):\n    return x.softmax(-1)\n\n"
        "@softmax.provider('wrong')\ndef wrong(x):\n    return x.exp() / x.exp().sum(-1, keepdim=True)\n"
    )
    named = [word for name in ("native", "right", "wrong") for word in ("--provider", name)]
    options = "--json - --seed 0 --timeout 0".split()
    done = run_here("kernels", "verify", "softmax", "--kernel-plugin", str(plugin), *options, *named)
    rows = {r["provider"]: r for r in json.loads(done.stdout)}
    assert done.returncode == 1 and not rows["right"]["failures"] and rows["native"]["cases"] > 50
    assert any("scale 50" in f for f in rows["wrong"]["failures"])
    worst = {name: row["worst_error_over_tolerance"] for name, row in rows.items()}
    assert 0 < worst["right"] < 1 < worst["wrong"]


def test_kernels_verify_says_which_cases_failed_without_a_result(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "import torch\nfrom nanovllm.kernels import softmax\n\n"
        "@softmax.provider('raises')\ndef raises(x):\n    return x.sofmax(-1)\n\n"
        "@softmax.provider('mixed')\ndef mixed(x):\n    return x.sofmax(-1) if len(x) == 1 else 2 * x\n"
    )
    options = "--kernel-plugin", str(tmp_path / "plugin.py"), "--provider", "raises", "--provider", "mixed", "--quick"
    for more in ((), ("--timeout", "0")):
        done = run_here("kernels", "verify", "softmax", *options, *more)
        assert re.search(r"^softmax +raises +21 +0 +- 21 failed$", done.stdout, re.M), done.stdout
        assert re.search(r"^softmax +mixed +21 +0 +\S+ 1\d wrong, \d failed$", done.stdout, re.M), done.stdout


NO_MASK = """
import torch, triton
import triton.language as tl
from nanovllm.kernels import softmax, triton_support

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, BLOCK)
    row = tl.load(x + i, tl.arange(0, BLOCK) < n, float("-inf"))
    e = tl.exp(row - tl.max(row))
    tl.store(y + i, e / tl.sum(e))

@softmax.provider("no_mask", support=triton_support)
def no_mask(x):
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        kernel[(x.numel() // x.shape[-1],)](x, y, x.shape[-1], triton.next_power_of_2(x.shape[-1]))
    return y
"""


@pytest.mark.slow
def test_kernels_verify_finds_a_store_without_a_mask(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "plugin.py").write_text(NO_MASK)
    done = run("kernels", "verify", "softmax", "--kernel-plugin", str(tmp_path / "plugin.py"), "--provider", "no_mask")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"^softmax +no_mask +\d+ +\d+ +- crashed$", done.stdout, re.M), done.stdout
    said = " ".join(done.stdout.split())
    assert "crashed (SIGSEGV) at plugin.py:11, `tl.store(y + i, e / tl.sum(e))`: a store with a wrong" in said


def test_kernels_verify_prints_the_seed_it_drew():
    """And with it draws the same inputs again; in this process too, without a time limit."""
    command = "kernels", "verify", "softmax", "--provider", "native", "--quick", "--json", "-"
    first, second = run_here(*command), run_here(*command, "--timeout", "0")
    (seed,), (other,) = (
        re.findall(r"^--seed (\d+) repeats these inputs$", done.stderr, re.M) for done in (first, second)
    )
    assert seed != other and first.stdout != second.stdout
    (row,) = json.loads(first.stdout)
    assert row["seed"] == int(seed) and row["cases"] == 21 and not row["failures"]
    assert run_here(*command, "--seed", seed, "--timeout", "0").stdout == first.stdout
    assert "repeats these inputs" not in run_here(*command, "--seed", "7", "--timeout", "0").stderr
    done = run_here(*command, "--jobs", "0")
    assert done.returncode and "--jobs" in done.stderr


def test_kernels_bench_keeps_what_was_measured_before_it_is_interrupted(tmp_path, capsys):
    from nanovllm.cli import kernels_bench

    def interrupted(x, weight, eps):
        raise KeyboardInterrupt

    options = dict(device="cpu", dtype="float32", shape=["4x64"], provider=["native", "mine"])
    with registered("rms_norm", interrupted), pytest.raises(typer.Exit) as end:
        kernels_bench.bench("rms_norm", save=tmp_path / "it.json", **options)
    out, err = capsys.readouterr()
    assert end.value.exit_code == 130 and err.endswith("stopped early, with what was measured so far\n")
    assert "native" in out and "4x64 float32" in out
    assert len(json.loads((tmp_path / "it.json").read_text())["measurements"]) == 1


def test_kernels_bench_and_table(tmp_path):
    saved, command = tmp_path / "sub" / "bench.json", "kernels bench rms_norm --shape 4x64 --dtype float32 --device cpu"
    done = run_here(*command.split(), "--save", str(saved))
    assert done.returncode == 0 and "4x64 float32" in done.stdout
    document = json.loads(saved.read_text())
    assert document["versions"]["torch"] and document["measurements"][0]["us"] > 0
    assert document["command"] == f"nanovllm {command}"
    table = run_here("kernels", "table").stdout
    assert all(f"| `{name}` |" in table for name in all_ops())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["example.py", "test_custom_kernels.py"])
def test_programs_end_without_a_traceback(program, smollm2_path):
    """At Ctrl-C with what there is, and when the reader of a pipe has gone."""
    command = [sys.executable, "-u", str(ROOT / program)]
    command += ["--max-tokens", "2000"] if program == "example.py" else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first and process.returncode == 130 and err.endswith(f"{program}: interrupted\n"), err
    assert "Traceback" not in out + err and (program != "example.py" or out.count("[cut short]") in (0, 3))
    process = subprocess.Popen(command[:3], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.readline()
    process.stdout.close()
    assert "Traceback" not in process.stderr.read() and process.wait(timeout=100) == 0


@pytest.mark.parametrize("program", ["example.py", "bench.py", "test_custom_kernels.py"])
def test_the_help_of_a_script_fits_80_columns(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # one of them sets it for its process, which is this one
    done = run_here("--help", script=program)
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80

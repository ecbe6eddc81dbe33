"""The arguments of `bench.py`: what is taken, and what is refused before anything is measured."""

import importlib.util
import re

import pytest

import bench
from nanovllm.bench.command_line import MEANT, check_drawing, check_installed, check_model
from nanovllm.kernels.op import availability
from nanovllm.kernels.op.registry import temporary
from tests.commands import Terminal


def test_arguments(capfd, tmp_path):
    args = bench.parser().parse_args(["--dtype", "bf16", "--kv-cache-dtype", "fp16"])
    assert (args.dtype, args.kv_cache_dtype) == ("bfloat16", "float16")
    assert bench.main(["--preset", "qwen3-0.6", "--in-process"]) == 2
    assert "did you mean 'qwen3-0.6b'" in capfd.readouterr().err
    for name in ("Qwen/Qwen3-0.6B", "gpt2", str(tmp_path)):  # what may be the id of a hub is not refused
        check_model(name)


def test_an_error_on_a_terminal_ends_lines_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    given = ["--model", "/none/such", "--device", "cpu"]
    assert bench.main(given) == 2
    whole = capsys.readouterr().err
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    assert bench.main(given) == 2
    lines = shown.getvalue().splitlines()
    assert "--model /none/such: no such file" in whole and whole.split() == shown.getvalue().split()
    assert max(map(len, lines)) <= 80 < len(whole)


def test_the_help_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: bench.py [options]" and max(map(len, lines)) <= 80


def test_a_report_that_does_not_exist_is_named_with_its_option(capsys):
    assert bench.main(["--report", "none.json"]) == 2
    assert "bench.py: --report none.json: there is no such file; pass the profile.json" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_said_at_once(tiny_qwen3, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    (tmp_path / "bad" / "cpu").mkdir(parents=True)
    (tmp_path / "bad" / "cpu" / "tiny.json").write_text("{")
    for arguments, said in (
        (["--json", str(tmp_path / "file" / "out.json")], "--json"),
        (["--json", str(tmp_path)], "is a folder"),
        (["--save", "--results", str(tmp_path / "file")], "--results"),
        (["--save", "--results", str(tmp_path / "bad")], "is not a file of kept results"),
        (["--profile", "--profile-dir", str(tmp_path / "file" / "x")], "--profile-dir"),
    ):
        common = ["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--workload", "tiny"]
        assert bench.main([*common, *([] if "--profile" in arguments else ["--no-profile"]), *arguments]) == 2
        captured = capfd.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_plugin_of_which_nothing_runs_on_this_cpu_is_refused_with_its_reasons(tiny_qwen3, tmp_path, capfd):
    file = tmp_path / "theirs.py"
    file.write_text(
        "from nanovllm.kernels import rms_norm\n"
        "@rms_norm.provider('elsewhere', support=lambda device: 'it needs a GPU; plug one in')\n"
        "def elsewhere(x, weight, eps):\n    return x\n"
    )
    common = ["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--workload", "tiny", "--no-profile"]
    with temporary():
        assert bench.main([*common, "--kernel-plugin", str(file)]) == 2
    captured = capfd.readouterr()
    said = "it has no kernel that can be measured here: rms_norm, elsewhere: it needs a GPU; plug one in"
    assert captured.err == f"bench.py: --kernel-plugin {file}: {said}\n" and not captured.out


@pytest.mark.parametrize("interprets", [False, True])
def test_a_triton_kernel_is_not_measured_on_a_cpu(interprets, tiny_qwen3, tmp_path, capfd, monkeypatch):
    """With the variable TRITON_INTERPRET Triton's interpreter would run it, for minutes."""
    monkeypatch.setattr(availability, "triton_support", lambda device: None if interprets else "no GPU")
    file = tmp_path / "theirs.py"
    file.write_text(
        "from nanovllm.kernels import rms_norm, silu_and_mul\n"
        "from nanovllm.kernels.op.availability import triton_support\n"
        "@rms_norm.provider('theirs', support=triton_support)\n"
        "def theirs(x, weight, eps):\n    return x\n"
    )
    common = ["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--workload", "tiny", "--no-profile"]
    with temporary():
        assert bench.main([*common, "--kernel-plugin", str(file)]) == 2
        with open(file, "a") as more:
            more.write("@silu_and_mul.provider('other')\ndef other(gate_up):\n    return gate_up\n")
        assert not interprets or bench.main([*common, "--kernel-plugin", str(file)]) == 2
    said = f"bench.py: --kernel-plugin {file}: it has no kernel that can be measured here: rms_norm, theirs: Triton"
    captured = capfd.readouterr()
    assert captured.err.startswith(said) and "`nanovllm kernels verify`" in captured.err and not captured.out
    assert not interprets or f"{file}: it cannot be measured here: rms_norm, theirs: Triton" in captured.err


def test_a_peer_that_is_not_installed_is_refused_before_anything_is_measured(tiny_qwen3, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    common = ["--model", str(tiny_qwen3), "--device", "cpu", "--workload", "tiny", "--engine", "sglang"]
    assert bench.main(common) == 2
    captured = capfd.readouterr()
    said = "bench.py: --engine sglang: sglang is not installed; pip install sglang, or name the folder"
    assert captured.err.startswith(said) and "--engine-path sglang=DIR" in captured.err and not captured.out
    check_installed(["sglang", "nanovllm"], {"sglang": str(tmp_path), "nanovllm": ""})


@pytest.mark.parametrize(
    "line, said",
    [
        ("--kernel-plugin none.py", "--kernel-plugin none.py: there is no such file"),
        ("--kernel-plugin {file} --no-use-custom-kernels", "no kernel of a plugin runs with --no-use-custom-kernels"),
        ("--kernel-plugin {file} --save", "--save keeps figures of the package's own kernels"),
        ("--kernel-plugin {file} --engine transformers", "add nanovllm to --engine"),
    ],
)
def test_a_plugin_that_cannot_be_measured_is_said_at_once(tiny_qwen3, capfd, line, said):
    common = ["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--workload", "tiny", "--no-profile"]
    assert bench.main([*common, *line.format(file=__file__).split()]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("bench.py: --kernel-plugin") and said in captured.err and not captured.out


@pytest.mark.parametrize(
    "line, said",
    [
        ("--num-prompts 4", "--num-prompts: no such option; use --num-requests with --input-len and --output-len"),
        ("--num_prompts=4", "--num_prompts: no such option; use --num-requests with"),
        ("--batch-size 8", "--batch-size: no such option; use --workload bs8 (bs1, bs8, bs32, bs128), --num-requests"),
        ("-tp 2", "-tp: no such option; use --tensor-parallel-size"),
        ("--max-model-len 8k", "--max-model-len: no such option; leave it out: it follows from the workload"),
        ("--work_load bs1", "--work_load: no such option; did you mean --workload?"),
        ("--input_len 4", "--input_len: no such option; did you mean --input-len?"),
        ("--zzz", "--zzz: no such option; `python bench.py --help` lists the options"),
        ("bs1", "there is no option before bs1; write such as --workload bs1"),
    ],
)
def test_an_unknown_option_says_which_there_is(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main([*line.split(), "--seed", "1"])
    assert end.value.code == 2 and f": error: {said}" in capsys.readouterr().err


def test_all_unknown_options_are_named(capsys):
    with pytest.raises(SystemExit):
        bench.main("--num-prompts 4 --seed 1 --modle x".split())
    assert capsys.readouterr().err.splitlines()[-1] == "--modle: no such option; did you mean --model?"


def test_what_is_meant_by_options_of_others_is_there():
    there = bench.parser().format_help()
    for option, meant in MEANT.items():
        assert f"{option} " not in there
        assert all(name in there for name in re.findall("--[a-z-]+", meant)), meant


def test_pictures_that_cannot_be_drawn_are_said_at_once(tiny_qwen3, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, find=importlib.util.find_spec: find(name) if name != "matplotlib" else None,
    )
    common = ["--model", str(tiny_qwen3), "--device", "cpu", "--in-process", "--workload", "tiny", "--repeat", "1"]
    common += ["--profile-dir", str(tmp_path)]
    for arguments in ([*common, "--plots"], ["--report", "profile.json", "--plots"]):
        assert bench.main(arguments) == 2
        captured = capfd.readouterr()
        remedy = "it needs matplotlib: pip install matplotlib, or leave --plots out"
        assert captured.err == f"bench.py: --plots: {remedy}\n" and not captured.out
    assert (
        check_drawing(False) == "no page of the profile will be drawn, as it needs matplotlib: pip install matplotlib"
    )
    assert bench.main(["--report", "none.json"]) == 2 and "none.json: there is no such file" in capfd.readouterr().err

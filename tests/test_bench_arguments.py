"""The arguments of `bench.py`: what is taken, and what is refused before anything is measured."""

import pytest

import bench
from nanovllm.bench.command_line import check_model
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

"""transformers' own tests: which files are run, and how their outcomes are compared."""

import pytest

from benchmarks import transformers_tests
from benchmarks.transformers_tests import main
from benchmarks.transformers_tests import test_files as files_of


def test_a_checkout_runs_its_own_files(tmp_path):
    tests = tmp_path / "tests"
    (tests / "models" / "llama").mkdir(parents=True)
    (tests / "models" / "llama" / "test_modeling_llama.py").touch()
    assert files_of(tests, ["llama"], tmp_path) == (tmp_path, ["tests/models/llama/test_modeling_llama.py"])


def test_a_source_distribution_runs_the_shared_tests(tmp_path):
    tests, folder = tmp_path / "sdist" / "tests", tmp_path / "made"
    tests.mkdir(parents=True)
    folder.mkdir()
    (tests / "test_modeling_common.py").write_text("shared = 1\n")
    where, files = files_of(tests, ["qwen3"], folder)
    assert where == folder and files == ["tests/test_modeling_qwen3.py"]
    assert "class Qwen3Test(ModelTesterMixin" in (folder / files[0]).read_text()
    assert (folder / "tests" / "generation" / "test_utils.py").exists()


def test_tests_that_pass_no_more_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_modeling_common.py").touch()
    before = {"a": "passed", "b": "failed", "c": "passed"}
    outcomes = {False: before, True: before | {"c": "failed"}}
    monkeypatch.setattr(transformers_tests, "results", lambda where, files, patched, rest: outcomes[patched])
    assert main([str(tmp_path), "--models", "llama", "--", "-k", "x"]) == 1
    printed = capsys.readouterr().out
    assert "as they are: 1 failed, 2 passed" in printed
    assert "passes no more: c" in printed and "no more: b" not in printed


def test_nothing_to_compare_is_no_success(tmp_path, monkeypatch, capsys):
    """As where the tests cannot be imported."""
    (tmp_path / "test_modeling_common.py").touch()
    monkeypatch.setattr(transformers_tests, "results", lambda where, files, patched, rest: {"llama": "failed"})
    assert main([str(tmp_path), "--models", "llama"]) == 1
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [(["{}", "--models", "bert"], "unknown 'bert'"), (["{}/models"], "has no test_modeling_common.py")],
)
def test_wrong_arguments(arguments, message, tmp_path, capsys):
    (tmp_path / "test_modeling_common.py").touch()
    with pytest.raises(SystemExit):
        main([argument.format(tmp_path) for argument in arguments])
    assert message in capsys.readouterr().err

"""Options of `nanovllm serve`: what they become, and what is said of wrong ones."""

import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')
from typer.testing import CliRunner

from nanovllm.cli import app
from nanovllm.cli.serve_options import EngineOptions
from nanovllm.frontend.engine_client import ThreadClient
from tests import tiny


def test_options_reach_the_server(tmp_path, monkeypatch):
    tiny.save_with_tokenizer(tmp_path)
    started = []
    monkeypatch.setattr("nanovllm.serve.server.run", lambda server, *_: started.append(server.service))
    line = f"serve {tmp_path} --port 0 --in-process --num-kvcache-blocks 4"
    given = "--enable-force-include-usage --strict-max-tokens --max-waiting 9"
    for args in (line, f"{line} {given}"):
        assert CliRunner().invoke(app, args.split()).exit_code == 0
        started[-1].engine.close()
    plain, asked = (service.options for service in started)
    assert not plain.enable_force_include_usage and not plain.strict_max_tokens and plain.max_waiting == 4096
    assert asked.enable_force_include_usage and asked.strict_max_tokens and asked.max_waiting == 9
    assert not asked.engine_restarts, "there is no engine's process that could be started again"


@pytest.mark.parametrize("restart", ["always", "never"])
def test_the_server_knows_whether_its_engine_is_started_again(tmp_path, monkeypatch, restart):
    tiny.save_with_tokenizer(tmp_path)
    started = []
    monkeypatch.setattr("nanovllm.serve.server.run", lambda server, *_: started.append(server.service))
    monkeypatch.setattr("nanovllm.serve.process_client.ProcessClient", lambda config, *_: ThreadClient(config))
    line = f"serve {tmp_path} --port 0 --num-kvcache-blocks 4 --restart {restart}"
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    started[0].engine.close()
    assert started[0].options.engine_restarts == (restart == "always")
    again = "; it is being started again" * (restart == "always")
    assert started[0].stuck == f"the engine is not running{again}"


def test_kernels_are_chosen_as_in_generate():
    chosen = EngineOptions(kernels="rms_norm=triton,native;*=native").config("m").kernel_priority
    assert chosen == {"rms_norm": ["triton", "native"], "*": ["native"]}
    assert EngineOptions().config("m").kernel_priority is None


@pytest.mark.parametrize(
    "kernels, said",
    [
        ("rms_nrm=native", "--kernels: unknown op 'rms_nrm'; did you mean"),
        ("rms_norm=nativ", "--kernels names 'nativ', but the providers of"),
    ],
)
def test_unknown_kernels_are_named(tmp_path, kernels, said):
    tiny.save_with_tokenizer(tmp_path)
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", "--in-process", "--kernels", kernels])
    assert isinstance(done.exception, ValueError) and str(done.exception).startswith(said)


def test_a_second_name_is_not_taken_for_a_model(tmp_path, monkeypatch):
    """vLLM takes several names after one option; here the second one is MODEL, if there is no other."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, "serve --served-model-name a b".split())
    assert isinstance(done.exception, FileNotFoundError)
    assert str(done.exception).startswith("MODEL b: is no local directory, and a hub id has a slash; for several names")
    assert str(done.exception).endswith("nanovllm serve MODEL --served-model-name a b")
    tiny.save_with_tokenizer(tmp_path / "b")
    for args in (
        "--served-model-name a b",
        "--served-model-name a org/b",
        "--served-model-name a b --load-format dummy",
    ):
        done = CliRunner().invoke(app, f"serve {args} --port 0 --max-waiting 0".split())
        assert "max-waiting=0" in str(done.exception), args


def test_the_help_has_the_servers_own_numbers():
    said = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    said = " ".join(said.split())
    assert "by default 8192 on a GPU, 512 on a CPU" in said and "16384" not in said
    assert "whole blocks alone" in said and "with warning, the start" in said.lower()

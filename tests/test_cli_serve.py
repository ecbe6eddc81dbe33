"""`nanovllm serve` and `nanovllm bench serve` as commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')
import httpx
from typer.testing import CliRunner

from nanovllm.cli import app
from nanovllm.cli.option_records import takes_records
from nanovllm.cli.serve_options import (
    AccessOptions,
    ChatOptions,
    EngineOptions,
    LimitOptions,
    ModelOptions,
    ReportOptions,
)  # fmt: skip
from nanovllm.cli.serve_ray_options import RayOptions
from nanovllm.config import EngineConfig
from nanovllm.serve.options import ServeOptions
from tests import tiny
from tests.serve.running import LONG
from tests.waiting import wait_until


@pytest.mark.parametrize(
    "args, said",
    [
        ("serve --model m --log-level loud", "--log-level loud"),
        ("serve --model m --restart maybe", "--restart maybe"),
        ("serve a --model b", "MODEL a and --model b are both given"),
        ("serve --model m --api-key short", "at least 8"),
        ("serve --model m --max-waiting 0", "--max-waiting=0"),
        ("serve --model m --kvcache-block-size 7", "--kvcache-block-size=7"),
        ("serve --model m --rank-timeout 0", "--rank-timeout=0.0: must be seconds, above 0"),
        ("serve --model m --kernels rms_norm", "--kernels: 'rms_norm' is not of the form op=provider"),
        ("serve --model m --max-per-key 0", "--max-per-key=0: must be at least 1; leave it out"),
        ("serve --model m --max-per-key 2", "--max-per-key=2: counts requests by API key, and there is no key; pass"),
        ("serve --model m --max-body-mib 0", "--max-body-mib 0: must be at least 1"),
        ("serve --model m --cors-origin app.example.com", "--cors-origin='app.example.com': must be an origin"),
        ("serve --model m --cors-origin http://a.com/", "--cors-origin='http://a.com/': must be an origin"),
        ("serve --model m --metrics-prefix my-", "--metrics-prefix='my-': must be letters"),
        ("serve --model m --otlp-endpoint localhost:4318", "--otlp-endpoint='localhost:4318': must be an address"),
        ("serve --model m --host=", "--host='': names no address"),
        ("serve --model m --host no.such.host.invalid", "cannot listen at no.such.host.invalid"),
        ("serve --model m --port 99999999", "--port 99999999: must be 0 to 65535"),
        ("bench serve localhost", "url='localhost'"),
        ("bench serve http://127.0.0.1:1 --model m --concurrency no", "--concurrency no"),
        ("bench serve http://127.0.0.1:1", "is a server there?"),
        ("bench serve http://h --workload tiny --rate 3", "--workload tiny brings its own load; leave out --rate"),
        ("bench serve http://h --workload a --input-len 3 --output-len 2", "; leave out --input-len and --output-len"),
        ("bench serve http://h --workload a --concurrency 1,8 --num-requests 2", "--concurrency and --num-requests"),
        ("bench serve http://h --rate 3 --concurrency 2", "--rate 3 sends requests at its own times; leave out --conc"),
        (
            "bench serve http://127.0.0.1:1 --model m --prompts /no/such",
            "--prompts /no/such: No such file or directory;",
        ),
        ("bench serve http://h --prompts f --vocab-size 9", "--prompts f brings the prompts; leave out --vocab-size"),
    ],
)
def test_bad_input_is_named(args, said):
    done = CliRunner().invoke(app, args.split())
    assert isinstance(done.exception, ValueError) and said in str(done.exception)


def test_a_gpu_that_is_not_here_is_said_before_anything_is_loaded(tmp_path, capfd):
    command = f"serve {tmp_path} --device cuda:99 --port 0"
    done = CliRunner().invoke(app, command.split())
    assert isinstance(done.exception, ValueError) and "cuda:99" in str(done.exception)
    assert "Loading" not in capfd.readouterr().err + done.output


def test_the_name_of_a_local_model_is_the_last_part_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "some-model").mkdir()
    (tmp_path / "some.gguf").touch()
    monkeypatch.chdir(tmp_path / "some-model")
    for model, name in [
        (str(tmp_path / "some-model"), "some-model"), (f"{tmp_path}/some-model/", "some-model"), (".", "some-model"),
        ("../some.gguf", "some.gguf"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/", "/"),
    ]:  # fmt: skip
        assert ModelOptions(model=model).located() == (model, (name,))
    assert ModelOptions(positional=".", served_model_name=["a", "b"]).located() == (".", ("a", "b"))


def test_a_path_is_checked_before_torch_is_imported():
    program = """
import sys
from nanovllm.cli.serve import serve
for model, said in [("/nope", "is no local directory or .gguf file; pass"), ("none.gguf", ": no such file")]:
    try:
        serve(model=model)
    except FileNotFoundError as error:
        assert said in str(error), error
    else:
        raise AssertionError(model)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONG)


def test_defaults_are_those_of_the_engine_and_the_server():
    assert EngineOptions().config("m") == EngineConfig("m", max_model_len="auto")  # as vLLM's server
    server = {f.name: f.default for f in fields(ServeOptions)}
    same = [f for record in (LimitOptions, ReportOptions, ChatOptions) for f in fields(record) if f.name in server]
    assert len(same) > 7 and {f.name: f.default for f in same} == {f.name: server[f.name] for f in same}


def test_options_reach_the_record_that_has_them():
    given = []

    @takes_records
    def command(model: ModelOptions, ray: RayOptions) -> None:
        given.extend((model, ray))

    command(replicas=2, host="::")
    assert given == [ModelOptions(host="::"), RayOptions(replicas=2)]
    with pytest.raises(TypeError, match="hots"):
        command(hots="::")


def test_keys_are_read_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# staff\n\n  first-secret \nsecond-secret\n")
    assert AccessOptions(api_key=["own-secret"], api_key_file=file).keys() == (
        "own-secret", "first-secret", "second-secret",
    )  # fmt: skip
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match=f"{file}: holds no key"):
        AccessOptions(api_key_file=file).keys()
    with pytest.raises(ValueError, match=f"{file}: holds no key"):
        AccessOptions(api_key=["own-secret"], api_key_file=file).keys()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"--api-key-file {file}: cannot be read: "):
        AccessOptions(api_key_file=file).keys()
    with pytest.raises(
        ValueError, match=f"--api-key-file {tmp_path / 'none'}: cannot be read: No such file or directory$"
    ):
        AccessOptions(api_key_file=tmp_path / "none").keys()


def test_keys_of_options_replace_those_of_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("secret-of-file\n")
    monkeypatch.setenv("NANOVLLM_API_KEY", "secret-of-env another-of-env")
    assert AccessOptions().keys() == ("secret-of-env", "another-of-env")
    assert AccessOptions(api_key=["own-secret"]).keys() == ("own-secret",)
    assert AccessOptions(api_key_file=file).keys() == ("secret-of-file",)
    assert AccessOptions(api_key=["own-secret"], api_key_file=file).keys() == ("own-secret", "secret-of-file")
    assert "NANOVLLM_API_KEY" in CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output


def start(server):
    """(what a server wrote until it was ready, its address)"""
    lines = []
    while line := server.stderr.readline():
        lines.append(line)
        if found := re.search(r" at (http://127\.0\.0\.1:\d+) ", line):
            return lines, found[1]
    raise AssertionError(lines)


@pytest.fixture
def process(tmp_path):
    """(server's process, its address)"""
    tiny.save_with_tokenizer(tmp_path)
    command = [sys.executable, "-m", "nanovllm", "serve", str(tmp_path), "--served-model-name", "tiny"]
    command += "--port 0 --num-kvcache-blocks 64 --kvcache-block-size 16 --drain 60 --log-json --access-log".split()
    env = os.environ | {"NANOVLLM_API_KEY": "some-secret-key"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        try:
            lines, url = start(server)
            said = [json.loads(line)["message"] for line in lines]
            assert said[0] == f"Loading {tmp_path.name} ..." and any(
                text.startswith("weights loaded in ") for text in said
            ), said
            assert "KV cache: 1,024 tokens (64 x 16, 0.00 GiB), 2.0 sequences of 512 tokens at a time" in said
            assert "tiny on cpu, float32, context 512 tokens, at " in said[-1]
            yield server, url
        finally:
            server.kill()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_signals_end_a_server_and_its_engine(process):
    server, url = process
    with httpx.Client(base_url=url, headers={"x-api-key": "some-secret-key"}, trust_env=False, timeout=LONG) as client:
        assert client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3}).status_code == 200
        (engine,) = children(server.pid)
        body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 100}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            server.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert server.poll() is None, "the first signal lets running requests finish"
            next(pieces)
            server.send_signal(signal.SIGTERM)
            assert server.wait(LONG) == 0
    wait_until(lambda: not alive(engine))
    logs = server.stderr.read()
    assert '"logger": "nanovllm.serve.access"' in logs and "/v1/completions 200" in logs and "Traceback" not in logs


@pytest.mark.slow
def test_an_engine_does_not_outlive_its_server(process):
    server, url = process
    (engine,) = children(server.pid)
    server.kill()
    server.wait(LONG)
    wait_until(lambda: not alive(engine))


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_before_the_server_is_ready_ends_it_with_a_line(tmp_path, as_json):
    tiny.save_with_tokenizer(tmp_path)
    waits, begun = tmp_path / "waits.py", tmp_path / "begun"
    waits.write_text(f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n"
                     f"time.sleep({LONG})\n")  # fmt: skip
    command = [sys.executable, "-m", "nanovllm", "serve", str(tmp_path), "--port", "0", "--kernel-plugin", str(waits)]
    command += ["--log-json"] * as_json
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_until(lambda: begun.exists() and begun.read_text())
            server.terminate()
            last = server.stderr.read().splitlines()[-1]
        finally:
            server.kill()
    assert server.returncode == -signal.SIGTERM
    said = json.loads(last)["message"] if as_json else last.removeprefix("nanovllm: ")
    assert said == "ended by SIGTERM before the server was ready"
    wait_until(lambda: not alive(int(begun.read_text())))


@pytest.mark.slow
def test_all_processes_log_json(tmp_path):
    """Every line of every process is JSON, and one about a request has the client's id."""
    tiny.save_with_tokenizer(tmp_path)
    command = [sys.executable, "-m", "nanovllm", "serve", str(tmp_path), "--device", "cpu", "--port", "0"]
    command += (
        "--num-kvcache-blocks 64 --kvcache-block-size 16 --log-json --log-level info --tensor-parallel-size 2".split()
    )
    command += ["--api-servers", "2"]
    allowed = [tiny.tokenizer().convert_tokens_to_ids("z")]
    body = {"prompt": "x", "structured_outputs": {"regex": "ab"}, "allowed_token_ids": allowed}
    env = os.environ | {"VLLM_API_KEY": "of-another-engine"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        try:
            lines, url = start(server)
            named = {"x-request-id": "of-the-client"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=named, timeout=LONG, trust_env=False)
            assert answer.status_code == 400
            server.terminate()
            lines += server.stderr.readlines()
        finally:
            server.kill()
    records = [json.loads(line) for line in lines]
    assert all(r["time"].endswith("Z") and r["level"] and r["logger"] and r["message"] for r in records)
    loggers = {record["logger"] for record in records if "rank" not in record}
    assert {"nanovllm.serve", "nanovllm.engine.llm_engine"} <= loggers
    assert {"nanovllm.engine.llm_engine"} <= {record["logger"] for record in records if record.get("rank") == 1}
    assert any("VLLM_API_KEY is not read" in record["message"] for record in records)
    (early,) = [record for record in records if "ends early" in record["message"]]
    assert early["request_id"] == "of-the-client" and "request of-the-client ends early" in early["message"]

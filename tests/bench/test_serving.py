"""`nanovllm bench serve`: what it reads out of answers, and a run against a real server."""

import json
import re
import subprocess

import pytest
from typer.testing import CliRunner

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')

from nanovllm.bench import serving_client
from nanovllm.bench.serving import Goal, Load, ServingResult, measure
from nanovllm.bench.serving_client import ResponseRecorder, Target, Timed, get_json, request_body, take_apart
from nanovllm.bench.workloads import Workload
from nanovllm.cli import app
from nanovllm.cli.bench import _print
from nanovllm.serve.options import ServeOptions
from tests import tiny
from tests.serve.running import RunningServer


class Recorded(ResponseRecorder):
    """An answer whose pieces come a second apart."""

    def __init__(self, *pieces):
        self.pieces = [b"", *pieces]
        self.times = [float(i) for i in range(len(self.pieces))]


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


def test_times_of_a_stream_however_it_is_cut():
    role, one, two = (event(choices=[{"delta": {"content": text}}]) for text in ("", "a", "b"))
    whole = HEAD + chunk(role) + chunk(one) + chunk(two[:9]) + chunk(two[9:] + USAGE) + chunk(DONE) + b"0\r\n\r\n"
    found = take_apart(Recorded(whole), None)
    assert found.error is None and found.times == [1.0, 1.0] and (found.num_prompt, found.num_output) == (5, 4)
    at = len(HEAD + chunk(role) + chunk(one))
    found = take_apart(Recorded(whole[:at], whole[at : at + 12], whole[at + 12 :]), None)
    assert found.times == [1.0, 3.0] and found.start == 0.0
    assert take_apart(Recorded(*(bytes([b]) for b in whole)), None).num_output == 4


@pytest.mark.parametrize(
    "data, said",
    [
        (HEAD + chunk(event(error={"message": "broken"})) + chunk(DONE) + b"0\r\n\r\n", "broken"),
        (HEAD + chunk(event(choices=[{"text": "a"}])), "without [DONE]"),
        (HEAD + chunk(USAGE + DONE) + b"0\r\n\r\n", "no text"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"choices": []}', "does not stream"),
        (b"", "status missing"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(data, said):
    assert said in take_apart(Recorded(data), None).error


@pytest.mark.parametrize(
    "data, said",
    [
        (b'HTTP/1.1 503 no\r\n\r\n{"error": "full"}', "status 503: full"),
        (
            b'HTTP/1.1 400 no\r\n\r\n{"error": {"code": 4,\n "message": "n=0: ' + b"x" * 300 + b'"}}',
            "status 400: n=0: " + "x" * 300,
        ),
        (b"HTTP/1.1 502 no\r\n\r\n<p>Bad Gateway</p>", "status 502: <p>Bad Gateway</p>"),
        (
            HEAD.replace(b"200", b"400") + chunk(b'{"error": {"mes') + chunk(b'sage": "no"}}') + b"0\r\n\r\n",
            "status 400: no",
        ),
        (b"HTTP/1.1 500 no\r\n\r\n[1]", "status 500: [1]"),
    ],
)
def test_the_message_of_an_error_is_shown_alone_and_whole(data, said):
    assert take_apart(Recorded(data), None).error == said


def test_figures():
    requests = [Timed(0.0, [1.0, 1.5, 2.0], 2.0, 5, 3), Timed(1.0, [3.0], 3.0, 5, 1), Timed(error="refused")]
    found = ServingResult.of(Load(3), requests, Goal(ttft=1.5))
    assert (found.num_ok, found.num_failed, found.num_good, found.errors) == (2, 1, 1, {"refused": 1})
    assert found.seconds == 3.0 and found.output_rate == pytest.approx(4 / 3)
    assert found.ttft.mean == 1.5 and found.itl.median == 0.5 and found.tpot.p99 == 0.5
    assert found.client_load is None and ServingResult.of(Load(3), requests, None, 1.5).client_load == 0.5
    shown = json.loads(json.dumps(found.as_dict()))
    assert shown["requests_per_s"] == pytest.approx(2 / 3) and shown["output_tokens_per_s"] == pytest.approx(4 / 3)
    assert shown["ttft_s"]["mean"] == 1.5 and (shown["num_ok"], shown["num_good"]) == (2, 1)


def test_a_server(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    options = ServeOptions(api_keys=("some-secret-key",))
    extra = {"ignore_eos": True}
    with RunningServer(tmp_path, options) as server:
        for endpoint, rate in (("completions", None), ("chat", 100.0)):
            target = Target(server.url + "/v1/", endpoint, "model", "some-secret-key")
            seen = []
            load = Load(6, input_len=5, output_len=7, concurrency=None if rate else 3, rate=rate, extra=extra)
            found = measure(target, load, progress=seen.append)
            assert found.errors == {} and found.num_output_tokens == 42 and seen == list(range(1, 7))
            assert found.client_load > 0
        load = Load(2, input_len=5, output_len=4, vocab_size=50, extra=extra)
        assert measure(Target(server.url, "completions", "model", "some-secret-key"), load).num_prompt_tokens == 10
        ids = Load(workload=Workload("some", 3, 5, (2, 4), rate=50.0), vocab_size=50, extra=extra)
        found = measure(Target(server.url, "completions", "model", "some-secret-key"), ids)
        assert (found.load, found.num_ok, found.num_prompt_tokens) == ("some", 3, 15)
        assert get_json(target, "models")["data"][0]["id"] == "model"
        wrong = measure(Target(server.url, "completions", "model", "wrong"), Load(2))
        assert wrong.num_failed == 2 and "status 401" in next(iter(wrong.errors))
        with pytest.raises(ValueError, match="HTTP 401 Unauthorized; pass --api-key KEY, or set OPENAI_API_KEY"):
            get_json(Target(server.url, "completions", "model", "wrong"), "models")
        with pytest.raises(ValueError, match="HTTP 404 Not Found; is it a server with OpenAI's interface"):
            get_json(target, "no-such-route")
        server.assert_idle()
    gone = measure(target, Load(1))
    assert "Connection" in next(iter(gone.errors))
    with pytest.raises(ValueError, match="is a server there"):
        get_json(target, "models")


def test_a_load_without_a_good_answer_ends_the_command_without_a_table(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    with RunningServer(tmp_path) as server:
        for options, said in (
            ("--model foo", "--model foo: the server has no such model; it has model"),
            ("--input-len 999", "no request succeeded of 3; the most frequent error: status 400: "),
        ):
            kept = tmp_path / "kept.json"
            command = f"bench serve {server.url} --num-requests 3 {options} --json {kept}"
            done = CliRunner().invoke(app, command.split())
            assert isinstance(done.exception, ValueError) and said in str(done.exception)
            assert "streams" not in done.output
            assert [load["num_failed"] for load in json.loads(kept.read_text())["loads"]] == [3]
            kept.unlink()


def test_the_json_says_what_was_asked_of_which_server(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    with RunningServer(tmp_path) as server:
        asked = "--concurrency 2 --input-len 3 --output-len 4 --seed 7 --goal-ttft 600000 --json -"
        done = CliRunner().invoke(app, f"bench serve {server.url} {asked}".split())
    found = json.loads(done.output)
    assert (found["server"], found["model"], found["endpoint"]) == (server.url, "model", "completions")
    assert found["options"] == {
        "workload": None, "prompts": None, "input_len": 3, "output_len": 4, "vocab_size": None, "seed": 7,
        "ignore_eos": True, "goal_ttft_ms": 600000.0, "goal_tpot_ms": None, "goal_e2e_ms": None,
    }  # fmt: skip
    (load,) = found["loads"]
    assert (load["load"], load["num_ok"], load["num_good"], load["num_output_tokens"]) == ("2 streams", 8, 8, 32)
    assert load["e2e_s"]["p99"] > 0


@pytest.fixture
def tls(tmp_path):
    """(certificate, key) that signs itself, for localhost."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-out",
        files[0],
        "-keyout",
        files[1],
    ]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_a_server_whose_certificate_signs_itself(tmp_path, tls, monkeypatch):
    tiny.save_with_tokenizer(tmp_path)
    certificate, key = map(str, tls)
    with RunningServer(tmp_path, tls=(("ssl_certfile", certificate), ("ssl_keyfile", key))) as server:
        there, load = server.url.replace("127.0.0.1", "localhost"), Load(2, input_len=3, output_len=3)
        refused = (
            "the server's certificate is refused: self.signed certificate; set the environment variable SSL_CERT_FILE"
        )
        for name in ("", " --model model"):
            done = CliRunner().invoke(app, f"bench serve {there} --num-requests 2{name}".split())
            assert isinstance(done.exception, ValueError) and re.search(refused, str(done.exception)), done.exception
            assert str(done.exception).endswith(", or pass --insecure")
        found = CliRunner().invoke(
            app, f"bench serve {server.url} --insecure --num-requests 2 --input-len 3 --output-len 3 --json -".split()
        )
        assert [load["num_ok"] for load in json.loads(found.stdout)["loads"]] == [2, 2]
        plain = Target(there.replace("https", "http"), "completions", "model")
        assert measure(plain, load).num_failed == 2
        with pytest.raises(ValueError, match="http://localhost"):
            get_json(plain, "models")

        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        serving_client.tls_context.cache_clear()
        try:
            assert measure(Target(there, "completions", "model"), load).num_ok == 2
            other = Target(server.url, "completions", "model")  # the certificate is not for 127.0.0.1
            with pytest.raises(
                ValueError, match="mismatch.*; call the server by a name that the certificate has, or pass"
            ):
                get_json(other, "models")
            assert "IP address mismatch" in next(iter(measure(other, load).errors))
        finally:
            serving_client.tls_context.cache_clear()


def test_https_to_a_server_without_it(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    with RunningServer(tmp_path) as server:
        target = Target(server.url.replace("http", "https"), "completions", "model", insecure=True)
        said = "the server does not speak https .*; write http:// in the address"
        with pytest.raises(ValueError, match=said):
            get_json(target, "models")
        assert re.match(said, next(iter(measure(target, Load(1)).errors)))


def test_bad_input():
    for kind, arguments, said in [
        (Target, {"url": "localhost:8000"}, "url='localhost:8000'"),
        (Target, {"url": "http://x", "endpoint": "y"}, "endpoint='y'"),
        (Load, {"num_requests": 0}, "num_requests=0"),
        (Load, {"rate": 0.0}, "rate=0.0"),
    ]:
        with pytest.raises(ValueError, match=said):
            kind(**arguments)
    body = json.loads(request_body(Target("http://x", "chat", "m"), "hello", 5, {"top_k": 1}))
    assert body["messages"] and body["stream"] and body["top_k"] == 1


def test_the_table_stays_in_line_whatever_the_times(capsys):
    requests = [Timed(0.0, [0.0051, 0.0062], 0.01, 5, 2)] * 2
    slow = [Timed(0.0, [123.4567, 124.4567], 130.0, 5, 2)] * 2
    loads = (Load(2, concurrency=1), requests), (Load(2, concurrency=None, rate=12345.0), slow)
    _print([ServingResult.of(load, timed, Goal(ttft=1.0)) for load, timed in loads])
    title, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "5.1 / 5.1" in first and "123457 / 123457" in second and "1000 / 1000" in second
    for end in ("TTFT ms", "ITL ms", "TPOT ms", "good"):
        column = title.index(end) + len(end)
        assert all(line[column - 1] != " " and line[column : column + 1] in (" ", "") for line in (first, second))

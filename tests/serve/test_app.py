"""Routes, keys, request ids, limits of the network."""

import asyncio
import gzip
import http.client
import inspect
import json
import logging
import re
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from nanovllm import __version__
from nanovllm.cli.serve import serve
from nanovllm.serve.app import App
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.server import Listener
from nanovllm.serve.service import Service
from tests.serve.running import LONG, RunningServer
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def guarded(model_path):
    options = ServeOptions(
        model_names=("one", "org/two"), api_keys=("secret-key-1", "secret-key-2"), max_body_bytes=2000,
        max_header_bytes=4096, max_headers=30, cors_origins=("https://example.org",),
    )  # fmt: skip
    with RunningServer(model_path, options) as running:
        yield running


def test_models_version_and_health(guarded):
    listed = guarded.client.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["one", "org/two"]
    for path in ("/v1/models/org/two", "/v1/models/org/two/"):
        assert guarded.client.get(path).json()["max_model_len"] == 256
    assert guarded.client.get("/version").json() == {"version": __version__}
    assert guarded.client.get("/health").status_code == guarded.client.head("/health/live").status_code == 200
    missing = guarded.client.get("/v1/models/three")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    status, error = guarded.refused("/v1/completions", model="three", prompt="x")
    assert (status, error["param"]) == (404, "model")
    assert error["message"] == "model='three': there is no such model; the server has one and org/two"
    empty = guarded.client.post("/v1/completions", content=b" \n", headers={"content-type": "application/json"})
    assert empty.status_code == 400 and empty.json()["error"]["message"] == "the body is empty; send a JSON object"
    byte_order = guarded.client.post(
        "/tokenize", content=b'\xef\xbb\xbf{"prompt": "hi"}', headers={"content-type": "application/json"}
    )
    assert byte_order.status_code == 200 and byte_order.json()["count"] > 0
    for text in ('{"prompt": "caf\xe9"}'.encode("latin-1"), '{"prompt": "hi"}'.encode("utf-16")):
        answer = guarded.client.post("/tokenize", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"].endswith("; encode it as UTF-8")
    wrong = guarded.client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path, instead",
    [
        ("/chat/completions", "use /v1/chat/completions"), ("/v1/v1/messages/", "use /v1/messages"),
        ("/v1/chat/completion", "use /v1/chat/completions"), ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/api/chat", "use /v1/chat/completions"), ("/completion", "use /v1/completions"),
        ("/v1/embeddings", "this server generates text; embeddings"), ("/v1/audio/speech", "this server generates"),
        ("/ping", "use /health"), ("/docs", "the routes are listed"), ("/nowhere", "the routes are listed"),
    ],
)  # fmt: skip
def test_a_path_that_is_no_route_is_answered_with_what_to_use(guarded, path, instead):
    answer = guarded.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"there is no {path!r} here; {instead}")


def test_tokenize_and_detokenize(guarded, llm):
    found = guarded.post("/tokenize", prompt="hello there", return_token_strs=True)
    assert found["tokens"] == llm.tokenizer.encode("hello there") and found["count"] == len(found["token_strs"])
    assert guarded.post("/detokenize", tokens=found["tokens"]) == {"prompt": "hello there"}
    assert guarded.post("/tokenize", prompt="hello there") == found | {"token_strs": None}
    assert guarded.refused("/tokenize", prompt="x", messages=[])[0] == 400
    error = guarded.refused("/detokenize", tokens=[10**7])[1]
    assert "vocabulary" in error["message"] and error["param"] == "tokens"


def test_keys(guarded):
    for headers, status in [
        ({}, 401), ({"authorization": "Bearer wrong-key-1"}, 401), ({"authorization": "Basic secret-key-1"}, 401),
        ({"authorization": "bearer secret-key-2"}, 200), ({"x-api-key": "secret-key-1"}, 200),
    ]:  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port)
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        assert answer.status == status, headers
        if status == 401:
            assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"
        connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port)
    for path, status in [("/health", 200), ("/", 200), ("/metrics", 401), ("/version", 401)]:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status, path
    with pytest.raises(ValueError, match="API key 2 of 2, of 5 characters: must have at least 8"):
        ServeOptions(api_keys=("long-enough", "short"))


def test_request_ids(guarded):
    answer = guarded.client.get("/version", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for hostile in ("a b", "x" * 200, "é"):
        answer = guarded.client.get("/version", headers={"x-request-id": hostile.encode()})
        assert answer.headers["x-request-id"] != hostile and len(answer.headers["x-request-id"]) == 24
    found = guarded.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "q"})
    assert found.json()["id"] == "cmpl-q"


def test_origins(guarded):
    allowed = guarded.client.options("/v1/completions", headers={"origin": "https://example.org"})
    assert allowed.status_code == 204 and allowed.headers["access-control-allow-origin"] == "https://example.org"
    asked = {"origin": "https://example.org", "access-control-request-headers": "x-stainless-os"}
    found = guarded.client.options("/v1/completions", headers=asked)
    assert found.headers["access-control-allow-headers"] == "x-stainless-os"
    other = guarded.client.get("/version", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    # A body without a type needs no preflight: the browser sends it for any page.
    sent = guarded.client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"origin": "https://evil.example"}
    )
    assert sent.status_code == 415
    assert sent.json()["error"]["message"] == (
        "content-type='': must be application/json; with curl add -H 'content-type: application/json'"
    )
    assert guarded.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}').status_code == 200


def test_a_packed_body_is_refused_by_name(guarded):
    packed = gzip.compress(b'{"prompt": "x"}')
    for name, status in (("gzip", 415), ("identity", 400)):
        answer = guarded.client.post("/v1/completions", content=packed, headers={"content-encoding": name})
        assert answer.status_code == status and ("content-encoding: gzip" in answer.text) == (status == 415)


def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(guarded):
    """nginx, unless told otherwise, asks in HTTP/1.0."""
    for stream in (True, False):
        body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", guarded.port), LONG) as sock:
            head = "POST /v1/completions HTTP/1.0\r\nauthorization: Bearer secret-key-1\r\ncontent-length: %d\r\n\r\n"
            sock.sendall((head % len(body)).encode() + body)
            with sock.makefile("rb") as answer:
                head, _, found = answer.read().partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"transfer-encoding" not in head and b"connection: close" in head
        if stream:
            assert found.startswith(b"data: {") and found.endswith(b"}\n\ndata: [DONE]\n\n")
        else:
            assert json.loads(found)["usage"]["completion_tokens"] == 3


def test_the_first_chat_does_not_hold_up_the_event_loop(model_path, monkeypatch):
    """The template is ready before the server is: it can take seconds."""
    where = []

    def render(self, *args, **kwargs):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        where.append("a thread without a loop")

    monkeypatch.setattr(Service, "render", render)
    with RunningServer(model_path) as running:
        assert where
        running.post("/v1/completions", prompt="x", max_tokens=1)


def test_many_connections_are_accepted_while_streams_keep_the_event_loop_busy(model_path):
    """uvloop alone takes one in an iteration of the loop, which hundreds of streams make long."""
    with RunningServer(model_path) as running:
        loop, iterations, sockets = running.server.servers[0].get_loop(), [], []

        def busy():
            time.sleep(0.01)
            iterations.append(len(running.server.server_state.connections))
            if iterations[-1] < 64:
                loop.call_soon(busy)

        loop.call_soon_threadsafe(time.sleep, 1)
        sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(64)]
        loop.call_soon_threadsafe(busy)
        wait_until(lambda: iterations and iterations[-1] == 64)
        assert len(iterations) < 30
        for sock in sockets:
            sock.close()


def test_a_path_cannot_forge_a_line_of_the_access_log(guarded, caplog):
    with caplog.at_level(logging.INFO, "nanovllm.serve.access"):
        guarded.client.get("/a%0aforged")
        wait_until(lambda: caplog.records)
    assert "\n" not in caplog.records[-1].getMessage() and "/a%0Aforged" in caplog.records[-1].getMessage()


def test_upgrades_are_ignored(guarded):
    """Java's client asks for HTTP/2 with its requests."""
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port)
    headers = {
        "authorization": "Bearer secret-key-1", "content-type": "application/json", "http2-settings": "AAMAAABk",
        "connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c",
    }  # fmt: skip
    for _ in range(2):
        connection.request("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1}', headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    connection.close()


def has_ipv6():
    """Sockets may be of both kinds where no interface has an address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_all_addresses():
    with Listener("::", 0).open() as sock:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, sock.getsockname()[1]), LONG).close()


def test_clients_without_a_certificate_are_refused(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj"]
    subprocess.run([*command, "/CN=localhost", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = (("ssl_certfile", certificate), ("ssl_keyfile", key), ("ssl_ca_certs", certificate))
    config = uvicorn.Config(App, **Listener(tls=tls).uvicorn_tls)
    config.load()
    assert config.ssl.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(ValueError, match="ssl_keyfile: needs a certificate"):
        Listener(tls=tls[1:2])
    with pytest.raises(ValueError, match="no such file"):
        Listener(tls=(("ssl_certfile", str(tmp_path / "none")),))
    text = tmp_path / "text"
    text.write_text("no certificate")
    said = f"ssl_certfile='{text}', ssl_keyfile='{text}': no PEM certificate with its key \\(\\w.*\\w\\)"
    with pytest.raises(ValueError, match=said):
        Listener(tls=(("ssl_certfile", str(text)), ("ssl_keyfile", str(text))))
    with pytest.raises(ValueError, match="ssl_certfile=.*cert.pem': no PEM certificate with its key"):
        Listener(tls=tls[:1])  # the file has no key
    with pytest.raises(ValueError, match=f"ssl_ca_certs='{text}': no PEM certificates"):
        Listener(tls=(*tls[:2], ("ssl_ca_certs", str(text))))


@pytest.mark.parametrize(
    "body, headers, status",
    [
        (b"{", {}, 400), (b"[1]", {}, 400), (b'"x"', {}, 400), (b"", {}, 400), (b"\xff\xfe", {}, 400),
        (b"[" * 1500, {}, 400), (b'{"prompt": "' + b"x" * 3000 + b'"}', {}, 413),
        (b"{}", {"content-type": "text/plain"}, 415), (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": "x", "temperature": NaN}', {}, 400), (b'{"prompt": "x", "n": 1e400}', {}, 400),
    ],
)  # fmt: skip
def test_hostile_bodies(guarded, body, headers, status):
    answer = guarded.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json", **headers}
    )
    assert answer.status_code == status, answer.text
    said = answer.json()["error"]["message"]
    assert "Traceback" not in said and "/nanovllm/" not in said
    assert status != 413 or "MiB" in said and "raise the server's --max-body-mib" in said


def raw(port, data):
    """What the server says to raw bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(LONG)
        sock.sendall(data)
        found = b""
        while piece := sock.recv(65536):
            found += piece
    return found


@pytest.fixture(scope="module")
def impatient(model_path):
    options = ServeOptions(max_header_bytes=4096, max_headers=30, receive_timeout=0.4)
    with RunningServer(model_path, options) as running:
        yield running


def test_hostile_headers(impatient):
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    many = b"".join(b"h%d: x\r\n" % i for i in range(60))
    for data, status, said in (
        (start + many + b"\r\n", b" 431 ", b"the request has more than 30 headers"),
        (start + b"h: " + b"x" * 5000 + b"\r\n\r\n", b" 431 ", b"the header 'h' has more than 4096 bytes"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n", b" 414 ", b"the URL has more than 4096 bytes"),
        (b"nonsense\r\n\r\n", b" 400 ", b"this is not a valid HTTP/1.1 request"),
    ):  # fmt: skip
        answer = raw(impatient.port, data)
        assert answer.startswith(b"HTTP/1.1" + status) and b'{"error":{"message":"' + said in answer, answer
        assert answer.count(b"HTTP/1.1 4") == 1
    with socket.create_connection(("127.0.0.1", impatient.port)) as sock:  # headers that never end
        sock.settimeout(LONG)
        with pytest.raises(ConnectionError):
            while True:
                sock.sendall(b"a" * 1000)
                time.sleep(0.0005)
    assert b" 408 " in raw(impatient.port, start)  # headers that do not come
    begun = start + b"content-length: 50\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", impatient.port)) as sock:  # a body that does not come
        sock.settimeout(LONG)
        sock.sendall(begun)
        assert b" 408 " in sock.recv(65536)


def test_more_connections_than_allowed(model_path):
    with RunningServer(model_path, ServeOptions(max_connections=2)) as server:
        assert server.client.get("/health").status_code == 200  # and stays connected
        with socket.create_connection(("127.0.0.1", server.port)) as second:
            second.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in second.recv(1000)
            refused = raw(server.port, b"")
            assert b" 503 " in refused and b"retry-after: 1\r\n" in refused and b"at most 2 connections" in refused
            assert server.client.get("/health").status_code == 200

        def a_place_is_free():
            try:
                return httpx.get(server.url + "/health", trust_env=False).status_code == 200
            except httpx.HTTPError:  # refused before the request was read
                return False

        wait_until(a_place_is_free)


def test_the_unit_uses_options_that_exist():
    unit = (ROOT / "deploy" / "nanovllm.service").read_text()
    options = set(re.findall(r" (--[a-z-]+)", unit[unit.index("ExecStart") :].partition("LoadCredential")[0]))
    assert len(options) >= 7
    assert options <= {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}

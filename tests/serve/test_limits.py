"""Requests that follow others on a connection before these are answered (pipelining)."""

import http.client
import json
import socket
import time

import pytest

from nanovllm.serve.options import ServeOptions
from tests.serve.running import LONG, RunningServer, slow_client
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def slow(model_path):
    options = ServeOptions(max_header_bytes=4096, max_headers=30, receive_timeout=0.3)
    with RunningServer(model_path, options, client=slow_client(model_path)) as running:
        yield running


def post(**body):
    data = json.dumps(body | {"prompt": "x", "ignore_eos": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data


STREAM = post(stream=True, max_tokens=60)
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
HEADERS = b"GET /version HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(60)) + b"\r\n"
URL = b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n"
BROKEN_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n"


def answers(server, *pieces, pause=0.05):
    """(status, body) of every answer until the server closes the connection. Pieces are sent `pause` seconds apart."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(LONG)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(pause)
        server.go()
        data = b""
        while piece := sock.recv(65536):
            data += piece
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        status, *headers = head.lower().split(b"\r\n")
        assert status.startswith(b"http/1.1 "), f"an answer begins within another one: {status!r}"
        length = next((int(h.split(b":")[1]) for h in headers if h.startswith(b"content-length:")), None)
        body = b""
        if length is None:
            while (size := int(data.split(b"\r\n")[0], 16)) > 0:
                start = data.index(b"\r\n") + 2
                body, data = body + data[start : start + size], data[start + size + 2 :]
            assert data.startswith(b"0\r\n\r\n")
            data = data[5:]
        else:
            body, data = data[:length], data[length:]
        found.append((int(status.split()[1]), body))
    return found


@pytest.mark.parametrize(
    "refused, status",
    [(HEADERS, 431), (URL, 414), (b"nonsense\r\n\r\n", 400), (BROKEN_BODY, 400), (b"GET / HT", 408)],
    ids=["headers", "url", "nonsense", "body", "unfinished"],
)
@pytest.mark.parametrize("together", [True, False])
def test_a_refusal_comes_after_the_answers_before_it(slow, refused, status, together):
    pieces = [STREAM + GET + refused + GET] if together and status != 408 else [STREAM, GET, refused]
    stream, version, last = answers(slow, *pieces)
    assert stream[0] == version[0] == 200 and last[0] == status
    assert stream[1].endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in stream[1]
    assert b'"version"' in version[1]
    slow.assert_idle()


def test_a_request_that_the_server_does_not_read_yet_is_not_too_slow(slow):
    """It reads nothing more while requests wait for the answer of an earlier one."""
    slow.hold()
    found = answers(slow, post(stream=True, max_tokens=60), GET + GET[:10], GET[10:], b"nonsense\r\n\r\n", pause=0.5)
    assert [status for status, _ in found] == [200, 200, 200, 400]


def test_a_bad_request_alone_is_answered_at_once(slow):
    for bad, status in ((HEADERS, 431), (URL, 414), (BROKEN_BODY, 400)):
        assert [found[0] for found in answers(slow, GET, bad)] == [200, status]


def test_few_requests_may_wait_on_a_connection(slow):
    found = answers(slow, STREAM + 200 * GET)
    assert [status for status, _ in found] == [200] * 65 + [503]
    error = json.loads(found[-1][1])["error"]
    assert error["message"] == "more than 64 requests wait for their answers on this connection"
    assert error["code"] == "overloaded"


@pytest.mark.parametrize(
    "refused, status, kind",
    [
        (HEADERS, 431, "invalid_request_error"), (URL, 414, "invalid_request_error"),
        (b"nonsense\r\n\r\n", 400, "invalid_request_error"), (b"GET / HT", 408, "timeout_error"),
    ],
)  # fmt: skip
def test_a_refusal_has_the_body_of_errors_and_an_id_that_the_log_has(slow, refused, status, kind, caplog):
    with caplog.at_level("INFO", "nanovllm.serve.access"), socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.settimeout(LONG)
        sock.sendall(refused)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        error = json.load(answer)["error"]
    assert answer.status == status and answer.headers["content-type"] == "application/json"
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == kind
    (logged,) = (r for r in caplog.records if getattr(r, "request_id", "") == answer.headers["x-request-id"])
    assert logged.message.startswith(f"127.0.0.1 - - {status}")


BODY = 1 << 20


@pytest.fixture(scope="module")
def small(model_path):
    with RunningServer(model_path, ServeOptions(max_body_bytes=BODY, max_header_bytes=4096)) as running:
        yield running


def upload(sock, size, headers=b"", head=b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
    sock.settimeout(LONG)
    sock.sendall(head + headers + b"content-length: %d\r\n\r\n" % size)
    for _ in range(0, size, 1 << 16):
        sock.sendall(b"x" * (1 << 16))


@pytest.mark.parametrize(
    "headers, status",
    [(b"connection: close\r\n", 413), (b"", 413), (b"connection: close\r\ncontent-type: text/plain\r\n", 415),
     (b"h: %b\r\n" % (b"x" * 5000), 431)],
    ids=["close", "keep", "type", "headers"],
)  # fmt: skip
def test_a_client_that_sends_all_before_it_reads_gets_its_answer(small, headers, status):
    """Closed with data that was not read, the connection would be reset, and the answer be lost."""
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", small.port)) as sock:
            upload(sock, 3 * BODY, headers)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.status == status and "error" in json.load(answer)
            if status == 413 and not headers:  # the connection is as good as before
                sock.sendall(GET)
                assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("headers", [b"connection: close\r\n", b""], ids=["close", "keep"])
def test_what_is_dropped_has_limits(small, headers):
    with socket.create_connection(("127.0.0.1", small.port)) as sock, pytest.raises(ConnectionError):
        upload(sock, 40 * BODY, headers)
    with socket.create_connection(("127.0.0.1", small.port)) as sock:
        sock.settimeout(LONG)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + headers + b"content-length: 9999999\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += sock.recv(65536)
        assert b"\r\nconnection: close\r\n" in answer, "the connection cannot be used again"
        wait_until(lambda: not small.server.server_state.connections)  # the server waits for 2 seconds
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # the first byte is answered with a reset
                sock.sendall(b"x")
                time.sleep(0.01)


def test_a_client_that_goes_ends_the_request_that_is_answered(slow):
    slow.hold()
    first = slow.engine_client.engine.num_steps
    long = post(stream=True, max_tokens=200)
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.settimeout(LONG)
        sock.sendall(long + long)
        assert sock.recv(1000)
        wait_until(lambda: slow.engine.num_unfinished == 1)
    wait_until(lambda: not slow.engine.num_unfinished)
    slow.go()
    slow.assert_idle()
    assert slow.engine_client.engine.num_steps < first + 40, "neither request was computed to its end"

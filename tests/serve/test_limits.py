"""Requests that follow others on a connection before these are answered (pipelining)."""

import json
import socket
import time

import pytest

from nanovllm.serve.options import ServeOptions
from tests.serve.running import RunningServer, slow_client, wait_until


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


def answers(server, *pieces):
    """(status, body) of every answer until the server closes the connection. Pieces are sent 50 ms apart."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(20)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.05)
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
    long = post(stream=True, max_tokens=200)
    found = answers(slow, long, GET + GET[:10], GET[10:], b"nonsense\r\n\r\n")
    assert [status for status, _ in found] == [200, 200, 200, 400]


def test_a_bad_request_alone_is_answered_at_once(slow):
    for bad, status in ((HEADERS, 431), (URL, 414), (BROKEN_BODY, 400)):
        assert [found[0] for found in answers(slow, GET, bad)] == [200, status]


def test_few_requests_may_wait_on_a_connection(slow):
    found = answers(slow, STREAM + 200 * GET)
    assert [status for status, _ in found] == [200] * 65 + [503]
    assert found[-1][1] == b"more than 64 requests wait for their answers on this connection"


def test_a_client_that_goes_ends_the_request_that_is_answered(slow):
    long = post(stream=True, max_tokens=200)
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.settimeout(20)
        sock.sendall(long + long)
        assert sock.recv(1000)
        wait_until(lambda: slow.engine.num_unfinished == 1)
    start = time.monotonic()
    slow.assert_idle()
    assert time.monotonic() - start < 0.5, "200 steps take a second"

"""Many clients, clients that vanish, clients that do not read, a full queue, a server that stops."""

import asyncio
import gc
import json
import os
import socket
import threading

import httpx
import pytest

from benchmarks.serving.storm import memory_mib
from nanovllm import SamplingParams
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.server import raise_descriptor_limit
from tests.serve.running import LONG, RunningServer, slow_client
from tests.waiting import wait_until


def test_concurrent_requests_lose_and_mix_nothing(server, llm):
    """Streamed and whole answers of 1,000 requests at once are those of the engine alone."""
    prompts = [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxy" for b in "abcdefghijklmnopqrst"]
    params = [SamplingParams(max_tokens=4, temperature=1.0, seed=i) for i in range(len(prompts))]
    expected = [o["text"] for o in llm.generate(prompts, params, use_tqdm=False)]

    async def ask(i, stream):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"prompt": prompts[i], "max_tokens": 4, "seed": i, "stream": stream}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head, _, answer = (await asyncio.wait_for(reader.read(), 5 * LONG)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 "), answer
        if not stream:
            return json.loads(answer)["choices"][0]["text"]
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        return "".join(json.loads(e)["choices"][0]["text"] for e in events)

    async def run():
        return await asyncio.gather(*(ask(i, s) for s in (False, True) for i in range(len(prompts))))

    raise_descriptor_limit()
    assert asyncio.run(run()) == expected * 2
    server.assert_idle()


def send(port, body, path="/v1/completions"):
    """A raw connection that has asked, with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(LONG)
    sock.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    sock.sendall(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(data), data)
    )
    return sock


def test_clients_that_vanish(model_path):
    """Before the first token, within a stream, and while a whole answer is made: all of it is aborted."""
    long = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True}
    with RunningServer(model_path, client=slow_client(model_path)) as server:
        sizes = []
        # A leak of every round is in any four. What was allocated at most grows in some of them, the more the busier
        # the machine is, and then no more.
        while len(sizes) < 4 or (sizes[-1] >= sizes[-4] + 8 and len(sizes) < 16):
            sockets = [send(server.port, long | {"stream": i % 2 == 0, "n": 1 + i % 3}) for i in range(200)]
            for i, sock in enumerate(sockets):
                if i % 2 == 0 and i < 10:
                    sock.recv(100)
                sock.close()
            server.assert_idle()
            gc.collect()
            sizes.append(memory_mib(os.getpid()))
        tokens = server.metric("vllm:generation_tokens_total")
        assert tokens < len(sizes) * 200 * 240 / 4, "nothing was aborted"
        assert sizes[-1] < sizes[-4] + 8, f"MiB after each round: {sizes}"
        answer = server.post("/v1/completions", prompt="x", max_tokens=2, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("patience", [0.5, 3600])
def test_a_slow_reader_holds_up_nobody(model_path, patience):
    with RunningServer(model_path, ServeOptions(send_timeout=patience, ping_interval=0.2)) as server:
        body = {"prompt": "hello", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 5}
        slow = send(server.port, body)
        server.post("/v1/completions", prompt="x", max_tokens=20, ignore_eos=True)
        if patience < 1:  # it is cut off, since it takes nothing for so long, and its completions are aborted
            wait_until(lambda: not server.engine.num_unfinished and not server.server.service.admission.num_open)
        slow.close()
        server.assert_idle()


def test_a_silent_stream_is_pinged(model_path):
    with RunningServer(model_path, ServeOptions(ping_interval=0.1), slow_client(model_path, max_num_seqs=1)) as server:
        server.hold()
        first = send(server.port, {"prompt": "a", "max_tokens": 250, "ignore_eos": True})
        wait_until(lambda: server.engine.stats.num_running)
        with server.client.stream("POST", "/v1/completions", json={"prompt": "b", "stream": True}) as answer:
            pieces = answer.iter_raw()
            assert next(pieces).startswith(b": ping")
            first.close()
            server.go()
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
        server.assert_idle()


def test_a_full_queue(model_path):
    options = ServeOptions(max_waiting=6, max_waiting_tokens=400)
    with RunningServer(model_path, options, slow_client(model_path, max_num_seqs=1)) as narrow:
        narrow.hold()
        long = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
        running = send(narrow.port, long | {"stream": True})
        assert running.recv(1000)
        admission = narrow.server.service.admission
        assert admission.waiting == 0
        waiting = [send(narrow.port, long | {"n": 2}) for _ in range(2)]
        wait_until(lambda: admission.waiting == 4)
        answer = narrow.client.post("/v1/completions", json={"prompt": "b", "n": 3})
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert error["code"] == "overloaded" and "4 completions waiting, at most 6" in error["message"]
        answer = narrow.client.post("/v1/completions", json={"prompt": [5] * 200, "n": 2})
        assert answer.status_code == 503 and "prompt tokens waiting" in answer.json()["error"]["message"]
        assert narrow.metric("vllm:admission_rejections_total") == 2
        for sock in (running, *waiting):
            sock.close()
        narrow.go()
        narrow.assert_idle()


def test_a_request_that_waits_too_long_for_its_first_token(model_path):
    with RunningServer(model_path, ServeOptions(queue_timeout=0.2), slow_client(model_path)) as server:
        server.hold(0)
        answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_timeout"
        assert answer.headers["retry-after"] == "5"
        assert "waited 0.2 seconds for its first token" in answer.json()["error"]["message"]
        server.go()
        server.assert_idle()


def test_requests_of_one_key(model_path):
    options = ServeOptions(api_keys=("key-number-one", "key-number-two"), max_per_key=1)
    with RunningServer(model_path, options, slow_client(model_path)) as server:
        server.hold()
        other = httpx.Client(base_url=server.url, timeout=LONG, trust_env=False)
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 16}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            refused = other.post("/v1/completions", json=body, headers={"x-api-key": "key-number-one"})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            server.go()
            served = other.post(
                "/v1/completions", json=body | {"max_tokens": 1}, headers={"x-api-key": "key-number-two"}
            )
            assert served.status_code == 200
        server.assert_idle()


def test_a_server_that_stops_lets_running_requests_finish(model_path, caplog):
    with RunningServer(model_path, ServeOptions(drain=LONG), slow_client(model_path)) as server:
        server.hold()
        body = {"prompt": "a", "max_tokens": 240, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            wait_until(lambda: server.server.service.admission.draining)
            server.go()
            text = first + b"".join(pieces)
        assert text.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in text
        stopping.join()
        (said,) = (record.message for record in caplog.records if record.name == "nanovllm.serve.server")
        assert said.startswith("shutting down: 1 running request has up to 300 seconds to finish; a second Ctrl-C")
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health", trust_env=False)


@pytest.mark.parametrize("drain, signals", [(0, 1), (0.05, 1), (60, 2)])
def test_what_outlives_the_drain_or_a_second_signal_ends_with_an_error(model_path, drain, signals, caplog):
    with RunningServer(model_path, ServeOptions(drain=drain), slow_client(model_path)) as server:
        server.hold()
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 8}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            for _ in range(signals - 1):  # before the event loop has seen the first one
                server.server.handle_exit(15, None)
            server.stop()
            text = b"".join(pieces)
        assert b'"error":{"message":"the server was shut down' in text and text.endswith(b"data: [DONE]\n\n")
        assert b'"code":"server_shutdown"' in text, "the engine did not die"
        assert drain or "to finish" not in caplog.text

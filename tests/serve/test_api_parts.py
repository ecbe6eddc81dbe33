"""The parts of `nanovllm serve --api-servers N`, and what it refuses."""

import json
import socket
import tempfile
import threading
import time
from dataclasses import replace

import msgspec
import pytest

from nanovllm.cli.serve import serve
from nanovllm.cli.serve_options import ProcessOptions
from nanovllm.config import EngineConfig
from nanovllm.frontend.core_messages import EngineInfo
from nanovllm.serve.api_servers import ApiProcessConfig
from nanovllm.serve.counts import Counts, total
from nanovllm.serve.frames import HELLO, READY, STEP, frame, read_frames, read_one
from nanovllm.serve.front_ends import FrontEnds, Outbox
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.process_client import ProcessClient
from nanovllm.serve.server import Listener
from tests.serve.running import LONG
from tests.waiting import wait_until


def test_several_sockets_share_a_port_that_no_other_server_has():
    sockets = Listener(port=0).open_several(3)
    try:
        (port,) = {sock.getsockname()[1] for sock in sockets}
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}: Address already in use; choose another"):
            Listener(port=port).open_several(2)
    finally:
        for sock in sockets:
            sock.close()


def test_a_count_out_of_range_is_refused():
    for count in (0, 65):
        with pytest.raises(ValueError, match=f"--api-servers {count}: must be from 1 to 64"):
            ProcessOptions(api_servers=count)
    assert [ProcessOptions(api_servers=count).api_servers for count in (1, 64)] == [1, 64]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(in_process=True), "--api-servers 2 shares an engine's process; leave out --in-process"),
        (dict(replicas=2), "--api-servers 2 is of one server; leave out --replicas"),
        (dict(max_per_key=3), "--max-per-key counts in one process; leave it out, or --api-servers"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, said):
    with pytest.raises(ValueError, match=said):
        serve(api_servers=2, **arguments)


def test_limits_are_shared():
    whole = ServeOptions(max_waiting=10, max_waiting_tokens=1000, max_connections=3)
    each = whole.share(4)
    assert (each.max_waiting, each.max_waiting_tokens, each.max_connections) == (3, 250, 1)
    assert whole.share(1) == whole


def test_the_models_of_all_processes_have_one_time(server):
    """That of the server's start, however much later an API process starts, perhaps for another one that died."""
    options = replace(ServeOptions(), created=1_700_000_000)
    config = ApiProcessConfig(options.share(3), "127.0.0.1", (), "path", 30, False, False, None)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ApiProcessConfig).options
    assert told.created == 1_700_000_000 and ServeOptions().created > told.created
    for path in ("/v1/models/model", "/v1/models"):
        found = server.client.get(path).json()
        assert found.get("data", [found])[0]["created"] == server.options.created


def test_counts_of_processes_are_added():
    one = Counts([([1, 2], 0.5)], {("a",): 1, ("http", "GET", "200"): 3}, 4, True, 0.0)
    other = Counts([([0, 5], 1.5)], {("a",): 2, ("http", "GET", "404"): 1}, 1, False, 2.0)
    found = total([one, other], ["API process 2 is not running"])
    assert found.histograms == [([1, 7], 2.0)]
    assert found.counters == {("a",): 3, ("http", "GET", "200"): 3, ("http", "GET", "404"): 1}
    assert (found.requests_open, found.engine_up, found.heartbeat_age) == (5, False, 2.0)
    assert total([other.ended(), one]).engine_up and total([other.ended(), one]).requests_open == 4


def test_a_front_end_that_lags_delays_nobody_and_misses_nothing():
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    pieces = [json.dumps(i).encode() * 5000 for i in range(400)]
    for piece in pieces:
        outbox.send(piece)  # it does not wait for a reader
    expected, found = b"".join(pieces), b""
    while len(found) < len(expected):
        found += theirs.recv(1 << 20)
    assert found == expected
    outbox.flush(5)
    outbox.close()
    ours.close(), theirs.close()


def test_a_front_end_that_reads_nothing_is_cut_off():
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours, most_behind=1 << 20, patience=0.2)
    for _ in range(30):
        outbox.send(bytes(1 << 20))
    size = 0
    while data := theirs.recv(1 << 20):
        size += len(data)
    assert 0 < size < 30 << 20
    ours.close(), theirs.close()


class NoEngine:
    """The calls that front ends make of an engine."""

    info = EngineInfo("none", None, 10, 10, 1, 1, 1, 1, "none", None)

    def close(self):
        self.closed = True

    def abort_front_end(self, number):
        pass


@pytest.mark.parametrize("gone", [True, False])
def test_front_ends_leave_no_thread_behind(tmp_path, gone):
    """Threads that run while the interpreter ends may abort the process."""
    before = set(threading.enumerate())
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        front_ends = FrontEnds(ours, read_frames(ours), exit_seconds=3600)
        core = NoEngine()
        front_ends.serve(core, listener)
        assert read_one(theirs)[0] == READY
        with socket.socket(socket.AF_UNIX) as further:
            further.connect(str(tmp_path / "engine"))
            further.sendall(frame(HELLO, 1))
            assert read_one(further)[0] == READY
            front_ends.send(STEP, b"x" * (32 << 20))  # more than the sockets take: threads send the rest
            if gone:
                theirs.close()
                wait_until(lambda: hasattr(core, "closed"))
            started = time.monotonic()
            front_ends.close(2 * LONG)
            assert time.monotonic() - started < LONG
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if not isinstance(thread, threading.Timer)]
        assert gone is not (tmp_path / "engine").exists()  # it is for the next engine, unless nobody would start one
    ours.close(), theirs.close()


def test_a_folder_whose_name_is_too_long_for_a_socket_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ValueError, match=f"{folder}/nanovllm-.*; set TMPDIR to a folder with a shorter name"):
        ProcessClient(EngineConfig("model"), shared=True)
    assert not list(folder.iterdir())

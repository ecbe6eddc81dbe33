"""Several API processes in front of one engine: `nanovllm serve --api-servers N`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from nanovllm import SamplingParams
from tests.serve.running import LONG, SLOW_PLUGIN
from tests.waiting import wait_until

COUNT = 3
STREAM = {"prompt": "hello there", "max_tokens": 240, "ignore_eos": True, "stream": True}


class Running:
    """A server in processes of its own, with a slow engine. folder: where `SLOW_PLUGIN` and its files are."""

    def __init__(self, model_path, folder, *arguments):
        self.folder = folder
        (folder / "slow.py").write_text(SLOW_PLUGIN)
        command = [sys.executable, "-m", "nanovllm", "serve", f"--model={model_path}", "--port=0", "--device=cpu"]
        command += ["--served-model-name=tiny", "--num-kvcache-blocks=256", "--kvcache-block-size=16"]
        command += ["--max-model-len=256", f"--api-servers={COUNT}", f"--kernel-plugin={folder}/slow.py", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = []
        found = None
        while not found and (line := self.process.stderr.readline()):
            self.said.append(line)
            found = re.search(r"tiny on cpu, float32, context [^a]*, at (http://127\.0\.0\.1:\d+) ", line)
        assert found, self.said
        self.url = found[1]
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def parts(self):
        """{process id: its module} of the processes that the server has started."""
        found = {}
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, children.read_text().split()):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "-m" in words:
                    found[pid] = words[words.index("-m") + 1].rpartition(".")[2]
        return found

    def pids(self, module):
        return sorted(pid for pid, name in self.parts.items() if name == module)

    def clients(self, number):
        """Each has a connection of its own, so that the kernel deals them out."""
        return [httpx.Client(base_url=self.url, timeout=LONG, trust_env=False) for _ in range(number)]

    def get(self, path):
        return httpx.get(self.url + path, timeout=LONG, trust_env=False)

    def metric(self, name):
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " "))]
        assert found, f"there is no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def streams(self, number, **body):
        """(threads that each read a stream to its end, the texts of those that have ended; "cut": of a broken one)."""
        ended = []

        def read(client):
            try:
                with client.stream("POST", "/v1/completions", json=STREAM | body) as answer:
                    ended.append("".join(answer.iter_text()))
            except httpx.HTTPError:
                ended.append("cut")

        return in_threads(read, self.clients(number)), ended

    def healthy(self):
        return self.get("/health").status_code == 200

    def refuses(self):
        try:
            self.get("/health")
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:  # accepted, and closed without an answer
            return False
        return False


def in_threads(call, arguments):
    threads = [threading.Thread(target=call, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(LONG)


@pytest.fixture(scope="module")
def several(model_path, tmp_path_factory):
    with Running(model_path, tmp_path_factory.mktemp("several"), f"--drain={LONG}") as running:
        yield running


def ask(client, **body):
    answer = client.post("/v1/completions", json={"prompt": "hello there", "max_tokens": 10, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
def test_all_processes_give_the_same_answers_and_one_sum_of_metrics(several, llm):
    (expected,) = llm.generate(["hello there"], SamplingParams(max_tokens=10, temperature=0), use_tqdm=False)
    names = ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count", "vllm:request_success_total")
    before = [several.metric(name) for name in names]
    clients = several.clients(40)
    texts = {}
    join(in_threads(lambda client: texts.update({client: ask(client)}), clients))
    assert set(texts.values()) == {expected.outputs[0].text} and len(texts) == 40
    tokens = len(expected.outputs[0].token_ids)
    assert len({client.get("/v1/models").json()["data"][0]["created"] for client in clients}) == 1
    totals = {client.get("/metrics").text.count("\n") for client in clients[:8]}
    assert len(totals) == 1
    wait_until(lambda: several.metric("nanovllm:requests_open") == 0)
    for _ in range(6):  # whichever process answers
        found = [several.metric(name) - value for name, value in zip(names, before)]
        assert found == [40 * tokens, 40, 40]
        assert several.metric("nanovllm:requests_open") == 0
        assert several.healthy()
    for client in clients:
        client.close()


@pytest.mark.slow
def test_an_api_process_that_dies_ends_its_own_requests_and_is_started_again(several):
    before = several.metric("vllm:request_success_total")
    first = several.pids("api_process")
    assert len(first) == COUNT - 1
    threads, ended = several.streams(24, max_tokens=200)
    wait_until(lambda: several.metric("vllm:num_requests_running") > 12)
    os.kill(first[0], signal.SIGKILL)
    join(threads)
    assert len(ended) == 24 and 0 < ended.count("cut") < 24 and not any('"error"' in text for text in ended)
    # The engine computes none of the requests that were lost, and what was counted before stays.
    wait_until(lambda: several.metric("vllm:num_requests_running") == 0)
    assert several.metric("vllm:kv_cache_usage_perc") == 0
    assert several.metric("vllm:request_success_total") >= before + 24 - ended.count("cut")
    wait_until(several.healthy)
    second = several.pids("api_process")
    assert len(second) == COUNT - 1 and first[0] not in second and first[1] in second
    assert len({ask(client) for client in several.clients(20)}) == 1


@pytest.mark.slow
def test_an_engine_that_dies_is_told_by_all_processes(several):
    (engine,) = several.pids("engine_process")
    threads, ended = several.streams(48)  # enough work to be seen running
    wait_until(lambda: several.metric("vllm:num_requests_running") > 8)
    (several.folder / "no start").touch()
    os.kill(engine, signal.SIGKILL)
    join(threads)
    lost = [text for text in ended if '"error":{"message":"the engine ended' in text]
    assert len(ended) == 48 and len(lost) > 8
    begun = [text for text in ended if text.startswith("data: ")]
    assert all(text.endswith("data: [DONE]\n\n") for text in begun)
    assert all(json.loads(text)["error"] for text in ended if text not in begun)  # it had not begun
    answers = [client.get("/health") for client in several.clients(8)]
    assert {answer.status_code for answer in answers} == {503}
    (several.folder / "no start").unlink()
    wait_until(several.healthy)
    assert len({ask(client) for client in several.clients(20)}) == 1


@pytest.mark.slow
def test_without_restarts_no_connection_goes_to_a_process_that_has_died_and_none_outlives_the_first(
    model_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Running(model_path, tmp_path, "--restart", "never") as server:
        parts = server.parts
        assert list(tmp_path.glob("nanovllm-*/engine"))
        assert sorted(parts.values()) == ["api_process"] * (COUNT - 1) + ["engine_process"]
        os.kill(server.pids("api_process")[0], signal.SIGKILL)
        wait_until(lambda: any("ended with signal 9" in line for line in server.said))
        for client in server.clients(30):
            assert client.get("/health").json()["reason"] == "API process 1 is not running"
            client.close()
        server.process.kill()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in parts))
    assert not list(tmp_path.glob("nanovllm-*"))


@pytest.mark.slow
def test_no_sums_are_given_when_the_first_process_does_not_answer(several):
    wait_until(several.healthy)
    clients = several.clients(16)
    assert {client.get("/version").status_code for client in clients} == {200}  # each has its process now
    answers = []
    os.kill(several.process.pid, signal.SIGSTOP)
    try:
        threads = in_threads(lambda client: answers.append(client.get("/metrics")), clients)
        wait_until(lambda: answers)
        told = list(answers)  # none of them by the first process
    finally:
        os.kill(several.process.pid, signal.SIGCONT)
    join(threads)
    assert {answer.status_code for answer in told} == {503}
    assert all("API process 0 does not answer" in answer.text for answer in told) and len(answers) == 16
    wait_until(several.healthy)


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_unhealthy(several):
    stopped, answers = several.pids("api_process")[-1], []
    os.kill(stopped, signal.SIGSTOP)
    try:
        threads = in_threads(lambda client: answers.append(client.get("/health")), several.clients(12))
        wait_until(lambda: answers)
        told = answers[0]
    finally:
        os.kill(stopped, signal.SIGCONT)
    join(threads)
    assert told.status_code == 503 and len(answers) == 12
    assert re.search(r"API process \d does not answer", told.json()["reason"])
    wait_until(several.healthy)


def check_drain(server, signals):
    parts = server.parts
    threads, ended = server.streams(12, n=8)
    wait_until(lambda: server.metric("nanovllm:requests_open") == 12)
    (server.folder / "no step").touch()
    for pid in (server.process.pid, *parts):  # as systemd does
        os.kill(pid, signal.SIGTERM)
    wait_until(server.refuses)
    if signals == 2:
        server.process.send_signal(signal.SIGTERM)
    (server.folder / "no step").unlink()
    join(threads)
    assert server.process.wait(LONG) == 0
    whole = [text for text in ended if '"error"' not in text]
    assert len(ended) == 12 and "cut" not in ended and (len(whole) == 12 if signals == 1 else len(whole) < 12)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in parts))
    assert "Traceback" not in "".join(server.said)


@pytest.mark.slow
def test_a_second_signal_cuts_a_drain_short(model_path, tmp_path):
    with Running(model_path, tmp_path, f"--drain={LONG}") as server:
        check_drain(server, 2)


@pytest.mark.slow
def test_a_drain_reaches_all_processes(several):
    """The last test: it ends the server that the others share, after what they did to it."""
    wait_until(several.healthy)
    check_drain(several, 1)

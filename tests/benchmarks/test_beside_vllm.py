"""The server's measurement beside a peer: servers that do not start, rows that a killed run keeps, the tables."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')

from benchmarks.serving import beside_vllm, dummy_tokenizer
from benchmarks.serving.result_file import OFFLINE, OURS, ResultFile, tables
from benchmarks.serving.server_process import ServerFailed, ServerProcess
from nanovllm import LLM, SamplingParams
from tests import tiny
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import http.server
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Ok).serve_forever()
"""


def server(program, tmp_path):
    return ServerProcess("the peer", [sys.executable, "-c", program], os.environ, tmp_path / "log")


def test_a_server_is_ready_when_its_health_is_ok(tmp_path):
    running = server(SERVER, tmp_path)
    try:
        assert 0 < running.wait(300) < 300
    finally:
        running.close()
    with pytest.raises(ServerFailed, match="ended with signal SIGTERM"):
        running.check()


@pytest.mark.parametrize(
    "program, limit, said",
    [
        ("raise RuntimeError('no such GPU')", 300, "the peer ended with exit code 1.*RuntimeError: no such GPU"),
        ("import time; print('loading', flush=True); time.sleep(600)", 1, "is not ready after 1 s.*log:\n    loading"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path, program, limit, said):
    failing = server(program, tmp_path)
    try:
        wait_until(lambda: (tmp_path / "log").read_text())
        with pytest.raises(ServerFailed, match=f"(?s){said}"):
            failing.wait(limit)
    finally:
        failing.close()


def row(rate, ttft=0.01):
    return {"output_tokens_per_s": rate, "ttft_s": {"median": ttft, "p99": 2 * ttft}, "itl_s": None}


def test_rows_are_in_the_file_as_they_come_and_make_tables(tmp_path, capsys):
    rows = ResultFile(tmp_path / "rows.json", {})
    for part, side, load, found in (
        ("std256", OFFLINE, "std256", row(1000.0)),
        ("std256", OURS, "std256", row(960.0)),
        ("structured", OURS, "0 of 128", row(500.0)),
        ("structured", OURS, "20 of 128", row(490.0)),
        ("streams", OURS, "16", row(300.0) | {"load": "16 streams"}),
        ("streams", OURS, "16", row(320.0, 0.03)),
        ("streams", "vllm", "16", row(155.0, 0.04)),
        ("streams", "vllm", "64", {"error": "exit code 1"}),
    ):
        rows.add(part, side, load, 0, found)
        assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == len(rows.rows)
    said = tables(ResultFile.read(tmp_path / "rows.json")).splitlines()
    assert said[0] == "std256: 960 tokens/s through HTTP, 1,000 by LLM.generate: 96.0 %"
    assert said[1:3] == ["0 of 128: 500 tokens/s, +0.0 %", "20 of 128: 490 tokens/s, -2.0 %"]
    assert "| 16 | 310 | 155 | 20.0 | 40.0 | 40.0 | 80.0 | - | - | - | - | 2.00 |" in said
    assert said[-1] == "streams, vllm, 64: exit code 1"


def test_structured_output_ends_with_the_end_token_of_a_dummy_tokenizer(tmp_path):
    tiny.save(tmp_path, vocab_size=600, eos_token_id=300)
    dummy_tokenizer.write(tmp_path, 600, 300)
    llm = LLM(tmp_path, device="cpu", max_model_len=64, num_kvcache_blocks=4, kvcache_block_size=16)
    params = SamplingParams(max_tokens=20, structured_outputs={"choice": ["12", "345"]})
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert output["text"] in ("12", "345") and output["token_ids"][-1] == 300


def test_the_folder_of_the_peer_is_given_as_to_bench(monkeypatch):
    for given, said in [("vllm=/none/such", "there is no folder"), ("/none/such", "write ENGINE=DIR")]:
        monkeypatch.setattr(sys, "argv", ["beside_vllm", "--engine-path", given])
        with pytest.raises(ValueError, match=f"--engine-path {given}: .*{said}"):
            beside_vllm.main()


@pytest.mark.slow
def test_a_run_that_is_ended_keeps_its_rows_and_ends_its_servers(tmp_path):
    """Its peer is this server; it is ended while a load that takes for ever runs."""
    model, file = tmp_path / "model", tmp_path / "rows.json"
    tiny.save_with_tokenizer(model, max_position_embeddings=100_000)
    command = [
        sys.executable, "-m", "benchmarks.serving.beside_vllm", "--json", str(file), "--model", str(model), "--peer",
        "nanovllm", "--serve-args=--device cpu", "--peer-args=--device cpu", "--workload", "tiny", "--loads", "1",
        "--structured", "4,2,24", "--storm", "2,4", "--input-len", "8", "--output-len", "60000", "--vocab-size", "200",
        "--rounds", "1", "--max-model-len", "65000", "--together",
    ]  # fmt: skip
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("start       peer"):
                break
        time.sleep(3)
        run.send_signal(signal.SIGTERM)
        rest, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 130, "".join(lines) + rest
    rows = json.loads(file.read_text())["rows"]
    parts = [(row["part"], row["side"]) for row in rows]
    assert parts == [
        ("std256", OFFLINE), ("start", OURS), ("std256", OURS), ("structured", OURS), ("structured", OURS),
        ("storm", OURS), ("start", "peer"),
    ]  # fmt: skip
    assert not any(row.get("error") for row in rows), rows
    assert "tiny: " in rest and "2 of 4: " in rest
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(model) not in left

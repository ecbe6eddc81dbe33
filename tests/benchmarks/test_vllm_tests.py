"""The server that vLLM's tests get."""

import sys

import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')

from benchmarks.serving.vllm_tests import RemoteOpenAIServer
from tests.serve.running import wait_until

PROGRAM = """
import pathlib, sys, time
print("tiny at http://127.0.0.1:1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
for i in range(5000):
    print(f"line {i} of a long log", file=sys.stderr)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_server_that_logs_much_does_not_block(tmp_path):
    logged = tmp_path / "logged"
    server = RemoteOpenAIServer("tiny", [])
    server._command = [sys.executable, "-c", PROGRAM, str(logged)]
    with server:
        assert server.url_for("v1") == "http://127.0.0.1:1/v1"
        wait_until(logged.exists)

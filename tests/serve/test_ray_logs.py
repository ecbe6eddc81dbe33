"""The pipe that brings what replicas write to standard error."""

import os
import subprocess
import sys

from nanovllm.serve.ray_logs import shared_stderr
from tests.serve.running import LONG
from tests.waiting import wait_until


def test_a_zero_byte_of_a_replica_does_not_end_it(capfd):
    said = []

    def has(text):
        said.append(capfd.readouterr().err)
        return text in "".join(said)

    with shared_stderr() as path, open(path, "wb", buffering=0) as replica:
        replica.write(b"one \0\n")
        wait_until(lambda: has("one"))
        replica.write(b"two\n")
    assert has("one \ntwo\n")


def test_replicas_go_on_when_standard_error_is_closed():
    code = (
        "from nanovllm.serve.ray_logs import shared_stderr\n"
        "with shared_stderr() as path, open(path, 'wb', buffering=0) as replica:\n"
        "    for _ in range(100):\n        replica.write(b'x' * 4096)\n"  # more than a pipe holds
        "print('ended')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, timeout=LONG)
    finally:
        os.close(writer)
    assert done.stdout == b"ended\n"

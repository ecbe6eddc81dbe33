"""Checks the Triton kernel of a lesson in Triton's interpreter, on a CPU, in a process of its own.

Triton decides at its import whether it compiles or interprets, and the process that shows PTX compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import torch

from nanovllm.lab.check import WayCheck, check
from nanovllm.lab.lesson import Lesson, dtype_name, lesson
from nanovllm.lab.ways import ways


def check_interpreted(lesson: Lesson, dtype: torch.dtype, seed: int) -> WayCheck:
    """`check` of the Triton way in another process, whose Triton interprets."""
    # -W: NumPy, which computes there, warns of overflows; a GPU does not.
    command = [sys.executable, "-W", "ignore", "-m", __name__, lesson.name, dtype_name(dtype), str(seed)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return WayCheck("triton", failures=(f"the interpreter failed: {last}",), how="interpreter")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return WayCheck(**{**found, "failures": tuple(found["failures"])})


def check_here(lesson: Lesson, dtype: torch.dtype, seed: int) -> WayCheck:
    """`check` of the Triton way in this process, whose Triton interprets."""
    device = torch.device("cpu")
    (way,) = ways(lesson, device, dtype, ["triton"])
    return replace(check(lesson, way, device, dtype, seed, lesson.interpreted_limit), how="interpreter")


if __name__ == "__main__":
    name, dtype, seed = sys.argv[1:]
    print(json.dumps(asdict(check_here(lesson(name), getattr(torch, dtype), int(seed)))))

"""What a script needs, looked at before it starts anything, and the lines that say what it does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

IN_ITS_ENVIRONMENT = "run this in vLLM's environment, with nanovllm in it (docs/adapters.md#vllm says how)"


def need_vllm(remedy: str = IN_ITS_ENVIRONMENT, gpu: bool = True) -> None:
    """End the program with a sentence if vLLM is not in this environment, or as `need_gpu` does."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"vllm is not installed here; {remedy}")
    if gpu:
        need_gpu()


def need_gpu(remedy: str = "run this on a machine with one") -> None:
    """End the program with a sentence if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"this machine has no CUDA device, and vLLM is measured on one; {remedy}")


def folder_of_vllm(given: list[str]) -> Path:
    """The folder that --engine-path names; the program ends with a sentence if vLLM is not in it."""
    from nanovllm.bench.command_line import engine_paths

    try:
        folder = Path(engine_paths(given, ["vllm"])["vllm"])
    except ValueError as error:
        sys.exit(str(error))
    if not (folder / "vllm").is_dir():
        sys.exit(f"--engine-path vllm={folder}: there is no package vllm in this directory; name its site-packages")
    return folder


def progress(what: str) -> None:
    """Say on standard error what is being done now: without a GPU it may take hours."""
    print(f"{what} ...", file=sys.stderr, flush=True)

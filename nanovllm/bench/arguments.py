"""What `bench.py` was asked for: its arguments, checked before anything is measured."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanovllm.bench.workloads import ON_CPU, ON_GPU, WORKLOADS, Workload, parse_length, select


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The load that was asked for."""
    own = {"--num-requests": args.num_requests, "--input-len": args.input_len, "--output-len": args.output_len}
    if any(v is not None for v in own.values()):
        missing = [name for name, v in own.items() if v is None]
        if missing or args.workload is not None:
            raise ValueError(f"a load of your own needs {', '.join(own)}, and no --workload")
        lengths = parse_length(args.input_len), parse_length(args.output_len)
        return [Workload("custom", args.num_requests, *lengths, rate=args.rate)]
    if args.workload is not None:
        found = select(names_in("--workload", args.workload, WORKLOADS))
    else:
        found = select(ON_GPU if has_gpu(args.device) else ON_CPU)
    if args.rate is not None:
        if not any(w.rate for w in found):
            raise ValueError("--rate: none of the workloads has arrivals; choose poisson")
        found = [dataclasses.replace(w, rate=args.rate) if w.rate else w for w in found]
    return found


def names_in(option: str, given: str, known: Iterable[str]) -> list[str]:
    """What an option names, separated by commas; a ValueError if that is nothing."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} {given!r}: names nothing; leave it out, or choose any of {', '.join(known)}")
    return names


def check_folder(option: str, given: Path, folder: Path) -> None:
    """Make a folder; a ValueError if files cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option} {given}: nothing can be written there ({error}); choose another place") from None


def check_model(name: str) -> None:
    """A ValueError for what is neither there nor of the form of a hub's id."""
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix == ".gguf" or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
        raise ValueError(
            f"--model {name}: no such file or directory, and no hub id; or take random weights with --preset"
        )


def check_device(name: str) -> None:
    """A ValueError for a GPU that is not there. Nothing is done with the device: that is for the processes that measure."""
    import torch

    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ValueError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} CUDA device(s); use auto or cpu")


def has_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()

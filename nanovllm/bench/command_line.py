"""The arguments of `bench.py`, checked before anything is measured, and what engines get of them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.bench.engines import ENGINES, needed_package
from nanovllm.bench.workloads import ON_CPU, ON_GPU, WORKLOADS, Workload, parse_length, select
from nanovllm.kernels.op.priority import check_priority, parse_priority

_PEERS_HAVE = (
    "dtype", "kv_cache_dtype", "device", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens",
    "tensor_parallel_size", "quantization", "lm_head_quantization",
)  # fmt: skip
_THREE_WAYS = ("activation_quantization", "capture_prefill", "piggyback_prefill", "use_custom_kernels")
"""Arguments of nanovllm alone that are on, off, or None: the engine decides."""
_RECORDED = (
    *_PEERS_HAVE, *_THREE_WAYS, "enforce_eager", "kernels", "preset", "workload", "num_requests",
    "input_len", "output_len", "rate", "repeat", "rounds", "warmup", "seed", "engine", "temperature", "top_p",
    "cpu_activations", "expand_small_weights", "prompt_activations",
)  # fmt: skip
"""Arguments that decide the figures; not where this machine has its files."""


def check(args: argparse.Namespace) -> list[str]:
    """The names of the engines to measure.

    Raises:
        ValueError: an argument is wrong, or two of them contradict each other.
    """
    engines = names_in("--engine", args.engine, ENGINES)
    for engine in engines:
        if engine not in ENGINES:
            raise ValueError(f"--engine {engine!r}: expected any of {', '.join(ENGINES)}")
    if args.vllm_plugin and "vllm" not in engines:
        raise ValueError("--vllm-plugin: vLLM is not among the engines; add vllm to --engine")
    if args.kernel_plugin:
        check_plugins(args, engines)
    if args.limit is not None and not args.limit > 0:
        raise ValueError(f"--limit {args.limit:g}: expected seconds, above 0; leave it out for no limit")
    if args.repeat < 1 or args.rounds < 1 or args.warmup < 0:
        raise ValueError("--repeat and --rounds are at least 1, --warmup at least 0")
    if args.temperature < 0 or not 0 < args.top_p <= 1:
        raise ValueError("--temperature is at least 0, --top-p above 0 and at most 1")
    if args.compare and args.use_custom_kernels is not None:
        raise ValueError("--compare runs both with and without custom kernels; leave out --use-custom-kernels")
    if args.ablate and args.use_custom_kernels is False:
        raise ValueError("--ablate needs custom kernels to turn off; leave out --no-use-custom-kernels")
    check_device(args.device)
    if args.tensor_parallel_size is not None:
        if args.tensor_parallel_size < 1:
            raise ValueError(f"--tensor-parallel-size {args.tensor_parallel_size}: expected at least 1")
        if "transformers" in engines:
            raise ValueError("--tensor-parallel-size: transformers is measured on one GPU; leave one of them out")
    if not args.preset:
        check_model(args.model)
    check_priority(engine_options(args).get("kernel_priority", {}), "--kernels")
    return engines


def check_plugins(args: argparse.Namespace, engines: list[str]) -> None:
    """Raise a ValueError if the plugins of --kernel-plugin cannot be measured. They are loaded later, by the engine."""
    if "nanovllm" not in engines:
        raise ValueError("--kernel-plugin: nanovllm is not among the engines; add nanovllm to --engine")
    if args.use_custom_kernels is False:
        raise ValueError(
            "--kernel-plugin: no kernel of a plugin runs with --no-use-custom-kernels; leave one of them out"
        )
    if args.save:
        raise ValueError("--kernel-plugin: --save keeps figures of the package's own kernels; leave one of them out")
    for plugin in args.kernel_plugin:
        if plugin.endswith(".py") and not Path(plugin).is_file():
            raise ValueError(f"--kernel-plugin {plugin}: there is no such file")
    if not has_gpu(args.device):  # on a GPU, to ask would take memory that the engine is to have
        check_plugins_run_on_cpu(args.kernel_plugin)


def check_plugins_run_on_cpu(plugins: list[str]) -> None:
    """Raise a ValueError with the reasons if a plugin cannot be loaded, none of its kernels runs on a CPU, or one would
    run in Triton's interpreter, whose time says nothing.
    """
    import torch

    from nanovllm.kernels import load_plugins
    from nanovllm.kernels.op.availability import is_triton_support
    from nanovllm.kernels.op.plugin_use import NOTHING_REGISTERED, registered_by
    from nanovllm.kernels.testing.compare import TIMED_ON_A_GPU
    from nanovllm.kernels.testing.plugin_check import reject_crashing

    reject_crashing(plugins)
    for plugin in load_plugins(plugins):
        found = registered_by(plugin)
        cpu = torch.device("cpu")
        interpreted = [p for _, p in found if is_triton_support(p.support) and p.support(cpu) is None]
        reasons = {
            f"{o.name}, {p.name}: {why}": why
            for o, p in found
            if (why := TIMED_ON_A_GPU if is_triton_support(p.support) else p.support(cpu))
        }
        if interpreted or len(reasons) == len(found):
            why_not = "; ".join(reasons) or NOTHING_REGISTERED
            what = (
                "has no kernel that can be measured here" if len(reasons) == len(found) else "cannot be measured here"
            )
            raise ValueError(f"--kernel-plugin {plugin}: it {what}: {why_not}")


def check_installed(engines: Iterable[str], paths: Mapping[str, str]) -> None:
    """Raise a ValueError for a peer that is not installed, before anything is measured.

    Args:
        paths: of --engine-path; what lies there is found by the engine's own process.
    """
    for engine in engines:
        module, package = needed_package(engine)
        if engine not in ("nanovllm", *paths) and importlib.util.find_spec(module) is None:
            elsewhere = f"name the folder that it is in: --engine-path {engine}=DIR (such as VENV/.../site-packages)"
            raise ValueError(f"--engine {engine}: {engine} is not installed; pip install {package}, or {elsewhere}")


def check_drawing(plots: bool) -> str | None:
    """A line if the page of a profile cannot be drawn here, for before anything is measured; None: it can.

    Raises:
        ValueError: plots, and they cannot be drawn.
    """
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    remedy = "it needs matplotlib: pip install matplotlib"
    if plots:
        raise ValueError(f"--plots: {remedy}, or leave --plots out")
    return f"no page of the profile will be drawn, as {remedy}"


MEANT = {
    "--num-prompts": "use --num-requests with --input-len and --output-len",
    "--num-seqs": "use --num-requests with --input-len and --output-len, or --max-num-seqs for the most in a step",
    "--batch-size": "use --workload bs8 (bs1, bs8, bs32, bs128), --num-requests for another number, or --max-num-seqs"
    " for the most in a step",
    "--max-concurrency": "use --max-num-seqs",
    "--concurrency": "use --max-num-seqs",
    "--random-input-len": "use --input-len",
    "--random-output-len": "use --output-len",
    "--prompt-len": "use --input-len",
    "--max-tokens": "use --output-len",
    "--request-rate": "use --rate",
    "--num-iters": "use --repeat",
    "--num-iters-warmup": "use --warmup",
    "--iterations": "use --repeat",
    "--output-json": "use --json",
    "--tp": "use --tensor-parallel-size",
    "-tp": "use --tensor-parallel-size",
    "--max-model-len": "leave it out: it follows from the workload",
    "--load-format": "leave it out: --model has weights of its own, --preset random ones",
    "--dataset-name": "leave it out: prompts are random token ids",
    "--dataset": "leave it out: prompts are random token ids",
    "--dataset-path": "leave it out: prompts are random token ids",
    "--backend": "use --engine",
}
"""Options of the benchmarks of vLLM and others."""


def unknown_options(given: Iterable[str], help_text: str) -> str:
    """What is said of words of the command line that no option takes. help_text: of the options that there are."""
    options = [word.partition("=")[0] for word in given if re.match("--?[a-zA-Z]", word)]
    if not options:
        return f"there is no option before {' '.join(given)}; write such as --workload bs1"
    known, lines = re.findall("--[a-z][a-z-]+", help_text), []
    for option in options:
        name = option.replace("_", "-")
        near = name if name in known else (difflib.get_close_matches(name, known, n=1) or [""])[0]
        meant = MEANT.get(name) or (f"did you mean {near}?" if near else "`python bench.py --help` lists the options")
        lines.append(f"{option}: no such option; {meant}")
    return "\n".join(lines)


def peer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of an engine that peers have too."""
    options = {name: getattr(args, name) for name in _PEERS_HAVE if getattr(args, name) is not None}
    return {**options, "enforce_eager": True} if args.enforce_eager else options


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of nanovllm's `LLM`."""
    options = peer_options(args)
    options |= {name: getattr(args, name) for name in _THREE_WAYS if getattr(args, name) is not None}
    for name in ("cpu_activations", "expand_small_weights", "prompt_activations"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.kernels:
        options["kernel_priority"] = parse_priority(args.kernels)
    return options


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a record of the results keeps."""
    given = {name: getattr(args, name) for name in _RECORDED}
    return {k: v for k, v in given.items() if v is not None and (v is not False or k in _THREE_WAYS)}


def workloads(args: argparse.Namespace) -> list[Workload]:
    """The load that was asked for."""
    own = {"--num-requests": args.num_requests, "--input-len": args.input_len, "--output-len": args.output_len}
    if any(v is not None for v in own.values()):
        missing = [name for name, v in own.items() if v is None]
        if missing or args.workload is not None:
            raise ValueError(f"a load of your own needs {', '.join(own)}, and no --workload")
        lengths = parse_length(args.input_len), parse_length(args.output_len)
        return [Workload("own-load", args.num_requests, *lengths, rate=args.rate)]
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


def engine_paths(given: Iterable[str], engines: Iterable[str]) -> dict[str, str]:
    """The folders of --engine-path ENGINE=DIR: engine -> an absolute path.

    Raises:
        ValueError: one is not of that form, is no folder, or is of an engine that is not measured.
    """
    found: dict[str, str] = {}
    for item in given:
        engine, _, folder = item.partition("=")
        if engine not in engines or engine == "nanovllm":
            raise ValueError(f"--engine-path {item}: {engine!r} is no peer among --engine; write ENGINE=DIR")
        path = Path(folder).expanduser()
        if not folder or not path.is_dir():
            raise ValueError(f"--engine-path {item}: there is no folder {folder!r}; name one with {engine}'s packages")
        found[engine] = str(path.resolve())
    return found


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
    """A ValueError for a GPU that is not there.

    Nothing is done with the device: that is for the processes that measure.
    """
    import torch

    from nanovllm.hardware.devices import cuda_devices

    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ValueError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: {cuda_devices(count)}; use auto or cpu")


def has_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()

"""How fast is this model, how far from the limit, and where does its time go?

    python bench.py              # on a GPU Qwen3-0.6B's shape, random weights,
                                 # on a CPU SmolLM2-135M-Instruct
    python bench.py --preset qwen3-8b --workload bs1,std256 --repeat 5
    python bench.py --model DIR --num-requests 64 --input-len 99 --output-len 9
    python bench.py --compare    # custom kernels against every op's reference
    python bench.py --ablate     # what is each op's custom kernel worth?
    python bench.py --engine nanovllm,transformers,vllm   # beside its peers
    python bench.py --engine sglang --engine-path sglang=VENV/.../site-packages
    python bench.py --engine nanovllm,llama.cpp,openvino --device cpu --rounds 3
    python bench.py --save; python bench.py --history; python bench.py --check
    python bench.py --tables FILE    # put the kept results between its markers

Each configuration runs in a process of its own, and so does the measurement of
the device's rates, before them and after. `--limit SECONDS` ends a row that
takes longer. A profile of the first workload follows, apart from the timed
runs, in `profiles/`: a trace for ui.perfetto.dev, a report as text, and one as
a page. `--no-profile` leaves it out.

Without options it takes about a minute on two cores of a CPU. On a terminal
a line says what is measured, which of the runs it is, and for how long.
"""

import argparse
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        usage="bench.py [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_model(p.add_argument_group("the model"))
    _add_load(p.add_argument_group("the load"))
    _add_engine(p.add_argument_group("the engine"))
    _add_output(p.add_argument_group("what comes out"))
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return p


def _add_model(group: Any) -> None:
    from nanovllm.arguments import full_dtype
    from nanovllm.config import ONLINE_QUANTIZATION

    group.add_argument("--model", help="a directory, a hub id, or a .gguf file, with its weights")
    group.add_argument("--preset", help="a published shape with random weights: qwen3-0.6b, llama3-8b, ...")
    group.add_argument(
        "--dtype", type=full_dtype, choices=("bfloat16", "float16", "float32"), help="default: the model's"
    )
    group.add_argument("--quantization", choices=ONLINE_QUANTIZATION, help="quantise weights while they are loaded")
    group.add_argument(
        "--lm-head-quantization", choices=("fp8", "int8"), help="quantise the LM head while it is loaded"
    )
    group.add_argument(
        "--prompt-activations", choices=("auto", "fp8"),
        help="fp8: steps of many tokens multiply int4, int8 and GGUF weights in fp8, less exactly (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--expand-small-weights", choices=("auto", "off"),
        help="copies in 16 bits of quantised weights of small layers, on a GPU where that is faster (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-dtype", type=full_dtype, help="auto: as --dtype; fp8: half the memory (default: auto)"
    )
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu")


def _add_load(group: Any) -> None:
    from nanovllm.bench.workloads import WORKLOADS

    named = "; ".join(f"{w.name}: {w.description}" for w in WORKLOADS.values())
    group.add_argument("--workload", help=f"names, separated by commas; prompts x input -> output tokens: {named}")
    group.add_argument("--num-requests", type=int, help="a load of your own, with --input-len and --output-len")
    group.add_argument("--input-len", help="tokens, or bounds: 100-1024")
    group.add_argument("--output-len", help="tokens, or bounds")
    group.add_argument("--rate", type=float, help="requests a second that arrive at random, for your own load")
    group.add_argument("--repeat", type=int, default=3, help="timed runs of each workload (default: 3)")
    group.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how often each engine is started, by turns; a ratio is the median of the rounds' ratios",
    )
    group.add_argument(
        "--temperature", type=float, default=0.6, help="temperature of every request; 0: greedy (default: 0.6)"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="top-p of every request")
    group.add_argument("--warmup", type=int, default=1, help="untimed runs before the timed ones (default: 1)")
    group.add_argument(
        "--limit", type=float, metavar="SECONDS",
        help="seconds after which a row ends, loading not counted; the repeats that are done are shown",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="seed of the prompts and their lengths (default: 0)")


def _add_engine(group: Any) -> None:
    from nanovllm.bench.engines import ENGINES

    group.add_argument("--engine", default="nanovllm", help=f"any of {','.join(ENGINES)}")
    group.add_argument(
        "--engine-path", action="append", default=[], metavar="ENGINE=DIR",
        help="packages of one peer, such as a venv's site-packages: vLLM and SGLang need different versions of some",
    )  # fmt: skip
    group.add_argument(
        "--vllm-plugin", nargs="?", const="1", action="append", metavar="OPS",
        help="measure vLLM again with nanovllm's kernels in it, or with those of these ops; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--use-custom-kernels", action=argparse.BooleanOptionalAction, default=None,
        help="custom kernels, or every op's PyTorch reference (default: custom)",
    )  # fmt: skip
    group.add_argument("--kernels", help='providers of ops, "rms_norm=triton;silu_and_mul=native"')
    group.add_argument(
        "--cpu-activations", choices=("float32", "int8", "bfloat16"),
        help="type of the activations that quantised weights are multiplied with, on a CPU",
    )  # fmt: skip
    group.add_argument(
        "--kernel-plugin", action="append", metavar="FILE",
        help="measure nanovllm again with the kernels of this Python file or module; may be repeated",
    )  # fmt: skip
    group.add_argument("--compare", action="store_true", help="measure with and without custom kernels")
    group.add_argument("--ablate", action="store_true", help="measure with each op's custom kernel off in turn")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    for names, said in (
        (["--activation-quantization"], "8-bit activations for fp8 weights in steps of many tokens (the default)"),
        (["--capture-prefill"], "CUDA graphs for steps with prompts too (the default)"),
        (["--piggyback-prefill", "--ride-prompts"],
         "compute prompts within decode steps; by default the engine decides by the model"),
    ):  # fmt: skip
        group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=said)
    group.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="GPUs that share the model; then no profile is made"
    )
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="share of the GPU's memory to use")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences in one step")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in one step")


def _add_output(group: Any) -> None:
    from nanovllm.json_output import HELP as JSON_HELP

    group.add_argument(
        "--profile", action=argparse.BooleanOptionalAction, default=True,
        help="profile the first workload after the timed runs (the default)",
    )  # fmt: skip
    group.add_argument(
        "--profile-dir", type=Path, default=Path("profiles"), help="the folder of the profile (default: profiles)"
    )
    group.add_argument("--plots", action="store_true", help="also write the report's figures as PNG files")
    group.add_argument("--report", type=Path, metavar="FILE", help="only draw the reports of an earlier profile.json")
    group.add_argument("--json", metavar="FILE|-", help=JSON_HELP[0].lower() + JSON_HELP[1:].rstrip("."))
    group.add_argument("--wide", action="store_true", help="all columns, however wide the table is")
    group.add_argument("--results", type=Path, default=ROOT / "results", help="where results are kept")
    group.add_argument("--save", action="store_true", help="keep this run's results")
    group.add_argument(
        "--check", action="store_true", help="compare this run's ratios with the kept ones; exit code 1 if one fell"
    )
    group.add_argument("--history", action="store_true", help="only print how the kept results have changed")
    group.add_argument(
        "--tables", type=Path, nargs="?", const=Path("-"),
        help="only write the tables of the kept results, to a file or to standard output",
    )  # fmt: skip
    group.add_argument("--verbose", action="store_true", help="show what the engines print")
    group.add_argument("--in-process", action="store_true", help="measure in this process, for debuggers")


def main(arguments: list[str] | None = None, launch: Any = None) -> int:
    """Run the benchmark; returns the exit code. launch: see `nanovllm.bench.launcher`."""
    from nanovllm.console import StatusLine

    status = StatusLine()
    if "--worker" not in sys.argv and "torch" not in sys.modules:
        status.show("starting ...", timed=True)
    try:
        options = parser()  # imports PyTorch
    finally:
        status.clear()
    args, unknown = options.parse_known_args(arguments)
    from nanovllm.bench import benchmark, launcher
    from nanovllm.bench.command_line import check_drawing, check_installed, engine_paths, names_in, unknown_options
    from nanovllm.bench.engines import ENGINES
    from nanovllm.environment import warn_of_misspelt
    from nanovllm.json_output import STDOUT, write_json

    if unknown:
        options.error(unknown_options(unknown, options.format_help()))
    if args.worker is not None:
        from nanovllm import LLM
        from nanovllm.early_exit import exit_with_parent

        exit_with_parent()
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        launcher.serve(args.worker, LLM)
        return 0
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is written
    warn_of_misspelt()
    try:
        if args.history:
            return print_history(args)
        if args.report:
            check_drawing(args.plots)
            return draw_reports(args)
        if args.tables:
            return write_tables(args)
        choose_model(args)
        paths = engine_paths(args.engine_path, names_in("--engine", args.engine, ENGINES))
        if args.in_process and launch is None:
            from nanovllm import LLM

            launch = launcher.in_process(LLM)
        elif launch is None:
            check_installed(names_in("--engine", args.engine, ENGINES), paths)
            launch = launcher.in_child([sys.executable, str(ROOT / "bench.py")], args.verbose, paths)
        run = benchmark.Benchmark(args, launch, ROOT)
        if args.json != STDOUT:
            return run.run()
        with contextlib.redirect_stdout(sys.stderr):
            code = run.run()
        write_json(STDOUT, run.record.to_json())
        return code
    except (ValueError, FileNotFoundError) as error:
        from nanovllm.console import say

        say(f"bench.py: {error}", sys.stderr)
        return 2


def choose_model(args: argparse.Namespace) -> None:
    """Set `preset_config` for a preset.

    By default a preset on a GPU, which needs no download; on a CPU SmolLM2-135M-Instruct.
    """
    import torch

    from nanovllm.models.model_presets import PRESETS, preset
    from nanovllm.weights.demo_model import demo_model_path

    for option in ("model", "preset"):
        if getattr(args, option) == "":
            raise ValueError(f"--{option} '': names nothing; leave it out, or name one")
    if args.model and args.preset:
        raise ValueError(
            f"--model {args.model} and --preset {args.preset}: one has weights of its own, the other random ones;"
            " leave one of them out"
        )
    if args.model and args.model.lower() in PRESETS and not Path(args.model).exists():
        raise ValueError(
            f"--model {args.model} is a preset (a shape without weights): --preset {args.model} takes random ones"
        )
    if not args.model and not args.preset:
        if args.device != "cpu" and torch.cuda.is_available():
            args.preset = "qwen3-0.6b"
        else:
            args.model = str(demo_model_path())
    if args.preset:
        args.preset_config = preset(args.preset)
    elif args.model.endswith(".gguf") and Path(args.model).is_file():
        from nanovllm.weights.gguf import read_config

        args.model_shape = read_config(args.model)


def print_history(args: argparse.Namespace) -> int:
    """Print how the kept workloads moved."""
    from nanovllm.bench import result_tables, results
    from nanovllm.bench.command_line import names_in
    from nanovllm.bench.workloads import WORKLOADS

    files = results.kept_files(args.results)
    if args.workload is not None:
        wanted = set(names_in("--workload", args.workload, WORKLOADS))
        files = [f for f in files if f.stem in wanted]
    if not files:
        print(f"nothing is kept in {args.results} yet; keep a run with --save")
        return 1
    for path in files:
        print("\n".join(result_tables.history_lines(path)))
    return 0


def draw_reports(args: argparse.Namespace) -> int:
    """Draw the reports of an earlier profile again."""
    from nanovllm.bench.profile_files import draw_again

    for line in draw_again(args.report, args.profile_dir, args.plots):
        print(line)
    return 0


def write_tables(args: argparse.Namespace) -> int:
    """Write the kept results as tables: to the standard output, or between a file's markers."""
    from nanovllm.bench import result_tables, results

    tables = result_tables.markdown(results.kept_files(args.results))
    if str(args.tables) == "-":
        print(tables)
    else:
        result_tables.write_between_markers(args.tables, tables)
        print(f"written: {args.tables}")
    return 0


if __name__ == "__main__":
    from nanovllm.console import run_program

    if "--worker" in sys.argv:  # whose traceback the process that started it reads
        sys.exit(main())
    run_program("bench.py", main)

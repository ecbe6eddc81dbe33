"""Are the custom kernels right, and faster? Every op and provider, here.

    python test_custom_kernels.py                   # all ops
    python test_custom_kernels.py rms_norm softmax  # whose names begin so

Four sections: correctness against the reference in float64, time, peak memory,
and a profile of the kernels that ran; then one table with a line for each op
and provider. Without a GPU it verifies through Triton's interpreter, on small
shapes: all ops take many minutes, so try one op first.

It is a pytest module as well: `pytest test_custom_kernels.py`; pytest needs
`pip install -e ".[test]"`. There the interpreter is not chosen, and without a
GPU the tests of the Triton providers are skipped;
`TRITON_INTERPRET=1 pytest test_custom_kernels.py -k rms_norm` runs them.
"""

import argparse
import os
from collections.abc import Sequence

from nanovllm.early_exit import leave_at_once

if __name__ == "__main__":
    leave_at_once("test_custom_kernels.py")

import torch

try:
    import pytest
except ModuleNotFoundError:  # the script runs without
    pytest = None

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, so before the kernels are

from nanovllm.arguments import did_you_mean
from nanovllm.console import Column, StatusLine, TablePrinter, run_program
from nanovllm.kernels import Op, Provider, all_ops, unavailable_reason
from nanovllm.kernels.op.priority import ALL_OPS
from nanovllm.kernels.testing.compare import Measurement, bench_cases, measure
from nanovllm.kernels.testing.verify import Case, cases, verify_case
from nanovllm.wording import counted

DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
PROVIDER = Column("provider", 12)
NAMES = Column("op", 31), PROVIDER
_ONE = "python test_custom_kernels.py rms_norm"
PAIRS = [(op, provider) for op in all_ops().values() for provider in op.providers.values() if op.inputs]


if pytest is not None:

    @pytest.mark.parametrize("op, provider", PAIRS, ids=lambda x: x.name)
    def test_provider(op: Op, provider: Provider) -> None:
        """Right on every case that it takes. Without a GPU the reference runs each shape once in each dtype."""
        reason = provider.support(DEVICE)
        if reason is not None:
            pytest.skip(reason)
        chosen = list(cases(op, full=DEVICE.type == "cuda"))
        if DEVICE.type == "cpu" and provider.name == "native":
            scaled = [case for case in chosen if case.scale != 1 and case.dtype == torch.float16]
            chosen = [*cases(op, full=False, quick=True), *scaled]
        verdicts = [verify_case(op, provider, DEVICE, case) for case in chosen]
        assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]


def correctness(pairs: list[tuple[Op, Provider]]) -> dict[tuple[str, str], str]:
    print("\n1. Correctness: largest error / tolerance, against the reference in float64")
    table = TablePrinter(*NAMES, Column("error", 5, number=True), Column("verdict", 22))
    status, verdicts = StatusLine(), {}
    for i, (op, provider) in enumerate(pairs):
        results, done = [], f"(done: {i} of {counted(len(pairs), 'provider')})"
        for case in cases(op, full=DEVICE.type == "cuda"):
            status.show(f"{op.name}, {provider.name}: {case} {done}", timed=True)
            results.append(verify_case(op, provider, DEVICE, case))
        status.clear()
        failures = [v for v in results if v.failure]
        worst = max((v.error for v in results), default=0.0)
        ran = sum(v.skipped is None for v in results)
        verdict = f"{len(failures)} of {ran} WRONG" if failures else f"right ({counted(ran, 'case')})"
        verdicts[op.name, provider.name] = verdict
        table.add(op.name, provider.name, f"{worst:.2f}", verdicts[op.name, provider.name])
        for v in failures[:3]:
            print(f"   {v.case}: {v.failure}")
    return verdicts


def of_the_largest_shape(results: list[Measurement]) -> dict[tuple[str, str], Measurement]:
    """By op and provider the measurement that moves the most bytes; of equals the first."""
    largest: dict[tuple[str, str], Measurement] = {}
    for m in results:
        key = m.op, m.provider
        if key not in largest or m.bytes > largest[key].bytes:
            largest[key] = m
    return largest


def benchmark(pairs: list[tuple[Op, Provider]]) -> list[Measurement]:
    where = "this CPU, the references only, on the first shape"
    print(f"\n2. Time on {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else where}")
    table = TablePrinter(Column("case", 46), PROVIDER, Column("us", 10, number=True), Column("limit", 5, number=True))
    status, results, shown = StatusLine(), [], ""
    if DEVICE.type == "cpu":
        pairs = [(op, p) for op, p in pairs if p.name == "native"]  # the interpreter's time says nothing
    for i, (op, provider) in enumerate(pairs):
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        for case in list(bench_cases(op, dtype))[: None if DEVICE.type == "cuda" else 1]:
            done = f"(done: {i} of {counted(len(pairs), 'provider')})"
            status.show(f"timing {op.name}, {provider.name}: {case} {done}", timed=True)
            m = measure(op, provider, case, DEVICE)
            status.clear()
            results.append(m)
            if shown != op.name:
                shown = op.name
                table.add(shown, "", "", "", style="bold")
            if m.timing is None:
                table.add(f"  {case}", f"{provider.name} {table.note(m.reason or '')}", "", "")
                continue
            share = "" if m.share is None else f"{m.share:.0%}"
            table.add(f"  {case}", provider.name, f"{1e6 * m.timing.median:.2f}", share)
    table.end()
    return results


def peak_memory(results: list[Measurement]) -> None:
    print("\n3. Peak memory above the inputs in MiB, on the largest shape, results included")
    largest = of_the_largest_shape([m for m in results if m.peak_bytes is not None])
    table = TablePrinter(*NAMES, Column("MiB", 8, number=True), Column("native", 8, number=True), Column("case", 17))
    for (op, provider), m in largest.items():
        native = largest.get((op, "native"))
        beside = f"{native.peak_bytes / 2**20:.1f}" if native and provider != "native" else ""
        table.add(op, provider, f"{m.peak_bytes / 2**20:.1f}", beside, str(m.case).split()[0])
    if not largest:
        print("   not measured without a GPU")


def profile(pairs: list[tuple[Op, Provider]]) -> None:
    print("\n4. Profile: what a call launches on the device")
    if DEVICE.type != "cuda":
        print("   no device kernels without a GPU")
        return
    table = TablePrinter(*NAMES, Column("kernels", 7, number=True), Column("us", 8, number=True), Column("longest", 18))
    for op, provider in pairs:
        shapes = op.inputs.decode or op.inputs.small
        case = Case(shapes[0], torch.bfloat16, op.inputs.variants[0])
        arguments = case.arguments(op, DEVICE)
        if op.refusal(provider, **arguments) is not None:
            continue
        provider.fn(**arguments)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            provider.fn(**arguments)
            torch.cuda.synchronize()
        kernels = [e for e in recorded.key_averages() if e.device_time_total > 0]
        kernels.sort(key=lambda e: -e.device_time_total)
        total = sum(e.device_time_total for e in kernels)
        longest = kernels[0].key[:18] if kernels else ""
        table.add(op.name, provider.name, str(sum(e.count for e in kernels)), f"{total:.1f}", longest)


def summary(verdicts: dict[tuple[str, str], str], results: list[Measurement]) -> None:
    shape = "largest" if DEVICE.type == "cuda" else "first"  # on a CPU no other is timed
    print(f"\nSummary: us of the {shape} shape, share of the limit, gain over native")
    table = TablePrinter(
        NAMES[0], Column("provider", 11), Column("verdict", 14), Column("us", 8, number=True),
        Column("limit", 5, number=True), Column("gain", 6, number=True),
    )  # fmt: skip
    largest = of_the_largest_shape([m for m in results if m.timing is not None])
    for (op, provider), verdict in verdicts.items():
        m, native = largest.get((op, provider)), largest.get((op, "native"))
        times = ["", "", ""]
        if m is not None:
            times = [f"{1e6 * m.timing.median:.1f}", "" if m.share is None else f"{m.share:.0%}", ""]
            if native is not None and m.case == native.case:
                times[2] = f"{native.timing.median / m.timing.median:.2f}"
        table.add(op, provider, verdict.partition(" (")[0], *times, style="red" if "WRONG" in verdict else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", help="an op, or a prefix of several (default: all ops)")
    asked = parser.parse_args(arguments).op
    for prefix in asked:
        if not any(name.startswith(prefix) for name in all_ops()):
            remedy = did_you_mean(prefix, all_ops()) or ALL_OPS
            parser.error(f"no op begins with {prefix!r}; {remedy}")
    wanted = [(op, p) for op, p in PAIRS if not asked or op.name.startswith(tuple(asked))]
    reason = unavailable_reason()
    if reason is not None:
        print(f"Triton kernels run in Triton's interpreter, on small shapes: {reason.partition(':')[0]}.")
    pairs = [(op, p) for op, p in wanted if p.support(DEVICE) is None]
    not_here: dict[str, list[str]] = {}
    for op, provider in wanted:
        if (why := provider.support(DEVICE)) is not None:
            not_here.setdefault(f"{provider.name}: {why}", []).append(op.name)
    for why, ops in not_here.items():
        print(f"Not run: {why} ({counted(len(ops), 'op')})")
    if not asked:
        print(f"{counted(len(pairs), 'provider')}: this takes minutes; `{_ONE}` tests one op", flush=True)
    verdicts = correctness(pairs)
    results = benchmark(pairs)
    peak_memory(results)
    profile(pairs)
    summary(verdicts, results)
    return int(any("WRONG" in v for v in verdicts.values()))


if __name__ == "__main__":
    run_program("test_custom_kernels.py", main)

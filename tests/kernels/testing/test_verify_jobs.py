"""`verify` by several processes: what one process finds, whatever happens to those of several."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import Provider, all_ops
from nanovllm.kernels.op.plugins import load_plugins
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.testing.verify import Verdict, cases, lacks_memory, verify_case
from nanovllm.kernels.testing.verify_jobs import Setting, shares, verify_in_processes

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]

OP = """
import ctypes
import multiprocessing
import os
import signal
import time
import torch
from nanovllm.kernels import Cost, Inputs, op

WORKER = multiprocessing.parent_process() is not None
{begin}

@op(
    arguments={{"x": "[..., n]"}},
    inputs=Inputs(lambda t, rows, size: {{"x": t.normal(rows, size)}}, small=[(2, 3), (1, 1), (4, 40)], scales=()),
    cost=lambda x: Cost(2 * x.nbytes),
)
def {name}(x: torch.Tensor) -> torch.Tensor:
    '''Thrice x.'''
    return 3 * x

"""
PROVIDER = """
@{name}.provider("{provider}")
def {provider}(x):
    {does}
    return x + x + x
"""


@pytest.fixture
def plugin(tmp_path):
    """Declare an op whose providers begin as given; (op, path). It is gone after the test."""

    def write(name, begin="", **providers):
        path = tmp_path / f"{name}.py"
        text = OP.format(name=name, begin=begin)
        path.write_text(text + "".join(PROVIDER.format(name=name, provider=p, does=d) for p, d in providers.items()))
        load_plugins([str(path)])
        return all_ops()[name], str(path)

    with temporary():
        yield write


def test_whatever_happens_to_processes_the_verdicts_are_those_of_one(plugin, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is printed is kept in buffers
    dies = "WORKER and x.dtype == torch.float16 and x.shape[-1] == 3 and os.kill(os.getpid(), signal.SIGKILL)"
    lacks = f"""
    if WORKER:
        with open({str(tmp_path / "tried")!r}, 'a+') as tried:
            if tried.seek(0) == 0 and str((x.shape, x.dtype)) not in tried.read():
                print((x.shape, x.dtype), file=tried)
                raise torch.OutOfMemoryError('no')"""
    says = "print('said by Python'); ctypes.CDLL(None).printf(b'said by C\\n')"
    wrong = "x = x.clone(); x[..., 2:3] += x[..., 2:3] * (x.shape[-1] == 40 and len(x) == 4)"
    declared, path = plugin("thrice", wrong=wrong, dying=dies, lacking=lacks, talking=says)
    setting = Setting("cpu", (path,), seed=4, quick=True, jobs=2)
    pairs = [("thrice", provider) for provider in declared.providers]
    found = {provider: verdicts for (_, provider), verdicts in verify_in_processes([declared], pairs, setting)}
    for name, provider in declared.providers.items():
        alone = [verify_case(declared, provider, CPU, case) for case in setting.cases(declared)]
        failed = [v for v in found[name] if v.failure]
        assert {v.case.shape[1:] for v in failed} == {"wrong": {(40,)}, "dying": {(3,)}}.get(name, set())
        if name == "dying":  # it has failed the case in which it died, and no other
            assert [(v.case.dtype, v.failure) for v in failed] == [
                (torch.float16, "crashed (SIGKILL): was the machine out of memory?")
            ]
        else:
            assert found[name] == alone
    printed = capfd.readouterr().err
    assert "said by Python" in printed and "said by C" in printed
    # What lacks memory beside others is verified again, alone.
    assert len((tmp_path / "tried").read_text().splitlines()) == len(found["lacking"])


ENDS = {
    "reads": (
        "ctypes.string_at(x.data_ptr() + x.nbytes + 64, 1)",
        r"crashed \(SIGSEGV\) at thrice_.*a load or store",
        2,
    ),
    "hangs": (
        "time.sleep(1000)",
        r"hung, or its process was paused: it took longer than 2 s at thrice_\w+.py:\d+, `.*time.sleep\(1000\)`",
        1,
    ),
    "writes": ("ctypes.memset(torch.empty(3).data_ptr(), 0, 4096)", r"crashed \(SIGSEGV\) at thrice_", 2),
    "exits": ("os._exit(0)", "crashed: it ended the process with code 0", 2),
}


@pytest.mark.parametrize(
    "end", ["reads", "hangs", *(pytest.param(e, marks=pytest.mark.slow) for e in ("writes", "exits"))]
)
def test_a_crash_or_a_hang_is_the_verdict_on_its_case_and_ends_the_provider(plugin, end):
    does, said, num_run = ENDS[end]
    declared, path = plugin(f"thrice_{end}", other=f"WORKER and {does}")
    setting = Setting("cpu", (path,), quick=True, limit=2 if end == "hangs" else 120)
    ((_, found),) = verify_in_processes([declared], [(declared.name, "other")], setting)
    failures = [v.failure for v in found if v.failure]
    assert len(failures) == num_run and all(re.match(said, f) for f in failures), failures
    assert [v.skipped.startswith("not run: ") for v in found if not v.failure] == [True] * (len(found) - num_run)


def test_memory_that_the_reference_lacks_is_a_failure(plugin):
    declared, _ = plugin("thrice_larger")
    case = next(cases(declared, False))
    greedy = Provider("greedy", lambda x: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    assert lacks_memory(verify_case(declared, greedy, CPU, case))
    assert not lacks_memory(Verdict(case)) and not lacks_memory(Verdict(case, failure="ValueError: no"))


def test_a_process_that_cannot_begin_is_an_error(plugin):
    declared, path = plugin("thrice_late", begin="WORKER and os._exit(5)")
    pairs = [("thrice_late", "native")]
    with pytest.raises(RuntimeError, match="ended with code 5 before it began"):
        list(verify_in_processes([declared], pairs, Setting("cpu", (path,), quick=True)))


@pytest.mark.parametrize("jobs", [1, 7])
def test_shares(jobs):
    ops = {name: all_ops()[name] for name in ("softmax", "rms_norm", "fused_activation")}
    of_op = {name: list(cases(declared, True)) for name, declared in ops.items()}
    pairs = [(name, provider) for name, declared in ops.items() for provider in declared.providers]
    dealt = shares(of_op, pairs, jobs)
    assert len(dealt) == jobs and Counter(task for tasks in dealt for task in tasks) == Counter(
        (op, provider, i) for op, provider in pairs for i in range(len(of_op[op]))
    )
    mine = [{(op, p, of_op[op][i].shape, of_op[op][i].dtype) for op, p, i in tasks} for tasks in dealt]
    assert sum(map(len, mine)) == len(set().union(*mine))  # whoever has one case of a shape and dtype has all
    counts = [len(tasks) for tasks in dealt]
    assert max(counts) < 1.3 * min(counts)


def test_quick_is_each_dtype_and_small_shape_once():
    for declared in all_ops().values():
        if declared.inputs is None:
            continue
        quick, inputs = list(cases(declared, True, seed=9, quick=True)), declared.inputs
        assert Counter((c.dtype, c.shape[1:]) for c in quick) == Counter(
            (d, s[1:]) for d in inputs.dtypes for s in inputs.small
        )
        assert all(c.shape in inputs.small or c.leading == (2, 3) for c in quick)
        assert {c.strided for c in quick} == {False, True} and {c.seed for c in quick} == {9}
        assert all(any(c.variant == v for c in quick) for v in inputs.variants) or len(inputs.variants) > len(quick)


def test_ctrl_c_ends_all(plugin, tmp_path):
    started = f"WORKER and (open({str(tmp_path)!r} + f'/pid{{os.getpid()}}', 'w').close(), time.sleep(100))"
    _, path = plugin("thrice_slow", other=started)
    command = [sys.executable, "-m", "nanovllm", "kernels", "verify", "thrice_slow", "--provider", "other"]
    command += ["--jobs", "2", "--kernel-plugin", path]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # so that it does not call itself once more
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("pid*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0 and "Traceback" not in said, said
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("pid")), 0)

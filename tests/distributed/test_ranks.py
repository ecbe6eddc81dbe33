"""`LLM(tensor_parallel_size=2)`: requests reach the other rank, and whatever goes wrong is an error that leaves no
process behind.
"""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.distributed import endings
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.kernels.op.registry import temporary
from tests import tiny
from tests.engine.fast.replayed import ReplayedFunctions

ARGUMENTS = dict(
    device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=40, max_model_len=128, max_num_seqs=8,
    max_num_batched_tokens=64, use_custom_kernels=False, seed=0, rank_timeout=300,
)  # fmt: skip
PROMPTS = ["hello world", "one two three", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(directory)
    return directory


def make(directory, size=2, **arguments):
    return LLM(directory, tensor_parallel_size=size, **ARGUMENTS | arguments)


def told(outputs):
    return [(o["text"], o["token_ids"], o.outputs[0].finish_reason) for o in outputs]


def exist(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def gone(pids, seconds=120):
    deadline = time.monotonic() + seconds
    while exist(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not exist(pids)


def conversation(llm):
    """What an engine answers to requests of all kinds, each of which the ranks must hear of."""
    said = [told(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (GREEDY, DRAWN)]
    if importlib.util.find_spec("llguidance"):
        drawn = SamplingParams(temperature=1, n=2, max_tokens=8, structured_outputs={"regex": "[a-f]{6}"})
        said.append(told(llm.generate(PROMPTS, [drawn, GREEDY, drawn], use_tqdm=False)))
    stop = said[0][0][0][4:7]
    said.append(told(llm.generate(PROMPTS, SamplingParams(temperature=0, stop=[stop]), use_tqdm=False)))
    stream = llm.stream(PROMPTS[1], GREEDY)
    said.append(next(stream))
    stream.close()  # aborts the request
    assert llm.reset_prefix_cache() or not llm.engine.step()
    said.append(told(llm.generate([PROMPTS[0] * 8] * 2, DRAWN, use_tqdm=False)))
    return said


class CapturedGraph:
    """Stands for a CUDA graph with sums over the ranks."""

    def __init__(self, events):
        self._events = events

    def reset(self):
        self._events.append("reset")


def test_graphs_end_before_the_group_that_they_sum_over(directory, monkeypatch):
    """NCCL waits in `abort` until every graph that holds its kernels has ended."""
    events, abort = [], endings.abort
    monkeypatch.setattr(endings, "abort", lambda groups: (events.append("abort"), abort(groups)))
    llm = make(directory)
    graph = CapturedGraph(events)
    llm.engine.runner.group.captured_graphs.add(graph)
    pids = llm.engine.ranks.pids
    del llm
    assert events == ["reset", "abort"] and gone(pids)


def test_requests_aborts_interrupts_and_the_end_of_a_rank(directory, monkeypatch, caplog, capfd):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")  # the ranks compare their schedules
    want = conversation(make(directory, 1))
    with caplog.at_level(logging.INFO, "nanovllm"):
        llm = make(directory, async_scheduling=True, fast_policy=FastPolicy(mask_thread=True))
    for said in (caplog.text, capfd.readouterr().err):  # every rank says how far its start is
        assert "weights loaded in " in said and "KV cache sized in " in said, said
    pids = llm.engine.ranks.pids
    assert conversation(llm) == want and exist(pids) == pids

    # Ctrl-C in a step ends the call after this step, and the ranks go on together.
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(100):
            llm.generate(PROMPTS, long, use_tqdm=False)
    assert told(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want[0]

    events = []
    graph = CapturedGraph(events)
    llm.engine.runner.group.captured_graphs.add(graph)
    os.kill(pids[0], signal.SIGKILL)
    while llm.engine.ranks.failure is None:  # the next step finds a rank that failed before it
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by signal 9"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert events == ["reset"]  # or NCCL's abort, in another thread, would wait for it
    with pytest.raises(RuntimeError, match="rank 1 of 2 .*; the engine has stopped, make a new one"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert gone(pids)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            dict(size=3),
            "4 query heads cannot be divided by tensor_parallel_size=3; sizes that this model allows: 1, 2, 4; on a"
            " CPU use 1, whose threads use all processors",
        ),
        (dict(device="cpu:0"), "device='cpu:0' with tensor_parallel_size=2: each rank has a device of its own"),
    ],
)
def test_bad_arguments(directory, arguments, said):
    with pytest.raises(ValueError, match=said):
        make(directory, **arguments)


CAPTURED = dict(
    fast_policy=FastPolicy(graph_backend=ReplayedFunctions, prefill_graphs=False, padding=True),
    kernel_priority={"attention_decode": ["reads_lengths"]},
)
FAULTS = {
    "stops": (
        "draw = lambda *arguments: time.sleep(300)",
        "rank 1 did not come to a sum over the ranks for 300 s; it hangs",
    ),
    "hangs": ("time.sleep(300)", "rank 1 did not answer for 3 s: it"),
    "fails": (
        "from nanovllm.engine import model_runner; model_runner.load_model = None",
        "rank 1 of 2 failed: TypeError",
    ),
    "ends": ("os._exit(7)", "rank 1 of 2 ended with exit code 7"),
    "lacks a kernel": (
        "del all_ops()['sample'].providers['lacks a kernel']",
        r"rank 1 differs from rank 0: 'sample': '\w+' instead of 'sample': 'lacks a kernel'",
    ),
    "captures": (
        "from nanovllm.engine.fast import step_shape\nstep_shape.batch_buckets = lambda most: [most]",
        r"rank 1 differs from rank 0: .*\(\[8\] instead of .*\(\[1, 2, 4, 8\]",
    ),
    "differs": (
        "draw = lambda logits, a, b, c, d, seeds, positions: sample.native(logits, a, b, c, d, seeds + 1, positions)",
        "rank 1 of 2 has another schedule or other tokens than rank 0 after 16 steps",
    ),
}
PLUGIN = """
import os, sys, time
from nanovllm.kernels import Provider, all_ops, sample
draw = sample.native
@sample.provider("{fault}")
def drawn(*arguments):
    return draw(*arguments)
attention = all_ops()["attention_decode"]
attention.providers["reads_lengths"] = Provider("reads_lengths", attention.native)
if sys.argv[0].endswith("ranks/worker.py"):
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=[pytest.mark.slow] * (f in ("fails", "differs", "stops", "captures", "lacks a kernel")))
        for f in FAULTS
    ],
)
def test_a_rank_that(fault, directory, tmp_path, monkeypatch):
    """A plugin does something else in the process of rank 1."""
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    what, said = FAULTS[fault]
    plugin = tmp_path / "fault.py"
    plugin.write_text(PLUGIN.format(fault=fault) + textwrap.indent(what, "    "))
    before, events = children(), []
    graph = CapturedGraph(events)
    with temporary(), pytest.raises(RuntimeError, match=said):
        llm = make(
            directory,
            kernel_plugins=[str(plugin)],
            use_custom_kernels=True,
            **CAPTURED if fault == "captures" else {},
            rank_timeout=3 if fault == "hangs" else 300,
        )
        if fault == "stops":  # not after 300 s, which a start may take
            gloo = llm.engine.runner.group.process_group._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(timedelta(seconds=2))
        llm.engine.runner.group.captured_graphs.add(graph)
        events.append("started")
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    assert gone(children() - before)
    assert events in ([], ["started", "reset"])


def children():
    """The processes that this one has started."""
    with open(f"/proc/self/task/{os.getpid()}/children") as f:
        return set(map(int, f.read().split()))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "error", "kill", "delete", "early"])
def test_the_ranks_end_with_their_program(directory, end):
    last = {
        "exit": "", "error": "raise ValueError", "kill": "os.kill(os.getpid(), signal.SIGKILL)", "early": "",
        # Without a collection, so that the memory which the ranks share is free at once.
        "delete": "gc.disable(); group = weakref.ref(llm.engine.runner.group); del llm; sys.exit(group() is not None)",
    }[end]  # fmt: skip
    # While rank 1 imports PyTorch and loads the model.
    early = "Processes.receive = lambda self, *_: (print(*self.pids, flush=True), time.sleep(2), os._exit(1))"
    program = (
        "import gc, os, signal, sys, time, weakref\nfrom nanovllm import LLM\n"
        f"from nanovllm.distributed.processes import Processes\n{early if end == 'early' else ''}\n"
        f"llm = LLM({str(directory)!r}, tensor_parallel_size=2, **{ARGUMENTS})\n"
        f"print(*llm.engine.ranks.pids, flush=True)\n{last}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 1 and gone(pids), done.stderr
    assert (done.returncode == 0) == (end in ("exit", "delete")), done.stderr


@pytest.mark.slow
def test_a_program_goes_on_after_a_start_that_was_too_slow(directory, warm_python):
    program = (
        "import time\nfrom nanovllm import LLM\n"
        f"try:\n    LLM({str(directory)!r}, tensor_parallel_size=2, **{ARGUMENTS | dict(rank_timeout=0.05)})\n"
        "except RuntimeError as error:\n    print(error)\ntime.sleep(2)\nprint('goes on')"
    )
    done = warm_python.run("-c", program, timeout=300)
    assert "rank 1 did not answer for 0.05 s: it has not started; pass a larger rank_timeout" in done.stdout, (
        done.stderr
    )
    assert done.stdout.endswith("goes on\n") and done.returncode == 0, done.stderr


def test_a_program_that_cannot_be_freed_from_a_dead_rank_ends(warm_python):
    program = (
        "import os, signal, time\nfrom nanovllm.distributed.processes import Processes\n"
        "processes = Processes('tests.distributed.spmd', 2, {}, lambda: time.sleep(600), stuck_seconds=1.0)\n"
        "processes.expect_return(True)\nos.kill(processes.pids[0], signal.SIGKILL)\ntime.sleep(600)"
    )
    done = warm_python.run("-c", program, timeout=300)
    assert done.returncode == 1 and "rank 1 of 2 was killed by signal 9" in done.stderr, done.stderr


STILL = """
import ctypes, sys, time
from tests.distributed.spmd import Pool

sleep = ctypes.CDLL(None).sleep  # a call that neither a signal nor an exception ends

def waits(group, seconds):
    (moves if group.rank else sleep)(seconds)

def moves(seconds):
    for place in "sleep(0.4)", "pass; sleep(0.35)":  # as different lines of a program
        exec(f"for _ in range({seconds}):\\n    {place}\\n    sleep(0.1)", {"sleep": time.sleep})

def both_wait(group):
    sleep(200)

if __name__ == "__main__":
    import still  # the other rank finds the functions by this name
    pool = Pool(2, stuck_seconds=0.5, still_seconds=3.2)
    pool.run(2, still.waits, 6)
    time.sleep(2)  # nothing is awaited meanwhile
    print("goes on while a rank moves", *pool.pids, flush=True)
    pool.run(2, still.both_wait)
"""


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_end(tmp_path):
    """As GPUs do whose kernels wait for each other, while Python's main threads wait for the GPUs."""
    (tmp_path / "still.py").write_text(STILL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, tmp_path / "still.py"], env=environment, capture_output=True, text=True, timeout=300
    )
    first, _, pid = done.stdout.strip().rpartition(" ")
    assert done.returncode == 1 and first == "goes on while a rank moves", done.stderr
    assert "none has moved for 3.2 s" in done.stderr and gone([int(pid)]), done.stderr


def test_a_rank_that_spins_ends_with_its_parent():
    child = (
        "from nanovllm.early_exit import exit_with_parent\n"
        "exit_with_parent()\nprint('ready', flush=True)\nwhile True: pass"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline())]
        assert exist(pids)
        process.kill()
    assert gone(pids)

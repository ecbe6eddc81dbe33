"""Processes that are measured in turns: replies, those that end or take too long, what the measurements do then."""

import json
import os
import sys
import textwrap
import time
from contextlib import suppress

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import adapters_compiled, vllm_plugin
from benchmarks.turns import Peer
from nanovllm.models.model_presets import preset

ANSWERS = """
import os, subprocess, sys, threading, time
from benchmarks.turns import serve

def answer(request):
    print("not a reply")
    subprocess.run([sys.executable, "-c", "print('nor is this')"])
    if request == "end":
        raise RuntimeError("no such GPU")
    if request == "wait":
        time.sleep(600)
    if request == "threads":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return [os.getpid(), started.pid]
    return {"twice": 2 * request}

serve(answer)
"""


@pytest.fixture
def peer(tmp_path):
    (tmp_path / "peer.py").write_text(textwrap.dedent(ANSWERS))
    made = Peer("one", [str(tmp_path / "peer.py")], {"PYTHONPATH": ":".join(sys.path)}, tmp_path / "log")
    yield made
    made.stop()


def reply(peer, request, seconds=300.0):
    peer.ask(request)
    return peer.reply(time.perf_counter() + seconds)


def test_replies_are_apart_from_what_is_printed(peer):
    assert [reply(peer, n) for n in (3, 4)] == [{"twice": 6}, {"twice": 8}]
    peer.ask(1)
    peer.ask(2)
    assert [peer.reply(time.perf_counter() + 300) for _ in range(2)] == [{"twice": 2}, {"twice": 4}]
    assert "not a reply" in peer.log.read_text() and "nor is this" in peer.log.read_text()


def test_one_that_ends_says_why(peer, capsys):
    assert reply(peer, "end") is None and "RuntimeError: no such GPU" in peer.failure
    assert "one: it ended" in capsys.readouterr().err
    assert reply(peer, 1) is None


def test_one_that_takes_too_long_is_stopped(peer):
    assert reply(peer, 1) is not None
    assert reply(peer, "wait", 0.2) is None and "took too long" in peer.failure
    assert peer.process.returncode is not None


def cpus_of_threads(process):
    """By the thread's number."""
    found = {}
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found[thread] = os.sched_getaffinity(int(thread))
    return found


def test_threads_and_processes_are_pinned(peer):
    before = cpus_of_threads(os.getpid())
    processes = reply(peer, "threads")
    allowed = os.sched_getaffinity(0)
    for cpus in ({min(allowed)}, {max(allowed)}, allowed):
        peer.pin(cpus)
        found = [cpus_of_threads(process) for process in processes]
        assert len(found[0]) >= 2 and found[1] and all(one == cpus for each in found for one in each.values())
    after = cpus_of_threads(os.getpid())  # other tests may have left threads, which end
    assert all(before[thread] == after[thread] for thread in before.keys() & after.keys())


class Standing:
    """In the place of a `Peer`: replies in order, None for a failure."""

    def __init__(self, label, replies):
        self.label, self.replies, self.failure, self.asked = label, list(replies), None, []
        self.pinned = []

    def pin(self, cpus):
        self.pinned.append(list(cpus))

    def ask(self, request):
        self.asked.append(request)

    def reply(self, end):
        found = self.replies.pop(0) if self.replies else None
        self.failure = "it ended" if found is None else None
        return found


def test_engines_in_turns(capsys, tmp_path):
    args = vllm_plugin.parser().parse_args(
        ["--workloads", "bs1", "--rounds", "3", "--json", str(tmp_path / "rows.json")]
    )
    first = Standing("0", [[], [1, 9], [1, 10], [1, 20], [1, 30]])
    second = Standing("1", [["rms_norm"], [1, 9], [1, 11], [1, 21], [1, 31]])
    third = Standing("bad", [])
    assert vllm_plugin.measure(args, [first, second, third], float("inf")) == 1
    out = capsys.readouterr().out
    assert "1: serves rms_norm" in out and "| bs1 | 0 | 20 | 1.000 | 1.000-1.000 | 10, 20, 30 |" in out
    assert "| bs1 | 1 | 21 | 1.050 | 1.033-1.100 | 11, 21, 31 |" in out and "bad" not in out
    assert [one["seed"] for one in first.asked] == [0, 1, 2, 3]
    assert '"ratio": 1.05' in (tmp_path / "rows.json").read_text()


@pytest.mark.parametrize("name, gib", [("qwen3-0.6b", 1.11), ("qwen3-8b", 15.26)])
def test_weights_and_cache_fit_into_an_engines_share(name, gib):
    weights = vllm_plugin.weight_gib(preset(name))
    assert weights == pytest.approx(gib, abs=0.01)
    share = 67 * 2**30
    cache = vllm_plugin.cache_bytes(share, weights) / 2**30
    assert 0 < cache < 67 - gib
    assert vllm_plugin.cache_bytes(share, 0) / 2**30 == pytest.approx(cache + weights)
    with pytest.raises(ValueError, match="nothing is left for the KV cache; name fewer variants"):
        vllm_plugin.cache_bytes(2 * 2**30, weights)


def test_two_engines_have_each_order_with_each_half_of_the_cpus(monkeypatch, capsys):
    monkeypatch.setattr(vllm_plugin.os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    args = vllm_plugin.parser().parse_args(["--workloads", "bs1", "--rounds", "4"])
    order = []

    class Ordered(Standing):
        def ask(self, request):
            super().ask(request)
            order.append(self.label)

    peers = [Ordered(label, [[]] + [[1, 9]] * 5) for label in "01"]
    assert vllm_plugin.measure(args, peers, float("inf")) == 0
    assert "".join(order[2:]) == "01100110"  # after the warm-up
    assert peers[0].pinned[1:] == [[2, 3], [2, 3], [4, 5], [4, 5]]
    assert peers[1].pinned[1:] == [[4, 5], [4, 5], [2, 3], [2, 3]]
    assert "bs1, round 4: 1: 9, 0: 9" in capsys.readouterr().out


def test_no_round_is_started_that_would_end_after_the_budget(monkeypatch, capsys):
    """Of 512 tokens a run; a warm-up that is shorter says how long it takes."""
    now = [0.0]
    monkeypatch.setattr(vllm_plugin.time, "perf_counter", lambda: now[0])
    args = vllm_plugin.parser().parse_args(["--workloads", "bs1,bs32", "--rounds", "3"])

    class Timed(Standing):
        def reply(self, end):
            found = super().reply(end)
            now[0] += found[0] if found else 0.0
            assert now[0] <= end
            return found

    def run(end):
        now[0] = 0.0
        one = Timed("0", [[], [1, 64], [8, 512], [8, 512], [8, 512]])
        assert vllm_plugin.measure(args, [one], end) == (0 if len(one.asked) > 1 else 1)
        return len(one.asked)

    assert run(9.7) == 1  # a round takes 8 s after the second of the warm-up, and a tenth more is allowed for
    assert run(9.9) == 2 and run(17.7) == 2 and run(17.9) == 3
    said = capsys.readouterr().out
    assert "bs1: 2 of 3 rounds, as the budget allows" in said and "bs32" not in said


def test_a_run_that_is_stopped_shows_and_keeps_its_rounds(capsys, tmp_path):
    args = vllm_plugin.parser().parse_args(["--workloads", "bs1", "--json", str(tmp_path / "rows.json")])

    class Stopped(Standing):
        def reply(self, end):
            if not self.replies:
                raise SystemExit(1)
            return super().reply(end)

    with pytest.raises(SystemExit):
        vllm_plugin.measure(args, [Stopped("0", [[], [1, 9], [1, 10]])], float("inf"))
    assert "| bs1 | 0 | 10 | 1.000 | 1.000-1.000 | 10 |" in capsys.readouterr().out
    assert [row["rounds"] for row in json.loads((tmp_path / "rows.json").read_text())] == [[10.0]]


def test_a_warm_up_has_shorter_outputs():
    assert vllm_plugin.shortened([512], vllm_plugin.WARM_UP) == [512]
    assert vllm_plugin.shortened([1600, 8, 3200, 1], 1200) == [400, 2, 800, 1]
    assert vllm_plugin.shortened([7, 100_000], None) == [7, 100_000]


def test_engines_share_the_cpus(monkeypatch):
    monkeypatch.setattr(vllm_plugin.os, "sched_getaffinity", lambda pid: {2, 3, 4, 7, 9})
    assert [vllm_plugin.cpus_of(i, 2) for i in range(2)] == [[2, 3], [4, 7]]
    assert vllm_plugin.cpus_of(3, 6) == [2, 3, 4, 7, 9]  # too few


def test_a_side_that_fails_leaves_the_others(capsys, tmp_path):
    args = adapters_compiled.parser().parse_args(["--rounds", "2", "--json", str(tmp_path / "rows.json")])
    turns = adapters_compiled.Turns(args)
    counts = {"graphs": 1, "breaks": 0, "skips": 0}
    prepared = {"took": 1.0, "pid": 7, "works": ["prefill"], **counts, "reasons": [], "failures": {}}
    torch.save((None, torch.tensor([1.0, -4.0])), tmp_path / "7-0")
    torch.save((None, torch.tensor([1.5, -4.0])), tmp_path / "8-0")
    peers = {
        "plain": Standing("plain", [prepared, {"seconds": 2.0}, {"seconds": 3.0}]),
        "nanovllm": Standing("nanovllm", [prepared | {"pid": 8}, {"seconds": 1.0}, {"seconds": 1.0}]),
        "packed": Standing("packed", [prepared, {"error": "no such kernel"}]),
        "traced": Standing("traced", [prepared | {"failures": {"0": "no such op"}}]),
        "eager": Standing("eager", [{"error": "no such model"}]),
    }
    ready = turns.ready("m", peers)
    assert list(ready) == ["plain", "nanovllm", "packed", "traced"]
    turns.measure("m", peers, ready, tmp_path)
    out, err = capsys.readouterr()
    assert "| m | prefill | nanovllm | 1000.000 ms | 1000.000-1000.000 | 2.500 |  | 1.2e-01 |" in out
    assert "packed |" not in out and "traced |" not in out and turns.failed
    for reason in ("no such kernel", "no such op", "no such model"):
        assert reason in err
    assert [row["side"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["plain", "nanovllm"]


@pytest.mark.parametrize(
    "tokens, error",
    [([[1, 2, 3], [4, 5, 6]], 0.5), ([[1, 9, 3], [4, 5, 6]], 0.125), (None, 0.5)],
)
def test_logits_are_compared_as_far_as_tokens_are_equal(tokens, error):
    """[steps, batch, vocabulary]; that of step 2 and sequence 0 is far off."""
    wanted = torch.ones(3, 2, 4)
    wanted[0, 1, 0] = 4
    got = wanted.clone()
    got[2, 0, 1], got[1, 1, 2] = 3, 1.5
    if tokens is None:
        assert adapters_compiled.difference((None, got), (None, wanted)) == error
    else:
        given = (torch.tensor(tokens), got), (torch.tensor([[1, 2, 3], [4, 5, 6]]), wanted)
        assert adapters_compiled.difference(*given) == error


@pytest.mark.slow
def test_a_tiny_model_on_a_cpu(tmp_path, capsys):
    """Compiled by the backend that runs graphs as they are."""
    arguments = [
        "--models", "tiny", "--layers", "1", "--sides", "plain,traced", "--batches", "2", "--prompt-len", "5",
        "--output-len", "11", "--prefill", "2x6", "--rounds", "1", "--device", "cpu", "--backend", "eager",
        "--json", str(tmp_path / "rows.json"),
    ]  # fmt: skip
    assert adapters_compiled.main(arguments) == 0, capsys.readouterr()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["work"], row["side"]) for row in rows] == [
        (work, side) for work in ("generate 2 x 5 -> 11, static cache", "prefill 2 x 6") for side in ("plain", "traced")
    ]
    assert all(row["difference"] < 1e-4 for row in rows)
    assert "tiny, traced: ready" in capsys.readouterr().out


def test_an_unknown_side_is_named():
    with pytest.raises(SystemExit, match="unknown 'fast'; known are plain, nanovllm"):
        adapters_compiled.main(["--sides", "fast"])


def test_the_time_of_the_gpu_in_turns(capsys, tmp_path):
    kept = tmp_path / "rows.json"
    args = vllm_plugin.parser().parse_args(
        ["--workloads", "bs1", "--rounds", "1", "--traces", "2", "--json", str(kept)]
    )
    first = Standing("0", [[], [1, 9], [1, 10], [99, 64], [64, 64], [128, 64]])
    second = Standing("1", [[], [1, 9], [1, 11], [99, 64], [32, 64], [64, 64]])
    assert vllm_plugin.measure(args, [first, second], float("inf")) == 0
    out = capsys.readouterr().out
    assert "| bs1 | 0 | 1.500 | 1.000 | 1.000, 2.000 |" in out and "| bs1 | 1 | 0.750 | 2.000 | 0.500, 1.000 |" in out
    assert [one["seed"] for one in first.asked if one.get("traced")] == [0, 1, 2]
    assert [row.get("gpu_ms") for row in json.loads(kept.read_text())] == [None, None, 1.5, 0.75]


def test_what_the_gpu_computed_by_a_trace(tmp_path):
    def event(cat, start, duration):
        return {"ph": "X", "cat": cat, "name": "k", "ts": start, "dur": duration}

    events = [
        event("kernel", 0, 1000),
        event("gpu_memcpy", 500, 1000),
        event("kernel", 4000, 500),
        event("cpu_op", 0, 9999),
    ]
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "x"}]}))
    assert vllm_plugin.milliseconds_of_device(tmp_path) == pytest.approx(2.0)
    with pytest.raises(RuntimeError, match="0 traces; expected the one"):  # the trace was removed
        vllm_plugin.milliseconds_of_device(tmp_path)
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps({"traceEvents": events[3:]}))
    with pytest.raises(RuntimeError, match="no kernels"):
        vllm_plugin.milliseconds_of_device(tmp_path)

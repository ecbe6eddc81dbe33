"""Measuring processes that do well, fail, and die."""

import sys

import pytest

from nanovllm.perf import launcher, worker
from nanovllm.perf.job import Job, Repeat, RequestTimes, Run
from nanovllm.perf.launcher import WorkerDied, in_child, measure_rows
from nanovllm.perf.workloads import Workload

ONE, TWO, THREE = (Workload(name, 1, 1, 2) for name in ("one", "two", "three"))
JOB = Job("nanovllm", "custom", "m", (ONE, TWO, THREE), options={"kernel_priority": {"rms_norm": ["native"]}})

# What a worker does, in place of an engine: one message a workload; "two" ends it in a way of its own.
SCRIPT = """
import json, os, signal, sys
job = json.loads(sys.stdin.read())
out = os.fdopen(int(sys.argv[sys.argv.index("--worker") + 1]), "w", buffering=1)
print("loading", job["workloads"][0]["name"])
for w in job["workloads"]:
    if w["name"] == "two":
        {how}
    row = dict(engine="nanovllm", variant="custom", model="m", workload=w["name"], load="l", error=None, repeats=[])
    out.write(json.dumps(["started", w["name"]]) + "\\n" + json.dumps(["row", row]) + "\\n")
"""


def rows_of(how):
    rows, said = [], []
    measure_rows(
        in_child([sys.executable, "-c", SCRIPT.format(how=how)]), JOB, rows.append, lambda k, c: said.append((k, c))
    )
    return rows, said


def test_a_job_survives_json():
    job = Job("vllm", "", "m", (Workload("x", 2, (3, 4), 5, rate=2.0),), {"a": 1}, {"dtype": "bfloat16"})
    assert Job.from_json(job.to_json()) == job


def test_rows_come_in_order():
    rows, said = rows_of("pass")
    assert [r.workload for r in rows] == ["one", "two", "three"] and not any(r.error for r in rows)
    assert ("started", "two") in said


@pytest.mark.parametrize(
    "how, reason",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV: loading"),
        ("print('no more memory'); sys.exit(7)", "exit code 7: loading"),
        ("raise RuntimeError('it broke')", "it broke"),
    ],
)
def test_a_process_that_dies_takes_one_row_with_it(how, reason):
    rows, _ = rows_of(how)
    assert [r.workload for r in rows] == ["one", "two", "three"]
    assert reason in rows[1].error and rows[0].error is None and rows[2].error is None


def test_a_process_that_ends_early_without_an_error_is_noticed():
    rows, _ = rows_of("sys.exit(0)")
    assert [r.workload for r in rows] == ["one", "two", "three"] and "without a result" in rows[1].error


def test_a_process_that_cannot_start():
    launch = in_child([sys.executable, "-c", "import nothing_of_that_name"])
    with pytest.raises(WorkerDied, match="exit code 1.*nothing_of_that_name"):
        launch(JOB, lambda k, c: None)


class FakeEngine:
    def __init__(self, fail=None):
        self.config = None
        self.fail = fail or {}
        self.runs = []

    def about(self):
        return {"device": "cpu", "dtype": "float32"}

    def run(self, items):
        self.runs.append(items)
        error = self.fail.get(len(self.runs))
        if error:
            raise error
        return Run(0.5, [RequestTimes(0.1, 0.2, i.num_output) for i in items])

    def close(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    from tests.perf.test_roofline import SMALL

    monkeypatch.setattr(worker, "model_shape", lambda *_: SMALL)

    def use(engine):
        monkeypatch.setattr(worker, "start", lambda *_: engine)
        rows = []
        launcher.measure_rows(launcher.in_process(None), JOB, rows.append, lambda k, c: None)
        return rows

    return use


def test_warm_up_is_not_counted_and_every_run_has_prompts_of_its_own(fake):
    engine = FakeEngine()
    rows = fake(engine)
    assert [(len(r.warmup_seconds), len(r.repeats)) for r in rows] == [(1, 3)] * 3
    assert isinstance(rows[0].repeats[0], Repeat) and rows[0].peak_memory > 0
    assert engine.runs[1] == ONE.draw(0, 5) and engine.runs[2] == ONE.draw(1, 5)
    assert engine.runs[0] not in engine.runs[1:4] or len(ONE.draw(0, 5)[0].prompt) == 1


def test_out_of_memory_ends_the_row_and_not_the_run(fake):
    import torch

    rows = fake(FakeEngine({6: torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")}))
    assert [bool(r.error) for r in rows] == [False, True, False]
    assert rows[1].error == "out of memory: CUDA out of memory. Tried to allocate 3 GiB"


def test_an_engine_that_does_not_start_is_a_reason_in_every_row(monkeypatch):
    def fail(*_):
        raise ValueError("no such\nmodel")

    monkeypatch.setattr(worker, "start", fail)
    rows = []
    launcher.measure_rows(launcher.in_process(None), JOB, rows.append, lambda k, c: None)
    assert [r.error for r in rows] == ["ValueError: no such model"] * 3


def test_an_engine_that_is_not_installed():
    import dataclasses
    import importlib.util

    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    rows = []
    job = dataclasses.replace(JOB, engine="vllm", variant="")
    launcher.measure_rows(launcher.in_process(None), job, rows.append, lambda k, c: None)
    assert {r.error for r in rows} == {"vllm is not installed; pip install vllm"}

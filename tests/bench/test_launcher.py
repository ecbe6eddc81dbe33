"""Measuring processes that do well, fail, and die."""

import dataclasses
import sys
import time

import pytest

from nanovllm.bench.job import Job
from nanovllm.bench.launcher import WorkerDied, in_child, measure_rows, with_causes
from nanovllm.bench.workloads import Workload

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


def rows_of(how, **options):
    """The rows of three workloads, of which the second one does something else."""
    rows, said, launch = [], [], in_child([sys.executable, "-c", SCRIPT.format(how=how)])
    measure_rows(launch, dataclasses.replace(JOB, **options), rows.append, lambda k, c: said.append((k, c)))
    assert [r.workload for r in rows] == ["one", "two", "three"] and not rows[0].error and not rows[2].error
    assert ("started", "one") in said
    return rows[1].error


def test_a_job_survives_json():
    job = Job("vllm", "", "m", (Workload("x", 2, (3, 4), 5, rate=2.0),), {"a": 1}, {"dtype": "bfloat16"})
    assert Job.from_json(job.to_json()) == job


def test_a_peer_finds_the_packages_of_its_own_folder_first(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("HERE = 'ours'")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    script = 'import colorsys; sys.exit(f\'{getattr(colorsys, "HERE", None)} {os.environ["PYTHONPATH"]}\')'
    launch = in_child([sys.executable, "-c", SCRIPT.format(how=script)], paths={"vllm": str(tmp_path)})
    job = dataclasses.replace(JOB, workloads=(TWO,))
    for engine, said in (("vllm", f"ours {tmp_path}:/elsewhere"), ("nanovllm", "None /elsewhere")):
        with pytest.raises(WorkerDied, match=said):
            launch(dataclasses.replace(job, engine=engine), lambda kind, content: None)


@pytest.mark.parametrize(
    "how, reason",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV: loading"),
        ("print('no more memory'); sys.exit(7)", "exit code 7: loading"),
        ("raise RuntimeError('it broke')", "it broke"),
        ("sys.exit(0)", "without a result"),
        ("pass", ""),
    ],
)
def test_a_process_that_dies_takes_one_row_with_it(how, reason):
    error = rows_of(how)
    assert reason in (error or "") and bool(error) == bool(reason)


# As an engine that is dead: it says little, another of its processes said more, and its end is no good one either.
DEAD = """
        print("(Core pid=7) ERROR [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB",
              flush=True)
        print("(Core pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB", flush=True)
        print("vllm.exceptions.EngineDeadError: See stack trace (above)", flush=True)
        row = dict(engine="nanovllm", variant="custom", model="m", workload="two", load="l", repeats=[],
                   error="EngineDeadError: See stack trace (above)")
        out.write(json.dumps(["failed", row]) + "\\n")
        print("after it", flush=True)
        sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_dead_engines_row_says_what_its_processes_printed(code):
    assert rows_of(DEAD.format(code=code).strip()) == (
        "EngineDeadError: See stack trace (above); printed before: "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB"
    )


def test_the_lines_that_look_like_errors():
    printed = "INFO fine\nRuntimeError: a\nx.y.ValueError: b\nerrors: none\n"
    printed += "Fatal Python error: Segmentation fault\nKeyError: c\n"
    assert with_causes("it died", printed) == (
        "it died; printed before: x.y.ValueError: b | Fatal Python error: Segmentation fault | KeyError: c"
    )
    assert with_causes("it died", "all went well\n") == "it died"


def test_a_row_that_takes_too_long_is_stopped_and_the_next_one_runs():
    started = time.perf_counter()
    slow = 'out.write(json.dumps(["started", "two"]) + "\\n"); import time; time.sleep(600)'
    assert rows_of(slow, limit=1.5) == "stopped after 1.5 s (--limit)"
    assert time.perf_counter() - started < 300


def test_a_process_that_cannot_start():
    launch = in_child([sys.executable, "-c", "import nothing_of_that_name"])
    with pytest.raises(WorkerDied, match="exit code 1.*nothing_of_that_name"):
        launch(JOB, lambda k, c: None)

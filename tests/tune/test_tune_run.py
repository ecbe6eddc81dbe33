"""From jobs to a file that kernels read: a whole run with a timer that says what it is told to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.rows.plans import RowPlan
from nanovllm.tune import Budget, Skipped
from nanovllm.tune.jobs import jobs
from nanovllm.tune.measure import TuningError
from nanovllm.tune.run import FATAL, MEASURED, ContextLost, tune
from tests.kernels.config_files import BF16, CPU, GPU

H200 = device_model("h200")
REPO = Path(__file__).parents[2]


def rms_jobs(*shapes):
    return jobs("rms_norm", shapes or [(64, 1024)], BF16, H200)[0]


class FakeTimer:
    """Says that more warps are faster, but for what it was told not to be possible."""

    impossible = {32: "out of registers: 65536"}

    def __init__(self, job, device):
        self.job, self.device = job, device

    def measure(self, plan, rounds):
        if reason := self.impossible.get(plan.warps):
            raise Skipped(reason)
        return 1e-6 * plan.rows + 1e-5 / plan.warps

    def verify(self, plan):
        if plan.warps == 16:
            raise Skipped("wrong result: no")

    def prepare(self, plans):
        pass

    def alive(self):
        return True


class Impossible(FakeTimer):
    impossible = dict.fromkeys((1, 2, 4, 8, 16, 32), "does not compile: x")


class Breaking(FakeTimer):
    """The second of the jobs does something that no plan may do."""

    def measure(self, plan, rounds):
        if self.job.key[0] == 64:
            raise TuningError("it asked for another key")
        return super().measure(plan, rounds)


class Dying(Breaking):
    def alive(self):
        return False


def run(found, out, timer=FakeTimer, **options):
    return list(tune(found, CPU, H200, GPU, out, timer=timer, **options))


def reasons(results):
    return [r.reason for r in results]


def test_a_run_writes_what_kernels_then_read(tmp_path, monkeypatch):
    found = rms_jobs((64, 1024), (60, 1024), (256, 1024))
    assert [len(j.shapes) for j in found] == [2, 1]
    results = run(found, tmp_path, budget=Budget(slower=100))
    assert [next(iter(r.outcome.ranking)) for r in results] == [RowPlan(1, 8)] * 2 and not list(tmp_path.glob("*.part"))
    data = json.loads((tmp_path / f"{GPU}.json").read_text())["entries"]
    assert {entry["key"]["rows"] for entry in data} == {64, 256}
    first = results[0].entry
    assert first["config"] == {"rows": 1, "warps": 8} and first["us"] == 2.25 and first["versions"] == versions()
    assert first["builtin"] == {"rows": 1, "warps": 4} and first["builtin_us"] == 3.5
    assert first["runner_up"] == {"rows": 2, "warps": 8} and first["runner_up_us"] == 3.25
    assert first["shapes"] == [[64, 1024], [60, 1024]] and first["op"] == "rms_norm" and first["dtype"] == "bfloat16"
    assert first["skipped"] == {"out of registers": 6, "wrong result": 2} and first["tried"] == 20
    assert first["pruned"] == {"more than 64 values a thread: registers spill": 10} and first["untried"] == 0
    assert {"device", "date", "commit", "dirty", "search"} <= set(first)
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    found = config_files.plans_in_force(tunables.RMS_NORM, GPU)
    assert found == {(rows, 1024, BF16): RowPlan(1, 8) for rows in (64, 256)}


def test_a_time_limit_is_shared_and_what_has_none_left_is_said(tmp_path):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    now = iter([0.0] * 4 + [99.0] * 10000)
    results = run(found, tmp_path, budget=Budget(seconds=6.0), clock=lambda: next(now))
    assert results[0].entry is not None
    assert reasons(results[1:]) == ["no time left"] * 2 and all(r.entry is None for r in results[1:])


def test_every_job_gets_an_equal_part_however_little(tmp_path):
    """Less than what a batch of plans takes, too: then fewer are compiled together."""
    batches, now = [], [0.0]

    class Slow(FakeTimer):
        def prepare(self, plans):
            batches.append((self.job.key[0], len(plans)))
            now[0] += 1.0

    found = rms_jobs(*((1 << i, 1024) for i in (0, 4, 5, 6)))
    results = run(found, tmp_path, Slow, budget=Budget(seconds=4.0), clock=lambda: now[0])
    # A second each: what one would leave, the next ones share.
    assert batches == [(1, 5), (16, 5), (32, 5), (64, 5)] and all(r.entry for r in results)
    assert {r.outcome.stopped for r in results[1:]} == {"time limit of 1 s"}


def test_a_run_goes_on_where_another_ended(tmp_path):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    interrupted = tune(found, CPU, H200, GPU, tmp_path, timer=FakeTimer)
    assert next(interrupted).entry and next(interrupted).entry  # each is written when it is there
    interrupted.close()
    path = tmp_path / f"{GPU}.json"
    data = json.loads(path.read_text())
    assert len(data["entries"]) == 2
    old = next(e for e in data["entries"] if e["key"]["rows"] == 64)
    old["source"] = "0" * 16  # of older kernels
    path.write_text(json.dumps(data))
    results = run(found, tmp_path, resume=True)
    assert reasons(results) == [MEASURED, None, None] and [r.entry is not None for r in results] == [False, True, True]
    assert all(r.entry is not None for r in run(found, tmp_path))  # not asked to go on
    assert reasons(run(found, tmp_path, resume=True)) == [MEASURED] * 3


@pytest.mark.slow
def test_an_error_ends_its_job_and_a_lost_device_the_run(tmp_path):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    results = run(found, tmp_path, Breaking)
    assert reasons(results) == [None, "it asked for another key", None] and not list(tmp_path.glob("*.under-way"))
    (tmp_path / f"{GPU}.json").unlink()
    done = tune(found, CPU, H200, GPU, tmp_path, timer=Dying)
    assert next(done).entry is not None
    with pytest.raises(ContextLost, match="it asked for another key; what was written before stays"):
        next(done)
    # It is left out from then on, until a run begins anew.
    assert reasons(run(found, tmp_path, Breaking, resume=True)) == [MEASURED, FATAL, None]
    assert reasons(run(found, tmp_path, Breaking, resume=True)) == [MEASURED, FATAL, MEASURED]
    assert all(r.entry for r in run(found, tmp_path)) and not list(tmp_path.glob("*.under-way"))


HANGS = """
import sys, time
from pathlib import Path
import tests.tune.test_tune_run as t
class Hangs(t.FakeTimer):
    def measure(self, plan, rounds):
        if self.job.key[0] == 64:
            time.sleep(600)
        return super().measure(plan, rounds)
found, out, hang = t.rms_jobs((1, 1024), (64, 1024), (256, 1024)), Path(sys.argv[1]), float(sys.argv[2])
for result in t.tune(found, t.CPU, t.H200, t.GPU, out, timer=Hangs, resume=True, hang_seconds=hang):
    print(result.job.key[0], result.reason, flush=True)
"""


def hanging(out, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", HANGS, str(out), str(seconds)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def test_a_hang_ends_the_process_and_the_next_run_goes_on_after_it(tmp_path):
    first = hanging(tmp_path, 3)
    said, errors = first.communicate(timeout=300)
    assert first.returncode == 1 and "Timeout" in errors and said == "1 None\n", errors
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    assert reasons(run(found, tmp_path, resume=True)) == [MEASURED, FATAL, None]


@pytest.mark.slow
def test_a_note_counts_when_its_process_is_dead_and_stays_while_it_lives(tmp_path):
    found = rms_jobs((64, 1024), (256, 1024))

    def notes():
        return {path.name: path.read_text() for path in tmp_path.glob("*.under-way")}

    with hanging(tmp_path, 500) as other:
        try:
            assert other.stdout.readline() == "1 None\n"
            wait_until(lambda: any(notes().values()))
            its = notes()
            assert all(r.entry for r in run(found, tmp_path)) and notes() == its
            (tmp_path / f"{GPU}.json").unlink()
            assert reasons(run(found, tmp_path, resume=True)) == [None, None] and notes() == its
        finally:
            other.kill()
    (tmp_path / f"{GPU}.json").unlink()
    assert reasons(run(found, tmp_path, resume=True)) == [FATAL, None] and notes() == its
    assert all(r.entry for r in run(found, tmp_path)) and not notes()


def test_nothing_right_writes_nothing(tmp_path):
    (result,) = run(rms_jobs(), tmp_path, Impossible)
    assert result.entry is None and result.outcome.skipped.total() == 26 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ['{"schema": 1, "gpu": "nvi', "[]", json.dumps({"schema": 1, "gpu": GPU, "entries": [{"tunable": "x"}]})]
)
def test_a_malformed_file_is_set_aside_before_anything_is_measured(tmp_path, text, caplog):
    path, seen = tmp_path / f"{GPU}.json", []
    path.write_text(text)

    class Looking(FakeTimer):
        def prepare(self, plans):
            seen.append(sorted(os.listdir(tmp_path)))

    (result,) = run(rms_jobs(), tmp_path, Looking, resume=True)
    broken = tmp_path / f"{GPU}.broken"
    assert result.entry is not None and broken.read_text() == text and broken.name in seen[0]
    assert [r.levelname for r in caplog.records if f"set aside as {broken.name}, 0 of" in r.getMessage()] == ["WARNING"]
    # A second one does not take its place.
    path.write_text("again")
    run(rms_jobs(), tmp_path)
    assert broken.read_text() == text and (tmp_path / f"{GPU}.broken1").read_text() == "again"

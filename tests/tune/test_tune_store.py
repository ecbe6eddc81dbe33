"""From jobs to a file that kernels read: a whole run with a timer that says what it is told to, and what a file must survive."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.rows.plans import RowPlan
from nanovllm.tune import Budget, Outcome, Skipped, store
from nanovllm.tune import tune as module
from nanovllm.tune.measure import TuningError
from nanovllm.tune.resume import ContextLost, identity
from nanovllm.tune.store import entry, readable, save
from nanovllm.tune.targets import jobs, target

GPU, CPU, BF16, H200 = "nvidia-test-9", torch.device("cpu"), torch.bfloat16, device_model("h200")
REPO = Path(__file__).parents[2]
RIGHT = ("device", "date", "commit", "dirty", "search", "seed")


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(config_files, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 9")
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    forget()
    yield
    forget()


def forget():
    config_files.forget_files()
    for tunable in tunables.ALL.values():
        tunable.forget()


def rms_jobs(*shapes):
    return jobs(target("rms_norm"), shapes or [(64, 1024)], BF16, H200)[0]


class FakeBench:
    """Says that more warps are faster, but for what it was told not to be possible."""

    impossible = {32: "out of registers: 65536", 16: None}

    def __init__(self, job, device):
        self.job, self.now = job, 0.0

    def measure(self, plan, rounds):
        reason = self.impossible.get(plan.warps)
        if reason:
            raise Skipped(reason)
        return 1e-6 * plan.rows + 1e-5 / plan.warps

    def verify(self, plan):
        if plan.warps == 16:
            raise Skipped("wrong result: no")

    def prepare(self, plans):
        pass


def run(found, out, **options):
    return list(module.tune(found, CPU, H200, out, bench=FakeBench, **options))


def test_a_run_writes_what_kernels_then_read(tmp_path):
    found = rms_jobs((64, 1024), (60, 1024), (256, 1024))
    assert [len(j.shapes) for j in found] == [2, 1]
    results = run(found, tmp_path, budget=Budget(slower=100))
    assert [r.outcome.best for r in results] == [RowPlan(1, 8)] * 2
    forget()
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) == tunables.RMS_NORM.find(CPU, 256, 1024, BF16) == RowPlan(1, 8)
    (first, second) = json.loads((tmp_path / f"{GPU}.json").read_text())["entries"]
    assert {first["key"]["rows"], second["key"]["rows"]} == {64, 256}
    first = results[0].entry
    assert first["config"] == {"rows": 1, "warps": 8} and first["us"] == 2.25 and first["versions"] == versions()
    assert first["builtin"] == {"rows": 1, "warps": 4} and first["builtin_us"] == 3.5
    assert first["runner_up"] == {"rows": 2, "warps": 8} and first["runner_up_us"] == 3.25
    assert first["shapes"] == [[64, 1024], [60, 1024]] and first["op"] == "rms_norm" and first["dtype"] == "bfloat16"
    assert first["skipped"] == {"out of registers": 6, "wrong result": 2} and first["tried"] == 20
    assert (
        first["pruned"] == {"constraints: more than 64 values a thread: registers spill": 10} and first["untried"] == 0
    )
    assert first["device"] == "NVIDIA Test 9" and all(name in first for name in RIGHT)
    assert not list(tmp_path.glob("*.part"))


def test_a_time_limit_is_shared_and_what_has_none_left_is_said(tmp_path):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    now = iter([0.0] * 4 + [99.0] * 10000)
    results = run(found, tmp_path, limit=6.0, clock=lambda: next(now))
    assert results[0].entry is not None
    assert [r.reason for r in results[1:]] == ["no time left"] * 2 and all(r.entry is None for r in results[1:])


def test_every_job_gets_an_equal_part_however_little(tmp_path, monkeypatch):
    """Less than what a batch of plans takes, too: then fewer are compiled together."""
    budgets = []
    search = module.search
    monkeypatch.setattr(
        module, "search", lambda *a, budget, **k: budgets.append(budget) or search(*a, budget=budget, **k)
    )
    found = rms_jobs(*((1 << i, 1024) for i in range(6)))
    results = run(found, tmp_path, limit=6.0, clock=lambda: 0.0)
    # Nothing takes any time here: what one leaves, the next ones share.
    assert [b.seconds for b in budgets] == [1.0, 1.2, 1.5, 2.0, 3.0, 6.0] and all(r.entry for r in results)
    assert [b.batch for b in budgets] == [5, 6, 8, 10, 16, 16]
    assert module._part(Budget(), 0.01).batch == 1


def test_a_run_goes_on_where_another_ended(tmp_path):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    run(found[:2], tmp_path)
    path = tmp_path / f"{GPU}.json"
    data = json.loads(path.read_text())
    data["entries"][1]["source"] = "0" * 16  # of older kernels
    path.write_text(json.dumps(data))
    results = run(found, tmp_path, resume=True)
    old = data["entries"][1]["key"]["rows"]
    assert [r.reason for r in results] == [
        module.MEASURED if j.key[0] != old and j is not found[2] else None for j in found
    ]
    assert sum(r.entry is not None for r in results) == 2
    assert all(r.entry is not None for r in run(found, tmp_path))  # not asked to go on
    assert [r.reason for r in run(found, tmp_path, resume=True)] == [module.MEASURED] * 3


class Breaking(FakeBench):
    """The second of the jobs does something that no plan may do."""

    def measure(self, plan, rounds):
        if self.job.key[0] == 64:
            raise TuningError("it asked for another key")
        return super().measure(plan, rounds)


def test_an_error_ends_its_job_and_a_lost_device_the_run(tmp_path, monkeypatch):
    found = rms_jobs((1, 1024), (64, 1024), (256, 1024))
    results = list(module.tune(found, CPU, H200, tmp_path, bench=Breaking))
    assert [r.entry is not None for r in results] == [True, False, True]
    assert results[1].reason == "it asked for another key" and not list(tmp_path.glob("*.under-way"))
    (tmp_path / f"{GPU}.json").unlink()

    monkeypatch.setattr(module, "_alive", lambda device: False)
    done = module.tune(found, CPU, H200, tmp_path, bench=Breaking)
    assert next(done).entry is not None
    with pytest.raises(ContextLost, match="it asked for another key; what was written before stays"):
        next(done)
    # It is left out from then on, until a run begins anew.
    for _ in range(2):
        results = list(module.tune(found, CPU, H200, tmp_path, bench=Breaking, resume=True))
        assert results[1].reason == module.FATAL and results[0].reason == module.MEASURED
    assert results[2].reason == module.MEASURED
    assert all(r.entry for r in run(found, tmp_path)) and not list(tmp_path.glob("*.under-way"))


HANGS = """
import sys, time, torch
from pathlib import Path
from nanovllm.tune import resume, tune as module
import tests.tune.test_tune_store as t
module.gpu_of = lambda device: t.GPU
torch.cuda.get_device_name = lambda device: "NVIDIA Test 9"
module.watched = lambda fn: resume.watched(fn, float(sys.argv[2]))
class Hangs(t.FakeBench):
    def measure(self, plan, rounds):
        if self.job.key[0] == 64:
            time.sleep(60)
        return super().measure(plan, rounds)
for result in module.tune(t.rms_jobs((1, 1024), (64, 1024), (256, 1024)), t.CPU, t.H200, Path(sys.argv[1]), bench=Hangs, resume=True):
    print(result.job.key[0], result.reason, flush=True)
"""


def test_a_hang_ends_the_process_and_the_next_run_goes_on_after_it(tmp_path):
    def go():
        return subprocess.run(
            [sys.executable, "-c", HANGS, str(tmp_path), "0.5"], cwd=REPO, capture_output=True, text=True, timeout=50
        )

    first, second = go(), go()
    assert first.returncode == 1 and "Timeout" in first.stderr and first.stdout == "1 None\n", first.stderr
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines() == [f"1 {module.MEASURED}", f"64 {module.FATAL}", "256 None"]


def test_a_note_is_believed_when_its_process_is_dead_and_left_to_it_while_it_lives(tmp_path):
    found = rms_jobs_unasked((64, 1024), (256, 1024))

    def notes():
        return {path.name: path.read_text() for path in tmp_path.glob("*.under-way")}

    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path), "50"], cwd=REPO, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "1 None\n"
            end = time.monotonic() + 20
            while not any(notes().values()):
                assert time.monotonic() < end
                time.sleep(0.01)
            its = notes()
            assert all(r.entry for r in run(found, tmp_path)) and notes() == its
            (tmp_path / f"{GPU}.json").unlink()
            assert [r.reason for r in run(found, tmp_path, resume=True)] == [None, None] and notes() == its
        finally:
            other.kill()
    (tmp_path / f"{GPU}.json").unlink()
    assert [r.reason for r in run(found, tmp_path, resume=True)] == [module.FATAL, None] and notes() == its
    assert all(r.entry for r in run(found, tmp_path)) and not notes()


def test_which_notes_count(tmp_path):
    (job,) = rms_jobs_unasked((64, 1024))
    empty = tmp_path / f"{GPU}.0.under-way"
    empty.touch()  # its process is about to lock it, or has just dropped the lock
    (tmp_path / f"{GPU}-nvl.1.under-way").write_text(identity(job))  # of another GPU
    assert [r.reason for r in run([job], tmp_path, resume=True)] == [None]
    assert all(r.entry for r in run([job], tmp_path)) and empty.exists()
    (tmp_path / f"{GPU}.json").unlink()
    dead = tmp_path / f"{GPU}.2.under-way"
    dead.write_text(identity(job))
    with open(dead) as note:
        fcntl.flock(note, fcntl.LOCK_SH)  # another run that goes on reads it at this moment
        assert [r.reason for r in run([job], tmp_path, resume=True)] == [module.FATAL]
        fcntl.flock(note, fcntl.LOCK_EX)
        assert [r.reason for r in run([job], tmp_path, resume=True)] == [None]


def test_each_result_is_written_when_it_is_there(tmp_path):
    run_of_two = module.tune(rms_jobs((1, 1024), (64, 1024)), CPU, H200, tmp_path, bench=FakeBench)
    next(run_of_two)
    assert len(config_files.document(tmp_path / f"{GPU}.json")["entries"]) == 1


def test_nothing_right_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeBench, "impossible", dict.fromkeys((1, 2, 4, 8, 16, 32), "does not compile: x"))
    (result,) = run(rms_jobs(), tmp_path)
    assert result.entry is None and result.outcome.skipped.total() == 26 and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected a winner to write, got none"):
        entry(rms_jobs()[0], Outcome(), {}, {})


def test_without_a_gpu_nothing_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "gpu_of", lambda device: None)
    with pytest.raises(ValueError, match="plans are timed on a CUDA device, not on cpu; --dry-run"):
        run(rms_jobs(), tmp_path)


def an_entry(**differ):
    (job,) = rms_jobs()
    outcome = Outcome(best=RowPlan(2, 8), seconds=1e-6, tried=1)
    return {**entry(job, outcome, {}, {"date": "2020-01-01"}), **differ}


def test_saving_replaces_the_same_key_and_versions_and_keeps_the_rest(tmp_path):
    others = [an_entry(versions={"triton": "1.0"}), an_entry(tunable="softmax"), an_entry(key={"rows": 8, "size": 64, "dtype": "float16"})]  # fmt: skip
    path = save(GPU, [an_entry(us=1.0), *others], tmp_path)
    save(GPU, [an_entry(us=2.0)], tmp_path)
    found = json.loads(path.read_text())["entries"]
    assert len(found) == 4 and [e["us"] for e in found if e["tunable"] == "rms_norm" and e["versions"] == versions() and e["key"]["rows"] == 64] == [2.0]  # fmt: skip
    # An older source of the kernel has the same key: it makes room.
    save(GPU, [an_entry(source="0" * 16)], tmp_path)
    assert len(json.loads(path.read_text())["entries"]) == 4


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = save(GPU, [an_entry(us=1.0)], tmp_path)
    before = path.read_text()
    half = Path.write_text

    def failing(self, text, *args, **kwargs):
        half(self, text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", failing)
    with pytest.raises(OSError, match="No space left"):
        save(GPU, [an_entry(us=2.0)], tmp_path)
    assert path.read_text() == before and sorted(os.listdir(tmp_path)) == [path.name, f"{GPU}.lock"]


MALFORMED = {
    "empty": "", "cut off": '{"schema": 1, "gpu": "nvi', "a list": "[]", "no schema": "{}", "another schema": '{"schema": 2}',
    "half an entry": json.dumps({"schema": 1, "gpu": GPU, "entries": [{"tunable": "x"}]}),
}  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_set_aside_before_anything_is_measured(tmp_path, text, caplog, monkeypatch):
    found = rms_jobs()
    path = tmp_path / f"{GPU}.json"
    path.write_text(text)
    order = []
    monkeypatch.setattr(FakeBench, "prepare", lambda self, plans: order.append(sorted(os.listdir(tmp_path))))
    (result,) = run(found, tmp_path, resume=True)
    broken = tmp_path / f"{GPU}.broken"
    assert result.entry is not None and broken.read_text() == text and broken.name in order[0]
    assert [r.levelname for r in caplog.records if f"set aside as {broken.name}, 0 of" in r.getMessage()] == ["WARNING"]
    forget()
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) == RowPlan(1, 8)
    # A second one does not take its place.
    path.write_text("again")
    save(GPU, [result.entry], tmp_path)
    assert broken.read_text() == text and (tmp_path / f"{GPU}.broken1").read_text() == "again"


def test_of_a_file_with_one_malformed_entry_the_others_are_kept(tmp_path, caplog):
    good, bad, other = an_entry(), an_entry(key={"rows": 100, "size": 64, "dtype": "float16"}), an_entry(tunable="gone")
    path = tmp_path / f"{GPU}.json"
    path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": [good, bad, other]}))
    forget()
    with pytest.raises(
        ValueError, match=r"entries\[1\].key.rows: expected 128, .*; write it anew with `nanovllm tune`"
    ):
        tunables.RMS_NORM.find(CPU, 64, 1024, BF16)
    run(rms_jobs_unasked((256, 1024)), tmp_path)  # as it says
    assert "entries[1].key.rows" in caplog.text and "2 of its entries are kept" in caplog.text
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) == RowPlan(2, 8)
    assert len(json.loads(path.read_text())["entries"]) == 3


@pytest.mark.parametrize("bad", ["no object", {"tunable": "rms_norm"}, {**an_entry(), "config": None}], ids=str)
def test_an_entry_without_the_fields_of_one_costs_no_other(tmp_path, bad):
    path = tmp_path / f"{GPU}.json"
    good = an_entry()
    path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": [bad, good]}))
    kept, wrong = readable(path)
    assert kept == [good] and "entries[0]" in wrong


def rms_jobs_unasked(*shapes):
    """As on a machine whose CPU has no configurations: listing jobs reads no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_files, "gpu_of", lambda device: None)
        found = rms_jobs(*shapes)
    forget()
    return found


ADDS = """
import sys, time
from pathlib import Path
import tests.tune.test_tune_store as t
from nanovllm.tune import store
entry, read = t.an_entry(), store.document
def slowly(path):
    found = read(path)
    time.sleep(0.02)  # time enough for the other one to write
    return found
store.document = slowly
for i in range(15):
    store.save(t.GPU, [{**entry, "key": {"rows": 64, "size": int(sys.argv[2]) + i, "dtype": "bfloat16"}}], Path(sys.argv[1]))
"""


def test_two_runs_lose_nothing_of_each_other(tmp_path):
    go = [
        subprocess.Popen(
            [sys.executable, "-c", ADDS, str(tmp_path), str(n)], cwd=REPO, stderr=subprocess.PIPE, text=True
        )
        for n in (1000, 2000)
    ]
    assert all(p.communicate(timeout=100) and p.returncode == 0 for p in go)
    found = json.loads((tmp_path / f"{GPU}.json").read_text())["entries"]
    assert sorted(e["key"]["size"] for e in found) == [n + i for n in (1000, 2000) for i in range(15)]


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="config.warps: expected 1, 2, 4, 8, 16 or 32, not 3"):
        save(GPU, [an_entry(config={"rows": 1, "warps": 3})], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_new_file_is_seen_without_a_new_process(tmp_path):
    """Of this process; a running engine has read its files and keeps to them."""
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) is None
    save(GPU, [an_entry()], tmp_path)
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) is None
    tunables.RMS_NORM.forget()
    assert tunables.RMS_NORM.find(CPU, 64, 1024, BF16) == RowPlan(2, 8)
    assert store.SCHEMA == config_files.SCHEMA

"""The file of a GPU: what a write keeps, what it refuses, and what it survives."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.hardware.gpu_presets import device_model
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.rows.plans import RowPlan
from nanovllm.tune import Outcome
from nanovllm.tune.jobs import jobs
from nanovllm.tune.store import entry, readable, save
from tests.kernels.config_files import BF16, GPU, forget


@pytest.fixture
def read_here(monkeypatch, tmp_path):
    """Kernels read the directory."""
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    forget()
    yield
    forget()


def an_entry(**differ):
    (job,) = jobs("rms_norm", [(64, 1024)], BF16, device_model("h200"))[0]
    outcome = Outcome({RowPlan(2, 8): 1e-6}, tried=1)
    return {**entry(job, outcome, {}, {"date": "2020-01-01"}), **differ}


def test_saving_replaces_the_same_key_and_versions_and_keeps_the_rest(tmp_path):
    key = {"rows": 8, "size": 64, "dtype": "float16"}
    others = [an_entry(versions={"triton": "1.0"}), an_entry(tunable="softmax"), an_entry(key=key)]
    path = save(GPU, [an_entry(us=1.0), *others], tmp_path)
    save(GPU, [an_entry(us=2.0)], tmp_path)
    found = json.loads(path.read_text())["entries"]
    same = [e for e in found if e["tunable"] == "rms_norm" and e["versions"] == versions() and e["key"]["rows"] == 64]
    assert len(found) == 4 and [e["us"] for e in same] == [2.0]
    # An older source of the kernel has the same key: it makes room.
    save(GPU, [an_entry(source="0" * 16)], tmp_path)
    assert len(json.loads(path.read_text())["entries"]) == 4


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    path = save(GPU, [an_entry(us=1.0)], tmp_path)
    before = path.read_text()
    with pytest.raises(TypeError, match="not JSON serializable"):  # in the middle of the text
        save(GPU, [an_entry(us=2.0, zzz=object())], tmp_path)
    (tmp_path / f"{GPU}.{os.getpid()}.part").mkdir()  # what is to be written first cannot be
    with pytest.raises(OSError, match="Is a directory"):
        save(GPU, [an_entry(us=2.0)], tmp_path)
    assert path.read_text() == before


def test_of_a_file_with_malformed_entries_the_others_are_kept(tmp_path, caplog, read_here):
    good, other = an_entry(), an_entry(tunable="gone")
    bad = an_entry(key={"rows": 100, "size": 64, "dtype": "float16"})
    new, half = an_entry(key={"rows": 8, "size": 64, "dtype": "float16"}), {**an_entry(), "config": None}
    path = tmp_path / f"{GPU}.json"
    path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": [good, bad, other]}))
    with pytest.raises(
        ValueError, match=r"entries\[1\].key.rows: expected 128, .*; write it anew with `nanovllm tune`"
    ):
        config_files.plans_in_force(tunables.RMS_NORM, GPU)
    save(GPU, [new], tmp_path)
    assert "entries[1].key.rows" in caplog.text and "2 of its entries are kept" in caplog.text
    assert len(json.loads(path.read_text())["entries"]) == 3
    assert config_files.plans_in_force(tunables.RMS_NORM, GPU)[64, 1024, BF16] == RowPlan(2, 8)
    for bad in ("no object", {"tunable": "rms_norm"}, half):
        path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": [bad, good]}))
        kept, wrong = readable(path)
        assert kept == [good] and "entries[0]" in wrong


def test_two_runs_lose_nothing_of_each_other(tmp_path):
    """The lock is of the open file, so two threads stand for two processes."""

    def add(first):
        for size in range(first, first + 10):
            new = an_entry(key={"rows": 64, "size": size, "dtype": "bfloat16"})
            save(GPU, [new], tmp_path, keep=lambda data: time.sleep(0.001) is None)  # time for the other to write

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, (1000, 2000)))
    found = json.loads((tmp_path / f"{GPU}.json").read_text())["entries"]
    assert sorted(e["key"]["size"] for e in found) == [n + i for n in (1000, 2000) for i in range(10)]


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="config.warps: expected 1, 2, 4, 8, 16 or 32, not 3"):
        save(GPU, [an_entry(config={"rows": 1, "warps": 3})], tmp_path)
    assert not list(tmp_path.iterdir())

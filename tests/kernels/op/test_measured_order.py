"""Tables of who is fastest: names of GPUs, versions, precedence."""

import json

import pytest
import torch

from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import measured_order
from nanovllm.kernels.op.measured_order import SHIPPED, save_table, table_path
from nanovllm.kernels.op.registry import all_ops

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Makes a directory for tables, and the one that is read: each directory is read once in a process."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 9")

    def directory(name="tables"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(measured_order.DIRECTORY_VARIABLE, str(tmp_path / name))
        return tmp_path / name

    return directory


def test_an_order_is_written_and_read(gpu):
    gpu("empty")
    assert measured_order.measured_order("rms_norm", GPU) is None
    tables, order = gpu(), {"rms_norm": {"order": ["native", "triton"], "relative": {}}}
    path = save_table("nvidia-test-9", order, "2020-01-02", tables)
    assert path == tables / "nvidia-test-9.json" == table_path("nvidia-test-9", tables)
    assert (
        measured_order.measured_order("rms_norm", GPU) == ["native", "triton"]
        and measured_order.measured_order("x", GPU) is None
    )


def test_the_entry_of_these_versions_counts_else_the_newest(gpu):
    def entry(order, date, **differ):
        return {"versions": {**versions(), **differ}, "date": date, "ops": {"rms_norm": {"order": order}}}

    old, here, new = entry(["old"], "2020", torch="1"), entry(["here"], "2021"), entry(["new"], "2022", torch="2")
    for i, (entries, expected) in enumerate(
        [([old, here, new], ["here"]), ([old, new], ["new"]), ([new, old], ["new"])]
    ):
        (gpu(f"tables {i}") / "nvidia-test-9.json").write_text(json.dumps({"gpu": "nvidia-test-9", "entries": entries}))
        assert measured_order.measured_order("rms_norm", GPU) == expected


def test_a_broken_table_is_named(gpu):
    (gpu() / "nvidia-test-9.json").write_text("{}")
    with pytest.raises(ValueError, match=r"nvidia-test-9.json is not a kernel table .*--save-table"):
        measured_order.measured_order("rms_norm", GPU)


def test_the_shipped_tables_speak_of_ops_and_providers_that_exist():
    for path in SHIPPED.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["gpu"] == path.stem
        for entry in document["entries"]:
            assert set(entry["versions"]) == set(versions()) and entry["date"]
            for name, op in entry["ops"].items():
                assert name in all_ops() and set(op["order"]) == set(op["relative"]) <= set(all_ops()[name].providers)


@pytest.mark.parametrize(
    "known, found, order",
    [
        ({"z": 1.0, "b": 1.5}, {"b": 1.0}, ["z", "b"]),  # the fastest is not installed now
        ({"a": 1.0, "b": 2.0, "c": 2.1}, {"b": 1.0, "c": 1.1}, ["a", "b", "c"]),
        ({"a": 3.0, "b": 2.0}, {"b": 1.0, "c": 2.0}, ["b", "a", "c"]),  # scaled by b's times
        ({"a": 1.0, "c": 3.0}, {"a": 1.0, "b": 2.0}, ["a", "b", "c"]),
        ({"a": 1.0, "b": 1.5}, {"c": 1.0}, ["a", "b", "c"]),  # nothing in common
    ],
)
def test_kept_providers_stand_where_their_times_put_them(tmp_path, known, found, order):
    other = {"other": {"order": ["a"], "relative": {"a": 1.0}}}
    for relative, more in ((known, other), (found, {})):
        measured = {"order": sorted(relative, key=relative.get), "relative": relative}
        path = save_table("g", {"op": measured, **more}, "2020-01-01", tmp_path)
    (entry,) = json.loads(path.read_text())["entries"]
    assert (
        entry["ops"]["op"]["order"] == order
        and min(entry["ops"]["op"]["relative"].values()) == 1
        and entry["ops"]["other"] == other["other"]
    )

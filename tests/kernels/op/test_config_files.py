"""Files of tuned configurations: precedence, what is stale or malformed, and those that are shipped."""

import json
import logging
import shutil

import pytest
import torch

triton = pytest.importorskip("triton")
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op import config_files
from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE, SHIPPED, entries, plans_in_force, read_document
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.rows.plans import RowPlan
from nanovllm.tune.store import drop_changed
from tests.kernels.config_files import BF16, CPU, GPU, KEY, entry, forget, rms_norm, write

if triton.knobs.runtime.interpret:
    pytest.skip("compares hashes of kernels, which are others in the interpreter", allow_module_level=True)


def test_without_files_nothing_is_found_nor_asked_again(config_folder):
    assert rms_norm() is None
    (config_folder / f"{GPU}.json").write_text("malformed")
    assert rms_norm() is None  # the next call asks no file


def test_a_file_is_read_once_and_for_its_keys_only(config_folder, monkeypatch):
    path = write(config_folder, entry())
    assert rms_norm() == rms_norm(rows=3) == RowPlan(2, 8)  # 3 rows are in the bucket of 4
    assert rms_norm(rows=5) is rms_norm(size=65) is rms_norm(dtype=torch.float16) is None
    path.unlink()
    assert rms_norm() == RowPlan(2, 8)
    monkeypatch.setattr(config_files, "gpu_of", lambda device: None)
    forget()
    assert rms_norm() is None  # not a GPU


def test_the_users_directory_takes_precedence_entry_by_entry(config_folder, tmp_path_factory, monkeypatch):
    shipped = tmp_path_factory.mktemp("shipped")

    def found():
        return [plans_in_force(tunables.RMS_NORM, GPU, shipped).get((rows, 64, BF16)) for rows in (4, 8)]

    other = {**KEY, "rows": 8}
    write(shipped, entry(config={"rows": 1, "warps": 1}), entry(key=other, config={"rows": 1, "warps": 2}))
    write(config_folder, entry(config={"rows": 4, "warps": 4}))
    assert found() == [RowPlan(4, 4), RowPlan(1, 2)]
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    assert found() == [RowPlan(1, 1), RowPlan(1, 2)]
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(config_folder / "absent"))
    assert found() == [RowPlan(1, 1), RowPlan(1, 2)]


@pytest.mark.parametrize(
    "differ, reason",
    [
        ({"source": "0" * 16}, "the kernels' source has changed since"),
        ({"versions": {**versions(), "triton": "1.0"}}, "measured with triton 1.0; here: triton "),
        ({"versions": {}}, "measured with torch none"),
    ],
)
def test_a_stale_entry_is_not_used_and_said_once(config_folder, caplog, monkeypatch, differ, reason):
    path = write(config_folder, entry(**differ))
    with caplog.at_level(logging.INFO):
        assert rms_norm() is None and rms_norm(rows=2) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and reason in record.getMessage() and str(path) in record.getMessage()
    assert reason in entries(tunables.RMS_NORM, GPU)[0].stale
    # What was shipped for others is no reason to warn.
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert plans_in_force(tunables.RMS_NORM, GPU, shipped=config_folder) == {}
    assert [r.levelno for r in caplog.records] == [logging.INFO]


def test_a_stale_entry_beside_a_good_one(config_folder):
    write(config_folder, entry(), entry(config={"rows": 1, "warps": 1}, versions={"triton": "1.0"}))
    assert rms_norm() == RowPlan(2, 8)


@pytest.mark.parametrize(
    "found, said",
    [
        (entry(config={"rows": 2}), r"entries\[0\].config.warps: missing"),
        (entry(config={"rows": 2, "warps": 4, "x": 1}), r"entries\[0\].config.x: unknown; known are rows, warps"),
        (entry(config={"rows": 3, "warps": 4}), r"entries\[0\].config.rows: expected a power of two, not 3"),
        (entry(config={"rows": 0, "warps": 4}), r"config.rows: expected a positive whole number, not 0"),
        (entry(config={"rows": 2.0, "warps": 4}), r"config.rows: expected a positive whole number, not 2.0"),
        (entry(config={"rows": True, "warps": 4}), r"config.rows: expected a positive whole number, not True"),
        (entry(config={"rows": 2, "warps": 3}), r"config.warps: expected 1, 2, 4, 8, 16 or 32, not 3"),
        (entry(config={"rows": 1 << 15, "warps": 4}), r"entries\[0\].config: rows: a program of 2097152 elements"),
        (entry(key={"rows": 4, "size": 64}), r"entries\[0\].key.dtype: missing"),
        (entry(key={**KEY, "dtype": "bf17"}), r"entries\[0\].key.dtype: expected the name of a dtype, not 'bf17'"),
        (entry(key={**KEY, "rows": "4"}), r"entries\[0\].key.rows: expected a whole number, not '4'"),
        (entry(config=[1]), r"entries\[0\].config: expected an object, not \[1\]"),
        ({"tunable": "rms_norm"}, r"entries\[0\].source: expected a text, not None"),
        ("x", r"entries\[0\]: expected an object, not 'x'"),
        (entry(tunables.PRODUCT, dict(m=64, n=8, k=64, dtype="bfloat16", gated=False, tma=False), {"plan": "Plan"}),
         r"config.plan: expected one of StreamPlan, TilePlan, not 'Plan'"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_an_error_that_names_file_and_field(config_folder, found, said):
    path = write(config_folder, found)
    tunable = tunables.ALL[found["tunable"]] if isinstance(found, dict) else tunables.RMS_NORM
    with pytest.raises(ValueError, match=said) as e:
        tunable.find(CPU)
    assert str(e.value).startswith(str(path)) and "nanovllm tune" in str(e.value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "not a file of kernel configurations"),
        ("[]", r"expected an object, not \[\]"),
        ('{"schema": 2, "gpu": "nvidia-test-9", "entries": []}', "schema: expected 1, not 2"),
        (
            '{"schema": 1, "gpu": "nvidia-h100", "entries": []}',
            "gpu: expected 'nvidia-test-9', which the file is named after",
        ),
        ('{"schema": 1, "gpu": "nvidia-test-9"}', "entries: expected a list, not None"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_an_error_that_names_it(config_folder, text, said):
    path = config_folder / f"{GPU}.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as e:
        rms_norm()
    assert str(path) in str(e.value)


def test_what_a_kernel_refuses_is_malformed_too(config_folder):
    key = {"m": 64, "n": 8, "k": 64, "dtype": "bfloat16", "gated": False, "tma": False}
    stream = {"plan": "StreamPlan", "tokens": 16, "rows": 64, "block_k": 64, "splits": 1, "warps": 4, "stages": 2}
    write(config_folder, entry(tunables.PRODUCT, key, stream))
    with pytest.raises(ValueError, match="tokens: fewer than m = 64"):
        tunables.PRODUCT.find(CPU, *key.values())


def test_an_unknown_tunable_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    entry = {"source": "x", "versions": versions(), "key": {}, "config": {}}
    found = [{**entry, "tunable": "rms_nrom"}, {**entry, "tunable": "rms_nrom"}]
    (tmp_path / f"{GPU}.json").write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": found}))
    config_files.forget_files()
    for tunable in (tunables.RMS_NORM, tunables.SOFTMAX):
        assert entries(tunable, GPU) == []
    (record,) = caplog.records
    assert (
        "2 configurations are not used: there is no tunable 'rms_nrom'; did you mean 'rms_norm'?" in record.getMessage()
    )
    config_files.forget_files()


@pytest.mark.parametrize("make, said", [(None, "does not exist"), ("file", "is no directory")])
def test_a_directory_that_is_none_is_said_once(tmp_path, monkeypatch, caplog, make, said):
    path = tmp_path / "typo"
    if make:
        path.write_text("")
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(path))
    config_files.forget_files()
    for tunable in (tunables.RMS_NORM, tunables.SOFTMAX):
        entries(tunable, GPU)
    (record,) = caplog.records
    assert (
        record.levelname == "WARNING" and f"{config_files.DIRECTORY_VARIABLE}={path}: it {said}" in record.getMessage()
    )
    config_files.forget_files()


# -------------------------------------------------------------------------------------------------------- shipped files


def test_shipped_files_are_well_formed():
    assert {p.stem for p in SHIPPED.glob("*.json")} >= {"nvidia-h100", "nvidia-h200"}
    for path in SHIPPED.glob("*.json"):
        for data in read_document(path)["entries"]:
            tunable = tunables.ALL[data["tunable"]]
            tunable.plan_from_json(data["config"], tunable.key_from_json(data["key"]))
            assert data["us"] > 0 and data["date"] and data["tried"] > 0 and data["device"]


DROP = """python -c 'from nanovllm.tune.store import drop_changed; print(*drop_changed(), sep="\\n")'"""


def _changed(path):
    """A line for each entry of a file whose kernels have changed since it was measured; last, how to remove them."""
    found = []
    for data in read_document(path)["entries"]:
        tunable = tunables.ALL[data["tunable"]]
        if data["source"] != tunable.source:
            shapes = " ".join(f"--shape {'x'.join(map(str, shape))}" for shape in data["shapes"])
            found.append(
                f"{path.name}: {data['tunable']} {data['key']}: the kernels' source has changed "
                f"({data['source']} -> {tunable.source}), "
                f"so nobody gets it. Measure anew, on an {data['device']}:\n"
                f"    nanovllm tune {data['op']} {shapes} --dtype {data['dtype']} --out nanovllm/kernels/configs"
            )
    return [*found, f"or, without such a GPU, remove all such entries:\n    {DROP}"] if found else []


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configurations_are_those_of_the_kernels_as_they_are(path):
    changed = _changed(path)
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_kernel_on_such_a_gpu_finds_what_is_shipped(path, monkeypatch):
    """With the versions that it was measured with; with others it is not used."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    device, current = torch.device("cuda", 0), []
    for data in read_document(path)["entries"]:
        tunable = tunables.ALL[data["tunable"]]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=data["device"]: name)
        key = tunable.key_from_json(data["key"])
        for measured_with, expected in ((data["versions"], data["config"]), ({"torch": "1.0"}, None)):
            monkeypatch.setattr(config_files, "versions", lambda measured_with=measured_with: measured_with)
            tunable.forget()
            plan = tunable.find(device, *key)
            found = None if plan is None else tunable.plan_to_json(plan)
            current.append((data["tunable"], data["key"], found, expected))
    forget()
    wrong = [
        f"{path.name}: {name} {key}: found {found}, not {expected}"
        for name, key, found, expected in current
        if found != expected
    ]
    assert not wrong, "\n".join([*wrong, *_changed(path)])


def test_entries_of_changed_kernels_are_named_and_can_be_removed(tmp_path):
    """The command that is named, done to a copy in which one kernel is another."""
    for path in SHIPPED.glob("*.json"):
        shutil.copy(path, tmp_path)
    path = tmp_path / "nvidia-h200.json"
    whole = json.loads(path.read_text())
    first = whole["entries"][0]
    first["source"] = "0" * 16
    path.write_text(json.dumps(whole))
    said, remedy = _changed(path)
    assert f"{first['tunable']} {first['key']}" in said and f"on an {first['device']}:" in said and DROP in remedy
    assert f"nanovllm tune {first['op']} --shape " in said and f"--dtype {first['dtype']} --out" in said
    assert drop_changed(tmp_path) == [f"nvidia-h200.json: {first['tunable']} {json.dumps(first['key'])}"]
    left = read_document(path)["entries"]
    assert sorted(map(str, left)) == sorted(map(str, whole["entries"][1:])) and drop_changed(tmp_path) == []
    assert DROP in (SHIPPED.parents[2] / "CONTRIBUTING.md").read_text()

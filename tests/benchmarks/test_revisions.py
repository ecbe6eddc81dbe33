"""Revisions of the repository that are measured in turns."""

import json
import subprocess

import pytest

from benchmarks import revisions


def test_speeds_are_of_each_round():
    rounds = [{"old": 2.0, "new": 1.0}, {"old": 3.0, "new": 3.0}, {"old": 1.0, "new": 2.0}]
    first, second = revisions.rows_of("bs1", "old", rounds)
    assert (first["revision"], first["seconds"], first["speed"]) == ("old", 2.0, 1.0)
    assert (second["revision"], second["seconds"], second["speed"]) == ("new", 2.0, 1.0)
    assert second["quartiles"] == [0.5, 2.0] and second["rounds"] == [1.0, 3.0, 2.0]
    assert revisions.rows_of("bs1", "old", []) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([".", "."], "REVISION: expected two different ones"),
        ([".", "no-such-revision"], "revision 'no-such-revision': git archive says"),
        ([".", "HEAD", "--workloads", "bs2"], "workload 'bs2': did you mean"),
        ([".", "HEAD", "--rounds", "0"], "'0': expected a whole number from 1 on"),
        ([".", "HEAD", "--option", "fp8"], "'fp8': expected NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        revisions.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_values_of_options():
    assert revisions.option("kv_cache_dtype=fp8") == ("kv_cache_dtype", "fp8")
    assert revisions.option("enforce_eager=true") == ("enforce_eager", True)


@pytest.mark.slow
def test_a_revision_beside_the_files(tiny_qwen3, tmp_path, capfd):
    """Each engine asserts on its own that it imported its revision's package."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=revisions.ROOT, capture_output=True).returncode:
        pytest.skip("this is no git repository")
    kept = tmp_path / "rows.json"
    arguments = ["HEAD", ".", "--model", str(tiny_qwen3), "--workloads", "tiny", "--rounds", "2"]
    arguments += ["--num-kvcache-blocks", "8", "--option", "device=cpu", "--json", str(kept)]
    assert revisions.main(arguments) == 0
    rows = json.loads(kept.read_text())
    assert [(row["workload"], row["revision"], len(row["rounds"])) for row in rows] == [
        ("tiny", "HEAD", 2),
        ("tiny", ".", 2),
    ]
    out, err = capfd.readouterr()
    assert "| tiny | HEAD |" in out and "loading " in err and "round 2 of 2 ...\n" in err

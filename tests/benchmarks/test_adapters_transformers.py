"""The measurement of the adapter of transformers runs, and its rows say what they should."""

import json

import pytest

pytest.importorskip("transformers")

from benchmarks.adapters_transformers import made, main, side_of
from nanovllm.kernels import all_ops
from tests.providers import registered


def test_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    arguments = [
        "--models", "tiny", "--batches", "2", "--prompt-len", "5", "--output-len", "3", "--prefill", "2x6",
        "--rounds", "1", "--no-parts", "--device", "cpu", "--sides", "plain,nanovllm",
        "--ops", "rms_norm=native", "--json", str(file),
    ]  # fmt: skip
    assert main(arguments) == 0
    rows = json.loads(file.read_text())
    assert [(row["work"], row["side"]) for row in rows] == [
        (work, side)
        for work in ("generate 2 x 5 -> 3, static cache", "prefill 2 x 6")
        for side in ("plain", "nanovllm")
    ]
    assert all(row["difference"] < 1e-4 and row["share"] is None for row in rows)
    out, err = capsys.readouterr()
    assert "| tiny | prefill 2 x 6 | nanovllm |" in out
    assert "making tiny on cpu ...\n" in err and "tiny, prefill 2 x 6, nanovllm: round 1 of 1 ...\n" in err


def test_tokens_that_are_drawn(tmp_path):
    file, drawn = tmp_path / "rows.json", []
    arguments = [
        "--models", "tiny", "--batches", "1,3", "--prompt-len", "5", "--output-len", "3", "--prefill", "", "--rounds",
        "1", "--no-parts", "--device", "cpu", "--sides", "plain,only sample,without rms_norm", "--ops", "sample=mine",
        "--sampling", "temperature=0.6,top_p=0.95,top_k=20", "--json", str(file),
    ]  # fmt: skip

    def mine(*args):
        drawn.append([float(args[1][0]), int(args[2][0]), round(float(args[3][0]), 6), len(args[0])])
        return all_ops()["sample"].native(*args)

    with registered("sample", mine):
        assert main(arguments) == 0
    rows = json.loads(file.read_text())
    assert [(row["work"], row["side"]) for row in rows] == [
        (f"generate {batch} x 5 -> 3, static cache, drawn", side)
        for batch in (1, 3)
        for side in ("plain", "only sample", "without rms_norm")
    ]
    # Two sides prepare by runs of 3 tokens and of 1, and are timed by the same.
    assert drawn == [pytest.approx([0.6, 20, 0.95, batch]) for batch in (1, 3) for _ in range(16)]


def test_a_side_is_taken_back():
    model = made("tiny", "cpu")
    with side_of(model, "only qk_norm_rope", None):
        assert "forward" in model.model.layers[0].self_attn.__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_there_is_no_time_for_is_named(capsys):
    arguments = ["--models", "tiny", "--batches", "2", "--device", "cpu", "--sides", "plain", "--budget", "0"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "left out: tiny: plain" in err and "left out: tiny: plain, only rms_norm" in err and "| tiny |" not in out

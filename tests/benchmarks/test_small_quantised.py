"""The benchmark of small quantised models, on a tiny one."""

import json
import re

import pytest
import torch

from benchmarks import small_quantised
from tests import tiny


def test_rows_of_each_form(tmp_path, capsys):
    tiny.save(tmp_path / "tiny", hidden_size=128, intermediate_size=128, head_dim=32)
    kept = tmp_path / "rows.json"
    loads = ["--decode", "1,3", "--prompts", "40,2x20", "--output", "4", "--repeat", "1"]
    arguments = ["--presets", str(tmp_path / "tiny"), "--forms", "int4,bf16", "--device", "cpu", "--json", str(kept)]
    assert small_quantised.main([*loads, *arguments]) == 0
    written = json.loads(kept.read_text())
    rows = written["rows"]
    assert written["versions"]["torch"] == torch.__version__.split("+")[0] and written["device"]
    assert written["arguments"]["forms"] == "int4,bf16"
    names = ["decode 1", "decode 3", "prompts 1x40", "prompts 2x20"]
    assert [(row["form"], row["load"]) for row in rows] == [(f, n) for f in ("bf16", "int4") for n in names]
    assert [row["unit"] for row in rows[:4]] == ["tok/s", "tok/s", "prompts/s", "prompts/s"]
    for plain, packed in zip(rows[:4], rows[4:]):
        assert plain["ratio"] == 1 and packed["ratio"] == packed["value"] / plain["value"]
    out, err = capsys.readouterr()
    *shown, _, _ = out.splitlines() + ["", ""]
    assert re.findall("loading .* in (.*) [.]{3}\n", err) == ["bf16", "int4"] and err.count("measuring ") == 8
    assert sum(" of bf16" in line for line in shown) >= 4 and any("rows of 8 are more than 1 %" in s for s in shown)


def test_without_bfloat16_there_is_no_ratio(tmp_path, capsys):
    tiny.save(tmp_path / "tiny", hidden_size=128, intermediate_size=128, head_dim=32, num_hidden_layers=1)
    loads = ["--decode", "2", "--prompts", "", "--output", "2", "--repeat", "1", "--expand-small-weights", "off"]
    small_quantised.main([*loads, "--presets", str(tmp_path / "tiny"), "--forms", "int8", "--device", "cpu"])
    assert "of bf16" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--forms", "bf16,q5"], "--forms: 'q5': expected some of bf16,fp8,int4"),
        (["--decode", "1,x"], "--decode: 'x': expected numbers of sequences"),
        (["--decode", "0"], "--decode: '0': expected numbers of sequences"),
        (["--prompts", "4xy"], "--prompts: '4xy': expected tokens, or NUMBERxTOKENS"),
        (["--prompts", "8,x4"], "--prompts: 'x4': expected tokens, or NUMBERxTOKENS"),
        (["--decode", "", "--prompts", ""], "name a load, such as --decode 8"),
        (["--output", "1"], "--output 1, --repeat 2: expected at least 2"),
    ],
)
def test_arguments_that_are_wrong(capsys, arguments, said):
    with pytest.raises(SystemExit):
        small_quantised.main(arguments)
    assert said in capsys.readouterr().err

"""Two engines that stay and are measured in turns: here nanovllm twice, on the CPU."""

import re
import time
from dataclasses import replace

from benchmarks.tensor_parallel_peer import Side, compare, jobs
from tests import tiny


def measured_in_turns(sides, rounds):
    try:
        compare([sides], ["tiny"], rounds, time.monotonic() + 100)
    finally:
        for side in sides:
            side.close()


def test_two_engines_are_measured_in_turns(tmp_path, capsys):
    tiny.save(tmp_path / "model")
    ours, theirs = jobs(
        str(tmp_path / "model"), 1, 1, None, device="cpu", use_custom_kernels=False, max_model_len=128,
        num_kvcache_blocks=4,
    )  # fmt: skip
    assert (ours.engine, theirs.engine) == ("nanovllm", "vllm")
    sides = Side(ours, tmp_path / "a"), Side(replace(theirs, engine="nanovllm"), tmp_path / "b", name="other")
    measured_in_turns(sides, 2)
    said = capsys.readouterr().out
    assert said.count(" ready\n") == 2 and len(re.findall(r"^\| tiny \| (nanovllm|other) \| \d", said, re.M)) == 4
    assert [len(side.rates["tiny"]) for side in sides] == [2, 2]
    assert re.search(r"^tiny: nanovllm [\d,]+ against other [\d,]+ tokens/s, ratio \d", said, re.M)


def test_an_engine_that_cannot_start_leaves_the_other(tmp_path, capsys):
    tiny.save(tmp_path / "model")
    ours, theirs = jobs(str(tmp_path / "model"), 1, 1, None, device="cpu", use_custom_kernels=False, max_model_len=128)
    sides = Side(ours, tmp_path / "a"), Side(replace(theirs, engine="no such engine"), tmp_path / "b")
    measured_in_turns(sides, 1)
    said = capsys.readouterr().out
    assert "no such engine ended" in said and said.count("| tiny | nanovllm |") == 1
    assert "no such engine is not installed" in (tmp_path / "b").read_text()

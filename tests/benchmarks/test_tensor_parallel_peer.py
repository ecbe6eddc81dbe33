"""Two engines that stay and are measured in turns: here nanovllm twice, on the CPU."""

import re
import time
from dataclasses import replace

import pytest

from benchmarks.tensor_parallel_peer import Side, answer, compare, jobs
from nanovllm.bench.job import RequestTimes, Run
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import preset
from tests import tiny


def measured_in_turns(sides, rounds):
    try:
        compare([sides], ["tiny"], rounds, time.monotonic() + 600)
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


class Prompts:
    """An engine that only keeps the prompts that it is given."""

    config = ModelConfig.from_dict(preset("qwen3-0.6b"))

    def __init__(self):
        self.seen = []

    def about(self):
        return {"device": "cpu", "dtype": "float32"}

    def run(self, items):
        self.seen += [tuple(item.prompt) for item in items]
        return Run(1.0, [RequestTimes(0.1, 0.2, item.num_output) for item in items])


@pytest.mark.parametrize("repeat", [1, 3])
def test_every_turn_has_prompts_of_its_own_which_all_engines_get(repeat):
    sides = jobs("qwen3-0.6b", 1, repeat, preset("qwen3-0.6b"))
    assert [job.options["enable_prefix_caching"] for job in sides] == [False, False]
    engines = [Prompts(), Prompts()]
    for job, engine in zip(sides, engines):
        for turn in range(3):
            for load in ("tiny", "bs8"):
                rates, ttft, _ = answer(job, engine, load, turn)
                assert len(rates) == repeat and ttft == pytest.approx(0.1)
    ours, theirs = (engine.seen for engine in engines)
    assert ours == theirs and len(ours) == 3 * (4 + 8) * (1 + repeat) == len(set(ours))


def test_an_engine_that_cannot_start_leaves_the_other(tmp_path, capsys):
    tiny.save(tmp_path / "model")
    ours, theirs = jobs(str(tmp_path / "model"), 1, 1, None, device="cpu", use_custom_kernels=False, max_model_len=128)
    sides = Side(ours, tmp_path / "a"), Side(replace(theirs, engine="no such engine"), tmp_path / "b")
    measured_in_turns(sides, 1)
    said = capsys.readouterr().out
    assert "no such engine ended" in said and said.count("| tiny | nanovllm |") == 1
    assert "no such engine is not installed" in (tmp_path / "b").read_text()

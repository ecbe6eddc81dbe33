"""What `benchmarks.structured_output` says of the host's time in a step."""

import base64
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import structured_output
from benchmarks.serving import dummy_tokenizer
from benchmarks.structured_output import SAID, RoundRates, Stages, in_threads, mask_seconds, print_masks, print_rates
from benchmarks.structured_output_host import Host, step_ms
from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.weights.tokenizer import load_tokenizer
from tests import tiny

NOTHING = Host(0, 0, 0, 0, 0)
HOST = Host(advance=0.2, bans=0.1, launch=0.2, schedule=0.1, read=0.5)


def test_the_host_has_the_times_that_are_measured():
    assert set(Host._fields) <= set(SAID)


def test_the_time_line_of_a_step():
    line = dict(sampling=0.1, masking=0.0)
    assert step_ms([0.0] * 50, NOTHING, 2.0, False, **line) == pytest.approx(2.0)
    assert step_ms([1.8] * 50, NOTHING, 2.0, False, **line) == pytest.approx(2.0)  # hidden behind the model
    assert step_ms([3.0] * 50, NOTHING, 2.0, False, **line) == pytest.approx(3.1)  # then it samples
    assert step_ms([0.5] * 50, HOST, 2.0, False, **line) == pytest.approx(2.0)
    host_bound = step_ms([3.0] * 999, HOST, 2.0, False, **line)
    assert host_bound == pytest.approx(0.2 + 3.0 + 0.1 + 0.2 + 0.1 + 0.5, rel=0.01)
    by_masks = 0.2 + 3.0 + 0.1 + 0.1  # the host's other work is beside that
    assert step_ms([3.0] * 999, HOST, 2.0, True, **line) == pytest.approx(by_masks, rel=0.01)
    by_the_host = Host(advance=0.2, bans=0.1, launch=2, schedule=1, read=1)
    assert step_ms([0.5] * 999, by_the_host, 2.0, True, **line) == pytest.approx(0.2 + 2 + 1 + 1, rel=0.01)
    assert step_ms([0.5] * 50, HOST, 2.0, True, sampling=0.1, masking=0.3) == pytest.approx(2.3)


def test_masks_in_threads():
    assert in_threads([1.0, 2.0, 3.0], 1) == 6
    assert in_threads([1.0, 2.0, 3.0], 2) == 4
    assert in_threads([1.0, 2.0, 3.0], 8) == 3


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_parts_of_a_step_add_up(tmp_path, in_thread):
    tiny.save_with_tokenizer(tmp_path)
    policy = FastPolicy.off(device_state=True, mask_thread=in_thread)
    llm = LLM(tmp_path, device="cpu", async_scheduling=True, num_kvcache_blocks=16, fast_policy=policy)
    stages = Stages(llm)
    params = SamplingParams(max_tokens=40, structured_outputs={"regex": "[a-f]{200}"})
    for _ in range(2):
        stages.clear()
        llm.generate([[5, 6, 7], [8]], params, use_tqdm=False)
        found = stages.milliseconds()
        assert set(found) == set(SAID) and {len(ms) for ms in found.values()} == {40 - 8}
        assert all((ms >= 0).all() for name, ms in found.items() if name != "launch")
        names = {"main_wait", "launch", "schedule", "read"}
        names |= set() if in_thread else {"tokens", "advance", "fill", "bans"}
        parts = sum(found[name] for name in names)
        # A busy machine may stop the engine between two parts of a step.
        assert np.median(parts / found["step"]) == pytest.approx(1, rel=0.05)


def stand_in(step=None):
    """An engine whose steps are calls of a function."""
    runner = SimpleNamespace(
        execute=None, sampler=SimpleNamespace(masks=SimpleNamespace(start=None, filler=SimpleNamespace(prepare=None))),
        fast=SimpleNamespace(enabled=SimpleNamespace(mask_thread=True)),
    )  # fmt: skip
    return SimpleNamespace(engine=SimpleNamespace(step=step, runner=runner, scheduler=SimpleNamespace(schedule=None)))


def test_the_steady_rate_is_that_of_the_steps_with_all_requests(monkeypatch):
    """Four requests: steps of prompts, eight that settle, ten of 2 s, the step in which one ends, and what follows."""
    steps = [(9.0, 0), (5.0, 2), *[(4.0, 4)] * 8, *[(2.0, 4)] * 10, (7.0, 4), (1.0, 3), (1.0, 2)]
    now, left = [0.0], iter(steps)

    def step():
        seconds, grown = next(left)
        now[0] += seconds
        return [None] * grown

    llm = stand_in(step)
    stages = Stages(llm)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for _ in steps:
        llm.engine.step()
    assert stages.steady_rate(4) == 4 / 2.0


def test_the_fewest_steps_of_a_steady_rate():
    llm = stand_in(lambda: [None] * 4)
    stages = Stages(llm)
    for _ in range(10):
        llm.engine.step()
    with pytest.raises(ValueError, match="all 4 requests got a token in 10 steps; .* at least 11 such steps"):
        stages.steady_rate(4)
    llm.engine.step()
    assert stages.steady_rate(4) > 0


@pytest.mark.parametrize(
    "tokens, said",
    [
        (10, "--tokens 10: the steady rate needs at least 11"),  # before a model is made
        (20, "--tokens 20: all 128 requests got a token in 0 steps; the steady rate needs at least 11 such steps"),
    ],
)
def test_too_few_tokens_for_a_steady_rate(monkeypatch, capsys, tokens, said):
    made = []
    monkeypatch.setattr(structured_output, "LLM", lambda *args, **kwargs: made.append(args) or stand_in())
    monkeypatch.setattr(structured_output, "demo_model_path", lambda: "none")
    monkeypatch.setattr(structured_output, "tokens_per_second", lambda *args: 1.0)
    monkeypatch.setattr(sys, "argv", ["structured_output", "--tokens", str(tokens)])
    with pytest.raises(SystemExit):
        structured_output.main()
    assert said in " ".join(capsys.readouterr().err.split()) and len(made) == (tokens > 10)


def test_a_vocabulary_that_is_not_there(monkeypatch, capsys, tmp_path):
    path = tmp_path / "qwen.tiktoken"
    monkeypatch.setattr(sys, "argv", ["structured_output", "--tiktoken", str(path)])
    with pytest.raises(SystemExit):
        structured_output.main()
    assert f"--tiktoken {path}: there is no such file" in " ".join(capsys.readouterr().err.split())


def test_what_both_rates_lose(capsys):
    print_rates({0: [RoundRates(100, 200), RoundRates(50, 400), RoundRates(80, 300)], 20: [RoundRates(72, 285)] * 3}, 8)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[1], line[5], line[7]) for line in said] == [
        ("whole", "0", "+0.0", "100.00"), ("whole", "20", "-10.0", "111.11"),
        ("steady", "0", "+0.0", "26.67"), ("steady", "20", "-5.0", "28.07"),
    ]  # fmt: skip


def test_times_of_single_masks(tmp_path, capsys):
    tiny.save_with_tokenizer(tmp_path)
    llm = LLM(tmp_path, device="cpu", num_kvcache_blocks=16)
    steps = mask_seconds(llm, 3, 5)
    assert [len(step) for step in steps] == [3] * 5 and min(map(min, steps)) > 0
    print_masks([[0.001, 0.003], [0.002, 0.002]])
    said = capsys.readouterr().out.splitlines()
    assert said[1].split()[-4:] == ["2.000", "2.000", "2.700", "2.970"]  # one mask
    assert said[2].split()[-4] == "2.500" and said[3].split()[-4] == "4.000" and said[4].split()[-4] == "2.500"


def test_a_real_vocabulary(tmp_path):
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"cd", b"abcd", b" ab"]
    text = b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (tmp_path / "small.tiktoken").write_bytes(text)
    dummy_tokenizer.write(tmp_path, 300, 280, tmp_path / "small.tiktoken")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("abcdabé", add_special_tokens=False) == [258, 256, 0xC3, 0xA9]
    assert tokenizer.encode(" ab", add_special_tokens=False) == [259]
    assert len(tokenizer) == 300 and tokenizer.eos_token_id == 280

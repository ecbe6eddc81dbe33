"""What the engines' adapters say of a run: the times between tokens, and a short warm-up."""

import sys
from types import SimpleNamespace

import pytest

from nanovllm.bench.job import Job, Repeat, RequestTimes, Run
from nanovllm.bench.workloads import Workload


def test_means_have_no_slow_tokens():
    only_means = Repeat.of(Run(2.0, [RequestTimes(0.5, 0.8, 3), RequestTimes(0.5, 0.9, 3)]), 0, 0, 0)
    assert only_means.itl_p50 == pytest.approx(0.175) and only_means.itl_p99 is None
    together = Repeat.of(Run(2.0, [RequestTimes(0.5, 0.8, 3)], gaps=[0.1, 0.2]), 0, 0, 0)
    assert together.itl_p50 == pytest.approx(0.15) and together.itl_p99 == pytest.approx(0.199)


def test_the_transformers_warm_up_is_short():
    from nanovllm.bench.engines.transformers import TransformersEngine

    engine = object.__new__(TransformersEngine)
    engine.run = lambda items: items
    warm = TransformersEngine.warm_up(engine, Workload("x", 2, 5, (3, 400)).draw(0, 50))
    drawn = Workload("x", 2, 5, (3, 400)).draw(0, 50)
    assert [i.prompt for i in warm] == [i.prompt for i in drawn] and max(i.num_output for i in warm) <= 8


def test_times_between_tokens_of_a_closed_loop(tmp_path):
    from nanovllm import LLM
    from nanovllm.bench.engines.nanovllm import NanovllmEngine
    from tests import tiny

    tiny.save(tmp_path, "qwen3", seed=1)
    options = {"device": "cpu", "num_kvcache_blocks": 4, "kvcache_block_size": 16}
    engine = NanovllmEngine(
        Job("nanovllm", "", str(tmp_path), (Workload("one", 1, 1, 2),), options=options, max_model_len=64), LLM
    )
    items = Workload("x", 5, (3, 20), (1, 12)).draw(0, 50)  # more than fit the cache at once
    step = engine.llm.engine.step
    for run in (engine.run(items), engine.run(items)):
        assert [len(r.gaps) for r in run.requests] == [i.num_output - 1 for i in items]
        for r in run.requests:
            assert min(r.gaps, default=0) >= 0 and sum(r.gaps) == pytest.approx(r.total - r.first_token, abs=0.02)
    assert engine.llm.engine.step == step


@pytest.mark.parametrize("told, complete", [([[0.1], [0.2, 0.3]], True), ([[0.1]], False), (None, False)])
def test_times_between_tokens_of_vllm(monkeypatch, told, complete):
    """With a module in vLLM's place, which keeps statistics as vLLM does."""
    manager = SimpleNamespace(record=lambda scheduler_stats, iteration_stats: None) if told is not None else None
    recorded = manager and manager.record

    def generate(prompts, params, use_tqdm):
        for gaps in told or ():
            manager.record(scheduler_stats=None, iteration_stats=SimpleNamespace(inter_token_latencies_iter=gaps))
        metrics = SimpleNamespace(first_token_latency=0.5, first_token_ts=1.0, last_token_ts=1.6)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * 4)], metrics=metrics) for _ in prompts]

    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # as the module sets it
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.vllm", raising=False)
    from nanovllm.bench.engines.vllm import VllmEngine

    monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.vllm")
    engine = object.__new__(VllmEngine)
    engine._llm = SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(logger_manager=manager))
    workload = Workload("x", 1, 2, 4)
    engine._job = Job("vllm", "", "", (workload,), options={}, max_model_len=64)
    run = engine.run(workload.draw(0, 9))
    repeat = Repeat.of(run, 2, 0, 0)
    assert repeat.itl_p50 == pytest.approx(0.2) and (repeat.itl_p99 is not None) == complete
    assert manager is None or manager.record is recorded

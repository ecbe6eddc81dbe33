"""Measuring processes that do well, fail, and die."""

import dataclasses
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from nanovllm.bench import launcher, worker
from nanovllm.bench.engines.common import EngineError
from nanovllm.bench.job import Job, Repeat, RequestTimes, Run
from nanovllm.bench.launcher import WorkerDied, in_child, measure_rows
from nanovllm.bench.workloads import Workload
from nanovllm.model_config import ModelConfig

ONE, TWO, THREE = (Workload(name, 1, 1, 2) for name in ("one", "two", "three"))
JOB = Job("nanovllm", "custom", "m", (ONE, TWO, THREE), options={"kernel_priority": {"rms_norm": ["native"]}})

# What a worker does, in place of an engine: one message a workload; "two" ends it in a way of its own.
SCRIPT = """
import json, os, signal, sys
job = json.loads(sys.stdin.read())
out = os.fdopen(int(sys.argv[sys.argv.index("--worker") + 1]), "w", buffering=1)
print("loading", job["workloads"][0]["name"])
for w in job["workloads"]:
    if w["name"] == "two":
        {how}
    row = dict(engine="nanovllm", variant="custom", model="m", workload=w["name"], load="l", error=None, repeats=[])
    out.write(json.dumps(["started", w["name"]]) + "\\n" + json.dumps(["row", row]) + "\\n")
"""


def rows_of(how):
    rows, said = [], []
    measure_rows(
        in_child([sys.executable, "-c", SCRIPT.format(how=how)]), JOB, rows.append, lambda k, c: said.append((k, c))
    )
    return rows, said


def test_a_job_survives_json():
    job = Job("vllm", "", "m", (Workload("x", 2, (3, 4), 5, rate=2.0),), {"a": 1}, {"dtype": "bfloat16"})
    assert Job.from_json(job.to_json()) == job


def test_rows_come_in_order():
    rows, said = rows_of("pass")
    assert [r.workload for r in rows] == ["one", "two", "three"] and not any(r.error for r in rows)
    assert ("started", "two") in said


@pytest.mark.parametrize(
    "how, reason",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV: loading"),
        ("print('no more memory'); sys.exit(7)", "exit code 7: loading"),
        ("raise RuntimeError('it broke')", "it broke"),
    ],
)
def test_a_process_that_dies_takes_one_row_with_it(how, reason):
    rows, _ = rows_of(how)
    assert [r.workload for r in rows] == ["one", "two", "three"]
    assert reason in rows[1].error and rows[0].error is None and rows[2].error is None


def test_a_process_that_ends_early_without_an_error_is_noticed():
    rows, _ = rows_of("sys.exit(0)")
    assert [r.workload for r in rows] == ["one", "two", "three"] and "without a result" in rows[1].error


# As an engine that is dead: it says little, another of its processes said more, and its end is no good one either.
DEAD = """
        print("(Core pid=7) ERROR [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB",
              flush=True)
        print("(Core pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB", flush=True)
        print("vllm.exceptions.EngineDeadError: See stack trace (above)", flush=True)
        row = dict(engine="nanovllm", variant="custom", model="m", workload="two", load="l", repeats=[],
                   error="EngineDeadError: See stack trace (above)")
        out.write(json.dumps(["failed", row]) + "\\n")
        print("after it", flush=True)
        sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_dead_engines_row_says_what_its_processes_printed(code):
    rows, _ = rows_of(DEAD.format(code=code).strip())
    assert [r.workload for r in rows] == ["one", "two", "three"] and not rows[0].error and not rows[2].error
    assert rows[1].error == (
        "EngineDeadError: See stack trace (above); printed before: "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB"
    )


def test_the_lines_that_look_like_errors():
    printed = "INFO fine\nRuntimeError: a\nx.y.ValueError: b\nerrors: none\n"
    printed += "Fatal Python error: Segmentation fault\nKeyError: c\n"
    assert launcher.with_causes("it died", printed) == (
        "it died; printed before: x.y.ValueError: b | Fatal Python error: Segmentation fault | KeyError: c"
    )
    assert launcher.with_causes("it died", "all went well\n") == "it died"


def test_a_row_that_takes_too_long_is_stopped_and_the_next_one_runs():
    rows, said = [], []
    script = SCRIPT.format(how='out.write(json.dumps(["started", "two"]) + "\\n"); import time; time.sleep(60)')
    started = time.perf_counter()
    job = dataclasses.replace(JOB, limit=0.3)
    measure_rows(in_child([sys.executable, "-c", script]), job, rows.append, lambda k, c: said.append(c))
    assert [r.error for r in rows] == [None, "stopped after 0.3 s (--limit)", None]
    assert time.perf_counter() - started < 30


def test_a_process_that_cannot_start():
    launch = in_child([sys.executable, "-c", "import nothing_of_that_name"])
    with pytest.raises(WorkerDied, match="exit code 1.*nothing_of_that_name"):
        launch(JOB, lambda k, c: None)


class FakeEngine:
    def __init__(self, fail=None):
        self.config = None
        self.fail = fail or {}
        self.runs = []

    def about(self):
        return {"device": "cpu", "dtype": "float32"}

    def run(self, items):
        self.runs.append(items)
        error = self.fail.get(len(self.runs))
        if error:
            raise error
        return Run(0.5, [RequestTimes(0.1, 0.2, i.num_output) for i in items])

    def close(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    from tests.bench.test_roofline import SMALL

    monkeypatch.setattr(worker, "model_shape", lambda *_: SMALL)

    def use(engine):
        monkeypatch.setattr(worker, "start", lambda *_: engine)
        rows = []
        launcher.measure_rows(launcher.in_process(None), JOB, rows.append, lambda k, c: None)
        return rows

    return use


def test_warm_up_is_not_counted_and_every_run_has_prompts_of_its_own(fake):
    engine = FakeEngine()
    rows = fake(engine)
    assert [(len(r.warmup_seconds), len(r.repeats)) for r in rows] == [(1, 3)] * 3
    assert isinstance(rows[0].repeats[0], Repeat) and rows[0].peak_memory > 0
    assert engine.runs[1] == ONE.draw(0, 5) and engine.runs[2] == ONE.draw(1, 5)
    assert engine.runs[0] not in engine.runs[1:4] or len(ONE.draw(0, 5)[0].prompt) == 1


def test_out_of_memory_ends_the_row_and_not_the_run(fake):
    rows = fake(FakeEngine({6: torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")}))
    assert [bool(r.error) for r in rows] == [False, True, False]
    assert rows[1].error == "out of memory: CUDA out of memory. Tried to allocate 3 GiB"


def test_a_dead_engine_costs_one_row(monkeypatch, fake):
    """Whatever it is asked after its death fails too, so the third workload gets another engine."""
    engines = []

    class Dying(FakeEngine):
        def run(self, items):
            if len(self.runs) >= 5 and self is engines[0]:
                raise RuntimeError("EngineDeadError")
            return super().run(items)

        def close(self):
            raise RuntimeError("cannot close what is dead")

    monkeypatch.setattr(worker, "start", lambda *_: engines.append(Dying()) or engines[-1])
    rows = []
    launcher.measure_rows(launcher.in_process(None), JOB, rows.append, lambda k, c: None)
    assert [r.error for r in rows] == [None, "RuntimeError: EngineDeadError", None]
    assert len(engines) == 2 and len(rows[2].repeats) == 3


def test_an_engine_that_only_refuses_goes_on(monkeypatch, fake):
    engine = FakeEngine({5: EngineError("not such a load")})
    rows = fake(engine)
    assert [r.error for r in rows] == [None, "not such a load", None]
    assert len(engine.runs) == 4 + 1 + 4  # the same engine: the refused workload's warm-up was its only run


def test_with_a_limit_a_row_keeps_the_repeats_it_has(monkeypatch, fake):
    now = [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(sys.modules[__name__], "JOB", dataclasses.replace(JOB, limit=20.0))

    class Slow(FakeEngine):
        seconds = 7.0

        def run(self, items):
            now[0] += self.seconds
            return dataclasses.replace(super().run(items), seconds=self.seconds)

    assert [(r.error, len(r.repeats)) for r in fake(Slow())] == [(None, 1)] * 3  # 7 s of warm-up, 7, and not 7 more
    Slow.seconds = 21.0
    assert {r.error for r in fake(Slow())} == {"stopped after 20 s (--limit)"}


def test_an_engines_own_warm_up(fake):
    class Quick(FakeEngine):
        warmed = 0

        def warm_up(self, items):
            self.warmed += 1
            return Run(0.25, [])

    engine = Quick()
    rows = fake(engine)
    assert engine.warmed == 3 and len(engine.runs) == 9 and rows[0].warmup_seconds == [0.25]


def test_the_transformers_warm_up_is_short():
    from nanovllm.bench.engines.transformers import TransformersEngine

    engine = object.__new__(TransformersEngine)
    engine.run = lambda items: items
    warm = TransformersEngine.warm_up(engine, Workload("x", 2, 5, (3, 400)).draw(0, 50))
    drawn = Workload("x", 2, 5, (3, 400)).draw(0, 50)
    assert [i.prompt for i in warm] == [i.prompt for i in drawn] and max(i.num_output for i in warm) <= 8


@pytest.mark.parametrize(
    "name, expected",
    [("auto", 2), ("fp8", 1), ("fp8_e4m3", 1), ("bfloat16", 2), ("fp16", 2), ("float32", 4), ("fp32", 4)],
)
def test_bytes_of_the_cache_by_its_dtype(name, expected):
    config = ModelConfig.from_dict(
        {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
         "vocab_size": 9, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    )  # fmt: skip
    job = dataclasses.replace(JOB, options={"kv_cache_dtype": name})
    assert worker.model_shape(job, config, "bfloat16").token_kv_bytes == 2 * 2 * 4 * expected


def test_rates_are_a_job_that_loads_nothing(monkeypatch):
    asked = []

    def rates(device, dtypes, refresh):
        asked.append((device.type, dtypes, refresh))
        return launcher_rates()

    monkeypatch.setattr(worker, "rates", rates)
    monkeypatch.setattr(worker, "start", lambda *_: pytest.fail("no engine is needed"))
    config = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    job = dataclasses.replace(JOB, task="rates", config=config, options={"device": "cpu"})
    said = []
    launcher.in_process(None)(job, lambda kind, content: said.append(kind))
    assert said == ["rates"] and asked == [("cpu", ("bfloat16", "float32"), True)]


def launcher_rates():
    from nanovllm.hardware.measured_rates import Rates

    return Rates("cpu", 1.0, 1.0, 1.0, {"float32": 1.0})


def test_means_have_no_slow_tokens():
    only_means = Repeat.of(Run(2.0, [RequestTimes(0.5, 0.8, 3), RequestTimes(0.5, 0.9, 3)]), 0, 0, 0)
    assert only_means.itl_p50 == pytest.approx(0.175) and only_means.itl_p99 is None
    together = Repeat.of(Run(2.0, [RequestTimes(0.5, 0.8, 3)], gaps=[0.1, 0.2]), 0, 0, 0)
    assert together.itl_p50 == pytest.approx(0.15) and together.itl_p99 == pytest.approx(0.199)


def test_times_between_tokens_of_a_closed_loop(tmp_path):
    from nanovllm import LLM
    from nanovllm.bench.engines.nanovllm import NanovllmEngine
    from tests import tiny

    tiny.save(tmp_path, "qwen3", seed=1)
    options = {"device": "cpu", "num_kvcache_blocks": 4, "kvcache_block_size": 16}
    engine = NanovllmEngine(Job("nanovllm", "", str(tmp_path), (ONE,), options=options, max_model_len=64), LLM)
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
    run = engine.run(Workload("x", 1, 2, 4).draw(0, 9))
    repeat = Repeat.of(run, 2, 0, 0)
    assert repeat.itl_p50 == pytest.approx(0.2) and (repeat.itl_p99 is not None) == complete
    assert manager is None or manager.record is recorded


def test_an_engine_that_does_not_start_is_a_reason_in_every_row(monkeypatch):
    def fail(*_):
        raise ValueError("no such\nmodel")

    monkeypatch.setattr(worker, "start", fail)
    rows = []
    launcher.measure_rows(launcher.in_process(None), JOB, rows.append, lambda k, c: None)
    assert [r.error for r in rows] == ["ValueError: no such model"] * 3


def test_an_engine_that_is_not_installed():
    import importlib.util

    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    rows = []
    job = dataclasses.replace(JOB, engine="vllm", variant="")
    launcher.measure_rows(launcher.in_process(None), job, rows.append, lambda k, c: None)
    assert {r.error for r in rows} == {"vllm is not installed; pip install vllm"}

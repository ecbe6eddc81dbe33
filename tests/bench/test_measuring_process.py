"""What a measuring process does with engines that work, refuse, and die."""

import dataclasses
import importlib.util

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench import measuring_process
from nanovllm.bench.engines.engine_interface import EngineError
from nanovllm.bench.engines.nanovllm import NanovllmEngine
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.launcher import in_process, measure_rows
from nanovllm.bench.workloads import Workload
from nanovllm.hardware.measured_rates import Rates
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.model_config import ModelConfig

ONE, TWO, THREE = (Workload(name, 1, 1, 2) for name in ("one", "two", "three"))
JOB = Job("nanovllm", "custom", "m", (ONE, TWO, THREE))
CONFIG = ModelConfig.from_dict(
    {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
     "vocab_size": 9, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
)  # fmt: skip


class FakeEngine:
    """Raises the error of a run, which are counted from 1. `clock` tells the seconds of all runs."""

    def __init__(self, fail=None, seconds=0.5):
        self.config, self.fail, self.seconds, self.runs = CONFIG, fail or {}, seconds, []

    def about(self):
        return {"device": "cpu", "dtype": "float32"}

    def run(self, items):
        self.runs.append(items)
        if error := self.fail.get(len(self.runs)):
            raise error
        return Run(self.seconds, [RequestTimes(0.1, 0.2, i.num_output) for i in items])

    def close(self):
        if self.fail:
            raise RuntimeError("cannot close what is dead")


def rows_of(*engines, job=JOB):
    """The rows of a job whose processes start these engines, one after the other."""
    rows, left = [], list(engines)

    def launch(job, emit):
        engine = left.pop(0)
        measuring_process.measure(job, lambda job: engine, emit, clock=lambda: engine.seconds * len(engine.runs))

    measure_rows(launch, job, rows.append, lambda kind, content: None)
    assert not left
    return rows


def test_warm_up_is_not_counted_and_every_run_has_prompts_of_its_own():
    engine = FakeEngine()
    rows = rows_of(engine)
    assert [(len(r.warmup_seconds), len(r.repeats)) for r in rows] == [(1, 3)] * 3 and rows[0].peak_memory > 0
    assert engine.runs[1:3] == [ONE.draw(0, 9), ONE.draw(1, 9)] and len(engine.runs) == 12


def test_out_of_memory_ends_the_row_and_not_the_run():
    error = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")
    rows = rows_of(FakeEngine({6: error}), FakeEngine())
    assert [r.error for r in rows] == [None, "out of memory: CUDA out of memory. Tried to allocate 3 GiB", None]


def test_a_dead_engine_costs_one_row():
    """Whatever it is asked after its death fails too, so the third workload gets another engine."""
    rows = rows_of(FakeEngine(dict.fromkeys(range(6, 20), RuntimeError("EngineDeadError"))), FakeEngine())
    assert [r.error for r in rows] == [None, "RuntimeError: EngineDeadError", None] and len(rows[2].repeats) == 3


def test_an_engine_that_only_refuses_goes_on():
    engine = FakeEngine({5: EngineError("not such a load")})
    assert [r.error for r in rows_of(engine)] == [None, "not such a load", None]
    assert len(engine.runs) == 4 + 1 + 4  # the same engine: the refused workload's warm-up was its only run


def test_with_a_limit_a_row_keeps_the_repeats_it_has():
    job = dataclasses.replace(JOB, limit=20.0)
    # 7 s of warm-up, 7, and not 7 more.
    assert [(r.error, len(r.repeats)) for r in rows_of(FakeEngine(seconds=7.0), job=job)] == [(None, 1)] * 3
    assert {r.error for r in rows_of(FakeEngine(seconds=21.0), job=job)} == {"stopped after 20 s (--limit)"}


def test_an_engines_own_warm_up():
    engine = FakeEngine()
    engine.warm_up = lambda items: Run(0.25, [])
    rows = rows_of(engine)
    assert len(engine.runs) == 9 and rows[0].warmup_seconds == [0.25]


@pytest.mark.parametrize("name, expected", [("auto", 2), ("fp8", 1), ("fp8_e4m3", 1), ("fp16", 2), ("fp32", 4)])
def test_bytes_of_the_cache_by_its_dtype(name, expected):
    job = dataclasses.replace(JOB, options={"kv_cache_dtype": name})
    assert measuring_process.model_shape(job, CONFIG, "bfloat16").token_kv_bytes == 2 * 2 * 4 * expected


def test_bytes_of_weights_that_are_quantised_while_they_are_loaded():
    """The layers' matrices are; the head is not."""
    plain = measuring_process.model_shape(JOB, CONFIG, "bfloat16")
    layers, head = CONFIG.num_hidden_layers * plain.layer_parameters, 9 * 8
    for form, bits in {"fp8": 8.002, "int8": 8.125, "int4": 4.125}.items():
        shape = measuring_process.model_shape(
            dataclasses.replace(JOB, options={"quantization": form}), CONFIG, "bfloat16"
        )
        assert shape.step_bytes == pytest.approx(layers * bits / 8 + head * 2, rel=0.02)


def test_rates_are_a_job_that_loads_nothing():
    def no_engine(*_, **__):
        pytest.fail("no engine is needed")

    rates = Rates("cpu", 1.0, 1.0, 1.0, {"float32": 1.0})
    said, job = {}, dataclasses.replace(JOB, task="rates", options={"device": "cpu"})
    in_process(no_engine, rates_of=lambda job: rates)(job, said.__setitem__)
    assert said == {"rates": dataclasses.asdict(rates)}


@pytest.mark.parametrize(
    "config, options, dtypes",
    [({"torch_dtype": "bfloat16"}, {}, {"bfloat16", "float32"}), ({}, {"dtype": "float16"}, {"float16", "float32"})],
)
def test_rates_are_measured_in_the_dtypes_that_the_model_may_have(config, options, dtypes):
    job = dataclasses.replace(JOB, config=config, options={"device": "cpu", **options})
    assert set(measuring_process.dtypes_of(job)) == dtypes


@pytest.mark.parametrize(
    "options, quantization, measured",
    [
        ({"quantization": "fp8"}, None, True),
        ({}, {"quant_method": "fp8"}, True),
        ({}, {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "float"}}}}, True),
        ({}, {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int"}}}}, False),
        ({"dtype": "float8"}, None, True),  # an engine turned out to use it
        ({"quantization": "fp8", "activation_quantization": False}, None, False),
        ({"quantization": "fp8", "use_custom_kernels": False}, None, False),
        ({"quantization": "int8"}, None, False),
        ({"quantization": "int8", "prompt_activations": "fp8"}, None, True),
        ({"quantization": "int8", "prompt_activations": "auto"}, None, False),
        ({}, None, False),
    ],
)
def test_the_rate_of_8_bit_floats_is_measured_where_it_may_be_used(monkeypatch, options, quantization, measured):
    config = {} if quantization is None else {"quantization_config": quantization}
    job = dataclasses.replace(JOB, config=config, options={"device": "cuda", **options})
    for capability, has in (((9, 0), measured), ((8, 9), measured), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ("float8" in measuring_process.dtypes_of(job)) is has
        assert {"bfloat16", "float16", "float32"} <= set(measuring_process.dtypes_of(job))


def test_an_engine_tells_what_it_multiplies_with_quantised_activations():
    engine, shape = FakeEngine(), measuring_process.model_shape(JOB, CONFIG, "float32")
    engine.quantised_weights = lambda num_tokens: shape.token_parameters if num_tokens > 4 else 0
    long = Workload("long", 2, 5, 2)
    few, many = rows_of(engine, job=dataclasses.replace(JOB, workloads=(THREE, long)))
    assert few.repeats[0].fp8_flops == 0 and many.repeats[0].fp8_flops == 2 * shape.product_flops(5, 1)
    (without,) = rows_of(FakeEngine(), job=dataclasses.replace(JOB, workloads=(long,)))
    assert without.repeats[0].fp8_flops == 0 and without.repeats[0].flops == many.repeats[0].flops


def test_an_engine_that_does_not_start_is_a_reason_in_every_row():
    def fail(*_, **__):
        raise ValueError("no such\nmodel")

    rows, absent = [], dataclasses.replace(JOB, engine="sglang", variant="")
    measure_rows(in_process(fail), JOB, rows.append, lambda kind, content: None)
    assert [r.error for r in rows] == ["ValueError: no such model"] * 3
    if importlib.util.find_spec("sglang") is None:
        measure_rows(in_process(None), absent, rows.append, lambda kind, content: None)
        assert {r.error for r in rows[3:]} == {"sglang is not installed; pip install sglang"}


@pytest.mark.parametrize("read, quantised", [(None, None), (4.0, None), (4.05, None), (0.6, True), (1.0, True)])
def test_weights_count_as_many_bytes_as_are_read(read, quantised):
    engine = FakeEngine()
    engine.bytes_of_a_weight = read
    plain, (row,) = FakeEngine(), rows_of(engine, job=dataclasses.replace(JOB, workloads=(THREE,)))
    (usual,) = rows_of(plain, job=dataclasses.replace(JOB, workloads=(THREE,)))
    assert row.about.get("quantised") is quantised
    shape = measuring_process.model_shape(JOB, CONFIG, "float32")
    steps = 2
    more = steps * (dataclasses.replace(shape, weight_bytes=read or 4).step_bytes - shape.step_bytes)
    assert row.repeats[0].bytes == usual.repeats[0].bytes + more


@pytest.mark.parametrize("quant, nbytes", [("Q8_0", 34 / 32), ("Q4_1", 20 / 32), ("F16", 2), ("F32", None)])
def test_packed_weights_on_a_cpu_count_their_packed_bytes(tmp_path, monkeypatch, quant, nbytes):
    for name in ("NANOVLLM_KERNELS", "NANOVLLM_CPU_ARCH"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("gguf")
    if (reason := cpu_support(torch.device("cpu"))) is not None:
        pytest.skip(reason)
    from tests.weights import gguf_files

    weights = gguf_files.to_gguf("llama", gguf_files.hf_weights("llama", True))
    path = gguf_files.write(tmp_path / "m.gguf", "llama", weights, quant)
    job = dataclasses.replace(
        JOB, model=str(path), max_model_len=64, options={"device": "cpu", "num_kvcache_blocks": 8, "dtype": "float32"}
    )
    engine = NanovllmEngine(job, LLM)
    found = engine.bytes_of_a_weight
    assert found is nbytes is None or found == pytest.approx(nbytes)
    assert "compiled_for" not in engine.about()
    monkeypatch.setenv("NANOVLLM_CPU_ARCH", "x86-64-v3")  # too late for this engine: only its name is of interest here
    assert engine.about()["compiled_for"] == "x86-64-v3"

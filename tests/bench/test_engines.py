"""What the engines' adapters say of a run: the times between tokens, and a short warm-up."""

import asyncio
import importlib
import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import bench
from nanovllm import LLM
from nanovllm.bench import benchmark, command_line
from nanovllm.bench.engines.engine_interface import EngineError, model_directory, quantised_by_peer
from nanovllm.bench.engines.nanovllm import NanovllmEngine
from nanovllm.bench.job import Job, Repeat
from nanovllm.bench.workload_cost import ModelShape
from nanovllm.bench.workloads import Workload
from nanovllm.config import EngineConfig
from nanovllm.hardware.roofline import Work
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.weights.checkpoint import locate
from tests import tiny


def test_peers_quantise_all_activations_of_layers_with_fp8_weights(monkeypatch):
    config = ModelConfig.from_dict(tiny_config())
    fp8, int8 = (Job("vllm", "", "", (), options={"quantization": form}) for form in ("fp8", "int8"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert quantised_by_peer(fp8, config) == ModelShape.of(config, 1).token_parameters > 0
    assert quantised_by_peer(int8, config) == 0
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert quantised_by_peer(fp8, config) == 0


def test_the_transformers_warm_up_is_short():
    from nanovllm.bench.engines.transformers import TransformersEngine

    engine = object.__new__(TransformersEngine)
    engine.run = lambda items: items
    warm = TransformersEngine.warm_up(engine, Workload("x", 2, 5, (3, 400)).draw(0, 50))
    drawn = Workload("x", 2, 5, (3, 400)).draw(0, 50)
    assert [i.prompt for i in warm] == [i.prompt for i in drawn] and max(i.num_output for i in warm) <= 8


def test_times_between_tokens_of_a_closed_loop(tmp_path):
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


@pytest.fixture
def with_vllm(monkeypatch):
    """The module of vLLM's engine, with what it is given in vLLM's place."""

    def imported(**attributes):
        monkeypatch.setenv("NANOVLLM_VLLM", "")
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(**attributes))
        monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.vllm", raising=False)
        module = importlib.import_module("nanovllm.bench.engines.vllm")
        monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.vllm")
        return module

    return imported


@pytest.mark.parametrize("told, complete", [([[0.1], [0.2, 0.3]], True), ([[0.1]], False), (None, False)])
def test_times_between_tokens_of_vllm(with_vllm, told, complete):
    """vLLM's statistics may lack some; another release has none."""
    manager = SimpleNamespace(record=lambda scheduler_stats, iteration_stats: None) if told is not None else None
    recorded = manager and manager.record

    def generate(prompts, params, use_tqdm):
        for gaps in told or ():
            manager.record(scheduler_stats=None, iteration_stats=SimpleNamespace(inter_token_latencies_iter=gaps))
        metrics = SimpleNamespace(first_token_latency=0.5, first_token_ts=1.0, last_token_ts=1.6)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * 4)], metrics=metrics) for _ in prompts]

    engine = object.__new__(with_vllm(SamplingParams=lambda **_: None).VllmEngine)
    engine.llm = SimpleNamespace(generate=generate, llm_engine=SimpleNamespace(logger_manager=manager))
    workload = Workload("x", 1, 2, 4)
    engine.job = Job("vllm", "", "", (workload,), options={}, max_model_len=64)
    run = engine.run(workload.draw(0, 9))
    repeat = Repeat.of(run, 2, Work())
    assert repeat.itl_p50 == pytest.approx(0.2) and (repeat.itl_p99 is not None) == complete
    assert manager is None or manager.record is recorded


def test_vllm_with_the_plugin_is_a_row_of_its_own(tmp_path):
    def jobs(*arguments):
        common = ["--preset", "qwen3-0.6b", "--no-profile", "--device", "cpu", "--engine", "vllm", "--workload", "bs1"]
        args, given = bench.parser().parse_args([*common, *arguments]), []
        args.preset_config = {}
        benchmark.Benchmark(args, lambda job, emit: given.append(job), tmp_path).run()
        return [(j.engine, j.variant, j.options.get("vllm_plugin")) for j in given if j.task == "measure"]

    assert jobs() == [("vllm", "", None)]
    rows = [("vllm", "", None), ("vllm", "plugin", "1"), ("vllm", "plugin rms_norm", "rms_norm")]
    assert jobs("--vllm-plugin", "--vllm-plugin", "rms_norm") == rows
    args = bench.parser().parse_args(["--preset", "qwen3-0.6b", "--vllm-plugin"])
    with pytest.raises(ValueError, match="--vllm-plugin: vLLM is not among the engines"):
        command_line.check(args)


@pytest.mark.parametrize(
    "plugin, served, missing",
    [("1", "rms_norm", ""), ("", "", ""), ("1", "", "anything"),
     ("rms_norm,attention_decode", "rms_norm", "attention_decode")],
)  # fmt: skip
def test_vllm_starts_with_the_plugin_or_without(plugin, served, missing, with_vllm, tmp_path):
    config = SimpleNamespace(dtype="torch.bfloat16", hf_config=SimpleNamespace(to_dict=tiny_config))
    extra = SimpleNamespace(additional_config={"nanovllm": {"ops": [served]}} if served else {})
    stand_in = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config, vllm_config=extra))
    start = with_vllm(__version__="0.24.0", LLM=lambda **_: stand_in).start
    said = f"does not serve {missing}; is nanovllm installed beside vLLM"
    with pytest.raises(EngineError, match=said) if missing else nullcontext():
        start(Job("vllm", "", str(tmp_path), (), options={"vllm_plugin": plugin}))
    assert os.environ["NANOVLLM_VLLM"] == (plugin or "0")


def tiny_config():
    return PRESETS["qwen3-0.6b"]


class StandInSglang:
    """`sglang.Engine`, as far as it is used: every token is 7, and `asked` is what it was given."""

    def __init__(self, **options):
        self.asked, self.loop, self.is_open = [options], asyncio.new_event_loop(), True
        hf_config = SimpleNamespace(to_dict=tiny_config)
        model_config = SimpleNamespace(dtype="torch.bfloat16", hf_config=hf_config)
        self.tokenizer_manager = SimpleNamespace(model_config=model_config)

    def generate(self, input_ids, sampling_params):
        self.asked.append((input_ids, sampling_params))
        counts = [params["max_new_tokens"] for params in sampling_params]
        told = [{"completion_tokens": n, "e2e_latency": 0.5, "decode_throughput": 10.0} for n in counts]
        return [{"output_ids": [7] * n, "meta_info": meta} for n, meta in zip(counts, told)]

    async def async_generate(self, input_ids, sampling_params, stream):
        async def chunks():
            for n in range(1, sampling_params["max_new_tokens"] + 1):
                await asyncio.sleep(0)
                yield {"output_ids": [7] * n, "meta_info": {"completion_tokens": n}}

        return chunks()

    def shutdown(self):
        self.is_open = False
        self.loop.close()


@pytest.fixture
def sglang_engine(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.15", Engine=StandInSglang))
    monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.sglang", raising=False)
    from nanovllm.bench.engines.sglang import start

    monkeypatch.delitem(sys.modules, "nanovllm.bench.engines.sglang")
    options = {"max_num_seqs": 8, "enforce_eager": True, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    engine = start(Job("sglang", "", str(tmp_path), (), options=options, temperature=0.0, max_model_len=128))
    yield engine
    engine.close()
    assert not engine.engine.is_open


def test_sglang_gets_our_options_under_its_names(sglang_engine):
    given = sglang_engine.engine.asked[0]
    assert given["max_running_requests"] == 8 and given["disable_cuda_graph"] is True
    assert given["kv_cache_dtype"] == "fp8_e4m3" and given["context_length"] == 130  # SGLang leaves two unused
    assert given["skip_tokenizer_init"] is True and given["load_format"] == "auto" and "tp_size" not in given


def test_sglang_serves_a_closed_and_an_open_loop(sglang_engine):
    items = Workload("x", 3, 5, (2, 4)).draw(0, 50)
    run = sglang_engine.run(items)
    prompts, params = sglang_engine.engine.asked[-1]
    assert prompts == [list(i.prompt) for i in items]
    assert all(p == {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": i.num_output, "ignore_eos": True}
               for p, i in zip(params, items))  # fmt: skip
    assert [r.num_output for r in run.requests] == [i.num_output for i in items] and run.seconds > 0
    assert all(r.first_token == pytest.approx(0.5 - (r.num_output - 1) / 10) for r in run.requests)
    arriving = Workload("y", 3, 5, (2, 4), rate=500.0).draw(0, 50)
    run = sglang_engine.run(arriving)
    for request, item in zip(run.requests, arriving):
        assert request.num_output == item.num_output == len(request.gaps) + 1
        assert 0 <= request.first_token <= request.total


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_peers_get_a_configuration_of_the_same_form(tmp_path, form):
    """For random weights; a model with weights would be quantised in another way."""
    workload = Workload("one", 1, 1, 2)
    job = Job("vllm", "", "qwen3-0.6b", (workload,), preset("qwen3-0.6b"), {"quantization": form})
    directory = model_directory(job, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    storage = locate(EngineConfig(directory)).quantization.storage_of("model.layers.0.mlp.up_proj")
    assert storage.label.startswith(form) and "128" in storage.label
    with pytest.raises(EngineError, match="vllm quantises a model in another way; pass a quantised checkpoint"):
        model_directory(Job("vllm", "", str(tmp_path), (workload,), options={"quantization": form}), tmp_path)

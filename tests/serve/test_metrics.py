"""/metrics, and the dashboard that reads them."""

import json
import re
from pathlib import Path

import pytest

from nanovllm.serve.options import ServeOptions
from tests.serve.running import RunningServer, slow_client
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def guarded(model_path):
    with RunningServer(model_path, ServeOptions(model_names=("one", "org/two"), api_keys=("secret-key-1",))) as running:
        yield running


def test_metrics(guarded):
    guarded.post("/v1/completions", prompt="hello", max_tokens=5, ignore_eos=True)
    guarded.refused("/v1/completions", prompt=[5] * 5000)
    text = guarded.client.get("/metrics").text
    for name in (
        "vllm:num_requests_waiting{", "vllm:num_preemptions_total{", "vllm:prefix_cache_queries_total{",
        'vllm:request_success_total{finished_reason="error"',
        "vllm:inter_token_latency_seconds_sum{", "vllm:e2e_request_latency_seconds_count{",
        'nanovllm:http_requests_total{method="POST",path="/v1/completions",status="200"} ',
    ):  # fmt: skip
        assert name in text, name
    assert guarded.metric("vllm:generation_tokens_total") >= 5
    assert guarded.metric("vllm:request_success_total") >= 1
    wait_until(lambda: guarded.metric("vllm:num_requests_running") == 0)
    assert guarded.metric("vllm:kv_cache_usage_perc") == 0

    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"(?:vllm|nanovllm):\w+", asked))
    names |= {"nanovllm:step_seconds", "nanovllm:frontend_lag_seconds", "nanovllm:engine_up", "vllm:request_params_n"}
    assert len(names) > 12 and all(f"# TYPE {name.removesuffix('_bucket')} " in text for name in names)


def test_open_requests_are_counted_whatever_they_ask_for(model_path):
    with RunningServer(model_path, client=slow_client(model_path)) as server:
        server.hold()
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 200, "ignore_eos": True, "stream": True}
        assert server.metric("nanovllm:requests_open") == 0
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()  # if nothing held it, the stream would be closed
            next(pieces)
            assert server.engine.num_unfinished == 3 and server.metric("nanovllm:requests_open") == 1
            text = server.client.get("/metrics").text
            assert "# HELP nanovllm:requests_open HTTP requests that generate and have not ended." in text
        wait_until(lambda: server.metric("nanovllm:requests_open") == 0)


def test_the_metrics_that_dashboards_of_vllm_read(guarded):
    """Those of vLLM 0.26, but for sleep, images, LoRA, speculation and caches elsewhere."""
    sums = """
        request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_max_tokens
        request_params_n request_prefill_kv_computed_tokens iteration_tokens_total
    """.split()
    seconds = """
        time_to_first_token inter_token_latency request_time_per_output_token e2e_request_latency request_queue_time
        request_inference_time request_prefill_time request_decode_time
    """.split()
    totals = "prompt_tokens prompt_tokens_cached generation_tokens prefix_cache_queries prefix_cache_hits".split()

    def read():
        found = {name: guarded.metric(f"vllm:{name}_sum") for name in sums}
        found |= {name: guarded.metric(f"vllm:{name}_seconds_sum") for name in seconds}
        return found | {name: guarded.metric(f"vllm:{name}_total") for name in totals}

    guarded.post("/v1/completions", prompt=(prompt := list(range(10, 50))), max_tokens=1)  # fills the cache
    before = read()
    guarded.post("/v1/completions", prompt=prompt, max_tokens=7, ignore_eos=True, n=2)
    now = {name: value - before[name] for name, value in read().items()}
    assert [now[name] for name in sums] == [40, 14, 7, 7, 2, 8, 54]
    assert [now[name] for name in totals] == [40, 32, 14, 40, 32]
    assert all(now[name] > 0 for name in seconds if name != "request_queue_time")
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(now[name] for name in parts) == pytest.approx(now["e2e_request_latency"])
    text = guarded.client.get("/metrics").text
    assert 'vllm:cache_config_info{block_size="16",model_name="one",num_gpu_blocks="256"} 1.0' in text
    assert 'vllm:prompt_tokens_by_source_total{model_name="one",source="local_cache_hit"}' in text
    assert 'vllm:num_requests_waiting_by_reason{model_name="one",reason="capacity"} 0.0' in text

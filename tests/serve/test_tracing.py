"""One span for each request, in the client's trace."""

import pytest

pytest.importorskip("opentelemetry.sdk", reason='pip install "nanovllm[tracing]"')
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nanovllm.serve.tracing import Tracing
from tests.serve.running import RunningServer, slow_client
from tests.waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans(model_path):
    spans = InMemorySpanExporter()
    with RunningServer(model_path, client=slow_client(model_path)) as server:
        server.server.service.generated = Tracing("http://127.0.0.1:4318/v1/traces", "model", spans).record
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}
        server.client.post("/v1/completions", json=body, headers={"traceparent": PARENT, "x-request-id": "mine"})
        server.hold()
        with server.client.stream("POST", "/v1/completions", json=body | {"max_tokens": 250, "stream": True}) as answer:
            pieces = answer.iter_raw()
            next(pieces)
        server.go()
        wait_until(lambda: len(spans.get_finished_spans()) == 2)
        server.client.get("/health")
        whole, left = spans.get_finished_spans()
    assert whole.name == "POST /v1/completions" and f"{whole.context.trace_id:032x}" == PARENT[3:35]
    told = whole.attributes
    assert told["gen_ai.usage.completion_tokens"] == 5 and told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.id"] == "mine" and told["gen_ai.response.finish_reasons"] == ("length",)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert whole.status.is_ok or whole.status.is_unset
    assert left.parent is None and not left.status.is_ok and left.status.description == "the client has gone"

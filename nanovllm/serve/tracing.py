"""OpenTelemetry: one span for each request that generates, which continues the client's trace."""

from __future__ import annotations

import time
from typing import Any

from nanovllm.serve.generation import Generation


class Tracing:
    """Writes spans. The attributes have vLLM's names, which are OpenTelemetry's for generative AI where there is one.

    Args:
        endpoint: the endpoint of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.
        model: the model's name.
        exporter: for tests: what gets the spans, in place of the collector.

    Raises:
        ValueError: the endpoint is no address, or the packages are not installed.
    """

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={endpoint!r}: must be an address such as http://127.0.0.1:4318/v1/traces")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint))  # it sends in a thread of its own
            else:
                processor = SimpleSpanProcessor(exporter)
        except ImportError as error:
            raise ValueError(f'traces need the package {error.name!r}; run pip install "nanovllm[tracing]"') from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "nanovllm"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("nanovllm.serve")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._model = model

    def record(self, generation: Generation) -> None:
        """Write the span of a generation that has ended, in whatever way."""
        exchange = generation.exchange
        carrier = {
            name: value.decode("latin-1")
            for name in ("traceparent", "tracestate")
            if (value := exchange.headers.get(name.encode())) is not None
        }
        first = generation.streams[0]
        request, now = first.request, time.time_ns()
        age = time.perf_counter() - request.arrival_time
        span = self._tracer.start_span(
            f"POST {exchange.path}", self._propagator.extract(carrier), self._kind, start_time=now - int(1e9 * age)
        )
        usage, params = generation.usage(), request.params
        reasons = [
            c.seq.finish_reason for s in generation.streams for c in s.request.completions if c.seq.finish_reason
        ]
        attributes = {
            "gen_ai.response.model": self._model, "gen_ai.request.id": exchange.request_id,
            "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens, "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
            "gen_ai.usage.completion_tokens": usage["completion_tokens"],
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.latency.time_in_queue": first.queue_seconds,
            "gen_ai.latency.time_to_first_token": request.seconds_until(request.first_token_time),
            "gen_ai.latency.e2e": age, "http.response.status_code": exchange.status,
        }  # fmt: skip
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if not all(stream.request.finished for stream in generation.streams):
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, "the client has gone" if exchange.gone else "not finished"))
        span.end(end_time=now)

    def close(self) -> None:
        """Send what was not sent."""
        self._provider.shutdown()

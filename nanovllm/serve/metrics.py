"""Statistics for Prometheus, under the names that vLLM uses."""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nanovllm.async_llm import AsyncLLM
from nanovllm.frontend.core_messages import StepOutputs
from nanovllm.frontend.output_stream import OutputStream
from nanovllm.outputs import RequestOutput
from nanovllm.serve.counts import Counts

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2,
                 0.3, 0.5, 1, 2.5, 10)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)
_TOTALS = {
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Output tokens.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens that were found in the prefix cache.",
}
_SOURCES = "local_compute", "local_cache_hit", "external_kv_transfer"
"""Where vLLM's prompt tokens come from; here none come from outside."""


class Histogram:
    """Counts in buckets. An observation may stand for several equal ones.

    It is not prometheus_client's, which would take a lock for every token.
    """

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name, self.documentation = name, documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, weight: int = 1) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += weight
            self._sum += value * weight

    def counted(self) -> tuple[list[int], float]:
        """(how many in each bucket, the sum)"""
        with self._lock:
            return list(self._counts), self._sum

    def family(self, model: str, counts: list[int], total: float) -> HistogramMetricFamily:
        """What Prometheus gets of `counted`, maybe of several processes."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=["model_name"])
        buckets, cumulative = [], 0
        for bound, count in zip((*map(float, self._bounds), float("inf")), counts):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), cumulative))
        family.add_metric([model], buckets, total)
        return family


class Metrics:
    """Collects what requests and steps tell, and writes Prometheus' text."""

    def __init__(self, engine: AsyncLLM, model: str, prefix: str) -> None:
        self._engine = engine
        self._model = model
        self._prefix = prefix

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(prefix + name, documentation, bounds)

        self._ttft = histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.", _STEP_SECONDS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean seconds between a request's tokens.", _STEP_SECONDS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Seconds that a request waited.", _SECONDS)
        self._inference = histogram("request_inference_time_seconds", "Seconds that a request ran.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Seconds that a request's prompt took.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Seconds from first to last token.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generation = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest completion.", _TOKENS
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self._n = histogram("request_params_n", "The parameter n.", _COUNTS)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", _TOKENS)
        self._iteration = histogram("iteration_tokens_total", "Tokens of new prompts and outputs in a step.", _TOKENS)
        self._step = Histogram("nanovllm:step_seconds", "Seconds of a step.", _STEP_SECONDS)
        self._lag = Histogram("nanovllm:frontend_lag_seconds", "How late the event loop is.", _STEP_SECONDS)
        self._counters: Counter[tuple[str, ...]] = Counter()
        """By name and values of the labels."""
        self._counters.update({(name,): 0 for name in _TOTALS})
        self._counters.update({("request_success", reason): 0 for reason in ("stop", "length", "abort", "error")})
        self._counters.update({("prompt_tokens_by_source", source): 0 for source in _SOURCES})
        self._last_step = 0.0
        self._histograms = (
            self._ttft, self._itl, self._tpot, self._e2e, self._queue, self._inference, self._prefill, self._decode,
            self._prompt, self._generation, self._longest, self._computed, self._n, self._max_tokens, self._iteration,
            self._step, self._lag,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ what is told

    def stepped(self, outputs: StepOutputs) -> None:
        """A step's outputs have come."""
        now = time.monotonic()
        num_tokens = len(outputs.token_ids)
        if num_tokens:
            continuing = num_tokens - len(outputs.first)
            if continuing > 0 and self._last_step:
                self._itl.observe(now - self._last_step, continuing)
            self._iteration.observe(num_tokens + sum(first.num_prompt_tokens for first in outputs.first))
            self._counters["generation_tokens",] += num_tokens
        if outputs.stats.step_seconds:
            self._step.observe(outputs.stats.step_seconds)
        self._last_step = now if outputs.stats.has_work else 0.0

    def first_token(self, stream: OutputStream) -> None:
        request = stream.request
        num_prompt = len(request.prompt_token_ids)
        seconds = request.seconds_until(request.first_token_time)
        if seconds is not None:
            self._ttft.observe(seconds)
        if stream.queue_seconds is not None:
            self._queue.observe(stream.queue_seconds)
        self._prompt.observe(num_prompt)
        self._n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)
        num_cached = stream.num_cached_tokens
        self._computed.observe(num_prompt - num_cached)
        self._counters["prompt_tokens",] += num_prompt
        self._counters["prompt_tokens_by_source", "local_compute"] += num_prompt - num_cached
        self._counters["prompt_tokens_by_source", "local_cache_hit"] += num_cached
        self._counters["prompt_tokens_cached",] += num_cached
        self._counters["prefix_cache_queries",] += num_prompt
        self._counters["prefix_cache_hits",] += num_cached

    def finished(self, stream: OutputStream, output: RequestOutput) -> None:
        """A request has ended by itself."""
        request = stream.request
        self._counters["request_success", request.completions[0].seq.finish_reason or "stop"] += 1
        self._generation.observe(request.num_output_tokens)
        total, first = output.metrics.total_time, output.metrics.time_to_first_token
        longest = max(completion.seq.num_output_tokens for completion in request.completions)
        self._longest.observe(longest)
        if total is not None and first is not None:
            queued = stream.queue_seconds or 0.0
            self._e2e.observe(total)
            self._inference.observe(max(0.0, total - queued))
            self._prefill.observe(max(0.0, first - queued))
            self._decode.observe(total - first)
            if longest > 1:
                self._tpot.observe((total - first) / (longest - 1))

    def aborted(self) -> None:
        """A client has gone, or a request was lost."""
        self._counters["request_success", "abort"] += 1

    def rejected(self, reason: str) -> None:
        self._counters["admission_rejections", reason] += 1

    def answered(self, method: str, path: str, status: int) -> None:
        """path: a route's, so that there are few."""
        self._counters["http_requests", method, path, str(status)] += 1

    def lagged(self, seconds: float) -> None:
        self._lag.observe(seconds)

    @property
    def tokens(self) -> tuple[int, int]:
        """(prompt tokens, output tokens) of all steps that this process has heard of."""
        output = self._counters["generation_tokens",]
        return int(self._iteration.counted()[1]) - output, output

    # ------------------------------------------------------------------------------------------------ what is written

    def counts(self, requests_open: int) -> Counts:
        """What this process has counted so far.

        Args:
            requests_open: generating HTTP requests that have not ended.
        """
        engine = self._engine
        return Counts(
            histograms=[histogram.counted() for histogram in self._histograms], counters=dict(self._counters),
            requests_open=requests_open, engine_up=engine.alive, heartbeat_age=engine.seconds_without_step,
        )  # fmt: skip

    def text(self, counts: Counts) -> bytes:
        """Prometheus' text format, version 0.0.4.

        Args:
            counts: of this process, or of all API processes of a server.
        """
        registry = CollectorRegistry()
        registry.register(_Collector(self._families(counts)))  # type: ignore[arg-type]
        return generate_latest(registry)

    def _families(self, counts: Counts) -> Iterable[Metric]:
        stats = self._engine.stats
        prefix = self._prefix
        for name, documentation, value in (
            (f"{prefix}num_requests_running", "Completions in the batch.", stats.num_running),
            (f"{prefix}num_requests_waiting", "Completions that wait for the batch.", stats.num_waiting),
            (f"{prefix}kv_cache_usage_perc", "The share of the KV cache in use, from 0 to 1.", stats.kv_usage),
            ("nanovllm:engine_up", "Whether the engine takes requests.", int(counts.engine_up)),
            ("nanovllm:engine_heartbeat_age_seconds", "Seconds without a step, while there is work.",
             counts.heartbeat_age),
            ("nanovllm:requests_open", "HTTP requests that generate and have not ended.", counts.requests_open),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, documentation, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        waiting = GaugeMetricFamily(
            f"{prefix}num_requests_waiting_by_reason", "Waiting completions by reason.", labels=["model_name", "reason"]
        )
        waiting.add_metric([self._model, "capacity"], stats.num_waiting)
        waiting.add_metric([self._model, "deferred"], 0)
        yield waiting
        info = self._engine.info
        cache = {"model_name": self._model, "block_size": info.block_size, "num_gpu_blocks": info.num_blocks}
        config = GaugeMetricFamily(f"{prefix}cache_config_info", "Settings of the KV cache.", labels=list(cache))
        config.add_metric([str(value) for value in cache.values()], 1)
        yield config
        counters = counts.counters | {("num_preemptions",): stats.num_preemptions}
        families: list[tuple[str, str, str, list[str]]] = [
            *((prefix, name, documentation, []) for name, documentation in _TOTALS.items()),
            (prefix, "num_preemptions", "Sequences that gave up their blocks, to be computed again.", []),
            (prefix, "prompt_tokens_by_source", "Prompt tokens by where they came from.", ["source"]),
            (prefix, "request_success", "Requests that ended.", ["finished_reason"]),
            (prefix, "admission_rejections", "Requests that were refused.", ["reason"]),
            ("nanovllm:", "http_requests", "HTTP answers.", ["method", "path", "status"]),
        ]
        for of_name, name, documentation, labels in families:
            own = {} if name == "http_requests" else {"model_name": self._model}
            counter = CounterMetricFamily(of_name + name, documentation, labels=[*own, *labels])
            for (counted, *values), count in counters.items():
                if counted == name:
                    counter.add_metric([*own.values(), *values], count)
            yield counter
        for histogram, (buckets, total) in zip(self._histograms, counts.histograms):
            yield histogram.family(self._model, buckets, total)


class _Collector:
    """Families for prometheus_client."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families

"""What operators look at: Prometheus' metrics of a server, by vLLM's names, and a line of log."""

import asyncio
import logging
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from eaglegbv import metrics as engine
from eaglegbv.metrics import EngineMetrics, RequestMetrics
from eaglegbv.text import Completion

LOG_SECONDS = 10.0
"""Seconds between two lines of log while there is work."""

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_MODEL = ["model_name"]
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds to the first token.", _LONG),
    "inter_token_latency_seconds": ("Seconds between tokens.", _SHORT),
    "e2e_request_latency_seconds": ("Seconds of a request.", _LONG),
    "request_queue_time_seconds": ("Seconds until a request's first step.", _LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}
COUNTERS = {
    "prompt_tokens": ("Tokens of prompts.",),
    "generation_tokens": ("Tokens of answers.",),
    "request_success": ("Finished requests.", "finished_reason"),
    "spec_decode_num_drafts": ("Verifications of drafts.",),
    "spec_decode_num_draft_tokens": ("Nodes of draft trees.",),
    "spec_decode_num_accepted_tokens": ("Accepted drafts.",),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Accepted drafts, by their place after the last token.",
        "position",
    ),
}
GAUGES = {
    "num_requests_running": ("Requests that take part in steps.", engine.RUNNING),
    "num_requests_waiting": ("Requests that wait.", engine.WAITING),
}

_log = logging.getLogger(__name__)


class ServerMetrics(Collector):
    """The metrics of a server and of its engine, each with a label of the model."""

    def __init__(self, model: str, counted: EngineMetrics) -> None:
        """Begin at 0; the engine counts in ``counted``."""
        self._model, self._engine = model, counted
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _MODEL, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", text, [*_MODEL, *labels], registry=registry)
            for name, (text, *labels) in COUNTERS.items()
        }

    def exposition(self) -> tuple[bytes, int, None, str]:
        """Return all values in Prometheus' format, as a response's content, status and type."""
        return generate_latest(self._registry), 200, None, CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts."""
        for metric, by_label in tuple(self._engine.values.items()):
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=[*_MODEL, *filter(None, [metric.label])])
            for label, value in tuple(by_label.items()):
                family.add_metric([self._model, *([label] if metric.label else [])], value)
            yield family
        for name, (text, metric) in GAUGES.items():
            yield self._gauge(name, text, self._engine.value(metric))
        yield self._gauge("kv_cache_usage_perc", "Share of KV used.", self._kv_share)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_MODEL)
        gauge.add_metric([self._model], value)
        return gauge

    @property
    def _kv_share(self) -> float:
        return self._engine.value(engine.KV_USED) / max(1.0, self._engine.value(engine.KV_SLOTS))

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].labels(self._model).observe(value)

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """Increase a counter."""
        self._counters[name].labels(self._model, *labels).inc(amount)

    async def report(self) -> None:
        """Log a line every :data:`LOG_SECONDS` while there is work."""
        before = self._progress()
        while True:
            await asyncio.sleep(LOG_SECONDS)
            now = self._progress()
            steps, tokens, forwards = (new - old for new, old in zip(now, before, strict=True))
            before = now
            if steps:
                _log.info(
                    "running %d, waiting %d, KV %.1f%%, %.1f tokens/s, %.2f tokens a verification",
                    self._engine.value(engine.RUNNING),
                    self._engine.value(engine.WAITING),
                    100 * self._kv_share,
                    tokens / LOG_SECONDS,
                    tokens / max(1.0, forwards),
                )

    def _progress(self) -> tuple[float, float, float]:
        """Return the numbers of steps, of committed tokens and of forwards that gave them."""
        forwards = sum(self._engine.values.get(engine.FORWARDS, {}).values())
        return self._engine.value(engine.STEPS), self._engine.value(engine.COMMITTED), forwards


class Timing:
    """Times the tokens of one answer."""

    def __init__(self, metrics: ServerMetrics, begin: float) -> None:
        """Take when it was asked for, by ``perf_counter``."""
        self._metrics, self._begin, self._last = metrics, begin, 0.0

    def observe(self, tokens: int, completion: Completion | None) -> None:
        """Count the tokens of a piece that has come, and the answer if it is complete."""
        now, observe = time.perf_counter(), self._metrics.observe
        if tokens:
            if not self._last:
                observe("time_to_first_token_seconds", now - self._begin)
            for _ in range(tokens if self._last else 0):
                observe("inter_token_latency_seconds", (now - self._last) / tokens)
            self._last = now
        if completion is not None:
            observe("e2e_request_latency_seconds", now - self._begin)
            self._end(completion, completion.metrics)

    def _end(self, answer: Completion, metrics: RequestMetrics) -> None:
        observe, count = self._metrics.observe, self._metrics.count
        observe("request_queue_time_seconds", metrics.queue_seconds)
        count("request_success", 1, str(answer.finish_reason))
        for name, ids in (
            ("prompt_tokens", answer.prompt_token_ids),
            ("generation_tokens", answer.token_ids),
        ):
            observe(f"request_{name}", len(ids))
            count(name, len(ids))
        count("spec_decode_num_drafts", len(metrics.accepted_by_step))
        count("spec_decode_num_draft_tokens", metrics.drafted_nodes)
        count("spec_decode_num_accepted_tokens", metrics.accepted_tokens)
        for place, accepted in enumerate(metrics.accepted_by_depth):
            count("spec_decode_num_accepted_tokens_per_pos", accepted, str(place))

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
from eaglegbv.metrics import EngineMetrics
from eaglegbv.text import Completion

LOG_SECONDS = 10.0
"""Seconds between two lines of log while there is work."""

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

HISTOGRAMS = {
    "first": ("time_to_first_token_seconds", "Seconds to the first token.", _LONG),
    "between": ("inter_token_latency_seconds", "Seconds between tokens.", _SHORT),
    "whole": ("e2e_request_latency_seconds", "Seconds of a request.", _LONG),
    "queue": ("request_queue_time_seconds", "Seconds until a request's first step.", _LONG),
    "read": ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "written": ("request_generation_tokens", "Tokens of an answer.", _TOKENS),
}
COUNTERS = {
    "read_total": ("prompt_tokens", "Tokens of prompts.", ()),
    "written_total": ("generation_tokens", "Tokens of answers.", ()),
    "finished": ("request_success", "Finished requests.", ("finished_reason",)),
    "steps": ("spec_decode_num_drafts", "Verifications of drafts.", ()),
    "drafted": ("spec_decode_num_draft_tokens", "Nodes of draft trees.", ()),
    "accepted": ("spec_decode_num_accepted_tokens", "Accepted drafts.", ()),
    "accepted_at": (
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts, by their place after the last token.",
        ("position",),
    ),
}
GAUGES = {
    engine.RUNNING: ("num_requests_running", "Requests that take part in steps."),
    engine.WAITING: ("num_requests_waiting", "Requests that wait."),
}

_log = logging.getLogger(__name__)


class ServerMetrics(Collector):
    """The metrics of a server and of its engine, each with a label of the model."""

    def __init__(self, model: str, counted: EngineMetrics) -> None:
        """Begin at 0; the engine counts in ``counted``."""
        self._model = model
        self._engine = counted
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.histograms = {
            key: Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry
            ).labels(model)
            for key, (name, text, buckets) in HISTOGRAMS.items()
        }
        self.counters = {
            key: Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self._registry)
            for key, (name, text, labels) in COUNTERS.items()
        }

    def exposition(self) -> tuple[bytes, int, None, str]:
        """Return all values in Prometheus' format, as a response's content, status and type."""
        return generate_latest(self._registry), 200, None, CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield what the engine counts."""
        for metric, by_label in tuple(self._engine.values.items()):
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            labels = ["model_name", *([metric.label] if metric.label else [])]
            family = kind(metric.name, metric.help, labels=labels)
            for label, value in tuple(by_label.items()):
                family.add_metric([self._model, *([label] if metric.label else [])], value)
            yield family
        for metric, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], self._engine.value(metric))
            yield gauge
        used = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV used.", labels=["model_name"]
        )
        used.add_metric([self._model], self._kv_share)
        yield used

    @property
    def _kv_share(self) -> float:
        return self._engine.value(engine.KV_USED) / max(1.0, self._engine.value(engine.KV_SLOTS))

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """Increase a counter."""
        self.counters[name].labels(self._model, *labels).inc(amount)

    def timing(self, begin: float) -> "Timing":
        """Return what times an answer that was asked for at ``begin``, by ``perf_counter``."""
        return Timing(self, begin)

    async def report(self) -> None:
        """Log a line every :data:`LOG_SECONDS` while there is work."""
        before = self._engine.value(engine.COMMITTED), self._engine.value(engine.STEPS)
        while True:
            await asyncio.sleep(LOG_SECONDS)
            value = self._engine.value
            now = value(engine.COMMITTED), value(engine.STEPS)
            if now != before:
                tokens = now[0] - before[0]
                _log.info(
                    "running %d, waiting %d, KV %.1f%%, %.1f tokens/s, %.2f tokens a verification",
                    value(engine.RUNNING),
                    value(engine.WAITING),
                    100 * self._kv_share,
                    tokens / LOG_SECONDS,
                    self._tokens_a_verification(),
                )
            before = now

    def _tokens_a_verification(self) -> float:
        forwards = sum(self._engine.values.get(engine.FORWARDS, {}).values())
        new = self._engine.value(engine.COMMITTED), forwards
        tokens, steps = (now - past for now, past in zip(new, self._told, strict=True))
        self._told = new
        return tokens / max(1.0, steps)

    _told = (0.0, 0.0)


class Timing:
    """Times the tokens of one answer."""

    def __init__(self, metrics: ServerMetrics, begin: float) -> None:
        self._metrics, self._begin, self._last = metrics, begin, 0.0

    def observe(self, tokens: int, completion: Completion | None) -> None:
        """Count the tokens of a piece that has come, and the answer if it is complete."""
        now, histograms = time.perf_counter(), self._metrics.histograms
        if tokens and not self._last:
            histograms["first"].observe(now - self._begin)
        elif tokens:
            for _ in range(tokens):
                histograms["between"].observe((now - self._last) / tokens)
        self._last = now if tokens else self._last
        if completion is None:
            return
        read, written = len(completion.prompt_token_ids), len(completion.token_ids)
        counts, count = completion.metrics, self._metrics.count
        histograms["whole"].observe(now - self._begin)
        histograms["queue"].observe(counts.queue_seconds)
        histograms["read"].observe(read)
        histograms["written"].observe(written)
        count("finished", 1, str(completion.finish_reason))
        count("read_total", read)
        count("written_total", written)
        count("steps", len(counts.accepted_by_step))
        count("drafted", counts.drafted_nodes)
        count("accepted", counts.accepted_tokens)
        for place, accepted in enumerate(counts.accepted_by_depth):
            count("accepted_at", accepted, str(place))

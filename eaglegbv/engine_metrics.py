"""Counters and gauges of an engine."""

from dataclasses import dataclass, field

from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.metrics import (
    ACCEPTED,
    COMMITTED,
    DRAFTED,
    FORWARDS,
    METRICS,
    PHASE_SECONDS,
    REASONS,
    STEP_SECONDS,
    STEPS,
    Metric,
)
from eaglegbv.step_record import StepRecord


@dataclass(slots=True)
class EngineMetrics:
    """Counters and gauges of an engine.

    Attributes:
        values: Values by metric, then by the value of its label (``""`` if it has none).
    """

    values: dict[Metric, dict[str, float]] = field(default_factory=dict)

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Increase a counter."""
        by_label = self.values.setdefault(metric, {})
        by_label[label] = by_label.get(label, 0) + amount

    def set(self, metric: Metric, value: float, label: str = "") -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        self.values.setdefault(metric, {})[label] = value

    def value(self, metric: Metric | str, label: str = "") -> float:
        """Return the value of a metric, given itself or its name; 0 before it has one.

        Raises:
            InvalidArgument: No metric has that name.
        """
        if isinstance(metric, str):
            if metric not in METRICS:
                raise InvalidArgument("metric", metric, one_of(sorted(METRICS), metric))
            metric = METRICS[metric]
        return self.values.get(metric, {}).get(label, 0)

    def on_step(self, record: StepRecord) -> None:
        """Count a step."""
        self.add(STEPS)
        self.add(STEP_SECONDS, record.seconds)
        for span in record.spans:
            self.add(PHASE_SECONDS, span.seconds, span.phase)
        self.add(COMMITTED, record.committed)
        self.add(ACCEPTED, record.accepted)
        self.add(DRAFTED, record.nodes)
        for plan, requests in record.plans.items():
            self.add(FORWARDS, requests, plan)
        for reason, requests in record.reasons.items():
            self.add(REASONS, requests, reason)

    def __str__(self) -> str:
        return self.exposition()

    def exposition(self) -> str:
        """Return all values in Prometheus' text format (version 0.0.4)."""
        lines = []
        for metric, by_label in sorted(self.values.items(), key=lambda item: item[0].name):
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            for label, value in sorted(by_label.items()):
                where = f'{{{metric.label}="{_escaped(label)}"}}' if metric.label else ""
                lines.append(f"{metric.name}{where} {value:.12g}")
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

"""The record of one step of an engine, and the protocol of observers of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eaglegbv.stopwatch import Span
from eaglegbv.tree_record import TreeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one step of an engine.

    Attributes:
        number: Running number of the step.
        started: ``time.perf_counter()`` at its start.
        seconds: Duration of the step.
        spans: Its phases in order.
        requests: Number of requests that took part.
        prefilling: Number of those that read their prompt, or a part of it.
        waiting: Number of requests waiting for admission.
        nodes: Tree nodes drafted, without roots.
        accepted: Drafted tokens accepted.
        committed: Tokens committed by decoding requests.
        plans: Decoding requests by plan.
        reasons: Decoding requests by the reason for the choice of their plan.
        kv_used: KV slots in use after the step.
        kv_slots: KV slots in the pool.
        trees: Each request's draft tree and its verdict; empty unless an observer requested trees.
    """

    number: int
    started: float
    seconds: float
    spans: tuple[Span, ...]
    requests: int
    prefilling: int
    waiting: int
    nodes: int
    accepted: int
    committed: int
    plans: Mapping[str, int]
    reasons: Mapping[str, int]
    kv_used: int
    kv_slots: int
    trees: Sequence[TreeRecord] = ()


class StepObserver(Protocol):
    """Receives the record of every step."""

    def on_step(self, record: StepRecord) -> None:
        """Receive the record of a step that has just ended."""

"""Small benchmark runs for tests."""

from collections.abc import Sequence

import msgspec

from eaglegbv.config import PLAIN, Plan
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Environment, Record, RunSettings, Setting, Turn
from eaglegbv.metrics import Phase, RequestMetrics

NONE = Setting(plan=PLAIN)
OTBV = Setting(plan=Plan(verifier="otbv", paths=2, depth=3))

QUESTIONS = tuple(
    Question(id=f"q{i}", category="math", turns=("One?", "Two?"), source="test") for i in range(3)
)

ENVIRONMENT = Environment(
    started="2025-01-01T00:00:00+00:00",
    versions={"python": "3.11"},
    platform="test",
    processor="test",
    cores=2,
    threads=1,
    device="cpu",
)


RUN = RunSettings(
    suite="test", origin="here", question_ids=tuple(q.id for q in QUESTIONS), model="target",
    drafter="drafter", system=None, settings=(NONE, OTBV), max_tokens=8, seed=0, repeats=2,
)  # fmt: skip


def run_settings(**changes: object) -> RunSettings:
    return msgspec.structs.replace(RUN, **changes)


def counted(accepted: Sequence[int], *, offered: int, nodes: int, plan: str) -> RequestMetrics:
    """Counts of forwards that accepted so many tokens, each with one more."""
    metrics = RequestMetrics()
    for number in accepted:
        metrics.count_forward(
            offered=offered, accepted=number, committed=number + 1, nodes=nodes, plan=plan
        )
    return metrics


def record(
    setting: Setting,
    question: str,
    repeat: int,
    *,
    forwards: int,
    committed: int,
    decode_seconds: float,
    error: str | None = None,
) -> Record:
    """One conversation of one turn: a second of prefill, and forwards that accept alike."""
    metrics = RequestMetrics(target_forwards=forwards, committed_tokens=committed)
    metrics.accepted_tokens = committed - forwards
    depth = setting.plan.depth if setting.plan.speculative else 0
    metrics.offered_by_depth = [forwards] * depth
    metrics.accepted_by_depth = [max(0, forwards - d) for d in range(depth)]
    metrics.add_seconds(Phase.PREFILL, 1.0)
    metrics.add_seconds(Phase.FORWARD, 0.75 * decode_seconds)
    told = {"completion_tokens": committed + 1, "wall_seconds": 1.0 + decode_seconds}
    turn = Turn(text="", finish_reason="length", metrics=metrics, **told)
    asked = {"question_id": question, "category": "math", "setting": setting.name}
    return Record(**asked, repeat=repeat, turns=[turn], error=error)


def records(setting: Setting, *figures: tuple[int, int, float], repeat: int = 0) -> list[Record]:
    """Questions q0, q1, ... by forwards, committed tokens and seconds of decoding."""
    return [
        record(setting, f"q{n}", repeat, forwards=forwards, committed=tokens, decode_seconds=time)
        for n, (forwards, tokens, time) in enumerate(figures)
    ]

"""Small benchmark runs for tests."""

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


def run_settings(**changes: object) -> RunSettings:
    values: dict[str, object] = {
        "suite": "test",
        "origin": "here",
        "question_ids": tuple(q.id for q in QUESTIONS),
        "model": "target",
        "drafter": "drafter",
        "system": None,
        "settings": (NONE, OTBV),
        "max_tokens": 8,
        "seed": 0,
        "repeats": 2,
    }
    return RunSettings(**{**values, **changes})


def record(
    setting: Setting,
    question: str,
    repeat: int,
    *,
    forwards: int,
    committed: int,
    decode_seconds: float,
    prefill_seconds: float = 1.0,
    error: str | None = None,
) -> Record:
    """One conversation of one turn; every forward accepts as many tokens as the next."""
    metrics = RequestMetrics(target_forwards=forwards, committed_tokens=committed)
    metrics.accepted_tokens = committed - forwards
    depth = setting.plan.depth if setting.plan.speculative else 0
    metrics.offered_by_depth = [forwards] * depth
    metrics.accepted_by_depth = [max(0, forwards - d) for d in range(depth)]
    metrics.add_seconds(Phase.PREFILL, prefill_seconds)
    metrics.add_seconds(Phase.FORWARD, 0.75 * decode_seconds)
    turn = Turn(
        text="",
        completion_tokens=committed + 1,
        finish_reason="length",
        wall_seconds=prefill_seconds + decode_seconds,
        metrics=metrics,
    )
    return Record(
        question_id=question,
        category="math",
        setting=setting.name,
        repeat=repeat,
        turns=[turn],
        error=error,
    )


def records(setting: Setting, *figures: tuple[int, int, float], repeat: int = 0) -> list[Record]:
    """Questions q0, q1, ... by forwards, committed tokens and seconds of decoding."""
    return [
        record(setting, f"q{n}", repeat, forwards=forwards, committed=tokens, decode_seconds=time)
        for n, (forwards, tokens, time) in enumerate(figures)
    ]

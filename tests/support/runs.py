"""Small benchmark runs for tests."""

from collections.abc import Iterable, Sequence

from eaglegbv.config import PLAIN, Plan
from eaglegbv.eval.observations import Environment, Head, Observation, Part, Run
from eaglegbv.eval.questions import Question
from eaglegbv.eval.settings import Setting
from eaglegbv.metrics import RequestMetrics

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
SETUP = {
    "suite": "test",
    "question_ids": ["q0", "q1", "q2"],
    "model": "target",
    "drafter": "drafter",
    "dtype": "float32",
    "system": None,
    "max_tokens": 8,
    "seed": 0,
}


def head(experiment: str = "mt-bench", settings: Sequence[Setting] = (NONE, OTBV), **setup) -> Head:
    return Head(
        experiment=experiment,
        setup=SETUP | setup,
        sheets={"conversations": tuple(settings)},
        environment=ENVIRONMENT,
    )


def run_of(observations: Iterable[Observation], of: Head | None = None) -> Run:
    parts = (
        Part(sheet="conversations", key=str(number), observations=[one])
        for number, one in enumerate(observations)
    )
    return Run(of or head(), parts)


def counted(accepted: Sequence[int], *, offered: int, nodes: int, plan: str) -> RequestMetrics:
    """Counts of forwards that accepted so many tokens, each with one more."""
    metrics = RequestMetrics()
    for number in accepted:
        metrics.count_forward(
            offered=offered, accepted=number, committed=number + 1, nodes=nodes, plan=plan
        )
    return metrics


def observation(
    setting: Setting,
    question: str,
    *,
    forwards: int,
    committed: int,
    decode_seconds: float,
    repeat: int = 0,
    error: str | None = None,
    texts: tuple[str, ...] = (),
) -> Observation:
    """One conversation of one turn: a second of prefill, and forwards that accept alike."""
    depth = setting.plan.depth if setting.plan.speculative else 0
    sums = {"steps": forwards, "tokens": committed, "seconds": decode_seconds}
    sums |= {"answer_tokens": committed + 1, "wall_seconds": 1 + decode_seconds}
    sums |= {"seconds.prefill": 1.0, "seconds.forward": 0.75 * decode_seconds}
    sums |= {f"offered.{d}": forwards for d in range(1, depth + 1)}
    sums |= {f"accepted.{d}": max(0, forwards - d) for d in range(1, depth + 1)}
    return Observation(
        setting=setting.name,
        unit=question,
        category="math",
        repeat=repeat,
        sums={name: float(value) for name, value in sums.items()},
        error=error,
        texts=texts,
    )


def observations(
    setting: Setting, *figures: tuple[int, int, float], repeat: int = 0
) -> list[Observation]:
    """Questions q0, q1, ... by forwards, committed tokens and seconds of decoding."""
    return [
        observation(
            setting,
            f"q{n}",
            forwards=forwards,
            committed=tokens,
            decode_seconds=time,
            repeat=repeat,
        )
        for n, (forwards, tokens, time) in enumerate(figures)
    ]

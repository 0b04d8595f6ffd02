"""Conversations held at once: each once, with its own seed, whatever the order they end in."""

import threading
from dataclasses import dataclass

import msgspec

from eaglegbv.config import Plan
from eaglegbv.errors import StepFailed
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, RunSettings, Setting
from eaglegbv.eval.report import served_table
from eaglegbv.eval.runner import hold_at_once
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams

QUESTIONS = tuple(Question(str(i), "none", (f"ask {i}", "go on"), "test") for i in range(5))
SETTING = Setting(plan=Plan(verifier="gbv", paths=2, depth=3))
OTHER = Setting(plan=Plan(verifier="otbv", paths=2, depth=3))
SETTINGS = RunSettings(
    suite="test",
    origin="test",
    question_ids=tuple(question.id for question in QUESTIONS),
    model="m",
    drafter="d",
    system=None,
    settings=(SETTING, OTHER),
    max_tokens=6,
    seed=3,
    repeats=1,
)


@dataclass(frozen=True)
class Answer:
    """Six tokens in two verifications that accepted three."""

    text: str
    token_ids: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    finish_reason: str = "length"

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(target_forwards=2, committed_tokens=5, accepted_tokens=3)


class Together:
    """Answers two conversations at the same time or none."""

    def __init__(self) -> None:
        self.seeds: dict[tuple[str, ...], int | None] = {}
        self._both = threading.Barrier(2, timeout=30)

    def __call__(
        self, prompts: list[dict[str, str]], sampling_params: SamplingParams, *, plan: Plan
    ) -> Answer:
        del plan
        said = tuple(message["content"] for message in prompts)
        self.seeds[said] = sampling_params.seed
        if said[0] == "ask 4":
            raise StepFailed(0, "no more")
        self._both.wait()
        return Answer(f"answer {len(prompts)}")


def hold(done: set[tuple[str, str, int]], own: Setting = SETTING) -> tuple[Together, list[Record]]:
    records: list[Record] = []
    generate = Together()
    settings = msgspec.structs.replace(SETTINGS, settings=(own,))
    hold_at_once(generate, QUESTIONS, settings, at_once=2, done=done, on_record=records.append)
    return generate, records


def test_every_conversation_is_held_once() -> None:
    generate, records = hold(set())
    assert {record.key for record in records} == set(SETTINGS.keys([SETTING]))
    assert ("ask 2", "answer 1", "go on") in generate.seeds
    assert len(set(generate.seeds.values())) == len(generate.seeds) == 9
    assert hold(set(), OTHER)[0].seeds == generate.seeds


def test_what_is_done_is_not_held_again() -> None:
    done = {(SETTING.name, name, 0) for name in ("0", "1")}
    generate, records = hold(done)
    assert {record.question_id for record in records} == {"2", "3", "4"}
    assert generate.seeds.items() <= hold(set())[0].seeds.items()


def test_figures_of_whole_conversations() -> None:
    _, records = hold(set())
    headings, figures = served_table(SETTINGS, records)
    assert figures[:4] == [SETTING.name, "4", "1", "48"]
    assert figures[4:] == ["1.50", "2.50"]  # all alike: the interval is a point
    assert len(headings) == len(figures)

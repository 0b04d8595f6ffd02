import threading
from typing import Any

import msgspec
import pytest
from support.fake_llm import FakeLLM, answer
from support.runs import NONE, QUESTIONS, run_settings

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Record, Setting
from eaglegbv.eval.report import served_table
from eaglegbv.eval.runner import WARM_UP_TOKENS, run
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion


def collect(llm: FakeLLM, **changes: object) -> list[Record]:
    records: list[Record] = []
    run(llm, QUESTIONS, run_settings(**changes), on_record=records.append)
    return records


def test_each_conversation_feeds_back_its_own_answer() -> None:
    llm = FakeLLM()
    collect(llm, system="Be brief.", repeats=1)
    second_turns = [(m, plan) for m, _, plan in llm.calls if len(m) == 4]
    assert len(second_turns) == 2 * len(QUESTIONS)
    for messages, plan in second_turns:
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
        said = ["Be brief.", "One?", f"{plan.verifier} answers", "Two?"]
        assert [m["content"] for m in messages] == said


def test_warm_up_is_not_recorded() -> None:
    llm = FakeLLM()
    records = collect(llm, repeats=1, max_tokens=50)
    warm_ups = [params for _, params, _ in llm.calls if params.max_tokens == WARM_UP_TOKENS]
    assert len(warm_ups) == 2
    assert len(llm.calls) == len(warm_ups) + sum(len(r.turns) for r in records)
    assert [params.max_tokens for _, params, _ in llm.calls[:2]] == [WARM_UP_TOKENS] * 2


def test_seeds_differ_by_question_turn_and_repeat_but_not_by_setting() -> None:
    llm = FakeLLM()
    collect(llm)
    seeds: dict[str, list[int | None]] = {"none": [], "otbv": []}
    for _, params, plan in llm.calls[2:]:
        seeds[plan.verifier].append(params.seed)
    assert sorted(map(str, seeds["none"])) == sorted(map(str, seeds["otbv"]))
    assert len(set(seeds["none"])) == 2 * 2 * len(QUESTIONS)
    other = FakeLLM()
    collect(other, seed=1)
    assert not {p.seed for _, p, _ in other.calls[2:]} & set(seeds["none"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"repeats": 0}, "repeats=0"), ({"settings": (NONE, NONE)}, "each once")],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run_settings(**changes)
    with pytest.raises(InvalidArgument, match="plain decoding for transformers"):
        Setting(plan=Plan(), baseline="transformers")


# --- conversations held at once: each once, with its own seed, whatever the order they end in
ASKED = tuple(Question(str(i), "none", (f"ask {i}", "go on"), "test") for i in range(5))
SETTING = Setting(plan=Plan(verifier="gbv", paths=2, depth=3))
OTHER = Setting(plan=Plan(verifier="otbv", paths=2, depth=3))
SERVED = run_settings(
    question_ids=tuple(question.id for question in ASKED),
    settings=(SETTING, OTHER),
    max_tokens=6,
    seed=3,
    repeats=1,
)


class Together:
    """Answers two conversations at the same time or none."""

    def __init__(self) -> None:
        self.seeds: dict[tuple[str, ...], int | None] = {}
        self._both = threading.Barrier(2, timeout=30)

    def __call__(self, prompts, sampling_params: SamplingParams, **_: Plan) -> Completion:
        said = tuple(message["content"] for message in prompts)
        self.seeds[said] = sampling_params.seed
        if said[0] == "ask 4":
            raise StepFailed(0, "no more")
        self._both.wait()
        # Six tokens in two verifications that accepted three.
        metrics = RequestMetrics(target_forwards=2, committed_tokens=5, accepted_tokens=3)
        return answer(f"answer {len(prompts)}", [*range(6)], metrics)


def hold_served(done: set[Any], own: Setting = SETTING) -> tuple[Together, list[Record]]:
    records: list[Record] = []
    generate = Together()
    settings = msgspec.structs.replace(SERVED, settings=(own,))
    run(generate, ASKED, settings, at_once=2, done=done, on_record=records.append)
    return generate, records


def test_every_conversation_is_held_once() -> None:
    generate, records = hold_served(set())
    assert {record.key for record in records} == set(SERVED.keys([SETTING]))
    assert ("ask 2", "answer 1", "go on") in generate.seeds
    assert len(set(generate.seeds.values())) == len(generate.seeds) == 9
    assert hold_served(set(), OTHER)[0].seeds == generate.seeds
    # What is done is not held again.
    rest, records = hold_served({(SETTING.name, name, 0) for name in ("0", "1")})
    assert {record.question_id for record in records} == {"2", "3", "4"}
    assert rest.seeds.items() <= generate.seeds.items()


def test_figures_of_whole_conversations() -> None:
    _, records = hold_served(set())
    headings, figures = served_table(SERVED, records)
    assert figures[:4] == [SETTING.name, "4", "1", "48"]
    assert figures[4:] == ["1.50", "2.50"]  # all alike: the interval is a point
    assert len(headings) == len(figures)

"""Conversations: what is asked in which order, seeds, sittings, and those held at once."""

import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
from support.fake_llm import FakeLLM, answer
from support.runs import ENVIRONMENT, NONE, OTBV, QUESTIONS
from support.table_pairs import counted

from eaglegbv.config import Plan
from eaglegbv.errors import StepFailed
from eaglegbv.eval.benches import bench
from eaglegbv.eval.experiment import Experiment, Part, Sheet, measure, note, open_run, report
from eaglegbv.eval.figures import ACCEPTANCE, Sums
from eaglegbv.eval.observations import Observation, Run
from eaglegbv.eval.questions import Question
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import by_setting
from eaglegbv.eval.ways.conversations import (
    SHEET,
    WARM_UP_TOKENS,
    Conversations,
    Holding,
    Sitting,
)
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion


def way(llm, settings=(NONE, OTBV), questions=QUESTIONS, **options) -> Conversations:
    @contextmanager
    def opened():
        yield llm

    sitting = Sitting(tuple(settings), opened)
    options = {"max_tokens": 8, "seed": 0, "repeats": 2} | options
    return Conversations([sitting], questions, Holding(**options))


def held(conversations: Conversations, settings=(NONE, OTBV)) -> list[Observation]:
    with conversations:
        return [one for part in conversations(settings) for one in part.measure()]


def test_each_conversation_feeds_back_its_own_answer() -> None:
    llm = FakeLLM()
    held(way(llm, system="Be brief.", repeats=1))
    second_turns = [(m, plan) for m, _, plan in llm.calls if len(m) == 4]
    assert len(second_turns) == 2 * len(QUESTIONS)
    for messages, plan in second_turns:
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
        said = ["Be brief.", "One?", f"{plan.verifier} answers", "Two?"]
        assert [m["content"] for m in messages] == said


def test_a_question_s_own_system_message_stands_before_it() -> None:
    llm = FakeLLM()
    kind = msgspec.structs.replace(QUESTIONS[0], system="Be kind.")
    held(way(llm, (NONE,), (kind, QUESTIONS[1]), system="Be brief.", repeats=1), (NONE,))
    said = [messages[0]["content"] for messages, *_ in llm.calls]
    assert said == ["Be kind."] * 3 + ["Be brief."] * 2  # the first is the warm-up


def test_settings_take_turns_after_a_warm_up_that_is_not_recorded() -> None:
    llm = FakeLLM()
    observed = held(way(llm, repeats=1, max_tokens=50))
    warm_ups = [params for _, params, _ in llm.calls if params.max_tokens == WARM_UP_TOKENS]
    assert len(warm_ups) == 2
    assert len(llm.calls) == len(warm_ups) + sum(len(one.texts) for one in observed)
    order = [(one.unit, one.setting) for one in observed]
    assert order[:4] == [*(("q0", "none"), ("q0", OTBV.name), ("q1", OTBV.name), ("q1", "none"))]


def test_seeds_differ_by_question_turn_and_repeat_but_not_by_setting() -> None:
    llm, other = FakeLLM(), FakeLLM()
    held(way(llm))
    seeds: dict[str, list[int | None]] = {"none": [], "otbv": []}
    for _, params, plan in llm.calls:
        if params.max_tokens != WARM_UP_TOKENS:
            seeds[plan.verifier].append(params.seed)
    assert sorted(map(str, seeds["none"])) == sorted(map(str, seeds["otbv"]))
    assert len(set(seeds["none"])) == 2 * 2 * len(QUESTIONS)
    held(way(other, seed=1))
    told = (p for _, p, _ in other.calls if p.max_tokens != WARM_UP_TOKENS)
    assert not {params.seed for params in told} & set(seeds["none"])


def test_a_sitting_is_opened_when_it_is_first_asked_and_one_at_a_time() -> None:
    log: list[str] = []

    def sitting(setting: Setting) -> Sitting:
        @contextmanager
        def opened():
            log.append(f"open {setting.name}")
            yield FakeLLM()
            log.append(f"close {setting.name}")

        return Sitting((setting,), opened)

    both = Conversations([sitting(NONE), sitting(OTBV)], QUESTIONS, Holding(max_tokens=8))
    with both:
        parts = list(both((NONE, OTBV)))
        assert log == []
        for part in parts[1:]:
            part.measure()
    assert log == ["open none", "close none", f"open {OTBV.name}", f"close {OTBV.name}"]


# --- conversations held at once: each once, with its own seed, whatever the order they end in
ASKED = tuple(Question(str(i), "none", (f"ask {i}", "go on"), "test") for i in range(5))
SETTING = Setting(plan=Plan(verifier="gbv", paths=2, depth=3))


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


def test_every_conversation_is_held_once() -> None:
    generate = Together()
    options = {"seed": 3, "repeats": 1, "max_tokens": 6, "at_once": 2}
    observed = held(way(generate, (SETTING,), ASKED, **options), (SETTING,))
    assert [one.unit for one in observed] == ["0", "1", "2", "3", "4"]
    assert [one.error is None for one in observed] == [True] * 4 + [False]
    assert ("ask 2", "answer 1", "go on") in generate.seeds
    assert len(set(generate.seeds.values())) == len(generate.seeds) == 9
    [table] = bench("served", (SETTING,)).sheets[0].tables(Sums(observed), (SETTING,))
    assert table.texts[1] == [SETTING.name, "4", "1", "48", "2.50"]  # the interval is a point


def test_a_run_is_measured_reported_and_gone_on_with(tmp_path: Path) -> None:
    experiment, llm = bench("mt-bench", (NONE, OTBV)), FakeLLM()
    for calls in (2 + 2 * 2 * 2 * 3, 0):
        del llm.calls[:]
        run = open_run(experiment, {"model": "m"}, ENVIRONMENT, tmp_path)
        with way(llm) as conversations:
            measure(experiment, run, {SHEET: conversations}, counted)
        assert len(llm.calls) == calls
    main, by_position, by_category, _ = report(experiment, Run.read(tmp_path)).tables
    assert [row[:2] for row in main.texts[1:]] == [["none", "1.00"], [OTBV.name, "4.00"]]
    assert by_position.texts == [["setting", "1", "2", "3"], [OTBV.name, *["1.000"] * 3]]
    assert by_category.rows[0] == ["setting", "math"]


def test_drafters_stand_beside_the_first() -> None:
    """Acceptance by position, paired by question."""
    settings = [Setting(plan=Plan(paths=1, depth=2), who=name) for name in ("a", "b")]
    observed = [
        Observation(
            setting=setting.name,
            unit=str(n),
            category=("maths", "prose")[n % 2],
            sums={"steps": 10.0, "tokens": 10.0 + more, "accepted.1": more, "offered.1": 10.0},
        )
        for setting, more in zip(settings, (2.0, 8.0), strict=True)
        for n in range(8)
    ]
    table, categories = bench("drafters", settings).sheets[0].tables(Sums(observed), settings)
    assert table.texts[1] == ["a", "otbv", "1", "1.200", "-", "0.200", "0.000"]
    assert table.texts[2] == ["b", "otbv", "1", "1.800", "1.500", "0.800", "0.000"]
    assert categories.rows[0] == ["drafter", "maths", "prose"]


# --- a new benchmark is a way and a sheet; everything else comes with them
def test_a_new_benchmark_is_a_way_and_a_sheet(tmp_path: Path) -> None:
    settings = (NONE, OTBV)

    def coins(wanted):
        """Measure how many tokens lie on a table."""
        for setting in wanted:
            tokens = 2.0 if setting.plan.speculative else 1.0
            sums = {"tokens": tokens, "steps": 1.0}
            observed = [Observation(setting=setting.name, unit=str(n), sums=sums) for n in range(9)]
            yield Part(setting.name, 9, lambda own=observed: own)

    sheet = Sheet(
        name="coins",
        settings=settings,
        tables=lambda sums, own: [by_setting(sums, own)],
    )
    experiment = Experiment(name="coins", sheets=(sheet,))
    run = open_run(experiment, {}, ENVIRONMENT, tmp_path)
    measure(experiment, run, {"coins": coins}, counted)
    assert note(run.observations("coins")) == f"{OTBV.name}: 2.00 tokens/forward"
    again = open_run(experiment, {}, ENVIRONMENT, tmp_path)
    measure(experiment, again, {"coins": coins}, counted)
    told = report(experiment, again)
    [table] = told.tables
    [[*_], [name, length, *_], _] = told.content["tables"][0]["rows"]  # JSON has numbers
    assert (name, length) == ("none", 1.0)
    assert table.texts[2][:2] == [OTBV.name, "2.00"]
    assert Sums(again.observations("coins")).rank(ACCEPTANCE, ["none", OTBV.name]).behind == (
        "none",
    )

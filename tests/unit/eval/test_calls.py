"""Whole calls by batch: turns, prompts, and what auto chose."""

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from eaglegbv.config import AUTO, Plan
from eaglegbv.eval.figures import Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.questions import make_prompts
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.calls import (
    Caller,
    Calls,
    Grid,
    batch_tables,
    engine_caller,
    faster,
)
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, EngineMetrics

QUESTIONS = partial(make_prompts, [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
NONE, AUTOMATIC = Setting(batch=2), Setting(who="auto", batch=2)

Call = tuple[str, int, int, int]


def told(name: str, calls: list[Call], max_batch=None) -> tuple[Caller, list[int]]:
    """A way that notes how it was asked, and its seeds."""
    seeds: list[int] = []

    def run(prompts: list[list[int]], tokens: int, _: float, seed: int) -> dict[str, float]:
        calls.append((name, len(prompts), len(prompts[0]), tokens))
        seeds.append(seed)
        return {"answer_tokens": float(tokens * len(prompts))}

    return Caller(Setting(who=name), run, max_batch), seeds


def measured(callers: list[Caller], grid: Grid, prompts=QUESTIONS) -> list[Observation]:
    parts = Calls(callers, prompts, grid)(grid.settings(callers))
    return [one for part in parts for one in part.measure()]


def test_ways_take_turns_and_share_seeds() -> None:
    calls: list[Call] = []
    (first, seeds), (second, others) = told("a", calls), told("b", calls)
    single, _ = told("c", calls, 1)
    grid = Grid(batches=[1, 2], contexts=[5], temperature=[1.0], tokens=40, repeats=2)
    observed = measured([first, second, single], grid)
    order = [name for name, batch, _, tokens in calls if tokens == 40 and batch == 1]
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert sorted(name for name, *_, tokens in calls if tokens == 24) == list("aabbc")
    assert {length for _, _, length, _ in calls} == {5}
    assert all(batch == 1 for name, batch, _, _ in calls if name == "c")
    assert seeds == others
    assert len(observed) == 3 * 2 + 2 * 2
    assert observed[0].sums["answer_tokens"] == 40


def test_small_batches_are_measured_on_several_prompts() -> None:
    calls: list[Call] = []
    (first, seeds), (second, _) = told("a", calls), told("b", calls)
    grid = Grid(batches=[1, 2], contexts=[0], temperature=[1.0], tokens=40, repeats=1, prompts=3)
    observed = measured([first, second], grid)
    order = [(name, batch, length) for name, batch, length, tokens in calls if tokens == 40]
    alone = [("a", 1, 3), ("b", 1, 3), ("b", 1, 2), ("a", 1, 2), ("a", 1, 4), ("b", 1, 4)]
    assert order == [*alone, ("a", 2, 3), ("b", 2, 3), ("b", 2, 4), ("a", 2, 4)]
    assert [one.unit for one in observed if one.setting.startswith("a")] == list("01202")
    assert len({*seeds} - {0}) == 3 + 1 - (0 in seeds)


def timed(setting: Setting, repeat: int, seconds: float) -> Observation:
    sums = {"answer_tokens": 100.0, "wall_seconds": seconds}
    return Observation(setting=setting.name, unit="0", repeat=repeat, sums=sums)


def test_ratios_are_taken_within_a_repeat() -> None:
    # A machine that slows down threefold in the second repeat.
    seconds = {NONE: (2.0, 6.0, 2.0), AUTOMATIC: (1.0, 3.0, 0.8)}
    sums = Sums(timed(own, n, spent[n]) for n in range(3) for own, spent in seconds.items())
    assert batch_tables(sums, list(seconds))[0].texts == [
        ["tokens/s (of none)", "batch 2"],
        ["T=1, none", "50 (1.00)"],
        ["T=1, auto", "100 (2.00)"],
    ]
    assert faster(sums, AUTOMATIC.name, NONE.name) is None  # of one call there is no interval
    alone = Sums([timed(AUTOMATIC, 0, 1.0)])
    assert batch_tables(alone, [AUTOMATIC])[0].texts[1] == ["T=1, auto", "100"]
    long = Setting(batch=2, context=9)
    both = Sums([timed(NONE, 0, 1.0), timed(long, 0, 2.0)])
    rows = batch_tables(both, [NONE, long])[0].texts
    assert [row[0] for row in rows[1:]] == ["T=1, none", "T=1, 9 tokens, none"]


class Counting:
    """An engine that counts a plan as often as the prompts say."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()

    def generate(self, prompts: list[list[int]], params: object, *, plan: object) -> list[object]:
        for prompt in prompts:
            for plan_number in prompt:
                self.metrics.add(FORWARDS, 1, f"plan {plan_number}")
                self.metrics.add(REASONS, 1, "best")
        return [SimpleNamespace(error=None, token_ids=[1]) for _ in prompts]


def test_choices_are_those_of_the_way_in_a_batch_alone() -> None:
    engine = cast("LLM", Counting())
    callers = [engine_caller(engine, AUTO), engine_caller(engine, Plan())]
    grid = Grid(batches=[1, 2], contexts=[0], temperature=[1.0], tokens=1, repeats=2)
    asked = {1: [[1, 1, 1, 2]], 2: [[3] * 99, [4]]}
    sums = Sums(measured(callers, grid, lambda count, _: asked[count]))
    settings = grid.settings(callers)
    _, chosen = batch_tables(sums, settings)
    # Of one call each there is no interval, and so no ratio.
    assert chosen.texts[1:] == [
        ["T=1, auto", "1", "plan 1 75%, plan 2 25%", "best 100%", "-", "-", "otbv 3x4"],
        ["T=1, auto", "2", "plan 3 99%, others 1%", "best 100%", "-", "-", "otbv 3x4"],
    ]
    assert sums.total("otbv 3x4 batch 1", "plans.plan 1") == 6


def test_the_best_other_way_is_what_auto_is_compared_with() -> None:
    best = Setting(plan=Plan(), batch=2)
    spent = {NONE: 4.0, best: 2.0, AUTOMATIC: 1.0}
    sums = Sums(
        Observation(
            setting=own.name, unit=str(n), sums={"answer_tokens": 8.0 + n, "wall_seconds": seconds}
        )
        for own, seconds in spent.items()
        for n in range(9)
    )
    [[*_, over_plain, over_best, best_way]] = batch_tables(sums, list(spent))[1].texts[1:]
    assert [over_plain[:5], over_best[:5], best_way] == ["4.000", "2.000", "otbv 3x4"]
    ratio = faster(sums, AUTOMATIC.name, NONE.name)
    assert ratio is not None
    assert ratio.value == pytest.approx(4)


def test_prompts_are_questions_or_so_many_tokens_of_several() -> None:
    assert QUESTIONS(4, 0) == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]]
    assert QUESTIONS(2, 4) == [[5, 1, 2, 3], [8, 9, 4, 5]]
    assert [len(prompt) for prompt in QUESTIONS(3, 50)] == [50] * 3
    many = partial(make_prompts, [[n] for n in range(80)])
    assert many(8, 0) == [[n] for n in range(0, 80, 10)]
    assert many(3, 0) == [[0], [26], [53]]
    assert many(1, 0) == [[0]]

from functools import partial
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from eaglegbv.config import AUTO
from eaglegbv.eval import throughput
from eaglegbv.eval.questions import make_prompts
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, EngineMetrics

QUESTIONS = partial(make_prompts, [[1, 2, 3], [4, 5], [6, 7, 8, 9]])


Call = tuple[str, int, int, int]


def told(name: str, calls: list[Call], max_batch=None) -> tuple[throughput.Way, list[int]]:
    """A way that notes how it was asked, and its seeds."""
    seeds: list[int] = []

    def run(prompts: throughput.Prompts, tokens: int, _: float, seed: int) -> throughput.Counts:
        calls.append((name, len(prompts), len(prompts[0]), tokens))
        seeds.append(seed)
        return throughput.Counts(tokens=tokens * len(prompts))

    return throughput.Way(name, run, max_batch), seeds


def timing(way: str, repeat: int, seconds: float, batch: int = 2) -> throughput.Timing:
    return throughput.Timing(
        way=way, batch=batch, context=0, temperature=1.0, repeat=repeat, tokens=100, seconds=seconds
    )


def test_ways_take_turns_after_a_warm_up_and_share_seeds() -> None:
    calls: list[Call] = []
    (first, seeds), (second, others) = told("a", calls), told("b", calls)
    single, _ = told("c", calls, 1)
    grid = throughput.Grid(batches=[1, 2], contexts=[5], temperature=[1.0], tokens=40, repeats=2)
    timings = list(throughput.measure([first, second, single], QUESTIONS, grid))
    order = [name for name, batch, _, tokens in calls if tokens == 40 and batch == 1]
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert [name for name, batch, _, tokens in calls if tokens == 24] == list("abcab")
    assert {length for _, _, length, _ in calls} == {5}
    assert all(batch == 1 for name, batch, _, _ in calls if name == "c")
    assert seeds == others
    assert len(timings) == 3 * 2 + 2 * 2
    assert timings[0].tokens == 40


def test_small_batches_are_measured_on_several_prompts() -> None:
    calls: list[Call] = []
    (first, seeds), (second, _) = told("a", calls), told("b", calls)
    grid = throughput.Grid(
        batches=[1, 2], contexts=[0], temperature=[1.0], tokens=40, repeats=1, prompts=3
    )
    timings = list(throughput.measure([first, second], QUESTIONS, grid))
    order = [(name, batch, length) for name, batch, length, tokens in calls if tokens == 40]
    alone = [("a", 1, 3), ("b", 1, 3), ("b", 1, 2), ("a", 1, 2), ("a", 1, 4), ("b", 1, 4)]
    assert order == [*alone, ("a", 2, 3), ("b", 2, 3), ("b", 2, 4), ("a", 2, 4)]
    assert [t.first for t in timings if t.way == "a"] == [0, 1, 2, 0, 2]
    assert len(set(seeds)) == 3 + 1


def speeds(*timings: throughput.Timing) -> dict[str, throughput.Speeds]:
    [found] = throughput.speeds_by_cell(timings).values()
    return found


def test_ratios_are_taken_within_a_repeat() -> None:
    # A machine that slows down threefold in the second repeat.
    seconds = {"none": (2.0, 6.0, 2.0), "auto": (1.0, 3.0, 0.8)}
    calls = [timing(way, n, own[n]) for n in range(3) for way, own in seconds.items()]
    found = speeds(*calls)
    assert found["auto"].ratios == pytest.approx((2.0, 2.0, 2.5))
    assert str(found["auto"]) == "100 (2.00)"
    assert str(found["none"]) == "50 (1.00)"
    assert str(speeds(timing("auto", 0, 1.0))["auto"]) == "100"
    # Calls of a repeat count together.
    found = speeds(*[timing("none", 0, 1.0), timing("none", 0, 3.0), timing("auto", 0, 1.0)] * 2)
    assert found["none"].rates == pytest.approx((50,))
    assert found["auto"].ratios == pytest.approx((2,))


def test_the_table_has_a_column_a_batch() -> None:
    calls = [timing("none", 0, 2.0), timing("auto", 0, 1.0), timing("none", 0, 1.0, batch=4)]
    assert throughput.rate_table(calls) == [
        ["tokens/s (of none)", "batch 2", "batch 4"],
        ["T=1, none", "50 (1.00)", "100 (1.00)"],
        ["T=1, auto", "100 (2.00)", "-"],
    ]
    long = [msgspec.structs.replace(one, context=n) for n, one in enumerate(calls)]
    assert [row[0] for row in throughput.rate_table(long)[1:3]] == [
        *("T=1, own tokens, none", "T=1, 1 tokens, auto")
    ]


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
    ways = [
        throughput.Way(name, partial(throughput.run_engine, engine, AUTO))
        for name in ("auto", "3x4")
    ]
    grid = throughput.Grid(batches=[1, 2], contexts=[0], temperature=[1.0], tokens=1, repeats=2)
    asked = {1: [[1, 1, 1, 2]], 2: [[3] * 99, [4]]}
    timings = list(throughput.measure(ways, lambda count, _: asked[count], grid))
    assert {(t.batch, t.way): t.plans for t in timings} == {
        **{(1, way.name): {"plan 1": 3, "plan 2": 1} for way in ways},
        **{(2, way.name): {"plan 3": 99, "plan 4": 1} for way in ways},
    }
    assert throughput.choice_lines(timings) == [
        "T=1, auto, batch 1: plan 1 75%, plan 2 25%; best 100%",
        "T=1, auto, batch 2: plan 3 99%, others 1%; best 100%",
    ]


def test_prompts_are_questions_or_so_many_tokens_of_several() -> None:
    assert QUESTIONS(4, 0) == [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 3]]
    assert QUESTIONS(2, 4) == [[5, 1, 2, 3], [8, 9, 4, 5]]
    assert [len(prompt) for prompt in QUESTIONS(3, 50)] == [50] * 3
    many = partial(make_prompts, [[n] for n in range(80)])
    assert many(8, 0) == [[n] for n in range(0, 80, 10)]
    assert many(3, 0) == [[0], [26], [53]]
    assert many(1, 0) == [[0]]

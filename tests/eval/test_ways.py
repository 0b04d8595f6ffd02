"""The plans that a way of the engine chooses are counted, apart from those of other ways."""

from collections import Counter
from types import SimpleNamespace
from typing import cast

from eaglegbv.config import AUTO
from eaglegbv.eval.throughput import Cell, EngineWay, Grid, WatchedWay, choice_lines, measure
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, EngineMetrics


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
    watched, other = WatchedWay(EngineWay("auto", engine, AUTO)), EngineWay("3x4", engine, AUTO)
    grid = Grid(batches=[1, 2], contexts=[0], temperatures=[1.0], tokens=1, repeats=2)
    asked = {1: [[1, 1, 1, 2]], 2: [[3] * 99, [4]]}
    for told in measure([watched, other], lambda count, _: asked[count], grid):
        watched.note(told)
    assert {cell: found[FORWARDS] for cell, found in watched.chosen.items()} == {
        Cell(1.0, 0, 1): Counter({"plan 1": 6, "plan 2": 2}),
        Cell(1.0, 0, 2): Counter({"plan 3": 198, "plan 4": 2}),
    }
    assert choice_lines(watched) == [
        "T=1, auto, batch 1: plan 1 75%, plan 2 25%; best 100%",
        "T=1, auto, batch 2: plan 3 99%, others 1%; best 100%",
    ]

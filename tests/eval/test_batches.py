"""bench batch: ways take turns, and ratios are those of the same repeat."""

from dataclasses import dataclass, field

import pytest

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.questions import PromptSource
from eaglegbv.eval.throughput import Grid, Timing, measure, summarise

QUESTIONS = PromptSource([[1, 2, 3], [4, 5], [6, 7, 8, 9]])


@dataclass
class Told:
    """A way that notes how it was asked."""

    name: str
    calls: list[tuple[str, int, int, int]]
    max_batch: int | None = None
    seeds: list[int] = field(default_factory=list)

    def run(self, prompts: list[list[int]], tokens: int, *, temperature: float, seed: int) -> int:
        self.calls.append((self.name, len(prompts), len(prompts[0]), tokens))
        self.seeds.append(seed)
        return tokens * len(prompts)


def timing(way: str, repeat: int, seconds: float, batch: int = 2) -> Timing:
    return Timing(
        way=way,
        batch=batch,
        context=0,
        temperature=1.0,
        repeat=repeat,
        tokens=100,
        seconds=seconds,
    )


def test_ways_take_turns_after_a_warm_up_and_share_seeds() -> None:
    calls: list[tuple[str, int, int, int]] = []
    first, second, single = Told("a", calls), Told("b", calls), Told("c", calls, max_batch=1)
    grid = Grid(batches=[1, 2], contexts=[5], temperatures=[1.0], tokens=40, repeats=2)
    timings = list(measure([first, second, single], QUESTIONS.take, grid))
    order = [name for name, batch, _, tokens in calls if tokens == 40 and batch == 1]
    assert order == ["a", "b", "c", "b", "c", "a"]
    assert [name for name, batch, _, tokens in calls if tokens == 24] == list("abcab")
    assert {length for _, _, length, _ in calls} == {5}
    assert all(batch == 1 for name, batch, _, _ in calls if name == "c")
    assert first.seeds == second.seeds
    assert len(timings) == 3 * 2 + 2 * 2
    assert timings[0].tokens == 40


def test_small_batches_are_measured_on_several_prompts() -> None:
    calls: list[tuple[str, int, int, int]] = []
    first, second = Told("a", calls), Told("b", calls)
    grid = Grid(batches=[1, 2], contexts=[0], temperatures=[1.0], tokens=40, repeats=1, prompts=3)
    timings = list(measure([first, second], QUESTIONS.take, grid))
    order = [(name, batch, length) for name, batch, length, tokens in calls if tokens == 40]
    alone = [("a", 1, 3), ("b", 1, 3), ("b", 1, 2), ("a", 1, 2), ("a", 1, 4), ("b", 1, 4)]
    assert order == [*alone, ("a", 2, 3), ("b", 2, 3), ("b", 2, 4), ("a", 2, 4)]
    assert [t.first for t in timings if t.way == "a"] == [0, 1, 2, 0, 2]
    assert len(set(first.seeds)) == 3 + 1


def test_calls_of_a_repeat_count_together() -> None:
    rows = summarise(
        [timing("none", 0, 1.0), timing("none", 0, 3.0), timing("auto", 0, 1.0, 2)] * 2
    )
    found = {row.way: row for row in rows}
    assert found["none"].rate == pytest.approx(50)
    assert found["auto"].ratio == pytest.approx(2)


def test_ratios_are_taken_within_a_repeat() -> None:
    # A machine that slows down threefold in the second repeat.
    rows = summarise(
        [
            timing("none", 0, 2.0),
            timing("auto", 0, 1.0),
            timing("none", 1, 6.0),
            timing("auto", 1, 3.0),
            timing("none", 2, 2.0),
            timing("auto", 2, 0.8),
        ]
    )
    found = {row.way: row for row in rows}
    assert found["auto"].ratio == pytest.approx(2.0)
    assert found["none"].ratio == 1
    assert found["none"].rate == 50
    assert summarise([timing("auto", 0, 1.0)])[0].ratio is None


def test_an_empty_grid_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="batches"):
        Grid(batches=[0], contexts=[0], temperatures=[1.0], tokens=8, repeats=1)

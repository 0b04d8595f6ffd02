"""Cells: what one setting came to, question by question, however it was measured."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.records import Setting
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio
from eaglegbv.metrics import Phase


class Figure(StrEnum):
    """What of two cells is compared; more is better."""

    TOKENS_A_STEP = "tokens a step"
    TOKENS_A_SECOND = "tokens a second"
    VERIFYING = "tokens a second of verifying"
    STEPS_A_SECOND = "nodes a second"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting came to; at a single node a token is an accepted draft, a place a step."""

    setting: Setting  # which
    tokens: tuple[float, ...]  # for each question, tokens committed in its steps
    steps: tuple[int, ...]  # for each question, steps: places, or decoding forwards of the target
    # For each question, nodes without roots that the target scored; nothing where an engine ran.
    nodes: tuple[float, ...] = ()
    # For each phase, seconds of each question; nothing where nothing was timed.
    seconds: dict[Phase, tuple[float, ...]] = {}

    @property
    def mean(self) -> float:
        """Mean tokens a step."""
        return sum(self.tokens) / sum(self.steps)

    @property
    def mean_nodes(self) -> float:
        """Mean number of drafted nodes of a tree."""
        return sum(self.nodes) / sum(self.steps)

    def estimate(self) -> Estimate:
        """Return tokens a step with its 95% bootstrap interval over questions."""
        return bootstrap_ratio(self.tokens, self.steps)

    def over(self, other: "Cell", figure: Figure = Figure.TOKENS_A_STEP) -> Estimate:
        """Return the ratio of a figure to another cell's, paired by question."""
        return bootstrap_ratio(*self.columns(figure), *other.columns(figure))

    def columns(self, figure: Figure) -> tuple[Sequence[float], Sequence[float]]:
        """Return what the figure divides by what, for each question."""
        if figure is Figure.TOKENS_A_STEP:
            return self.tokens, self.steps
        if not self.seconds:
            raise InvalidArgument("figure", str(figure), "a figure of steps: nothing was timed")
        wanted = [Phase.VERIFY] if figure is Figure.VERIFYING else list(self.seconds)
        totals = np.sum([self.seconds[phase] for phase in wanted], axis=0).tolist()
        return self.steps if figure is Figure.STEPS_A_SECOND else self.tokens, totals

    @classmethod
    def joined(cls, parts: "Sequence[Cell]") -> "Cell":
        """Return the cell of all questions of ``parts``; it is empty where one of them is."""
        first, whole = parts[0], all(part.steps for part in parts)
        own = parts if whole else ()
        return cls(
            setting=first.setting,
            tokens=tuple(x for part in own for x in part.tokens),
            steps=tuple(x for part in own for x in part.steps),
            nodes=tuple(x for part in own for x in part.nodes),
            seconds={p: tuple(x for part in own for x in part.seconds[p]) for p in first.seconds},
        )

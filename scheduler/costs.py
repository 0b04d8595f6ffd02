"""Seconds of a step: a fit by what it does, corrected by the latest times of steps like it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from eaglegbv.config import Plan, Source

Array: TypeAlias = NDArray[np.float64]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Cell: TypeAlias = tuple[int, ...]
"""Steps timed together: class of batch sizes, levels and nodes of a draft, class of contexts."""

REST = 400  # steps after which the times of a cell count half
_RECENT = 8  # steps for which the times of a cell are beyond doubt
_LEAST = 0.1  # least weight of a cell in the fit
_TRUSTED = 2  # times of a cell after which a surprise is news, and no error of the fit
_GAIN = 1 / 8  # share of a step's time in what is typical: times vary by 5%, their mean by 1%
_NEWS = 0.35  # largest log of a ratio that chance explains
# Steps of one request, path or length cannot tell some costs apart: on most machines a further
# request costs little, so that counts as a cost of the step, of a level or of a node.
_RIDGE = np.diag((0.03, 0.14, 0.14, 0.03, 0.03, 0.14, 0.055, 0.14))


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What decides the cost of a step.

    Attributes:
        requests: Number of requests.
        context: KV slots that they attend to, all together.
        drafting: Number of those whose drafts the drafter makes.
        levels: Levels of each such draft that cost a forward of the drafter.
        nodes: Nodes of each such draft.
        looked_up: Nodes of looked-up drafts, all together.
    """

    requests: Annotated[int, msgspec.Meta(ge=1)]
    context: Count
    drafting: Count = 0
    levels: Count = 0
    nodes: Count = 0
    looked_up: Count = 0

    @classmethod
    def of(
        cls, plans: Sequence[Plan], requests: int, context: int, *, at_once: bool = False
    ) -> "StepShape":
        """Return the shape of a step by ``plans``; a single one is that of all requests.

        All levels count as one where the drafter gives them ``at_once``.
        """
        drafting = 0
        levels = 0
        nodes = 0
        looked_up = 0
        for plan in plans:
            if plan.source is Source.LOOKUP:
                looked_up += plan.depth
            elif plan.speculative:
                drafting += requests // len(plans)
                levels = 1 if at_once else plan.depth
                nodes = plan.tree_nodes - 1
        return cls(requests, context, drafting, levels, nodes, looked_up)

    @property
    def features(self) -> tuple[float, ...]:
        """What the fit multiplies: a step, its requests, their context in units of 1024 tokens; and
        of drafts a step, its levels, requests, nodes, and looks of the nodes at contexts."""
        context = self.context / 1024
        nodes = self.drafting * self.nodes + self.looked_up
        looks = nodes * context / self.requests
        drafting = self.drafting
        return 1, self.requests, context, drafting > 0, self.levels, drafting, nodes, looks

    @property
    def drafts(self) -> bool:
        """Whether the drafter drafts."""
        return self.drafting > 0

    @property
    def cell(self) -> Cell:
        """The cell by whose times it is corrected."""
        levels = self.levels or self.looked_up.bit_length()
        length = (self.context // self.requests // 512).bit_length()
        return size_class(self.requests), levels, self.nodes, length


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A step that was timed: its shape and its seconds."""

    shape: StepShape
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class KnownCosts(msgspec.Struct, frozen=True):
    """What an earlier run learned of steps at temperature 0, and at others."""

    greedy: tuple[Measured, ...] = ()
    sampled: tuple[Measured, ...] = ()


@dataclass(slots=True)
class _Typical:
    """What is typical of a cell: its latest shape and the seconds of that."""

    shape: StepShape
    seconds: float
    times: int = 0  # own times in it, of this run
    seen: int = 0  # the step of the latest one
    slow: bool = False  # whether that one was much slower than expected


class StepCosts:
    """Learns from steps what steps cost."""

    def __init__(self, recorded: Sequence[Measured] = ()) -> None:
        """Start from what an earlier run learned, maybe on a machine that was slower or faster."""
        self._cells: dict[Cell, _Typical] = {}
        for step in recorded:
            self._cells[step.shape.cell] = _Typical(step.shape, step.seconds, _TRUSTED)
        self._steps = 0
        self._fit: Array | None = None
        self.timed: set[bool] = set()
        """Whether steps that draft (True) and steps that do not (False) were timed in this run."""

    @property
    def known(self) -> tuple[Measured, ...]:
        """What was learned: one step of every cell."""
        cells = self._cells.values()
        return tuple(Measured(cell.shape, cell.seconds) for cell in cells)

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn from a step that took ``seconds``, more than 0; return whether that was news.

        A step may be held up, but is neither sped up nor held up twice. So news is one that was
        much faster, or the second in a row that was much slower, and also the first of this run.
        News is believed of all plans of its kind that have rested.
        """
        self._steps += 1
        first = shape.drafts not in self.timed
        self.timed.add(shape.drafts)
        expected = seconds
        if self._cells:
            expected = self._expected(shape)
        cell = self._cells.get(shape.cell)
        if cell is None:
            cell = _Typical(shape, expected)
            self._cells[shape.cell] = cell
        surprise = math.log(seconds / expected)
        slow = surprise > _NEWS
        twice_slow = slow and cell.slow
        sudden = twice_slow or surprise < -_NEWS
        news = first or (sudden and cell.times >= _TRUSTED)
        if news:
            self._spread(shape.drafts, surprise)
        elif not sudden:
            gain = max(_GAIN, 1 / (cell.times + 1))
            surprise = gain * min(_NEWS, surprise)
        cell.shape = shape
        cell.seconds = expected * math.exp(surprise)
        cell.times += 1
        cell.seen = self._steps
        cell.slow = slow and not sudden
        self._fit = None
        return news

    def _spread(self, drafts: bool, surprise: float) -> None:
        """Believe a surprise of all plans of a kind that have rested."""
        for cell in self._cells.values():
            alike = cell.shape.drafts == drafts
            rested = self._steps - cell.seen > _RECENT
            if alike and (rested or not cell.seen):
                cell.seconds *= math.exp(surprise)

    def seconds(self, shapes: Sequence[StepShape]) -> Array:
        """Return ``[shapes]`` float64: expected seconds; at least one step is known."""
        return np.array([self._expected(shape) for shape in shapes])

    def node_seconds(self, context: float) -> float:
        """Return the seconds of a further node that looks at ``context`` slots."""
        node, look = self._coefficients()[-2:]
        return float(node + look * context / 1024)

    def _expected(self, shape: StepShape) -> float:
        """Return seconds by the fit, corrected by the cell."""
        seconds = self._linear(shape)
        cell = self._cells.get(shape.cell)
        if cell is not None:
            ratio = cell.seconds / self._linear(cell.shape)
            seconds *= ratio ** self._weight(cell)
        return seconds

    def _weight(self, cell: _Typical) -> float:
        """Return how much the times of a cell count yet."""
        rested = self._steps - cell.seen
        return math.exp2(-rested / REST)

    def _linear(self, shape: StepShape) -> float:
        """Return the seconds of the fit."""
        seconds = np.dot(shape.features, self._coefficients())
        return max(1e-9, float(seconds))

    def _coefficients(self) -> Array:
        """Return ``[8]`` float64, none below 0, of least squares of the relative errors."""
        if self._fit is not None:
            return self._fit
        rows = []
        weights = []
        for cell in self._cells.values():
            weight = max(_LEAST, self._weight(cell))
            row = np.array(cell.shape.features)
            rows.append(row * weight / cell.seconds)
            weights.append(weight)
        scale = np.linalg.norm(rows, axis=0)
        scale = np.maximum(scale, 1e-150)
        table = np.concatenate((rows / scale, _RIDGE))
        wanted = np.zeros(len(table))
        wanted[: len(weights)] = weights
        solution, _ = nnls(table, wanted)
        self._fit = solution / scale
        return self._fit

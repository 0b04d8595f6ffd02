"""What a step costs: measured times of steps, generalised over batches and plans.

The estimate has two layers. The first is a linear distribution of the step's shape, with coefficients of at
least 0. It is fitted to relative errors by non-negative least squares over all steps seen; old ones
fade:

    seconds ~ step + a request + a token of context + a step that drafts + a request that drafts
              + a level of the trees + a node + a node's look at a token of its request's context

The distribution extrapolates to steps that were never run. The second layer is a correction for each (batch
size, plan) that was run, because a machine is not linear: there are caches, kernels that fit
certain sizes, and graphs for some of them. The pace of the whole machine, which other programs
change, is tracked apart from both, so that a slow minute is not blamed on the plan that ran in it.
"""

import math
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from eaglegbv.config import Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import require_integer, require_numbers

Array: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_MEMORY = 0.995
"""Weight that a step keeps in the linear distribution with every further one."""

_PACE = 0.15
"""Share of a surprise that is attributed to the machine's pace."""

_PACE_MEMORY = 0.95
"""Share of the pace that is kept with every step: a lasting change belongs in the distribution."""

_SLOWEST_RATE = 0.08
"""Least share of a surprise that is attributed to a correction; early steps take more."""

_TRUST = 2.0
"""Number of steps with which a correction counts half."""

_FADING = 200.0
"""Observed steps after which a correction that was not updated has lost half its weight."""

ALIKE = 2
"""Number of like steps in a row from which on their times are typical.

The first of them finds caches full of what other steps needed, and takes up to a third longer.
Where its shapes are new, memory is also allocated and kernels are prepared for it. Probes last for
this many steps too.
"""

_SURPRISE, _FIRST_SURPRISE = 0.35, 1.0
"""Largest surprises (logarithms of seconds) taken at face value, in general and for a cell's first
step.

The linear distribution's estimate for a size that was never run may be far off; but a program that was
suspended for a second says nothing about that size.
"""

_REFIT = 8
"""Steps between two fits of the linear distribution; up to this many steps, it is fitted after each."""

_FEATURES = 8
"""Number of features that the linear distribution multiplies."""

_DRAFTING, _NODE, _LOOK = 4, 6, 7
"""Indices of three features: a request that drafts, a node, a node's look at 1024 tokens."""

_RIDGE = 1e-3 * np.diag((1.0, 20.0, 20.0, 1.0, 20.0, 1.0, 5.0, 20.0))
"""Regularisation of the linear distribution's coefficients.

Steps of a single request, of a single path, or of texts of equal length cannot tell some costs
apart. These count as costs of the whole step, of a level or of a node: on most machines a further
request or node costs little.
"""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The features of a step that decide its cost.

    Attributes:
        requests: Requests in the batch, r.
        context: KV slots they attend to, all together.
        drafting: Requests that draft, 0 ... r.
        paths: Paths each of those drafts; 0 where none drafts.
        depth: Tokens of a path.
        looked_up: Nodes of looked-up drafts of the other requests, all together.
    """

    requests: int
    context: int
    drafting: int
    paths: int
    depth: int
    looked_up: int = 0

    @classmethod
    def of(
        cls, plan: Plan, *, requests: int, context: int, drafting: int, looked_up: int = 0
    ) -> Self:
        """Return the shape of a step in which ``drafting`` of the requests draft by ``plan``."""
        paths, depth = (plan.paths, plan.depth) if drafting else (0, 0)
        return cls(requests, context, drafting, paths, depth, looked_up)

    @property
    def features(self) -> Array:
        """``[8]`` float64, what the linear dist multiplies; see :func:`features`."""
        columns = _columns(
            self.requests, self.context, self.drafting, self.paths, self.depth, self.looked_up
        )
        return np.array(columns, dtype=np.float64)

    @property
    def cell(self) -> "Cell":
        """The cell whose correction applies to the shape."""
        if not self.drafting:
            return Cell(size_class(self.requests), 0, self.looked_up.bit_length())
        return Cell(size_class(self.requests), self.paths, self.depth)


@dataclass(frozen=True, slots=True)
class Cell:
    """Steps that share a correction: a class of batch sizes, and a plan.

    Where no drafter runs, paths are 0 and depth is a class of the number of looked-up nodes.
    """

    size: int
    paths: int
    depth: int


def cell_of(plan: Plan, size: int) -> Cell:
    """Return the cell of steps in a class of sizes in which all draft by ``plan``."""
    return Cell(size, plan.paths, plan.depth) if plan.speculative else Cell(size, 0, 0)


@dataclass(slots=True)
class _Correction:
    """How a cell's steps differ from the linear distribution.

    Attributes:
        row: Features of the latest step.
        log: Natural logarithm of the ratio of measured to predicted time, at the machine's usual
            pace.
        steps: Number of steps so far.
        latest: Number of the latest step, among all steps observed.
        earlier: Number of steps that an earlier run of the program observed, of made-up requests.
    """

    row: Array
    log: float = 0.0
    steps: int = 0
    latest: int = 0
    earlier: int = 0

    @property
    def share(self) -> float:
        """Share of a surprise that the correction takes; all earlier steps count as one."""
        known = self.steps - self.earlier + min(1, self.earlier)
        return max(_SLOWEST_RATE, 1 / (known + 1))

    def trusted(self, now: int) -> float:
        """Return the part of ``log`` to rely on: less with few steps, or if they are long past."""
        fresh = 0.5 ** ((now - self.latest) / _FADING)
        return float(self.log * fresh * self.steps / (self.steps + _TRUST))


def features(requests: int, context: int, drafting: Ints, paths: Ints, depth: Ints) -> Array:
    """Return ``[..., 8]`` features of the linear distribution; the arrays are broadcast together."""
    columns = np.broadcast_arrays(*_columns(requests, context, drafting, paths, depth))
    return np.stack(columns, axis=-1).astype(np.float64)


def _columns(
    requests: int,
    context: int,
    drafting: int | Ints,
    paths: int | Ints,
    depth: int | Ints,
    looked_up: int = 0,
) -> tuple[ArrayLike, ...]:
    """Return the features of the linear distribution, as numbers or arrays.

    Contexts count in units of 1024 tokens; nodes are assumed to attend to contexts of mean length.
    """
    drafts = np.minimum(drafting, 1)
    nodes = drafting * paths * depth + looked_up
    texts = context / 1024
    looks = nodes * (texts / requests)
    return 1.0, requests, texts, drafts, drafting, drafts * depth, nodes, looks


def size_class(requests: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (requests - 1).bit_length()


class KnownCell(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved of a cell; see :class:`_Correction` for ``row`` and ``log``."""

    size: int
    paths: int
    depth: int
    row: tuple[float, ...]
    log: float
    steps: int

    def __post_init__(self) -> None:
        require_numbers("row", self.row, count=_FEATURES)
        require_numbers("log", (self.log,), count=1)
        require_integer("steps", self.steps, 1)


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned about steps, for saving to disk.

    Attributes:
        gram: ``[8][8]``, weighted products of features.
        moment: ``[8]``, weighted products of features with times.
        dist: ``[8]``, seconds per unit of each feature.
        cells: Corrections.
        steps: Number of steps from which all of this was learned.
    """

    gram: tuple[tuple[float, ...], ...]
    moment: tuple[float, ...]
    dist: tuple[float, ...]
    cells: tuple[KnownCell, ...]
    steps: int

    def __post_init__(self) -> None:
        if len(self.gram) != _FEATURES:
            raise InvalidArgument("gram", len(self.gram), f"{_FEATURES} rows")
        for row in (*self.gram, self.moment, self.dist):
            require_numbers("costs", row, count=_FEATURES)
        require_integer("steps", self.steps, sum(cell.steps for cell in self.cells))

    @property
    def knows_drafts(self) -> bool:
        """Whether any step drafted; if none did, drafts would seem to cost nothing."""
        return any(cell.paths for cell in self.cells)


class KnownCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the cost of steps before the first one runs.

    Attributes:
        greedy: Costs of steps at temperature 0.
        sampled: Costs of other steps.
    """

    greedy: CostTable
    sampled: CostTable


@dataclass(slots=True)
class StepCosts:
    """Learns from steps what steps cost."""

    _gram: Array = field(default_factory=lambda: np.zeros((8, 8)))
    _moment: Array = field(default_factory=lambda: np.zeros(8))
    _dist: Array = field(default_factory=lambda: np.zeros(8))
    _pace: float = 0.0
    _corrections: dict[Cell, _Correction] = field(default_factory=dict)
    _steps: int = 0
    _unfitted: int = 0

    @classmethod
    def of_table(cls, table: CostTable) -> Self:
        """Continue from what was learned before, as if it had just been learned."""
        costs = cls(
            _gram=np.array(table.gram),
            _moment=np.array(table.moment),
            _dist=np.array(table.dist),
            _steps=table.steps,
        )
        for cell in table.cells:
            costs._corrections[Cell(cell.size, cell.paths, cell.depth)] = _Correction(
                row=np.array(cell.row),
                log=cell.log,
                steps=cell.steps,
                latest=table.steps,
                earlier=cell.steps,
            )
        return costs

    def table(self) -> CostTable:
        """Return what was learned, without the machine's present pace."""
        return CostTable(
            gram=tuple(map(tuple, self._gram.tolist())),
            moment=tuple(self._moment.tolist()),
            dist=tuple(self._dist.tolist()),
            cells=tuple(
                KnownCell(
                    size=cell.size,
                    paths=cell.paths,
                    depth=cell.depth,
                    row=tuple(known.row.tolist()),
                    log=known.log,
                    steps=known.steps,
                )
                for cell, known in self._corrections.items()
            ),
            steps=self._steps,
        )

    @property
    def steps(self) -> int:
        """Number of steps observed."""
        return self._steps

    def steps_in(self, cell: Cell) -> int:
        """Return the number of steps observed in a cell."""
        correction = self._corrections.get(cell)
        return 0 if correction is None else correction.steps

    def spans(self, size: int) -> bool:
        """Return whether a class of batch sizes lies within the range of those observed."""
        sizes = [cell.size for cell in self._corrections]
        return bool(sizes) and min(sizes) <= size <= max(sizes)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one step.

        Args:
            shape: Shape of the step.
            seconds: Time it took, more than 0.
        """
        row = shape.features
        correction = self._corrections.setdefault(shape.cell, _Correction(row))
        correction.row = row
        if not self._steps:
            self._dist[0] = seconds
        usual = self._linear(row) * math.exp(correction.log)
        surprise = math.log(seconds / usual) - self._pace
        if correction.steps == 1 and surprise < -_SURPRISE:
            # Something else held up the cell's first step, so this one replaces it.
            correction.log += surprise
            usual *= math.exp(surprise)
            surprise = 0.0
        elif correction.steps:
            # What all cells have in common goes to the pace; a new cell's surprise is its own.
            surprise = max(-_SURPRISE, min(_SURPRISE, surprise))
            self._pace = _PACE_MEMORY * self._pace + _PACE * surprise
            surprise *= 1 - _PACE
        elif self._steps:
            surprise = max(-_FIRST_SURPRISE, min(_FIRST_SURPRISE, surprise))
        correction.log += correction.share * surprise
        correction.steps += 1
        self._steps += 1
        correction.latest = self._steps
        # To fit relative errors, a row and its time at the usual pace are divided by the estimate.
        scaled = row / usual
        self._gram *= _MEMORY
        self._gram += scaled[:, None] * scaled
        self._moment *= _MEMORY
        self._moment += scaled * math.exp(surprise)
        self._unfitted += 1
        if self._steps <= _REFIT or self._unfitted >= _REFIT:
            self._fit()

    def seconds(self, shape: StepShape) -> float:
        """Return the expected time of a step; 0 before the first was observed."""
        if not self._steps:
            return 0.0
        return self._linear(shape.features) * self.factor(shape.cell)

    def node_seconds(self, context: float) -> float:
        """Return the expected seconds of a further node of a request.

        Args:
            context: KV slots that the request attends to.
        """
        dist = self._dist
        return float(dist[_NODE] + dist[_LOOK] * context / 1024) * math.exp(self._pace)

    @property
    def request_seconds(self) -> float:
        """Expected seconds of a further request that drafts, without its nodes."""
        return float(self._dist[_DRAFTING]) * math.exp(self._pace)

    def linear(self, rows: Array) -> Array:
        """Return the linear distribution's estimates for ``[..., 8]`` rows, in seconds."""
        result: Array = rows @ self._dist
        return result

    def factor(self, cell: Cell) -> float:
        """Return the factor by which the linear distribution is multiplied in a cell."""
        correction = self._corrections.get(cell)
        if correction is None and not cell.paths:
            # A lookup size that was never run takes the correction of plain decoding.
            correction = self._corrections.get(Cell(cell.size, 0, 0))
        own = 0.0 if correction is None else correction.trusted(self._steps)
        return math.exp(self._pace + own)

    def _linear(self, row: Array) -> float:
        return max(1e-9, float(row @ self._dist))

    def _fit(self) -> None:
        """Fit the linear distribution, and adjust the corrections so that their cells' estimates stay."""
        self._unfitted = 0
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-300))
        gram = self._gram / np.outer(scale, scale) + _RIDGE
        root = np.linalg.cholesky(gram).T
        target = np.linalg.solve(root.T, self._moment / scale)
        rows = [correction.row for correction in self._corrections.values()]
        before = [self._linear(row) for row in rows]
        self._dist = nnls(root, target)[0] / scale
        for correction, old, row in zip(self._corrections.values(), before, rows, strict=True):
            correction.log += math.log(old / self._linear(row))

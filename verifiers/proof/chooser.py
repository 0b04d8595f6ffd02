"""Distributions over a small vocabulary, and how a reference draws its random decisions.

Distributions are tuples of floats or of exact rationals. A reference calls ``choose(weights,
purpose, index)`` and gets the number of the entry chosen. So one piece of code gives a sample, the
decision on given uniforms, and the exact distribution of the output. The pair (purpose, index)
names the uniform number that decides, so that a batched implementation with the same
:class:`~eaglegbv.verifiers.base.VerifyUniforms` decides identically:

* ``SELECTION``, index ``((depth * drafts) + number) * 2 + which``: the flattening of ``selection``
  ``[length, drafts, 2]``; ``depth`` is the node's (0 at the root). At a node of iid drafts the draw
  of that ``number`` in its level finds the partner of its token with ``which = 0`` and decides
  about relabelling with ``which = 1``. At ``fixed`` nodes a child is drawn with (depth, 0, 0),
  children in the order of their first draws; at ``greedy`` nodes (depth, 0, 1) decides whether the
  drawn child is taken and (depth, 0, 0) which of the others. ``global_resolution`` draws from a
  solver's plan with (depth, 0, 0), children in the order of their first draws.
* ``ACCEPTANCE``: rules of the block type test the node at depth i (1 at the root's children) with
  index i - 1, and so does ``token``; rules that walk down draft by draft use
  ``depth * drafts + number``, the number of the draw, or of the first draw of the child where equal
  ones do not count (``greedy_draft`` also draws its residual sample with the number of the first
  child that was not drawn);
  ``traversal`` uses node number - 1; ``target_only`` samples p at an inner node with index
  ``depth``.
* ``CORRECTION``, index 0: the last token of the step.
* Rules with a modified target draw how many drafts of earlier steps are left with further numbers,
  see :mod:`eaglegbv.verifiers.stateful`.
* ``DRAFT``: drafting, see :mod:`eaglegbv.verifiers.proof.tree`.

Entries are drawn by inverse CDF: the first entry i with u * total < cumulative_i; an entry of
weight 0 is never drawn. A test of probability h is ``choose((h, 1 - h), ...) == 0``: accepted iff
u < h, so h = 0 never accepts and h = 1 always does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, TypeAlias, TypeVar

from eaglegbv.errors import InvalidProbabilities
from eaglegbv.rng import Purpose

Number: TypeAlias = float | Fraction
"""A probability or a weight; code using it is exact when every input is a ``Fraction``."""

Probs: TypeAlias = tuple[Number, ...]
"""A distribution (or weights) over the vocabulary: entry x belongs to token x."""

Prefix: TypeAlias = tuple[int, ...]  # tokens from below the root to a node; the root is `()`
ProbsAt: TypeAlias = Callable[[Prefix], Probs]  # the distribution of the next token after a prefix


def positive(x: Number) -> Number:
    """Return max(x, 0) without changing the kind of number."""
    return x if x > 0 else x - x


def magnitude(x: Number) -> Number:
    """Return |x|."""
    return x if x >= 0 else -x


def share(weight: Number, total: Number) -> Number:
    """Return weight / total, exactly 1 where they are equal."""
    return 1 if weight == total else weight / total


def normalised(weights: Iterable[Number]) -> Probs:
    """Return the distribution in proportion to ``weights``.

    Raises:
        InvalidProbabilities: No weight is positive.
    """
    weights = tuple(weights)
    total = sum(weights)
    if not total > 0:
        raise InvalidProbabilities("weights", weights, "a positive sum")
    return tuple(share(w, total) if w else w for w in weights)


def residual(scale: Number, p: Sequence[Number], b: Sequence[Number]) -> Probs:
    """Return the weights max(scale p - b, 0)."""
    return tuple(positive(scale * px - bx) for px, bx in zip(p, b, strict=True))


def residual_or_target(scale: Number, p: Probs, b: Sequence[Number]) -> Probs:
    """Return :func:`residual`, or ``p`` where it vanishes.

    That has probability zero; where rounding leads there, only p is a harmless answer.
    """
    weights = residual(scale, p, b)
    return weights if sum(weights) > 0 else p


def support(probs: Sequence[Number]) -> tuple[int, ...]:
    """Return the tokens of positive probability, ascending."""
    return tuple(x for x, mass in enumerate(probs) if mass > 0)


def most_likely(probs: Sequence[Number], count: int) -> tuple[int, ...]:
    """Return the ``count`` most likely tokens of the distribution's support, ties by token id."""
    return tuple(sorted(support(probs), key=lambda x: (-probs[x], x))[:count])


def exact_tail_probs(q: Probs, kept: Sequence[int]) -> Probs:
    """Return q restricted to the tokens off ``kept``, normalised."""
    return normalised(q[x] if x not in kept else 0 for x in range(len(q)))


T = TypeVar("T")
NEGLIGIBLE = 1e-18
"""Branches in floating point that are less likely exist only by rounding, and are not walked."""


class Chooser(Protocol):
    """Decides every random choice of a reference."""

    def choose(self, weights: Sequence[Number], purpose: Purpose, index: int) -> int:
        """Return entry i with probability weights[i] / sum(weights).

        Raises:
            InvalidProbabilities: No weight is positive.
        """


def accepts(chooser: Chooser, h: Number, purpose: Purpose, index: int) -> bool:
    """Return True with probability h."""
    return chooser.choose((h, 1 - h), purpose, index) == 0


def selection_index(drafts: int, depth: int, number: int, which: int) -> int:
    """Return the index of a ``SELECTION`` number (see the module's docstring)."""
    return (depth * drafts + number) * 2 + which


@dataclass(slots=True)
class ReplayChooser:
    """Follows ``script``, then takes the first possible entry of every further choice."""

    script: tuple[int, ...]  # choices to repeat
    weight: Number = 1  # probability of the choices made so far, those of the script included
    # the branches not taken after the script's end: their scripts, and how likely they are
    branches: list[tuple[tuple[int, ...], Number]] = field(default_factory=list)
    # the numbers drawn; a number must not decide twice
    used: set[tuple[Purpose, int]] = field(default_factory=set)
    further: list[int] = field(default_factory=list)  # choices made after the script's end

    def choose(self, weights: Sequence[Number], purpose: Purpose, index: int) -> int:
        """Return the next entry of the script, or the first possible one."""
        position = len(self.used)
        self.used.add((purpose, index))
        if len(self.used) == position:
            raise IndexError(f"the number {purpose!r} {index} decides twice")
        if position < len(self.script):
            return self.script[position]
        total = _total(weights)
        # The most likely entry comes first: it is never negligible.
        chosen, *others = sorted(support(weights), key=lambda i: -weights[i])
        for other in others:
            mass = self.weight * share(weights[other], total)
            if mass >= NEGLIGIBLE or isinstance(mass, Fraction):
                self.branches.append(((*self.script, *self.further, other), mass))
        self.further.append(chosen)
        self.weight *= share(weights[chosen], total)
        return chosen


def exact_probs(run: Callable[[Chooser], T]) -> dict[T, Number]:
    """Return the exact distribution of what ``run`` returns, by walking all its branches.

    ``run`` must be a pure function of its chooser's decisions; its results must be hashable.
    Branches below :data:`NEGLIGIBLE` are left out, so their mass is missing and counts as error; in
    rational arithmetic there are none.
    """
    probs: dict[T, Number] = {}
    branches: list[tuple[tuple[int, ...], Number]] = [((), 1)]
    while branches:
        chooser = ReplayChooser(*branches.pop())
        result = run(chooser)
        probs[result] = probs.get(result, 0) + chooser.weight
        branches.extend(chooser.branches)
    return probs


def _total(weights: Sequence[Number]) -> Number:
    total = sum(weights)
    if not total > 0 or min(weights) < 0:
        raise InvalidProbabilities("weights", tuple(weights), "non-negative with a positive sum")
    return total

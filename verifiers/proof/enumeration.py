"""The exact distribution of what a verifier writes on a tiny problem, over one or several steps."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic

from eaglegbv.config import DraftSampling
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Prefix,
    Probs,
    ProbsAt,
    T,
    exact_probs,
    magnitude,
    most_likely,
    support,
)
from eaglegbv.verifiers.proof.tree import (
    DrawChildren,
    Drawing,
    Draws,
    ReferenceTree,
    Stop,
    Verify,
    draw_greedy,
    draw_hub,
    draw_iid,
    draw_wor,
    never,
)
from eaglegbv.verifiers.stateful import ModifiedTarget, Step, VerifyWithState, committing_draw


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a tiny problem."""

    vocab: int  # Tokens
    length: int  # depth of a path
    paths: int  # paths of an ``iid`` tree; children of every node for the other samplings
    # drafts of a node of each depth, times the drafts equal to it, instead of ``paths``
    widths: tuple[int, ...] = ()

    def widths_of(self, draft_sampling: DraftSampling) -> tuple[int, ...]:
        """Return the drafts of a node of each depth, times the drafts equal to it."""
        if self.widths:
            return self.widths
        below = 1 if draft_sampling is DraftSampling.IID else self.paths
        return (self.paths, *(below,) * (self.length - 1))[: self.length]

    def in_columns(self, draft_sampling: DraftSampling) -> bool:
        """Return whether its trees are K paths that fork at the root alone."""
        return all(width == 1 for width in self.widths_of(draft_sampling)[1:])


@dataclass(frozen=True, slots=True)
class Problem:
    """A target and the draft trees it is offered."""

    draft_sampling: DraftSampling  # how children arise
    target_probs: ProbsAt  # p, by all tokens since the start
    draft_probs: ProbsAt  # q, likewise
    shape: Shape  # Sizes
    stop: Stop = never  # when paths stop early, by the tokens since the start


_DRAWS: Mapping[DraftSampling, DrawChildren] = MappingProxyType(
    {
        DraftSampling.IID: draw_iid,
        DraftSampling.WOR: draw_wor,
        DraftSampling.GREEDY: draw_greedy,
        DraftSampling.FIXED: lambda q, count, *_: most_likely(q, count),
        DraftSampling.HUB: draw_hub,
    }
)


def draft(
    draft_sampling: DraftSampling, q: ProbsAt, shape: Shape, chooser: Chooser, stop: Stop = never
) -> Draws:
    """Draw one tree."""
    widths = shape.widths_of(draft_sampling)
    return Drawing(_DRAWS[draft_sampling], q, widths, chooser, stop).draws()


def trees_probs(
    draft_sampling: DraftSampling, q: ProbsAt, shape: Shape, stop: Stop = never
) -> dict[Draws, Number]:
    """Return the exact distribution of :func:`draft`."""
    if draft_sampling is not DraftSampling.IID:
        return exact_probs(lambda chooser: draft(draft_sampling, q, shape, chooser, stop))
    trees: dict[Draws, Number] = {(): 1}
    for width in shape.widths_of(draft_sampling):
        longer: dict[Draws, Number] = {}
        for draws, mass in trees.items():
            above = draws[-1] if draws else ((),)
            each = [options for prefix in above for options in [_options(q, prefix, stop)] * width]
            for chosen in itertools.product(*each):
                level = tuple(child for child, _ in chosen)
                longer[(*draws, level)] = mass * math.prod(share for _, share in chosen)
        trees = longer
    return trees


def _options(q: ProbsAt, prefix: Prefix | None, stop: Stop) -> list[tuple[Prefix | None, Number]]:
    """Return what a draw below ``prefix`` may lead to, and how likely."""
    if prefix is None or stop(prefix):
        return [(None, 1)]
    probs = q(prefix)
    return [((*prefix, x), probs[x]) for x in support(probs)]


def drafted_trees(problem: Problem) -> dict[Draws, Number]:
    """Return the exact distribution of the trees drawn at the start."""
    return trees_probs(problem.draft_sampling, problem.draft_probs, problem.shape, problem.stop)


def stateless(verify: Verify) -> VerifyWithState:
    """Return ``verify`` as a verifier that passes the plain target on."""

    def step(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        outcome = verify(tree, chooser)
        return Step(outcome, ModifiedTarget((*target.context, *outcome.tokens)))

    return step


def states_by_step(
    verify: VerifyWithState, problems: Sequence[Problem], total: int
) -> Iterator[dict[ModifiedTarget, Number]]:
    """Yield the exact distribution of the state after each step; step k is that of ``problems[k]``.

    Requests that have ``total`` tokens, or have stopped, take no further step.
    """
    states: dict[ModifiedTarget, Number] = {ModifiedTarget(): 1}
    for problem in problems:
        following: dict[ModifiedTarget, Number] = {}
        for state, mass in states.items():
            if len(state.context) >= total or problem.stop(state.context):
                following[state] = following.get(state, 0) + mass
                continue
            for after, probability in _step_probs(verify, problem, state):
                following[after] = following.get(after, 0) + mass * probability
        states = following
        yield states


def _step_probs(
    verify: VerifyWithState, problem: Problem, state: ModifiedTarget
) -> Iterator[tuple[ModifiedTarget, Number]]:
    p, q = (After(each, state.context) for each in (problem.target_probs, problem.draft_probs))
    stop = After(problem.stop, state.context)
    sampling = problem.draft_sampling
    shape = problem.shape
    draw = _DRAWS[sampling]
    widths = shape.widths_of(sampling)

    def run(chooser: Chooser) -> ModifiedTarget:
        drawing = Drawing(draw, q, widths, chooser, stop)
        tree = ReferenceTree(sampling, (), p, q, reach=shape.length, stop=stop, drawing=drawing)
        return verify(tree, state, chooser).target

    yield from exact_probs(run).items()


def completed(
    states: Mapping[ModifiedTarget, Number], p: ProbsAt, total: int
) -> dict[Prefix, Number]:
    """Continue every state by its own target; return the distribution of the first tokens."""
    probs: dict[Prefix, Number] = {}
    todo = list(states.items())
    while todo:
        state, mass = todo.pop()
        if len(state.context) >= total:
            key = state.context[:total]
            probs[key] = probs.get(key, 0) + mass
            continue
        target = p(state.context)
        for token, probability in enumerate(state.probs(target)):
            if probability > 0:
                todo.extend(
                    (after, mass * probability * share)
                    for after, share in _emitted(state, target, token).items()
                )
    return probs


def _emitted(state: ModifiedTarget, p: Probs, token: int) -> dict[ModifiedTarget, Number]:
    return exact_probs(lambda chooser: state.entered(p, token, committing_draw(chooser)))


def target_joint(p: ProbsAt, total: int) -> dict[Prefix, Number]:
    """Return the target's distribution of the first ``total`` tokens."""
    joint: dict[Prefix, Number] = {}
    for tokens in itertools.product(range(len(p(()))), repeat=total):
        mass: Number = 1
        for i, x in enumerate(tokens):
            mass *= p(tokens[:i])[x]
        joint[tokens] = mass
    return joint


def deviation(states: Mapping[ModifiedTarget, Number], p: ProbsAt, total: int) -> float:
    """Return the largest error of a probability of the first ``total`` tokens."""
    probs = completed(states, p, total)
    joint = target_joint(p, total)
    return max(
        float(magnitude(probs.get(tokens, 0) - joint.get(tokens, 0)))
        for tokens in probs.keys() | joint.keys()
    )


@dataclass(frozen=True, slots=True)
class After(Generic[T]):
    """A function of all tokens since the start, as one of the tokens after ``context``."""

    whole: Callable[[Prefix], T]
    context: Prefix

    def __call__(self, prefix: Prefix) -> T:
        """Return the value at ``context`` and ``prefix``."""
        return self.whole((*self.context, *prefix))

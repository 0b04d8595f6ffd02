"""The exact law of what a verifier writes on a tiny problem, over one or several steps."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.chooser import Chooser, exact_law
from eaglegbv.verifiers.reference.drafting import (
    DrawChildren,
    draft_iid,
    draft_tree,
    draw_fixed,
    draw_greedy,
    draw_hub,
    draw_wor,
)
from eaglegbv.verifiers.reference.greedy_block import Step
from eaglegbv.verifiers.reference.modified_target import ModifiedTarget, committing_draw
from eaglegbv.verifiers.reference.probs import LawAt, Number, Prefix, Probs, magnitude
from eaglegbv.verifiers.reference.tree import Outcome, ReferenceTree, Stop, never


class Verify(Protocol):
    """A verifier that keeps nothing from step to step."""

    def __call__(self, tree: ReferenceTree, chooser: Chooser) -> Outcome:
        """Judge one tree."""


class VerifyWithState(Protocol):
    """A verifier that leaves a modified target to the next step."""

    def __call__(self, tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        """Judge one tree, given the debts of earlier steps."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a tiny problem.

    Attributes:
        vocab: Tokens.
        length: Depth of a path.
        paths: Paths of an ``iid`` tree; children of every node for the other laws.
    """

    vocab: int
    length: int
    paths: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A target and the draft trees it is offered.

    Attributes:
        law: How children arise.
        target_law: p, by all tokens since the start.
        draft_law: q, likewise.
        shape: Sizes.
        stop: When paths stop early, by the tokens since the start.
    """

    law: Law
    target_law: LawAt
    draft_law: LawAt
    shape: Shape
    stop: Stop = never


def draft(
    law: Law, q: LawAt, shape: Shape, chooser: Chooser, stop: Stop = never
) -> tuple[Prefix, ...]:
    """Draw the paths of one tree."""
    draw: DrawChildren
    match law:
        case Law.IID:
            return draft_iid(q, shape.paths, shape.length, chooser, stop)
        case Law.WOR:
            draw = draw_wor
        case Law.GREEDY:
            draw = draw_greedy
        case Law.FIXED:
            draw = draw_fixed
        case Law.HUB:
            draw = draw_hub
    return draft_tree(draw, q, (shape.paths,) * shape.length, chooser, stop)


def paths_law(
    law: Law, q: LawAt, shape: Shape, stop: Stop = never
) -> dict[tuple[Prefix, ...], Number]:
    """Return the exact law of :func:`draft`."""
    if law is not Law.IID:
        return exact_law(lambda chooser: draft(law, q, shape, chooser, stop))
    one = exact_law(lambda chooser: draft_iid(q, 1, shape.length, chooser, stop)[0])
    return {
        paths: math.prod(one[path] for path in paths)
        for paths in itertools.product(one, repeat=shape.paths)
    }


def drafted_paths(problem: Problem) -> dict[tuple[Prefix, ...], Number]:
    """Return the exact law of the paths drawn at the start."""
    return paths_law(problem.law, problem.draft_law, problem.shape, problem.stop)


def drafted_trees(problem: Problem, context: Prefix = ()) -> Iterator[tuple[ReferenceTree, Number]]:
    """Yield every draft tree after ``context`` with its probability."""
    p, q = After(problem.target_law, context), After(problem.draft_law, context)
    stop = StopAfter(problem.stop, context)
    shape = problem.shape
    for paths, mass in paths_law(problem.law, q, shape, stop).items():
        yield ReferenceTree(problem.law, paths, p, q, reach=shape.length, stop=stop), mass


def output_law(verify: Verify, problem: Problem) -> dict[Prefix, Number]:
    """Return the exact law of the tokens that one step commits."""
    states = iterate(stateless(verify), [problem], problem.shape.length + 1)
    return {state.context: mass for state, mass in states.items()}


def acceptance_length(law: Mapping[Prefix, Number]) -> Number:
    """Return E[tau] of an output law: committed tokens less one."""
    return sum(mass * (len(tokens) - 1) for tokens, mass in law.items())


def stateless(verify: Verify) -> VerifyWithState:
    """Return ``verify`` as a verifier that passes the plain target on."""

    def step(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        outcome = verify(tree, chooser)
        return Step(outcome, ModifiedTarget((*target.context, *outcome.tokens)))

    return step


def states_by_step(
    verify: VerifyWithState, problems: Sequence[Problem], total: int
) -> Iterator[dict[ModifiedTarget, Number]]:
    """Yield the exact law of the state after each step; step k is that of ``problems[k]``.

    Requests that have ``total`` tokens, or have stopped, take no further step.
    """
    states: dict[ModifiedTarget, Number] = {ModifiedTarget(): 1}
    for problem in problems:
        following: dict[ModifiedTarget, Number] = {}
        for state, mass in states.items():
            if len(state.context) >= total or problem.stop(state.context):
                following[state] = following.get(state, 0) + mass
                continue
            for after, probability in _step_law(verify, problem, state):
                following[after] = following.get(after, 0) + mass * probability
        states = following
        yield states


def iterate(
    verify: VerifyWithState, problems: Sequence[Problem], total: int
) -> dict[ModifiedTarget, Number]:
    """Return the exact law of the state after one step for each of ``problems``."""
    return list(states_by_step(verify, problems, total))[-1]


def _step_law(
    verify: VerifyWithState, problem: Problem, state: ModifiedTarget
) -> Iterator[tuple[ModifiedTarget, Number]]:
    for tree, mass in drafted_trees(problem, state.context):

        def run(chooser: Chooser, tree: ReferenceTree = tree) -> ModifiedTarget:
            return verify(tree, state, chooser).target

        for after, probability in exact_law(run).items():
            yield after, mass * probability


def completed(
    states: Mapping[ModifiedTarget, Number], p: LawAt, total: int
) -> dict[Prefix, Number]:
    """Continue every state by its own target: the exact law of the first ``total`` tokens."""
    law: dict[Prefix, Number] = {}
    todo = list(states.items())
    while todo:
        state, mass = todo.pop()
        if len(state.context) >= total:
            key = state.context[:total]
            law[key] = law.get(key, 0) + mass
            continue
        own = p(state.context)
        for token, probability in enumerate(state.law(own)):
            if probability > 0:
                todo.extend(
                    (after, mass * probability * share)
                    for after, share in _emitted(state, own, token).items()
                )
    return law


def _emitted(state: ModifiedTarget, p: Probs, token: int) -> dict[ModifiedTarget, Number]:
    return exact_law(lambda chooser: state.entered(p, token, committing_draw(chooser)))


def target_joint(p: LawAt, total: int) -> dict[Prefix, Number]:
    """Return the target's law of the first ``total`` tokens."""
    joint: dict[Prefix, Number] = {}
    for tokens in itertools.product(range(len(p(()))), repeat=total):
        mass: Number = 1
        for i, x in enumerate(tokens):
            mass *= p(tokens[:i])[x]
        joint[tokens] = mass
    return joint


def max_error(verify: VerifyWithState, problems: Sequence[Problem], total: int) -> float:
    """Return the largest deviation of the law of the first ``total`` tokens from the target's."""
    return deviation(iterate(verify, problems, total), problems[0].target_law, total)


def deviation(states: Mapping[ModifiedTarget, Number], p: LawAt, total: int) -> float:
    """Return how far the law of the first ``total`` tokens is from the target's, at most."""
    law = completed(states, p, total)
    joint = target_joint(p, total)
    return max(
        float(magnitude(law.get(tokens, 0) - joint.get(tokens, 0)))
        for tokens in law.keys() | joint.keys()
    )


@dataclass(frozen=True, slots=True)
class After:
    """A law by all tokens since the start, as one by the tokens after ``context``."""

    law: LawAt
    context: Prefix

    def __call__(self, prefix: Prefix) -> Probs:
        """Return the law at ``context`` and ``prefix``."""
        return self.law((*self.context, *prefix))


@dataclass(frozen=True, slots=True)
class StopAfter:
    """A stopping rule by all tokens since the start, as one by the tokens after ``context``."""

    stop: Stop
    context: Prefix

    def __call__(self, prefix: Prefix) -> bool:
        """Return whether paths stop after ``context`` and ``prefix``."""
        return self.stop((*self.context, *prefix))

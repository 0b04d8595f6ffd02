"""Several verification steps in a row, exactly: states are carried along and merged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eaglegbv.tree import Law
from eaglegbv.verifiers.reference.chooser import Chooser, exact_law
from eaglegbv.verifiers.reference.greedy_block import Step
from eaglegbv.verifiers.reference.modified_target import ModifiedTarget, committing_draw
from eaglegbv.verifiers.reference.probs import LawAt, Number, Prefix, Probs
from eaglegbv.verifiers.reference.tree import ReferenceTree, Stop, never
from support.tables import Shape, Verify, draft, target_joint

VerifyWithState = Callable[[ReferenceTree, ModifiedTarget, Chooser], Step]
States = dict[ModifiedTarget, Number]


@dataclass(frozen=True)
class After:
    """A law of all tokens as one of the tokens after ``context``."""

    law: LawAt
    context: Prefix

    def __call__(self, prefix: Prefix) -> Probs:
        return self.law((*self.context, *prefix))


@dataclass(frozen=True)
class StopAfter:
    stop: Stop
    context: Prefix

    def __call__(self, prefix: Prefix) -> bool:
        return self.stop((*self.context, *prefix))


def stateless(verify: Verify) -> VerifyWithState:
    def step(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        outcome = verify(tree, chooser)
        return Step(outcome, ModifiedTarget((*target.context, *outcome.tokens)))

    return step


def iterate(
    verify: VerifyWithState,
    law: Law,
    p: LawAt,
    draft_laws: Sequence[LawAt],
    shape: Shape,
    total: int,
    stop: Stop = never,
) -> States:
    """The exact law of the state after ``len(draft_laws)`` steps, one draft law for each.

    Requests with ``total`` tokens are finished.
    """
    states: States = {ModifiedTarget(): 1}
    for q in draft_laws:
        following: States = {}
        for state, mass in states.items():
            if len(state.context) >= total or stop(state.context):
                following[state] = following.get(state, 0) + mass
                continue
            for step, probability in _step_law(verify, law, p, q, shape, state, stop):
                following[step] = following.get(step, 0) + mass * probability
        states = following
    return states


def _step_law(verify, law, p, q, shape, state, stop):
    p, q = After(p, state.context), After(q, state.context)
    stop = StopAfter(stop, state.context)
    for paths, mass in exact_law(lambda chooser: draft(law, q, shape, chooser, stop)).items():
        tree = ReferenceTree(law, paths, p, q, reach=shape.length, stop=stop)

        def run(chooser: Chooser, tree: ReferenceTree = tree) -> ModifiedTarget:
            step = verify(tree, state, chooser)
            assert step.target.context == (*state.context, *step.outcome.tokens)
            return step.target

        for after, probability in exact_law(run).items():
            yield after, mass * probability


def completed_states(states: Mapping[ModifiedTarget, Number], p: LawAt, total: int):
    """Continue every state by its own modified target: the law of the first ``total`` tokens."""
    law: dict[Prefix, Number] = {}
    todo = list(states.items())
    while todo:
        state, mass = todo.pop()
        if len(state.context) >= total:
            key = state.context[:total]
            law[key] = law.get(key, 0) + mass
            continue
        own = p(state.context)
        for token, share in enumerate(state.law(own)):
            if share > 0:

                def run(chooser: Chooser, state=state, own=own, token=token) -> ModifiedTarget:
                    return state.entered(own, token, committing_draw(chooser))

                todo.extend(
                    (after, mass * share * probability)
                    for after, probability in exact_law(run).items()
                )
    return law


def iterated_error(
    verify: VerifyWithState,
    law: Law,
    p: LawAt,
    draft_laws: Sequence[LawAt],
    shape: Shape,
    total: int,
    stop: Stop = never,
) -> float:
    """Largest deviation of the law of the first ``total`` tokens from the target's."""
    states = iterate(verify, law, p, draft_laws, shape, total, stop)
    full = completed_states(states, p, total)
    joint = target_joint(p, shape.vocab, total)
    return max(
        float(abs(full.get(tokens, 0) - joint.get(tokens, 0))) for tokens in full.keys() | joint
    )

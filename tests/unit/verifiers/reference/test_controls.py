"""Rules that are wrong on purpose: the tests of losslessness must reject every one of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.acceptance import claimed_length
from support.g_test import g_test
from support.published_spectr_gbv import published_spectr_gbv
from support.tables import (
    Model,
    Shape,
    acceptance_length,
    constant,
    max_error,
    output_probs,
    problem,
)

from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.block import acceptance, block_verification, block_weights
from eaglegbv.verifiers.gbv import gbv, skewed_probs
from eaglegbv.verifiers.greedy_block import Visit, greedy_block, greedy_verification
from eaglegbv.verifiers.otbv import otbv, select_child
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Number,
    Probs,
    accepts,
    inverse_cdf,
    residual,
    residual_or_target,
)
from eaglegbv.verifiers.proof.enumeration import Problem, stateless, target_joint
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree, Verify, draft_iid
from eaglegbv.verifiers.spectr_gbv import spectr_gbv
from eaglegbv.verifiers.stateful import ModifiedTarget, Step, VerifyWithState, entering_draw
from eaglegbv.verifiers.token import token
from eaglegbv.verifiers.transport import exact_transport, ranked

CAUGHT = 1e-3
"""Far above the tolerance of 1e-12: a control that errs by less proves little."""


def worst(verify: VerifyWithState, kind: str, shape: Shape, seeds: int = 6) -> float:
    cases = [problem(DraftSampling.IID, Model(shape.vocab, kind, s), shape) for s in range(seeds)]
    return max(max_error(verify, [case], shape.length + 1) for case in cases)


def block_without_weight(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """GBV's Equation 5 as printed: R = sum (p - q)+, without w."""
    (path,) = tree.paths
    dists = [tree.draft_probs(path[:i]) for i in range(len(path))]
    w = block_weights(tree, path, dists)
    for i in range(len(path), -1, -1):
        p = tree.target_probs(path[:i])
        h: Number = w[i]
        if i < len(path):
            h = acceptance(w[i], sum(residual(1, p, dists[i])))
        if i == 0 or accepts(chooser, h, Purpose.ACCEPTANCE, i - 1):
            weights = p if i == len(path) else residual_or_target(w[i], p, dists[i])
            return Outcome(path[:i], chooser.choose(weights, Purpose.CORRECTION, 0))
    raise AssertionError("the root accepts")


def test_block_verification_without_w_is_rejected() -> None:
    assert worst(stateless(block_without_weight), "random", Shape(3, 3, 1)) > CAUGHT


@pytest.mark.parametrize(
    ("verify", "paths"), [(greedy_block, 1), (spectr_gbv, 2)], ids=["greedy_block", "spectr_gbv"]
)
def test_a_greedy_rule_without_its_modified_target_is_rejected(
    verify: VerifyWithState, paths: int
) -> None:
    def forgetful(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        step = verify(tree, ModifiedTarget(target.context), chooser)
        return Step(step.outcome, ModifiedTarget(step.target.context))

    assert worst(forgetful, "random", Shape(3, 2, paths)) > CAUGHT


def two_steps(verify: VerifyWithState, shape: Shape, seed: int = 1) -> float:
    """Error over two steps whose draft distributions differ."""
    first, second = (Model(shape.vocab, "random", s) for s in (seed, seed + 1))
    case = problem(DraftSampling.IID, first, shape)
    return max_error(verify, [case, replace(case, draft_probs=second.q)], 4)


def test_a_layer_with_the_current_draft_distribution_is_rejected() -> None:
    """A layer needs the draft distribution of the step that pushed it."""

    def current_probs(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        depth = len(target.context)
        layers = tuple(
            replace(layer, draft_probs=lambda prefix: tree.draft_probs(prefix[depth:]))
            for layer in target.layers
        )
        return greedy_block(tree, replace(target, layers=layers), chooser)

    assert two_steps(greedy_block, Shape(2, 3, 1)) < 1e-12
    assert two_steps(current_probs, Shape(2, 3, 1)) > CAUGHT


def test_a_layer_that_keeps_its_number_of_drafts_is_rejected() -> None:
    """The drafts on the emitted token must be drawn anew, not kept."""

    def all_drafts(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        step = spectr_gbv(tree, target, chooser)
        layers = tuple(replace(layer, drafts=2) for layer in step.target.layers)
        return Step(step.outcome, replace(step.target, layers=layers))

    assert two_steps(spectr_gbv, Shape(2, 2, 2)) < 1e-12
    assert two_steps(all_drafts, Shape(2, 2, 2)) > CAUGHT


def test_selecting_for_the_plain_target_where_it_is_modified_is_rejected() -> None:
    """Where the target is modified, paths are selected for M, not for p, and b must say so."""

    assert two_steps(spectr_gbv, Shape(2, 2, 2), seed=10) < 1e-12
    assert two_steps(spectr_gbv_selecting_by_p, Shape(2, 2, 2), seed=10) > CAUGHT


def spectr_gbv_selecting_by_p(
    tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser
) -> Step:
    path: tuple[int, ...] = ()
    visits, state = [], target
    while drafts := tree.drafts(path):
        p = tree.target_probs(path)
        M = state.probs(p)
        honest = select_sampling(tree, path, M)
        x, _ = select_child(tree, path, p, chooser)
        visits.append(Visit(state, M, honest, len(drafts)))
        draw = entering_draw(tree, chooser, len(path), len(target.layers))
        state = state.entered(p, x, draw)
        path = (*path, x)
    return greedy_verification(tree, path, visits, state, chooser)


def select_sampling(tree: ReferenceTree, prefix: tuple[int, ...], M: Probs) -> Probs:
    q = tree.draft_probs(prefix)
    n = len(tree.drafts(prefix))
    return q if n == 1 else exact_transport(M, q, n).probs


def each_path_alone(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Every path is verified as if it were the only one; the longest acceptance is kept."""
    alone = ModifiedTarget(target.context)
    steps = (
        greedy_block(replace(tree, paths=(path,)), alone, Shift(chooser, k))
        for k, path in enumerate(tree.paths)
    )
    best = max(steps, key=lambda step: len(step.outcome.accepted))
    return Step(best.outcome, ModifiedTarget(best.target.context))


class Shift:
    """Gives every path numbers of its own."""

    def __init__(self, chooser: Chooser, path: int) -> None:
        self.chooser, self.path = chooser, path

    def choose(self, weights, purpose: Purpose, index: int) -> int:
        return self.chooser.choose(weights, purpose, 100 * self.path + index)


def test_verifying_every_path_alone_is_rejected() -> None:
    assert worst(each_path_alone, "random", Shape(3, 1, 2)) > CAUGHT


@pytest.mark.parametrize("length", [1, 2])
def test_the_published_rule_of_spectr_gbv_is_rejected_at_two_paths(length: int) -> None:
    """On one level the target is not modified, so the fault is the acceptance rule's alone."""
    shape = Shape(3, length, 2)
    published = stateless(published_spectr_gbv)
    assert worst(published, "random", Shape(3, 1, 1)) < 1e-12  # one path on one level is token
    assert worst(spectr_gbv, "random", shape) < 1e-12
    assert worst(published, "random", shape) > 10 * CAUGHT


def test_the_published_rule_of_spectr_gbv_accepts_less_than_its_theorem_claims() -> None:
    lost, total_variation = [], []
    for seed in range(100):
        model = Model(3, "random", seed)
        draft_sampling = output_probs(
            published_spectr_gbv, problem(DraftSampling.IID, model, Shape(3, 1, 2))
        )
        claim = float(claimed_length(model.p, model.q, 2, 1))
        lost.append(claim - float(acceptance_length(draft_sampling)))
        first = [sum(m for tokens, m in draft_sampling.items() if tokens[0] == x) for x in range(3)]
        off = sum(abs(a - b) for a, b in zip(first, model.p(()), strict=True)) / 2
        total_variation.append(float(off))
    assert np.mean(lost) > 0.01
    assert max(total_variation) > 0.1


def gbv_first_drafted(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """The best path by ratios alone: among equals the first drafted."""

    def ratios(path: tuple[int, ...]) -> tuple[float, ...]:
        dists = (
            (tree.target_probs(path[:i]), tree.draft_probs(path[:i])) for i in range(len(path))
        )
        return tuple(p[x] / q[x] for (p, q), x in zip(dists, path, strict=True))

    path = max(tree.paths, key=ratios)
    return block_verification(tree, path, skewed_probs(tree, path), chooser)


def test_gbv_that_breaks_ties_by_order_of_drafting_is_rejected() -> None:
    assert worst(stateless(gbv), "ties", Shape(4, 2, 2)) < 1e-12
    assert worst(stateless(gbv_first_drafted), "ties", Shape(4, 2, 2)) > CAUGHT


TOY = Problem(
    DraftSampling.IID,
    lambda prefix: (1 / 3, 2 / 3),
    lambda prefix: (2 / 3, 1 / 3),
    Shape(2, 3, 1),
)


class Numbers:
    """Decides by a request's stream; ``step_of`` and ``index_of`` say which number it takes."""

    def __init__(self, stream: RequestRng, step_of, index_of) -> None:
        self.stream, self.step_of, self.index_of = stream, step_of, index_of

    def choose(self, weights, purpose: Purpose, index: int) -> int:
        index = self.index_of(purpose, index)
        u = self.stream.draw(self.step_of(purpose), purpose, index + 1)[index]
        return inverse_cdf(weights, float(u))


def written(verify: Verify, seed: int, total: int, keys: Callable) -> tuple[int, ...]:
    """The first ``total`` tokens of one request, step after step."""
    tokens: tuple[int, ...] = ()
    step = 0
    while len(tokens) < total:
        numbers = Numbers(RequestRng(seed), *keys(step, len(tokens)))
        q, p = TOY.draft_probs, TOY.target_probs
        paths = draft_iid(q, 1, TOY.shape.length, numbers)
        tokens += verify(ReferenceTree(DraftSampling.IID, paths, p, q), numbers).tokens
        step += 1
    return tokens[:total]


def p_value(verify: Verify, keys: Callable, requests: int = 3000, total: int = 4) -> float:
    """G-test of the joint distribution of the first tokens."""
    joint = target_joint(TOY.target_probs, total)
    cells = [list(joint).index(written(verify, seed, total, keys)) for seed in range(requests)]
    return g_test(cells, np.array(list(joint.values()))).p_value


# Which step and index a number belongs to, at a step where so many tokens are written.
def by_step(step: int, written: int):
    return lambda purpose: step, lambda purpose, index: index


def always_the_same(step: int, written: int):
    return by_step(0, written)


def by_position(step: int, written: int):
    """Numbers belong to text positions: those of rejected positions come again."""
    return lambda purpose: 0, lambda purpose, index: index + written


@pytest.mark.parametrize("verify", [token, otbv], ids=["token", "otbv"])
def test_numbers_of_every_step_are_its_own(verify: Verify) -> None:
    assert p_value(verify, by_step) > 1e-3


@pytest.mark.parametrize(
    ("verify", "keys"), [(token, always_the_same), (otbv, always_the_same), (otbv, by_position)]
)
def test_numbers_used_again_in_the_next_step_are_rejected(verify: Verify, keys: Callable) -> None:
    assert p_value(verify, keys) < 1e-9


def test_ranking_of_ties_is_shared() -> None:
    """The exact fractions of the controls: two tokens of one ratio, ranked by id."""
    p, q = constant("1/2", "1/4", "1/4")(()), constant("1/4", "3/8", "3/8")(())
    assert ranked(p, q) == (1, 2, 0)

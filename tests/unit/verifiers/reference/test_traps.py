"""Traps seen in other implementations: each test fails when its trap is planted.

Every test states what holds, then plants the trap and shows that the same check catches it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tables import Model, Shape, max_error, problem

from eaglegbv.rng import Purpose
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers import transport as transport_module
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.block import block, block_verification
from eaglegbv.verifiers.otbv import otbv
from eaglegbv.verifiers.proof.chooser import (
    Chooser,
    Prefix,
    Probs,
    ProbsAt,
    UniformChooser,
    exact_probs,
    inverse_cdf,
    residual,
)
from eaglegbv.verifiers.proof.enumeration import (
    Problem,
    Verify,
    completed,
    draft,
    stateless,
    target_joint,
)
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.registry import ALL_VERIFIERS, REFERENCES
from eaglegbv.verifiers.specinfer import specinfer
from eaglegbv.verifiers.stateful import ModifiedTarget
from eaglegbv.verifiers.target_only import target_only
from eaglegbv.verifiers.token import token
from eaglegbv.verifiers.transport import exact_transport, select_draft

CAUGHT = 1e-3


def error(verify: Verify, case: Problem) -> float:
    return max_error(stateless(verify), [case], case.shape.length + 1)


def worst(
    verify: Verify, draft_sampling: DraftSampling, kind: str, shape: Shape, seeds: int = 6
) -> float:
    cases = [problem(draft_sampling, Model(shape.vocab, kind, s), shape) for s in range(seeds)]
    return max(error(verify, case) for case in cases)


def test_ties_are_ordered_alike_in_selection_and_distribution() -> None:
    """Planted: the distribution ranks ties by token id, the selection by descending id."""

    def otbv_reversed_ties(tree: ReferenceTree, chooser: Chooser) -> Outcome:
        path, dists = (), []
        while drafts := tree.drafts(path):
            p, q = tree.target_probs(path), tree.draft_probs(path)
            node = exact_transport(p, q, len(drafts))
            order = tuple(sorted(node.order, key=lambda x: (p[x] / q[x], -x)))
            other = replace(
                node,
                order=order,
                q=tuple(q[x] for x in order),
                v=node.v,
                b=tuple(node.probs[x] for x in order),
            )
            dists.append(node.probs)
            path = (*path, select_draft(other, drafts, len(path), len(tree.paths), chooser))
        return block_verification(tree, path, dists, chooser)

    assert worst(otbv, DraftSampling.IID, "ties", Shape(4, 1, 2), seeds=40) < 1e-12
    assert worst(otbv_reversed_ties, DraftSampling.IID, "ties", Shape(4, 1, 2), seeds=40) > CAUGHT


def uniforms(u: float, paths: int, length: int) -> VerifyUniforms:
    return VerifyUniforms(
        selection=torch.full((1, length, paths, 2), u, dtype=torch.float64),
        acceptance=torch.full((1, max(1, paths * length)), u, dtype=torch.float64),
        correction=torch.full((1,), u, dtype=torch.float64),
    )


class Planted:
    """A chooser with an inverse CDF of its own."""

    def __init__(self, u: float, inverse: Callable[[list[float], float], int]) -> None:
        self.u, self.inverse = u, inverse

    def choose(self, weights, purpose: Purpose, index: int) -> int:
        return self.inverse([float(w) for w in weights], self.u)


class OutsideVocabulary(Exception):
    pass


def impossible(make_chooser: Callable[[ReferenceTree], Chooser], name: str) -> bool:
    """Whether some committed token has target probability 0."""
    verify, rule = REFERENCES[name], ALL_VERIFIERS[name]
    for seed in range(20):
        model = Model(4, "zeros", seed)
        shape = Shape(4, 2, 1 if rule.max_paths == 1 else 2)
        draft_sampling = min(rule.draft_samplings)
        for paths in exact_probs(lambda c, m=model, s=shape, w=draft_sampling: draft(w, m.q, s, c)):
            tree = ReferenceTree(draft_sampling, paths, model.p, model.q)
            try:
                step = verify(tree, ModifiedTarget(), make_chooser(tree))
                tokens = step.outcome.tokens
            except OutsideVocabulary:
                return True
            if any(model.p(tokens[:i])[x] == 0 for i, x in enumerate(tokens)):
                return True
    return False


STATELESS = [n for n in ALL_VERIFIERS if n != "spectr_gbv"]


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0), 1.0])
def test_extreme_numbers_never_commit_an_impossible_token(name: str, u: float) -> None:
    """u = 0 meets h = 0, and u = 1 (a number rounded up) the end of the distribution."""
    assert not impossible(
        lambda tree: UniformChooser(uniforms(u, len(tree.paths), tree.length)), name
    )


def test_accepting_u_equal_to_h_commits_impossible_tokens() -> None:
    """Planted: u <= h."""

    def at_most(weights: list[float], u: float) -> int:
        return int(np.searchsorted(np.cumsum(weights), u * sum(weights), side="left"))

    assert impossible(lambda tree: Planted(0.0, at_most), "token")


def test_a_number_that_rounds_up_to_one_leaves_the_vocabulary() -> None:
    """Planted: a plain search in the cumulative sums."""

    def plain(weights: list[float], u: float) -> int:
        index = int(np.searchsorted(np.cumsum(weights), u * sum(weights), side="right"))
        if index == len(weights):
            raise OutsideVocabulary
        return index

    assert impossible(lambda tree: Planted(1.0, plain), "token")


def test_a_vanishing_residual_gives_a_token_of_the_target() -> None:
    """p = q up to rounding, and rounding rejects: the answer must be possible for the target.

    Planted: an empty residual that yields token 0, a uniform draw, or a division by its sum.
    """
    p: Probs = (0.0, 0.3, 0.7)
    assert sum(residual(1, p, p)) == 0

    def rejecting(weights: list[float], u: float) -> int:
        return 1 if len(weights) == 2 else inverse_cdf(weights, u)

    tree = ReferenceTree(DraftSampling.IID, ((1,),), lambda prefix: p, lambda prefix: p)
    for verify in (token, block, specinfer):
        for u in (0.0, 0.5, 1.0):
            outcome = verify(tree, Planted(u, rejecting))
            assert outcome.accepted == ()
            assert p[outcome.token] > 0

    def to_token_0(p: Probs, q: Probs, u: float) -> int:
        weights = np.array(residual(1, p, q))
        return int(np.argmax(np.cumsum(weights) > u * weights.sum()))

    def uniformly(p: Probs, q: Probs, u: float) -> int:
        return inverse_cdf([1.0] * len(p), u)

    def by_its_sum(p: Probs, q: Probs, u: float) -> int:
        weights = np.array(residual(1, p, q))
        with np.errstate(invalid="ignore"):
            dist = weights / weights.sum()
        assert np.isnan(dist).all()
        return int(np.argmax(np.cumsum(dist) > u))

    for planted in (to_token_0, uniformly, by_its_sum):
        assert p[planted(p, p, 0.2)] == 0


def test_ratio_tests_on_children_that_were_not_drawn() -> None:
    """Planted: the most likely tokens are judged as if they had been sampled from q."""

    def as_if_drawn(tree: ReferenceTree, chooser: Chooser) -> Outcome:
        return specinfer(replace(tree, draft_sampling=DraftSampling.WOR), chooser)

    assert worst(target_only, DraftSampling.FIXED, "random", Shape(3, 2, 2)) < 1e-12
    assert worst(as_if_drawn, DraftSampling.FIXED, "random", Shape(3, 2, 2)) > CAUGHT


@pytest.mark.parametrize("name", ["otbv", "gbv", "spectr", "specinfer", "global_resolution"])
def test_duplicated_paths_count_as_often_as_they_were_drawn(name: str) -> None:
    """Planted: equal paths are merged before verification."""
    verify = REFERENCES[name]

    def merged(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser):
        return verify(replace(tree, paths=tuple(dict.fromkeys(tree.paths))), target, chooser)

    cases = [problem(DraftSampling.IID, Model(3, "random", s), Shape(3, 1, 3)) for s in range(4)]
    assert max(max_error(verify, [case], 2) for case in cases) < 1e-12
    assert max(max_error(merged, [case], 2) for case in cases) > CAUGHT


def plain_tree(paths: tuple[Prefix, ...], model: Model) -> ReferenceTree:
    return ReferenceTree(DraftSampling.IID, paths, model.p, model.q)


def error_of(verify: Verify, model: Model, trees: list[tuple[ReferenceTree, float]]) -> float:
    """Error where the trees come with these probabilities, whatever q they claim."""
    outputs: dict[ModifiedTarget, float] = {}
    for tree, mass in trees:
        for outcome, share in exact_probs(lambda c, tree=tree: verify(tree, c)).items():
            state = ModifiedTarget(outcome.tokens)
            outputs[state] = outputs.get(state, 0) + mass * share
    full = completed(outputs, model.p, 3)
    return max(abs(full.get(k, 0) - mass) for k, mass in target_joint(model.p, 3).items())


def test_the_draft_distribution_handed_on_is_the_one_sampled() -> None:
    """Planted: sampling from q in bfloat16, or from the top of q, and handing on q itself."""
    model, shape = Model(4, "random", 3), Shape(4, 2, 1)

    def rounded(prefix: Prefix) -> Probs:
        dist = torch.tensor(model.q(prefix)).bfloat16().to(torch.float64)
        return tuple((dist / dist.sum()).tolist())

    def top_3(prefix: Prefix) -> Probs:
        dist = np.array(model.q(prefix))
        dist[dist.argmin()] = 0.0
        return tuple((dist / dist.sum()).tolist())

    def drawn_from(q: ProbsAt) -> list[tuple[ReferenceTree, float]]:
        drawn = exact_probs(lambda c: draft(DraftSampling.IID, q, shape, c))
        return [(plain_tree(paths, model), mass) for paths, mass in drawn.items()]

    for verify in (token, block):
        assert error_of(verify, model, drawn_from(model.q)) < 1e-12
        assert error_of(verify, model, drawn_from(rounded)) > 1e-5
        assert error_of(verify, model, drawn_from(top_3)) > CAUGHT


def test_a_truncated_draft_distribution_is_lossless_if_handed_on() -> None:
    """The top of q, renormalised and zero elsewhere, is a draft distribution like any other."""
    model, shape = Model(4, "random", 3), Shape(4, 2, 2)

    def top_2(prefix: Prefix) -> Probs:
        dist = np.array(model.q(prefix))
        dist[np.argsort(dist)[:2]] = 0.0
        return tuple((dist / dist.sum()).tolist())

    for name in ("gbv", "otbv", "spectr", "specinfer", "traversal"):
        case = Problem(DraftSampling.IID, model.p, top_2, shape)
        assert max_error(REFERENCES[name], [case], 3) < 1e-12


def test_the_bonus_token_follows_the_warped_distribution() -> None:
    """Planted: the token after a fully accepted path is drawn from the unwarped logits."""
    temperature = SamplingParams(temperature=0.5).temperature
    base = Model(3, "random", 4)

    def warped(prefix: Prefix) -> Probs:
        dist = np.array(base.p(prefix)) ** (1 / temperature)
        return tuple((dist / dist.sum()).tolist())

    def unwarped_leaf(verify: Verify) -> Verify:
        def planted(tree: ReferenceTree, chooser: Chooser) -> Outcome:
            def p(prefix: Prefix) -> Probs:
                return base.p(prefix) if len(prefix) == 2 else warped(prefix)

            return verify(replace(tree, target_probs=p), chooser)

        return planted

    case = Problem(DraftSampling.IID, warped, base.q, Shape(3, 2, 1))
    for verify in (token, block):
        assert error(verify, case) < 1e-12
        assert error(unwarped_leaf(verify), case) > CAUGHT


def test_paths_stop_by_what_is_emitted_only() -> None:
    """An end-of-sequence token may end its path; a path must not end *because* one would follow.

    Planted: a path whose next token would be the end token stops before it.
    """
    model, shape = Model(3, "random", 2), Shape(3, 2, 1)
    case = problem(DraftSampling.IID, model, shape, stop=lambda prefix: 0 in prefix)
    assert error(block, case) < 1e-12

    drawn = exact_probs(lambda c: draft(DraftSampling.IID, model.q, shape, c))
    cut = [(path[: path.index(0)] if 0 in path else path, mass) for (path,), mass in drawn.items()]
    trees = [(plain_tree((path,), model), mass) for path, mass in cut]
    assert error_of(block, model, trees) > CAUGHT


def test_padding_of_the_vocabulary_is_never_committed() -> None:
    """A drafter may propose padding ids; the target has no mass there.

    Planted: padding logits of zero instead of minus infinity.
    """

    def target(padding: float) -> Probs:
        dist = torch.softmax(torch.tensor([1.0, 0.5, padding, padding], dtype=torch.float64), 0)
        return tuple(dist.tolist())

    def committed(padding: float) -> set[int]:
        tree_probs = target(padding)
        case = Problem(
            DraftSampling.IID,
            lambda prefix: tree_probs,
            lambda prefix: (0.2, 0.3, 0.1, 0.4),
            Shape(4, 2, 2),
        )
        tokens: set[int] = set()
        for paths in exact_probs(
            lambda c: draft(DraftSampling.IID, case.draft_probs, case.shape, c)
        ):
            tree = ReferenceTree(DraftSampling.IID, paths, case.target_probs, case.draft_probs)
            for outcome in exact_probs(lambda c, tree=tree: otbv(tree, c)):
                tokens |= set(outcome.tokens)
        return tokens

    assert committed(-float("inf")) == {0, 1}
    assert committed(0.0) == {0, 1, 2, 3}


def test_dividing_by_q_twice_breaks_ties_differently() -> None:
    """Why ratio and order are computed once: a second division may reorder a tie."""
    rng = np.random.default_rng(0)
    reordered = 0
    for _ in range(200):
        counts = rng.integers(1, 9, size=4)
        q = counts / counts.sum()
        p = q.copy()
        again = q / np.float64(q.sum() * 3.0) * 3.0
        reordered += transport_module.ranked(tuple(p), tuple(q)) != transport_module.ranked(
            tuple(p), tuple(again)
        )
    assert reordered > 0

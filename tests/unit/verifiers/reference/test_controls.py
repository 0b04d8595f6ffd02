"""Rules that are wrong on purpose: the tests of losslessness must reject every one of them.

The mistakes are those seen in other implementations. What holds is checked first, and then that the
same check catches the mistake.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.g_test import g_test
from support.references import UniformChooser, draws_of_paths, inverse_cdf
from support.tables import Model, Shape, max_error, problem

from eaglegbv.eval.published import spectr_gbv_published
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.block import block, block_verification
from eaglegbv.verifiers.gbv import gbv, skewed_probs
from eaglegbv.verifiers.greedy_block import Visit, greedy_block, greedy_verification
from eaglegbv.verifiers.otbv import otbv, select_child
from eaglegbv.verifiers.proof import chooser as choosing
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix, Probs, exact_probs
from eaglegbv.verifiers.proof.enumeration import Problem, completed, draft, stateless, target_joint
from eaglegbv.verifiers.proof.tree import Draws, Outcome, ReferenceTree, Verify
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.specinfer import specinfer
from eaglegbv.verifiers.stateful import ModifiedTarget, Step, VerifyWithState, entering_draw
from eaglegbv.verifiers.target_only import target_only
from eaglegbv.verifiers.token import token
from eaglegbv.verifiers.transport import exact_transport, select_draft

CAUGHT = 1e-3
"""Far above the tolerance of 1e-12: a control that errs by less proves little."""

IID = DraftSampling.IID


# --- wrong rules, judged by the distribution of what they commit
def block_without_weight(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """GBV's Equation 5 as printed: R = sum (p - q)+, without w."""
    with patch("eaglegbv.verifiers.block.residual", lambda w, p, q: choosing.residual(1, p, q)):
        return block(tree, chooser)


def forgetful(verify: VerifyWithState) -> VerifyWithState:
    """A greedy rule without its modified target."""

    def wrong(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        step = verify(tree, ModifiedTarget(target.context), chooser)
        return Step(step.outcome, ModifiedTarget(step.target.context))

    return wrong


def gbv_first_drafted(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """The best path by ratios alone: among equals the first drafted."""

    def ratios(path: tuple[int, ...]) -> tuple[float, ...]:
        dists = (
            (tree.target_probs(path[:i]), tree.draft_probs(path[:i])) for i in range(len(path))
        )
        return tuple(p[x] / q[x] for (p, q), x in zip(dists, path, strict=True))

    path = max(tree.paths, key=ratios)
    return block_verification(tree, path, skewed_probs(tree, path), chooser)


def otbv_reversed_ties(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """The distribution ranks ties by token id, the selection by descending id."""
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
        path = (*path, select_draft(other, drafts, len(path), tree.most_draws, chooser))
    return block_verification(tree, path, dists, chooser)


def as_if_drawn(tree: ReferenceTree, chooser: Chooser) -> Outcome:
    """The most likely tokens are judged by p/q as if they had been sampled from q."""
    return specinfer(replace(tree, draft_sampling=DraftSampling.WOR), chooser)


def with_paths(tree: ReferenceTree, paths: Iterable[Prefix]) -> ReferenceTree:
    """The same tree of other paths."""
    return replace(tree, draws=draws_of_paths(tuple(paths)), drawing=None)


def each_path_alone(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Every path is verified as if it were the only one; the longest acceptance is kept."""
    alone = ModifiedTarget(target.context)
    steps = (
        greedy_block(with_paths(tree, [path]), alone, Shift(chooser, k))
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


def duplicates_merged(verify: VerifyWithState) -> VerifyWithState:
    """Equal paths count once."""

    def wrong(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
        return verify(with_paths(tree, dict.fromkeys(tree.paths)), target, chooser)

    return wrong


WRONG = {
    # right, wrong, kind of distributions, shape
    "GBV's Equation 5 without w": (
        stateless(block), stateless(block_without_weight), "random", Shape(3, 3, 1)),
    "greedy_block without its modified target": (
        greedy_block, forgetful(greedy_block), "random", Shape(3, 2, 1)),
    "spectr_gbv without its modified target": (
        greedy_block, forgetful(greedy_block), "random", Shape(2, 2, 2)),
    "spectr_gbv as published": (
        greedy_block, stateless(spectr_gbv_published), "random", Shape(3, 1, 2)),
    "first-drafted ties": (stateless(gbv), stateless(gbv_first_drafted), "ties", Shape(3, 2, 2)),
    "ties ordered in two ways": (
        stateless(otbv), stateless(otbv_reversed_ties), "ties", Shape(4, 1, 2)),
    "ratio tests on children not drawn": (
        stateless(target_only), stateless(as_if_drawn), "random", Shape(3, 2, 2)),
    "every path verified alone": (greedy_block, each_path_alone, "random", Shape(3, 1, 2)),
    **{f"duplicated paths counted once, {name}": (
        REFERENCES[name], duplicates_merged(REFERENCES[name]), "random", Shape(3, 1, 3))
       for name in ("otbv", "gbv", "spectr", "specinfer", "global_resolution")},
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_rule_is_rejected(case: str) -> None:
    right, wrong, kind, shape = WRONG[case]
    sampling = DraftSampling.FIXED if "not drawn" in case else IID
    seeds = 40 if "two ways" in case else 3
    cases = [problem(sampling, Model(shape.vocab, kind, s), shape) for s in range(seeds)]
    for verify, holds in ((right, True), (wrong, False)):
        error = max(max_error(verify, [one], shape.length + 1) for one in cases)
        assert error < 1e-12 if holds else error > CAUGHT


# --- wrong layers, over two steps whose draft distributions differ
def current_probs(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """A layer needs the draft distribution of the step that pushed it, not the current one."""
    depth = len(target.context)
    layers = tuple(
        replace(layer, draft_probs=lambda prefix: tree.draft_probs(prefix[depth:]))
        for layer in target.layers
    )
    return greedy_block(tree, replace(target, layers=layers), chooser)


def all_drafts(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """The drafts on the emitted token must be drawn anew, not kept."""
    step = greedy_block(tree, target, chooser)
    layers = tuple(replace(layer, drafts=2) for layer in step.target.layers)
    return Step(step.outcome, replace(step.target, layers=layers))


def selecting_by_p(tree: ReferenceTree, target: ModifiedTarget, chooser: Chooser) -> Step:
    """Where the target is modified, paths are selected for M, not for p, and b must say so."""
    path: tuple[int, ...] = ()
    visits, state = [], target
    while drafts := tree.drafts(path):
        p, q, n = tree.target_probs(path), tree.draft_probs(path), len(drafts)
        M = state.probs(p)
        honest = q if n == 1 else exact_transport(M, q, n).probs
        x, _ = select_child(tree, path, p, chooser)
        visits.append(Visit(state, M, honest, n))
        draw = entering_draw(tree, chooser, len(path), len(target.layers))
        state = state.entered(p, x, draw)
        path = (*path, x)
    return greedy_verification(tree, path, visits, state, chooser)


@pytest.mark.parametrize(
    ("right", "wrong", "shape", "seed"),
    [
        (greedy_block, current_probs, Shape(2, 3, 1), 1),
        (greedy_block, all_drafts, Shape(2, 2, 2), 1),
        (greedy_block, selecting_by_p, Shape(2, 2, 2), 10),
    ],
    ids=["current draft distribution", "kept number of drafts", "selection by p"],
)
def test_a_wrong_layer_is_rejected(right, wrong, shape, seed) -> None:
    first, second = (Model(shape.vocab, "random", s) for s in (seed, seed + 1))
    case = problem(IID, first, shape)
    cases = [case, replace(case, draft_probs=second.q)]
    assert max_error(right, cases, 4) < 1e-12
    assert max_error(wrong, cases, 4) > CAUGHT


# --- wrong use of numbers
TOY = Problem(IID, lambda prefix: (1 / 3, 2 / 3), lambda prefix: (2 / 3, 1 / 3), Shape(2, 3, 1))


class Numbers:
    """Decides by a request's stream; ``step_of`` and ``index_of`` say which number it takes."""

    def __init__(self, rng: RequestRng, step_of, index_of) -> None:
        self.rng, self.step_of, self.index_of = rng, step_of, index_of

    def choose(self, weights, purpose: Purpose, index: int) -> int:
        index = self.index_of(purpose, index)
        u = self.rng.draw(self.step_of(purpose), purpose, index + 1)[index]
        return inverse_cdf(weights, float(u))


def written(verify: Verify, seed: int, total: int, keys: Callable) -> tuple[int, ...]:
    """The first ``total`` tokens of one request, step after step."""
    tokens: tuple[int, ...] = ()
    step = 0
    while len(tokens) < total:
        numbers = Numbers(RequestRng(seed), *keys(step, len(tokens)))
        q, p = TOY.draft_probs, TOY.target_probs
        draws = draft(IID, q, TOY.shape, numbers)
        tokens += verify(ReferenceTree(IID, draws, p, q), numbers).tokens
        step += 1
    return tokens[:total]


# Which step and index a number belongs to, at a step where so many tokens are written.
def by_step(step: int, written: int):
    return lambda purpose: step, lambda purpose, index: index


def always_the_same(step: int, written: int):
    return by_step(0, written)


def by_position(step: int, written: int):
    """Numbers belong to text positions: those of rejected positions come again."""
    return lambda purpose: 0, lambda purpose, index: index + written


@pytest.mark.parametrize(
    ("verify", "keys"), [(token, by_step), (token, always_the_same), (otbv, by_position)]
)
def test_numbers_used_again_in_the_next_step_are_rejected(verify: Verify, keys: Callable) -> None:
    """By a G-test of the joint distribution of the first tokens."""
    joint = target_joint(TOY.target_probs, 4)
    requests = range(2000 if keys is by_position else 1000)
    cells = [list(joint).index(written(verify, seed, 4, keys)) for seed in requests]
    p_value = g_test(cells, np.array(list(joint.values()))).p_value
    assert p_value > 1e-3 if keys is by_step else p_value < 1e-9


class Planted:
    """A chooser with an inverse CDF of its own."""

    def __init__(self, u: float, inverse: Callable[[list[float], float], int]) -> None:
        self.u, self.inverse = u, inverse

    def choose(self, weights, purpose: Purpose, index: int) -> int:
        return self.inverse([float(w) for w in weights], self.u)


class OutsideVocabulary(Exception):
    pass


def impossible(make_chooser: Callable[[ReferenceTree], Chooser]) -> bool:
    """Whether some token that the rule ``token`` commits has target probability 0."""
    for seed in range(20):
        model, shape = Model(4, "zeros", seed), Shape(4, 2, 1)
        for draws in exact_probs(lambda c, m=model, s=shape: draft(IID, m.q, s, c)):
            tree = ReferenceTree(IID, draws, model.p, model.q)
            try:
                tokens = token(tree, make_chooser(tree)).tokens
            except OutsideVocabulary:
                return True
            if any(model.p(tokens[:i])[x] == 0 for i, x in enumerate(tokens)):
                return True
    return False


def at_most(weights: list[float], u: float) -> int:
    """Accepts u <= h, also where both are 0."""
    return int(np.searchsorted(np.cumsum(weights), u * sum(weights), side="left"))


def plain_search(weights: list[float], u: float) -> int:
    """Leaves the vocabulary where a number was rounded up to 1."""
    index = int(np.searchsorted(np.cumsum(weights), u * sum(weights), side="right"))
    if index == len(weights):
        raise OutsideVocabulary
    return index


@pytest.mark.parametrize(("u", "planted"), [(0.0, at_most), (1.0, plain_search)])
def test_extreme_numbers_commit_impossible_tokens(u: float, planted: Callable) -> None:
    full = torch.full((1, 2, 1, 2), u, dtype=torch.float64)
    uniforms = VerifyUniforms(full, full[:, :, 0, 0], full[:, 0, 0, 0])
    assert not impossible(lambda tree: UniformChooser(uniforms))
    assert impossible(lambda tree: Planted(u, planted))


def test_a_vanishing_residual_gives_a_token_of_the_target() -> None:
    """p = q up to rounding, and rounding rejects: the answer must be possible for the target.

    Planted: an empty residual that yields token 0, a uniform draw, or a division by its sum.
    """
    p: Probs = (0.0, 0.3, 0.7)
    weights = np.array(choosing.residual(1, p, p))
    assert weights.sum() == 0

    def rejecting(weights: list[float], u: float) -> int:
        return 1 if len(weights) == 2 else inverse_cdf(weights, u)

    tree = ReferenceTree(IID, (((1,),),), lambda prefix: p, lambda prefix: p)
    for verify in (token, block, specinfer):
        for u in (0.0, 0.5, 1.0):
            outcome = verify(tree, Planted(u, rejecting))
            assert outcome.accepted == ()
            assert p[outcome.token] > 0

    with np.errstate(invalid="ignore"):
        by_its_sum = int(np.argmax(np.cumsum(weights / weights.sum()) > 0.2))
    to_token_0 = int(np.argmax(np.cumsum(weights) > 0.2 * weights.sum()))
    uniformly = inverse_cdf([1.0] * len(p), 0.2)
    assert [p[token] for token in (to_token_0, uniformly, by_its_sum)] == [0, 0, 0]


# --- trees that are not what they are said to be
def error_of(verify: Verify, model: Model, drawn: dict[Draws, float]) -> float:
    """Error where the draws come with these probabilities, whatever q they claim."""
    outputs: dict[ModifiedTarget, float] = {}
    for draws, mass in drawn.items():
        tree = ReferenceTree(IID, draws, model.p, model.q)
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

    def drawn_from(q: choosing.ProbsAt) -> dict[Draws, float]:
        return exact_probs(lambda c: draft(IID, q, shape, c))

    for verify in (token, block):
        assert error_of(verify, model, drawn_from(model.q)) < 1e-12
        assert error_of(verify, model, drawn_from(rounded)) > 1e-5
        assert error_of(verify, model, drawn_from(top_3)) > CAUGHT


def test_paths_stop_by_what_is_emitted_only() -> None:
    """An end-of-sequence token may end its path; a path must not end *because* one would follow.

    Planted: a path whose next token would be the end token stops before it.
    """
    model, shape = Model(3, "random", 2), Shape(3, 2, 1)
    case = problem(IID, model, shape, stop=lambda prefix: 0 in prefix)
    assert max_error(stateless(block), [case], 3) < 1e-12
    cut: dict[Draws, float] = {}
    for draws, mass in exact_probs(lambda c: draft(IID, model.q, shape, c)).items():
        [path] = draws[-1]
        kept = draws_of_paths((path[: path.index(0)] if 0 in path else path,))
        cut[kept] = cut.get(kept, 0) + mass
    assert error_of(block, model, cut) > CAUGHT


def test_the_bonus_token_follows_the_warped_distribution() -> None:
    """Planted: the token after a fully accepted path is drawn from the unwarped logits."""
    temperature = SamplingParams(temperature=0.5).temperature
    base = Model(3, "random", 4)

    def warped(prefix: Prefix) -> Probs:
        dist = np.array(base.p(prefix)) ** (1 / temperature)
        return tuple((dist / dist.sum()).tolist())

    def unwarped_leaf(prefix: Prefix) -> Probs:
        return base.p(prefix) if len(prefix) == 2 else warped(prefix)

    case = Problem(IID, warped, base.q, Shape(3, 2, 1))
    for verify in (token, block):

        def planted(tree: ReferenceTree, chooser: Chooser, verify: Verify = verify) -> Outcome:
            return verify(replace(tree, target_probs=unwarped_leaf), chooser)

        assert max_error(stateless(verify), [case], 3) < 1e-12
        assert max_error(stateless(planted), [case], 3) > CAUGHT


def test_padding_of_the_vocabulary_is_never_committed() -> None:
    """A drafter may propose padding ids; the target has no mass there.

    Planted: padding logits of zero instead of minus infinity.
    """

    def committed(padding: float) -> set[int]:
        logits = torch.tensor([1.0, 0.5, padding, padding], dtype=torch.float64)
        p: Probs = tuple(torch.softmax(logits, 0).tolist())
        case = Problem(IID, lambda prefix: p, lambda prefix: (0.2, 0.3, 0.1, 0.4), Shape(4, 2, 2))
        tokens: set[int] = set()
        for draws in exact_probs(lambda c: draft(IID, case.draft_probs, case.shape, c)):
            tree = ReferenceTree(IID, draws, case.target_probs, case.draft_probs)
            for outcome in exact_probs(lambda c, tree=tree: otbv(tree, c)):
                tokens |= set(outcome.tokens)
        return tokens

    assert committed(-float("inf")) == {0, 1}
    assert committed(0.0) == {0, 1, 2, 3}

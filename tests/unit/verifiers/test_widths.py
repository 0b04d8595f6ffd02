"""Trees with several drafts at every node: proofs by enumeration, and mistakes that they catch."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.batched_trees import build_batch, outcomes, random_trees, reference_outcomes
from support.grown_trees import grown, prefixes
from support.references import inverse_cdf
from support.tables import Model, Shape, max_error, problem

from eaglegbv.config import Plan
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.errors import SamplingMismatch
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling
from eaglegbv.verification import check_plan
from eaglegbv.verifiers.otbv import otbv
from eaglegbv.verifiers.proof.chooser import Chooser, Prefix, Probs, exact_probs
from eaglegbv.verifiers.proof.enumeration import completed, draft, stateless, target_joint
from eaglegbv.verifiers.proof.tree import Draws, Outcome, ReferenceTree, Verify
from eaglegbv.verifiers.registry import ALL_VERIFIERS, REFERENCES, make_verifier
from eaglegbv.verifiers.specinfer import specinfer
from eaglegbv.verifiers.spectr import spectr
from eaglegbv.verifiers.stateful import ModifiedTarget

IID, WOR, GREEDY = DraftSampling.IID, DraftSampling.WOR, DraftSampling.GREEDY
TOLERANCE, CAUGHT = 1e-12, 1e-3
WIDTHS = {name: ALL_VERIFIERS[name].any_widths or frozenset() for name in REFERENCES}
TAKEN = [(name, own) for name, samplings in WIDTHS.items() for own in sorted(samplings)]
REFUSED = sorted(name for name, samplings in WIDTHS.items() if not samplings)

every_pair = pytest.mark.parametrize(("name", "draft_sampling"), TAKEN)


def shaped(vocab: int, *widths: int) -> Shape:
    return Shape(vocab, len(widths), int(np.prod(widths)), widths)


def ends(prefix: Prefix) -> bool:
    return prefix[-1:] == (0,)


@every_pair
def test_widths_by_depth_are_lossless(name: str, draft_sampling: DraftSampling) -> None:
    """Several drafts below the root, at one depth alone, and with early stops."""
    for shape in (shaped(3, 1, 2), shaped(2, 2, 2), shaped(2, 1, 1, 2)):
        for kind in ("random", "zeros", "ties"):
            case = problem(draft_sampling, Model(shape.vocab, kind, 3), shape)
            total = shape.length + 1
            assert max_error(REFERENCES[name], [case], total) < TOLERANCE, (shape, kind)
            stopping = replace(case, stop=ends)
            assert max_error(REFERENCES[name], [stopping], total) < TOLERANCE, (shape, kind)


def test_every_rule_says_which_widths_it_takes_and_none_of_a_sampling_that_it_refuses() -> None:
    for rule in map(ALL_VERIFIERS.__getitem__, REFERENCES):
        assert rule.any_widths is not None
        assert rule.any_widths <= rule.draft_samplings
    assert dict(TAKEN).keys() >= {"otbv", "specinfer", "traversal", "target_only"}


def test_rules_of_paths_would_be_wrong_on_widths() -> None:
    """Which is why the table leaves them out: gbv's distribution is that of independent paths."""
    for shape in (shaped(2, 1, 2), shaped(2, 2, 2)):
        case = problem(IID, Model(2, "random", 0), shape)
        assert max_error(REFERENCES["gbv"], [case], 3) > CAUGHT


@pytest.mark.parametrize("name", REFUSED)
def test_rules_of_paths_refuse_widths(name: str) -> None:
    sampling = ALL_VERIFIERS[name].default_sampling
    if sampling is IID:
        plan = Plan(verifier=name, widths=(1, 2))
        with pytest.raises(SamplingMismatch, match=f"verifier='{name}'.*widths.*K paths"):
            check_plan(plan, TabularDrafter)
    rng = np.random.default_rng(0)
    batch = build_batch(random_trees(IID, rng, 4, shaped(3, 1, 2)), 3, rng)
    if name in {"gbv", "block", "token"}:
        with pytest.raises(SamplingMismatch):
            make_verifier(name).verify(batch.tree, batch.target, batch.uniforms)


@every_pair
def test_batches_of_widths_decide_as_the_reference(
    name: str, draft_sampling: DraftSampling
) -> None:
    rng = np.random.default_rng(len(name))
    verifier = make_verifier(name)
    for widths in ((1, 2), (2, 2), (2, 1, 2), (1, 3)):
        trees = random_trees(draft_sampling, rng, 16, shaped(5, *widths))
        batch = build_batch(trees, 5, rng)
        verdict = verifier.verify(batch.tree, batch.target, batch.uniforms)
        assert outcomes(batch.tree, verdict) == reference_outcomes(name, batch)


def test_columns_are_judged_as_other_trees_are() -> None:
    """Paths of columns are found at once, those of other trees from their leaves."""
    rng = np.random.default_rng(4)
    for name in ("otbv", "traversal", "specinfer", "spectr"):
        batch = build_batch(random_trees(IID, rng, 16, Shape(4, 3, 3)), 4, rng)
        verifier = make_verifier(name)
        assert batch.tree.columns
        alike = [
            outcomes(tree, verifier.verify(tree, batch.target, batch.uniforms))
            for tree in (batch.tree, replace(batch.tree, columns=False))
        ]
        assert alike[0] == alike[1]


# --- growth
class Numbers:
    """Decides drafts by a matrix ``[draws, depth]`` of numbers, as growth does."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers.flatten()

    def choose(self, weights: Probs, purpose: Purpose, index: int) -> int:
        assert purpose is Purpose.DRAFT
        return inverse_cdf(weights, self.numbers[index])


@pytest.mark.parametrize("widths", [(3, 2, 2, 1), (1, 1, 3, 1), (2, 2), (1, 4)])
def test_widths_grow_as_the_reference_draws(widths: tuple[int, ...]) -> None:
    """Draw for draw, and what is drawn from at the nodes."""
    plan, vocab = Plan(widths=widths), 4
    rng = np.random.default_rng(len(widths))
    models = [Model(vocab, "random", seed) for seed in range(3)]
    uniforms = rng.random((len(models), plan.paths, plan.depth))
    tokens = tuple(range(vocab))
    tree = grown(plan, IID, [lambda p, m=m: (tokens, m.q(p)) for m in models], uniforms)
    assert not tree.columns
    for b, model in enumerate(models):
        shape = shaped(vocab, *widths)
        expected = draft(IID, model.q, shape, Numbers(uniforms[b]))
        nodes = prefixes(tree, b)
        found = [
            tuple(nodes[node] if node else None for node in level)
            for level in tree.draws[b].tolist()
        ]
        for level, drawn in zip(expected, found, strict=True):
            assert drawn == level + (None,) * (plan.paths - len(level))
        counts = tree.draft_counts()[b].tolist()
        drafts = ReferenceTree(IID, expected, model.p, model.q)
        assert counts[: len(nodes)] == [len(drafts.drafts(node)) for node in nodes]
        inner = [n for n, node in enumerate(nodes) if len(node) < plan.depth]
        probs = torch.tensor([model.q(nodes[n]) for n in inner], dtype=torch.float64)
        assert torch.equal(tree.draft_probs[b, inner], probs)


@pytest.mark.parametrize("draft_sampling", [WOR, GREEDY])
def test_different_children_of_any_widths(draft_sampling: DraftSampling) -> None:
    verifier = "otbv" if draft_sampling is GREEDY else "specinfer"
    plan = Plan(verifier=verifier, widths=(2, 3), draft_sampling=draft_sampling)
    model = Model(5, "random", 1)
    at = [lambda prefix: (tuple(range(5)), model.q(prefix))]
    uniforms = np.random.default_rng(3).random((1, plan.paths, plan.depth))
    tree = grown(plan, draft_sampling, at, uniforms)
    assert tree.num_nodes.tolist() == [1 + 2 + 6]
    assert tree.draft_counts()[0].tolist() == [2, 3, 3] + [0] * 6


# --- trees that are not drawn as they are said to be
def error_of(verify: Verify, model: Model, draw: Callable[[Chooser], Draws]) -> float:
    """Error where trees are drawn so, whatever q they claim."""

    def run(chooser: Chooser) -> Outcome:
        return verify(ReferenceTree(IID, draw(chooser), model.p, model.q), chooser)

    states = {ModifiedTarget(o.tokens): mass for o, mass in exact_probs(run).items()}
    full, joint = completed(states, model.p, 3), target_joint(model.p, 3)
    return max(abs(full.get(tokens, 0) - mass) for tokens, mass in joint.items())


def drawn_once(model: Model) -> Callable[[Chooser], Draws]:
    return lambda chooser: draft(IID, model.q, shaped(3, 2, 2), chooser)


def without(draws: Draws, keep: Callable[[int, int, Prefix], bool]) -> Draws:
    """The draws that ``keep`` (level, number, prefix) wants, and that go on from such."""
    levels: list[tuple[Prefix | None, ...]] = [((),)]
    for depth, level in enumerate(draws):
        width = len(level) // len(levels[-1])
        above = levels[-1]
        kept = [
            child
            if child is not None and above[number // width] is not None
            and keep(depth, number, child) else None
            for number, child in enumerate(level)
        ]  # fmt: skip
        levels.append(tuple(kept))
    return tuple(levels[1:])


MISTAKES: dict[str, Callable[[Draws], Draws]] = {
    # Of the two drafts at a node the second goes if it is token 0.
    "pruned children": lambda draws: without(
        draws, lambda depth, number, child: number % 2 == 0 or child[-1] != 0
    ),
    # A second draft is drawn only where the first was not token 1.
    "a number decided after the first draft": lambda draws: without(
        draws,
        lambda depth, number, child: number % 2 == 0 or draws[depth][number - 1][-1] != 1,
    ),
    # Equal children of a node count once.
    "merged children": lambda draws: without(
        draws, lambda depth, number, child: child not in draws[depth][:number]
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verify", [otbv, spectr])
def test_pruned_children_and_other_mistakes_are_caught(mistake: str, verify: Verify) -> None:
    model = Model(3, "random", 2)
    draw = drawn_once(model)
    assert error_of(verify, model, draw) < TOLERANCE
    assert error_of(verify, model, lambda chooser: MISTAKES[mistake](draw(chooser))) > CAUGHT


def test_growth_may_look_at_other_branches() -> None:
    """A node's number of drafts may follow from draws anywhere else, made before: lossless."""
    model = Model(3, "random", 5)

    def draw(chooser: Chooser) -> Draws:
        top = draft(IID, model.q, shaped(3, 2), chooser)[0]
        # Where the drafts at the root differ, only the nodes whose sibling is token 0 go on.
        level: list[Prefix | None] = []
        for number, node in enumerate(top):
            other = top[1 - number]
            for turn in range(2):
                goes_on = other == node or other == (0,)
                index = 50 + 2 * number + turn
                child = None
                if goes_on:
                    child = (*node, chooser.choose(model.q(node), Purpose.DRAFT, index))
                level.append(child)
        return top, tuple(level)

    assert error_of(otbv, model, draw) < TOLERANCE
    assert error_of(specinfer, model, draw) < TOLERANCE


def test_stateless_rules_stay_so() -> None:
    """Two steps in a row, of different shapes."""
    model = Model(2, "random", 1)
    cases = [problem(IID, model, shaped(2, *widths)) for widths in ((1, 2), (2, 2))]
    assert max_error(stateless(otbv), cases, 3) < TOLERANCE


def test_levels_go_on_from_the_draws_above() -> None:
    """Draw j of a level has the draws from j * width on below it."""
    model = Model(3, "random", 7)
    for draws in exact_probs(lambda c: draft(IID, model.q, shaped(3, 2, 2), c)):
        for above, level in pairwise((((),), *draws)):
            width = len(level) // len(above)
            assert all(child[:-1] == above[n // width] for n, child in enumerate(level))

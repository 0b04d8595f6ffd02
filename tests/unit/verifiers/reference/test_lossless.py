"""The completed output distribution of every verifier equals the target's, by exact enumeration."""

from dataclasses import replace
from fractions import Fraction

import pytest
from support.references import inverse_cdf
from support.tables import KINDS, Model, Shape, max_error, problem

from eaglegbv.errors import InvalidProbabilities
from eaglegbv.rng import Purpose
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof.chooser import exact_probs
from eaglegbv.verifiers.proof.enumeration import draft, trees_probs
from eaglegbv.verifiers.registry import ALL_VERIFIERS, REFERENCES

TOLERANCE = 1e-12
IID = DraftSampling.IID

SHAPES = [Shape(4, 1, 3), Shape(3, 2, 2), Shape(2, 3, 2), Shape(2, 2, 3)]

PAIRS = [
    (name, draft_sampling)
    for name, rule in ALL_VERIFIERS.items()
    for draft_sampling in sorted(rule.draft_samplings)
]


def offered(name: str, draft_sampling: DraftSampling, shape: Shape) -> Shape:
    """The paths a verifier or a distribution can use."""
    if ALL_VERIFIERS[name].max_paths == 1:
        return replace(shape, paths=1)
    return replace(shape, paths=2) if draft_sampling is DraftSampling.HUB else shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_one_step(name: str, draft_sampling: DraftSampling, kind: str) -> None:
    for shape in SHAPES[1:2] if kind == "equal" else SHAPES:  # of equals, all are partners
        shape = offered(name, draft_sampling, shape)
        for seed in range(1 if kind == "equal" else 2):
            case = problem(draft_sampling, Model(shape.vocab, kind, seed), shape)
            error = max_error(REFERENCES[name], [case], shape.length + 1)
            assert error < TOLERANCE, (shape, seed)


ROWS = [
    *((name, own, offered(name, own, Shape(2, 2, 2)), 3) for name, own in PAIRS),
    # What modifies the target.
    ("greedy_block", IID, Shape(3, 2, 1), 3),
    ("greedy_block", IID, Shape(2, 3, 1), 4),
    ("spectr_gbv", IID, Shape(2, 3, 2), 2),
    ("spectr_gbv", IID, Shape(2, 2, 3), 2),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "draft_sampling", "shape", "steps"), ROWS, ids=str)
def test_steps_in_a_row(name, draft_sampling, shape, steps, kind) -> None:
    """Each with a draft distribution of its own; the state is carried along."""
    kinds = (kind, "random", "zeros", kind)[:steps]
    dists = [Model(shape.vocab, own, step) for step, own in enumerate(kinds, start=1)]
    cases = [
        replace(problem(draft_sampling, dists[0], shape), draft_probs=model.q) for model in dists
    ]
    assert max_error(REFERENCES[name], cases, 5 if shape.vocab == 2 else 4) < TOLERANCE


def ends(prefix: tuple[int, ...]) -> bool:
    """A path ends after token 0: a rule that looks at the emitted prefix only."""
    return 0 in prefix


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize(("name", "draft_sampling"), PAIRS)
def test_paths_that_stop_early(name: str, draft_sampling: DraftSampling, kind: str) -> None:
    shape = offered(name, draft_sampling, Shape(3, 2, 2))
    for seed in range(2):
        case = problem(draft_sampling, Model(3, kind, seed), shape, ends)
        assert max_error(REFERENCES[name], [case], 3) < TOLERANCE


@pytest.mark.parametrize("name", ["greedy_block", "spectr_gbv"])
def test_a_layer_ends_where_its_path_would_have_stopped(name: str) -> None:
    shape = offered(name, IID, Shape(2, 3, 2))
    case = problem(IID, Model(2, "random", 0), shape, lambda prefix: len(prefix) == 2)
    unlimited = replace(case, stop=lambda prefix: False)
    assert max_error(REFERENCES[name], [case, unlimited], 4) < TOLERANCE


@pytest.mark.parametrize("draft_sampling", list(DraftSampling))
def test_the_distribution_of_the_drafts_is_that_of_drawing_them(draft_sampling) -> None:
    shape = Shape(3, 2, 2)
    model = Model(3, "zeros", 5)
    drawn = exact_probs(lambda c: draft(draft_sampling, model.q, shape, c))
    assert trees_probs(draft_sampling, model.q, shape) == pytest.approx(drawn, abs=1e-15)
    assert sum(drawn.values()) == pytest.approx(1, abs=1e-15)


# --- choices: by a number, or all of them
@pytest.mark.parametrize(
    ("weights", "u", "chosen"),
    [
        ((0.25, 0.75), 0.0, 0),
        ((0.25, 0.75), 0.2499, 0),
        ((0.25, 0.75), 0.25, 1),
        ((0.0, 1.0), 0.0, 1),
        ((0.5, 0.0, 0.5), 0.5, 2),
        ((1.0, 0.0), 1.0, 0),  # u rounded up to 1: still no token of probability 0
        ((0.3, 0.7, 0.0), 1.0, 1),
        ((2, 6), 0.3, 1),  # weights need not be normalised
    ],
)
def test_inverse_cdf(weights: tuple[float, ...], u: float, chosen: int) -> None:
    assert inverse_cdf(weights, u) == chosen


@pytest.mark.parametrize("weights", [(0.0, 0.0), (float("nan"), 1.0), (-0.5, 1.5)])
def test_weights_without_mass_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(InvalidProbabilities, match="positive sum"):
        inverse_cdf(weights, 0.5)


def test_exact_distribution_walks_every_branch_once() -> None:
    def run(chooser):
        if chooser.choose((Fraction(1, 3), 0, Fraction(2, 3)), Purpose.DRAFT, 0) == 0:
            return "a"
        return "b" + str(chooser.choose((Fraction(1, 4), Fraction(3, 4)), Purpose.ACCEPTANCE, 0))

    assert exact_probs(run) == {"a": Fraction(1, 3), "b0": Fraction(1, 6), "b1": Fraction(1, 2)}


def test_a_number_must_not_decide_twice() -> None:
    def run(chooser):
        chooser.choose((0.5, 0.5), Purpose.ACCEPTANCE, 3)
        return chooser.choose((0.5, 0.5), Purpose.ACCEPTANCE, 3)

    with pytest.raises(IndexError, match="twice"):
        exact_probs(run)

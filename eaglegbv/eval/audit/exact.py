"""The exact audit: a verifier's output distribution on random tiny problems, by enumeration."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import comb, perm
from operator import mul
from statistics import fmean
from time import perf_counter
from typing import TypeAlias

import msgspec

from eaglegbv.config import DraftSampling
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.eval.audit.problems import Sizes, instance
from eaglegbv.verifiers.base import Rule
from eaglegbv.verifiers.proof.enumeration import (
    Problem,
    Shape,
    deviation,
    drafted_trees,
    states_by_step,
)
from eaglegbv.verifiers.proof.lp import lp_acceptance_length
from eaglegbv.verifiers.registry import REFERENCES, make_any_verifier
from eaglegbv.verifiers.stateful import VerifyWithState

MOST_TREES = 20_000  # most draft trees of one problem that are listed
MOST_LP_ENTRIES = 5_000_000
"""Most entries of the linear program's matrix; with more, the optimum is not computed."""

TOLERANCE = 1e-12  # largest error of an exact audit that is rounding
HUB_PATHS = 2  # number of paths of SpecHub, which drafts pairs


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and what an audit found of it."""

    verifier: str  # name of the verifier
    block_efficiency: float  # mean number of tokens committed by a (first) step
    seconds: float  # wall time

    @property
    def passed(self) -> bool:
        """Whether nothing was found against it."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, object]:
        """Everything by name, with a verdict in words."""
        verdict = "lossless" if self.passed else "NOT LOSSLESS"
        return {**msgspec.structs.asdict(self), "verdict": verdict}


class Result(Judged, frozen=True, kw_only=True):
    """Result of an audit on random tiny problems."""

    draft_sampling: str  # the draft distribution
    paths: int  # see `Sizes`
    instances: int  # number of random problems
    widths: str | None = None  # the widths of its trees, such as 3x2x2x1, if any were given

    @property
    def facts(self) -> dict[str, object]:
        """Everything by name, with a verdict in words; widths only if there were any."""
        facts = super().facts
        if self.widths is None:
            del facts["widths"]
        return facts


OnInstance: TypeAlias = Callable[[float], object]
"""Called with the figure of each problem as it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A verifier under audit."""

    rule: Rule  # its claims
    # Audits it on problems, each for steps in a row; returns what makes the result of the rest.
    run: "Callable[[Iterator[Sequence[Problem]], Sizes, OnInstance], Callable[..., Result]]"

    @property
    def default_sampling(self) -> DraftSampling:
        """The distribution to audit if none is named: the rule's own, if it claims that."""
        usual = self.rule.default_sampling
        claimed = self.rule.draft_samplings
        return usual if usual in claimed else min(claimed)

    def fitting_paths(self, draft_sampling: DraftSampling, paths: int) -> int:
        """Return ``paths``, or the most that the verifier and the distribution allow."""
        hub = draft_sampling is DraftSampling.HUB
        return HUB_PATHS if hub else self.rule.fitting_paths(paths)

    def check(self, draft_sampling: DraftSampling, shape: Shape) -> None:
        """Check that the verifier claims to be lossless here, and that trees can be listed.

        Raises:
            SamplingMismatch: The verifier makes no claim for this draft sampling or number of
                paths.
            InvalidArgument: There are too many draft trees.
        """
        widths = shape.widths_of(draft_sampling)
        if draft_sampling is DraftSampling.HUB and set(widths) != {HUB_PATHS}:
            expected = f"{HUB_PATHS}: the distribution 'hub' draws pairs"
            raise SamplingMismatch("paths", shape.paths, expected)
        columns = shape.in_columns(draft_sampling)
        self.rule.check_sampling(draft_sampling, shape.paths, columns=columns)
        trees = count_trees(draft_sampling, shape)
        if trees > MOST_TREES:
            sizes = (shape.vocab, shape.length, shape.paths, *shape.widths)
            expected = f"at most {MOST_TREES} draft trees to list; here {trees} of {draft_sampling}"
            raise InvalidArgument("(vocab, depth, paths)", sizes, expected)

    def audit(
        self, draft_sampling: DraftSampling, sizes: Sizes, on_instance: OnInstance = lambda _: None
    ) -> Result:
        """Audit the verifier.

        Raises:
            SamplingMismatch, InvalidArgument: See :meth:`check`.
        """
        self.check(draft_sampling, sizes.shape)
        start = perf_counter()
        how = {"steps": sizes.iterations, "seed": sizes.seed}
        problems = (instance(draft_sampling, sizes.shape, n, **how) for n in range(sizes.instances))
        result_of = self.run(problems, sizes, on_instance)
        return result_of(
            verifier=self.rule.name,
            draft_sampling=str(draft_sampling),
            paths=sizes.paths,
            widths="x".join(map(str, sizes.widths)) or None,
            instances=sizes.instances,
            seconds=perf_counter() - start,
        )


class AuditResult(Result, frozen=True, kw_only=True):
    """Result of an exact audit, whose block efficiency is the expected one."""

    # Largest deviation, over all problems and texts of `depth + 1` tokens, of the text's
    # probability from the target's.
    max_abs_error: float
    # Mean of the largest block efficiency that a lossless step can have (GBV, Theorem 4.3); None
    # where the linear program is too large. A rule that leaves a modified target may exceed it,
    # because it borrows from later steps.
    lp_optimum: float | None

    @property
    def passed(self) -> bool:
        """Whether the error is rounding."""
        return self.max_abs_error <= TOLERANCE


def exact_subject(rule: Rule, verify: VerifyWithState) -> Subject:
    """Return the subject of a reference implementation, which is audited by enumeration."""
    return Subject(rule=rule, run=partial(_enumerate, verify))


def _enumerate(
    verify: VerifyWithState,
    problems: Iterator[Sequence[Problem]],
    sizes: Sizes,
    on_instance: OnInstance,
) -> Callable[..., Result]:
    """Enumerate the distribution of the texts that the verifier writes on random problems.

    The (modified) target completes the steps' texts. The distribution of the first ``depth + 1``
    tokens, within which every layer of a first step ends, is compared with the target's.
    """
    worst = 0.0
    efficiency = 0.0
    total = sizes.depth + 1
    optima: list[float] = []
    for steps in problems:
        p = steps[0].target_probs
        first, *later = states_by_step(verify, steps, total)
        error = deviation([first, *later][-1], p, total)
        worst = max(worst, error)
        efficiency += float(sum(m * len(state.context) for state, m in first.items()))
        if _lp_entries(steps[0].draft_sampling, sizes.shape) <= MOST_LP_ENTRIES:
            optima.append(1 + lp_acceptance_length(p, sizes.vocab, drafted_trees(steps[0])))
        on_instance(error)
    return partial(
        AuditResult,
        max_abs_error=worst,
        block_efficiency=efficiency / sizes.instances,
        lp_optimum=fmean(optima) if optima else None,
    )


def package_subjects() -> dict[str, Subject]:
    """Return all verifiers of the package by name."""
    return {
        name: exact_subject(make_any_verifier(name), verify) for name, verify in REFERENCES.items()
    }


def count_trees(draft_sampling: DraftSampling, shape: Shape) -> int:
    """Return the largest possible number of draft trees of positive probability."""
    vocab = shape.vocab
    widths = shape.widths_of(draft_sampling)
    if draft_sampling is DraftSampling.IID:
        return int(vocab ** sum(accumulate(widths, mul)))
    trees = nodes = 1
    for width in widths:
        children = min(width, vocab)
        ways = {
            DraftSampling.FIXED: 1,
            DraftSampling.WOR: perm(vocab, children),
            DraftSampling.GREEDY: vocab - children + 1,
            DraftSampling.HUB: 2 * (vocab - 1),
        }
        trees *= ways[draft_sampling] ** nodes
        nodes *= children
    return trees


def _lp_entries(draft_sampling: DraftSampling, shape: Shape) -> int:
    """Return a bound on the entries of the linear program's matrix."""
    vocab = shape.vocab
    length = shape.length
    paths = shape.paths
    widths = shape.widths_of(draft_sampling)
    draws = list(accumulate(widths, mul))
    trees = count_trees(draft_sampling, shape)
    if draft_sampling is DraftSampling.IID:
        # Trees that have the same nodes are one there.
        sets = 1
        for most in reversed(draws):
            sizes = range(1, min(most, vocab) + 1)
            sets = sum(comb(vocab, size) * sets**size for size in sizes)
        trees = min(trees, sets)
        if shape.in_columns(draft_sampling):
            trees = min(trees, comb(vocab**length + paths - 1, paths))
        nodes = 1 + sum(draws)
    else:
        nodes = 1 + sum(accumulate((min(width, vocab) for width in widths), mul))
    prefixes = sum(vocab**depth for depth in range(1, length + 1))
    return int(trees * nodes * (trees + prefixes))

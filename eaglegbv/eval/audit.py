"""The exact audit: a verifier's output law on random tiny problems, computed by enumeration."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb, perm
from time import perf_counter

import msgspec

from eaglegbv.errors import InvalidArgument, LawMismatch, one_of
from eaglegbv.eval.audit_instances import instance
from eaglegbv.tree import Law
from eaglegbv.verifiers.base import Rule
from eaglegbv.verifiers.reference.enumeration import (
    Problem,
    Shape,
    VerifyWithState,
    deviation,
    drafted_paths,
    states_by_step,
)
from eaglegbv.verifiers.reference.modified_target import ModifiedTarget
from eaglegbv.verifiers.reference.oracles import lp_acceptance_length
from eaglegbv.verifiers.reference.probs import Number
from eaglegbv.verifiers.reference.registry import REFERENCES
from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS, VERIFIERS

MOST_TREES = 20_000
"""Most draft trees of one problem that are listed."""

MOST_LP_ENTRIES = 5_000_000
"""Most entries of the linear program's matrix; with more, the optimum is not computed."""

HUB_PATHS = 2
"""Number of paths of SpecHub, which drafts pairs."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an audit.

    Attributes:
        vocab: Number of tokens.
        depth: Length of a path, L.
        paths: Paths of an ``iid`` tree, K; for the other laws, children of every node.
        instances: Number of random problems.
        iterations: Steps in a row, between which stateful verifiers keep their state.
        seed: Seed of the problems.

    Raises:
        InvalidArgument: A value is out of range.
    """

    vocab: int = 3
    depth: int = 2
    paths: int = 2
    instances: int = 50
    iterations: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "vocab": (2, 16),
            "depth": (1, 8),
            "paths": (1, 8),
            "instances": (1, 1_000_000),
            "iterations": (1, 8),
            "seed": (0, 2**63 - 1),
        }
        for name, (low, high) in limits.items():
            value = msgspec.structs.asdict(self)[name]
            if not low <= value <= high:
                raise InvalidArgument(name, value, f"an integer in [{low}, {high}]")

    @property
    def shape(self) -> Shape:
        """Sizes of one problem."""
        return Shape(self.vocab, self.depth, self.paths)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an audit.

    Attributes:
        verifier: Name of the verifier.
        law: The draft law.
        instances: Number of random problems.
    """

    verifier: str
    law: str
    instances: int

    def passed(self, tolerance: float) -> bool:
        """Return whether the verifier passed; ``tolerance`` limits the error of exact audits."""
        raise NotImplementedError

    def figures(self) -> dict[str, str]:
        """Return the measured figures as text, by name."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(ABC):
    """A verifier under audit, and its claims.

    Attributes:
        name: Name of the verifier.
        laws: Draft laws for which it claims to be lossless.
        default_law: The law to audit if none is named.
        max_paths: Most paths it can use; ``None`` for any number.
    """

    name: str
    laws: frozenset[Law]
    default_law: Law
    max_paths: int | None = None

    def fitting_paths(self, law: Law, paths: int) -> int:
        """Return ``paths``, or the most that the verifier and the law allow."""
        if law is Law.HUB:
            return HUB_PATHS
        return paths if self.max_paths is None else min(paths, self.max_paths)

    def check(self, law: Law, shape: Shape) -> None:
        """Check that the verifier claims to be lossless for ``law``, and that trees can be listed.

        Raises:
            LawMismatch: The verifier makes no claim for this law or number of paths.
            InvalidArgument: There are too many draft trees.
        """
        if law not in self.laws:
            expected = f"{one_of(sorted(self.laws))} for verifier {self.name!r}"
            raise LawMismatch("law", str(law), expected)
        fitting = self.fitting_paths(law, shape.paths)
        if law is Law.HUB and shape.paths != fitting:
            raise LawMismatch("paths", shape.paths, f"{HUB_PATHS}: the law 'hub' draws pairs")
        if shape.paths != fitting:
            raise LawMismatch("paths", shape.paths, f"at most {fitting} for {self.name!r}")
        trees = count_trees(law, shape)
        if trees > MOST_TREES:
            sizes = (shape.vocab, shape.length, shape.paths)
            expected = f"at most {MOST_TREES} draft trees to list; here {trees} of law {str(law)!r}"
            raise InvalidArgument("(vocab, depth, paths)", sizes, expected)

    @abstractmethod
    def audit(
        self, law: Law, sizes: Sizes, on_instance: Callable[[float], None] | None = None
    ) -> Result:
        """Audit the verifier on drafts of ``law``.

        ``on_instance`` is called with the figure of each problem.

        Raises:
            LawMismatch: The verifier makes no claim for this law or number of paths.
            InvalidArgument: The problems are too large.
        """


class AuditResult(Result, frozen=True, kw_only=True):
    """Result of an exact audit.

    Attributes:
        max_abs_error: Largest deviation, over all problems and texts of ``depth + 1`` tokens, of
            the text's probability from the target's.
        block_efficiency: Mean over the problems of the expected tokens committed by one step.
        lp_optimum: Mean of the largest block efficiency that a lossless step can have (GBV, Theorem
            4.3); None where the linear program is too large. A rule that leaves a modified target
            may exceed it, because it borrows from later steps.
        seconds: Wall time.
    """

    max_abs_error: float
    block_efficiency: float
    lp_optimum: float | None
    seconds: float

    def passed(self, tolerance: float) -> bool:
        """Return whether the error is within ``tolerance``."""
        return self.max_abs_error <= tolerance

    def figures(self) -> dict[str, str]:
        """See :meth:`Result.figures`."""
        return {
            "max error": f"{self.max_abs_error:.1e}",
            "block efficiency": f"{self.block_efficiency:.4f}",
            "LP optimum": "-" if self.lp_optimum is None else f"{self.lp_optimum:.4f}",
            "seconds": f"{self.seconds:.1f}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSubject(Subject):
    """A verifier whose reference implementation is audited by enumeration.

    Attributes:
        verify: The reference implementation.
    """

    verify: VerifyWithState

    def audit(
        self, law: Law, sizes: Sizes, on_instance: Callable[[float], None] | None = None
    ) -> AuditResult:
        """Enumerate the law of the texts that the verifier writes on random problems.

        The (modified) target completes the steps' texts. The law of the first ``depth + 1`` tokens,
        within which every debt of a first step falls due, is compared with the target's.
        ``on_instance`` is called with each problem's error.
        """
        self.check(law, sizes.shape)
        start = perf_counter()
        worst, efficiency, optimum = 0.0, 0.0, 0.0
        with_optimum = _lp_entries(law, sizes.shape) <= MOST_LP_ENTRIES
        for number in range(sizes.instances):
            problems = instance(law, sizes.shape, number, steps=sizes.iterations, seed=sizes.seed)
            total = sizes.depth + 1
            first, *later = states_by_step(self.verify, problems, total)
            error = deviation([first, *later][-1], problems[0].target_law, total)
            worst = max(worst, error)
            efficiency += committed(first)
            if with_optimum:
                optimum += optimal_block_efficiency(problems[0])
            if on_instance is not None:
                on_instance(error)
        return AuditResult(
            verifier=self.name,
            law=str(law),
            instances=sizes.instances,
            max_abs_error=worst,
            block_efficiency=efficiency / sizes.instances,
            lp_optimum=optimum / sizes.instances if with_optimum else None,
            seconds=perf_counter() - start,
        )


def package_subjects() -> dict[str, ExactSubject]:
    """Return all verifiers of the package by name."""
    rules: Mapping[str, type[Rule]] = {**VERIFIERS, **STATEFUL_VERIFIERS}
    return {
        name: ExactSubject(
            name=name,
            laws=reference.laws,
            default_law=rules[name].default_law,
            max_paths=reference.max_paths,
            verify=reference.verify,
        )
        for name, reference in REFERENCES.items()
    }


def committed(states: Mapping[ModifiedTarget, Number]) -> float:
    """Return the expected number of tokens committed, given the law of the states."""
    return float(sum(mass * len(state.context) for state, mass in states.items()))


def optimal_block_efficiency(problem: Problem) -> float:
    """Return the most tokens a lossless step can be expected to commit (GBV, Theorem 4.3)."""
    trees = drafted_paths(problem)
    return 1 + lp_acceptance_length(problem.target_law, problem.shape.vocab, trees)


def count_trees(law: Law, shape: Shape) -> int:
    """Return the largest possible number of draft trees of positive probability."""
    vocab, paths = shape.vocab, shape.paths
    if law is Law.IID:
        return int(vocab ** (paths * shape.length))
    if law is Law.FIXED:
        return 1
    children = min(paths, vocab)
    inner = sum(children**depth for depth in range(shape.length))
    ways = {
        Law.WOR: perm(vocab, children),
        Law.GREEDY: vocab - children + 1,
        Law.HUB: 2 * (vocab - 1),
    }
    return int(ways[law] ** inner)


def _lp_entries(law: Law, shape: Shape) -> int:
    """Return a bound on the entries of the linear program's matrix."""
    vocab, length, paths = shape.vocab, shape.length, shape.paths
    if law is Law.IID:
        trees = comb(vocab**length + paths - 1, paths)
        nodes = 1 + paths * length
    else:
        trees = count_trees(law, shape)
        nodes = sum(min(paths, vocab) ** depth for depth in range(length + 1))
    prefixes = sum(vocab**depth for depth in range(1, length + 1))
    return int(trees * nodes * (trees + prefixes))

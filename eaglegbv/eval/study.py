"""Sampled against deterministic draft trees, and the draft temperature, at equal nodes verified.

Trees are drafted at places of texts that the target wrote at a temperature. ``iid`` trees (K paths
of L tokens, judged by ``otbv``) are drafted at several multiples of that temperature, and
best-first ``fixed`` trees (judged by ``target_only``, which is optimal for them) in several sizes.
A sampled tree has as many nodes as its paths happen to have different prefixes. It is compared with
the mixture of the fixed trees of the next smaller and the next larger size whose mean number of
nodes is the same. Everything is paired by text.

At temperature 0 all sampled paths coincide: a sampled tree is one path, whatever K.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import msgspec
import numpy as np

from eaglegbv.config import Plan
from eaglegbv.defaults import DRAFT_WIDTH
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.estimates import Estimate, bootstrap_ratio_of_ratios
from eaglegbv.eval.records import Environment, Setting
from eaglegbv.eval.same_drafts import Sampling, Tally, Text, same_drafts
from eaglegbv.loading import Pair
from eaglegbv.tree import Law

SAMPLED, FIXED = "otbv", "target_only"

BATCH = 32
"""Number of texts read together."""


class StudySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the study.

    Attributes:
        temperatures: Temperatures of the target.
        draft_temperatures: Multiples of the target's temperature.
        paths: Numbers of paths of sampled trees.
        depth: Length of a path, and depth of fixed trees.
        sizes: Nodes of fixed trees, ascending, the largest at least that of the sampled trees.
        beam: For fixed trees, the nodes of a level that get children, and the children of each.
        draft_width: Number of candidates that a draft law keeps.
        places: Number of places of each text.
        judgements: How often each tree is judged.
        max_tokens: Most tokens of a text.
        seed: Seed of the texts.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    draft_temperatures: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)
    paths: tuple[int, ...] = (1, 2, 4)
    depth: int = 4
    sizes: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    beam: int = 8
    draft_width: int = DRAFT_WIDTH
    places: int = 3
    judgements: int = 3
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if 1.0 not in self.draft_temperatures:
            expected = "multiples with 1, which the others are compared with"
            raise InvalidArgument("draft_temperatures", self.draft_temperatures, expected)
        needed = max(self.paths) * self.depth
        ascending = list(self.sizes) == sorted(set(self.sizes))
        if not self.sizes or not ascending or self.sizes[0] < 1 or self.sizes[-1] < needed:
            expected = f"ascending numbers of nodes up to {needed} or more"
            raise InvalidArgument("sizes", self.sizes, expected)

    @property
    def sampling(self) -> Sampling:
        """Sizes of the sample."""
        return Sampling(places=self.places, judgements=self.judgements, batch=BATCH)

    def sampled(self, temperature: float) -> Iterator[Setting]:
        """Yield the sampled trees of a temperature."""
        for k, hotter in product(self.paths, self.draft_temperatures):
            plan = Plan(
                verifier=SAMPLED,
                paths=k,
                depth=self.depth,
                law=Law.IID,
                draft_width=self.draft_width,
                draft_temperature=hotter,
            )
            yield Setting(plan=plan, temperature=temperature)

    def fixed(self, temperature: float) -> Iterator[Setting]:
        """Yield the fixed trees of a temperature, by size."""
        for size in self.sizes:
            yield Setting(plan=self._fixed(FIXED, self.beam, size), temperature=temperature)

    def path(self) -> Setting:
        """Return the path to which sampled trees reduce at temperature 0."""
        return Setting(plan=self._fixed(FIXED, 1, self.depth), temperature=0.0)

    def largest_fixed(self, temperature: float) -> Setting:
        """Return the largest fixed tree, judged by the sampled trees' verifier."""
        plan = self._fixed(SAMPLED, self.beam, self.sizes[-1])
        return Setting(plan=plan, temperature=temperature)

    def _fixed(self, verifier: str, beam: int, nodes: int) -> Plan:
        return Plan(
            verifier=verifier,
            paths=max(self.paths),
            depth=self.depth,
            law=Law.FIXED,
            draft_width=self.draft_width,
            beam=beam,
            nodes=nodes,
        )


class SampledCell(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a sampled tree.

    Attributes:
        drafter: Name of the drafter.
        temperature: Temperature of the target.
        paths: Number of paths, K; 1 at temperature 0.
        draft_temperature: Draft temperature as a multiple of ``temperature``.
        nodes: Mean number of nodes.
        tokens: Tokens a step.
        fixed: Tokens a step of fixed trees with as many nodes.
        over_fixed: Ratio of ``tokens`` to ``fixed``.
        over_equal: Ratio to the same tree drafted at the target's own temperature.
    """

    drafter: str
    temperature: float
    paths: int
    draft_temperature: float
    nodes: float
    tokens: Estimate
    fixed: float
    over_fixed: Estimate
    over_equal: Estimate


class FixedCell(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a fixed tree.

    Attributes:
        drafter: Name of the drafter.
        temperature: Temperature of the target.
        verifier: Name of the verifier that judged it.
        nodes: Mean number of nodes.
        tokens: Tokens a step.
    """

    drafter: str
    temperature: float
    verifier: str
    nodes: float
    tokens: Estimate


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and results of a study.

    Attributes:
        model: The target.
        drafters: The drafters.
        questions: Identifiers of the questions.
        suite: Name of their suite.
        settings: What was compared.
        environment: Where and when it was measured.
        sampled: Results of the sampled trees.
        fixed: Results of the fixed trees.
    """

    model: str
    drafters: tuple[str, ...]
    questions: tuple[str, ...]
    suite: str
    settings: StudySettings
    environment: Environment
    sampled: tuple[SampledCell, ...]
    fixed: tuple[FixedCell, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one drafter at one temperature."""

    sampled: tuple[SampledCell, ...]
    fixed: tuple[FixedCell, ...]


def study_cells(
    name: str,
    pair: Pair,
    texts: Sequence[Text],
    temperature: float,
    settings: StudySettings,
    *,
    on_texts: Callable[[int], object] = lambda _: None,
) -> Cells:
    """Measure one drafter at one temperature.

    Args:
        name: Name of the drafter.
        pair: Target and drafter.
        texts: Texts that the target wrote at ``temperature``.
        temperature: Temperature of the target.
        settings: What to compare.
        on_texts: Called with the number of texts that have just been done.
    """
    sampled = list(settings.sampled(temperature)) if temperature > 0 else [settings.path()]
    fixed = list(settings.fixed(temperature))
    extra = [settings.largest_fixed(temperature)] if temperature > 0 else []
    asked = [*sampled, *fixed, *extra]
    tallies = same_drafts(pair, texts, asked, settings.sampling, on_texts=on_texts)
    drawn, sizes = tallies[: len(sampled)], tallies[len(sampled) :]
    ladder = [tally for tally in sizes if tally.setting.plan.verifier == FIXED]
    equal = {t.setting.plan.paths: t for t in drawn if t.setting.plan.draft_temperature == 1.0}
    cells = []
    for tally in drawn:
        plan = tally.setting.plan
        tokens = of_size(ladder, tally.mean_nodes)
        cells.append(
            SampledCell(
                drafter=name,
                temperature=temperature,
                paths=plan.paths if temperature > 0 else 1,
                draft_temperature=plan.draft_temperature,
                nodes=tally.mean_nodes,
                tokens=tally.estimate(),
                fixed=sum(tokens) / sum(tally.places),
                over_fixed=bootstrap_ratio_of_ratios(
                    tally.tokens, tally.places, tokens, tally.places
                ),
                over_equal=tally.over(equal[plan.paths]),
            )
        )
    return Cells(tuple(cells), tuple(_fixed_cell(name, tally) for tally in sizes))


def of_size(ladder: Sequence[Tally], nodes: float) -> list[float]:
    """Return, for each text, the tokens of a mixture of fixed trees with a mean of ``nodes`` nodes.

    The mixture takes the next larger tree with the probability that makes the means equal. Below
    the smallest tree, the other part is plain decoding: one token a step with no node.

    Raises:
        InvalidArgument: No fixed tree is large enough.
    """
    places = ladder[0].places
    known = [(0.0, np.array(places, dtype=np.float64))]
    known += [(tally.mean_nodes, np.array(tally.tokens)) for tally in ladder]
    known.sort(key=lambda pair: pair[0])
    for (less, low), (more, high) in pairwise(known):
        if less <= nodes <= more and less < more:
            share = (nodes - less) / (more - less)
            return list(((1 - share) * low + share * high).tolist())
    raise InvalidArgument("nodes", nodes, f"at most {known[-1][0]}, the largest fixed tree's")


def _fixed_cell(name: str, tally: Tally) -> FixedCell:
    return FixedCell(
        drafter=name,
        temperature=tally.setting.temperature,
        verifier=tally.setting.plan.verifier,
        nodes=tally.mean_nodes,
        tokens=tally.estimate(),
    )

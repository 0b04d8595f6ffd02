"""Sampled against deterministic draft trees, and the draft temperature, at equal nodes verified.

What is compared with what is in docs/study/benchmarks.md, and in :func:`of_size`. At temperature 0
all sampled paths coincide: a sampled tree is one path, whatever K.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import plots
from eaglegbv.eval.paired_comparison import Cell, Sampling, Text, same_drafts
from eaglegbv.eval.records import Environment, Setting, grid
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio
from eaglegbv.loading import Pair
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import DRAFT_WIDTH, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


SAMPLED, FIXED = "otbv", "target_only"
EAGLE1 = "eagle1"  # the name of EAGLE-1's tree
BATCH = 32  # number of texts read together


class StudySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the study.

    Attributes:
        temperatures: Temperatures of the target.
        draft_temperatures: Draft temperatures, as multiples of the target's, including 1.
        paths: Numbers of paths of sampled trees, K; none takes 1, 2, 4, with shapes 8 and 16 too.
        depth: Length of a path, and depth of fixed trees.
        sizes: Nodes of fixed trees, ascending, up to K L or more; none takes some up to 16, with
            shapes up to 64.
        beam: Nodes of a level of fixed trees that get children, and children of each.
        draft_width: Number of candidates a draft distribution keeps.
        places: Places per text at which trees are drafted.
        judgements: How many times each tree is judged.
        shapes: Trees to compare instead with paths and fixed trees of as many nodes, at the
            target's own temperature: widths such as 3x2x2x1 or 3x2x2x1 greedy, and eagle1;
            separated by commas.
        max_tokens: Most tokens of a text.
        seed: Seed of all random numbers.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    draft_temperatures: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)
    paths: tuple[int, ...] = ()
    depth: int = 4
    sizes: tuple[int, ...] = ()
    beam: int = 8
    draft_width: int = DRAFT_WIDTH
    places: int = 3
    judgements: int = 3
    shapes: tuple[str, ...] = ()
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if 1.0 not in self.draft_temperatures:
            expected = "multiples with 1, which the others are compared with"
            raise InvalidArgument("draft_temperatures", self.draft_temperatures, expected)
        if self.shapes and min(self.temperatures) <= 0:
            expected = "numbers above 0 with shapes: at 0 all sampled trees are one path"
            raise InvalidArgument("temperatures", self.temperatures, expected)
        names = tuple(name for text in self.shapes for name in text.split(","))
        msgspec.structs.force_setattr(self, "shapes", names)
        usual = {"paths": (1, 2, 4), "sizes": (1, 2, 4, 6, 8, 12, 16)}
        more = {"paths": (8, 16), "sizes": (24, 32, 48, 64)} if self.shapes else {}
        for name, values in usual.items():
            if not getattr(self, name):
                msgspec.structs.force_setattr(self, name, values + more.get(name, ()))
        needed = max(self.paths) * self.depth
        if self.shapes:
            needed = max(self.shape_plan(name).fixed_nodes for name in self.shapes)
        ascending = list(self.sizes) == sorted(set(self.sizes))
        if not ascending or self.sizes[0] < 1 or self.sizes[-1] < needed:
            expected = f"ascending numbers of nodes up to {needed} or more"
            raise InvalidArgument("sizes", self.sizes, expected)

    def trees(self, temperature: float) -> tuple[list[Setting], list[Setting]]:
        """Return the sampled trees of a temperature, and the fixed ones by size.

        At temperature 0, sampled trees are one path. Otherwise the last of the fixed trees is the
        largest once more, judged by the sampled trees' verifier.
        """
        ladder = [self._fixed(temperature, nodes=size) for size in self.sizes]
        if temperature == 0:
            return [self._fixed(0, nodes=self.depth, beam=1)], ladder
        base = Plan(draft_sampling=DraftSampling.IID, draft_width=self.draft_width)
        lists = (SAMPLED,), self.paths, (self.depth,), (temperature,)
        sampled = grid(*lists, base=base, draft_temperatures=self.draft_temperatures).settings
        judged = self._fixed(temperature, nodes=self.sizes[-1], verifier=SAMPLED)
        return list(sampled), [*ladder, judged]

    def _fixed(
        self, temperature: float, *, nodes: int, beam: int | None = None, verifier: str = FIXED
    ) -> Setting:
        plan = Plan(
            verifier=verifier,
            paths=max(self.paths),
            depth=self.depth,
            draft_sampling=DraftSampling.FIXED,
            draft_width=self.draft_width,
            beam=beam or self.beam,
            nodes=nodes,
        )
        return Setting(plan=plan, temperature=temperature)

    def shape_plan(self, name: str) -> Plan:
        """Return the plan of a tree with such a name: ``eagle1``, or widths such as 3x2x2x1.

        The tree of ``eagle1`` is a deterministic one, the others are sampled: independently, or as
        a second word says, as in ``3x2x2x1 greedy``.

        Raises:
            InvalidArgument: There is no such tree.
        """
        if name == EAGLE1:
            return Plan(
                verifier=FIXED,
                depth=max(map(len, EAGLE1_SHAPE)),
                draft_sampling=DraftSampling.FIXED,
                draft_width=self.draft_width,
                shape=EAGLE1_SHAPE,
            )
        sizes, _, sampling = name.partition(" ")
        widths = sizes.split("x")
        known = sampling in ("", *DraftSampling)
        if not known or not all(width.isdecimal() for width in widths):
            expected = f"widths such as 3x2x2x1 or '3x2x2x1 greedy', or {EAGLE1}"
            raise InvalidArgument("shapes", name, expected)
        return Plan(
            verifier=SAMPLED,
            widths=tuple(map(int, widths)),
            draft_sampling=DraftSampling(sampling) if sampling else None,
            draft_width=self.draft_width,
        )


class FixedCell(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a fixed tree: mean number of nodes, and tokens a step."""

    drafter: str
    temperature: float
    nodes: float
    tokens: Estimate
    verifier: str = SAMPLED


class SampledCell(FixedCell, frozen=True, kw_only=True):
    """Results of a sampled tree."""

    paths: int  # number of paths, K; 1 at temperature 0
    draft_temperature: float  # draft temperature as a multiple of `temperature`
    fixed: float  # tokens a step of fixed trees with as many nodes
    over_fixed: Estimate  # ratio of `tokens` to `fixed`
    over_equal: Estimate  # ratio to the same tree drafted at the target's own temperature


class ShapeCell(FixedCell, frozen=True, kw_only=True):
    """Results of a tree of a named shape."""

    tree: str  # its name
    # Ratio of `tokens` to those of independent paths with as many nodes; None where none have.
    over_paths: Estimate | None
    over_fixed: Estimate  # and to those of fixed trees with as many nodes


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and results of a study of the answers to questions, known by their ids."""

    model: str
    drafters: tuple[str, ...]
    questions: tuple[str, ...]
    suite: str
    settings: StudySettings
    environment: Environment
    sampled: tuple[SampledCell, ...]
    fixed: tuple[FixedCell, ...]
    shapes: tuple[ShapeCell, ...] = ()


def study_cells(
    name: str,
    pair: Pair,
    texts: Sequence[Text],
    temperature: float,
    settings: StudySettings,
    *,
    on_texts: Callable[[int], object] = lambda _: None,
) -> tuple[tuple[SampledCell, ...], tuple[FixedCell, ...]]:
    """Measure one drafter on texts that the target wrote at ``temperature``.

    ``on_texts`` is called with the number of texts that have just been done.
    """
    sampled, fixed = settings.trees(temperature)
    sampling = Sampling(settings.places, settings.judgements, BATCH)
    tallies = same_drafts(pair, texts, [*sampled, *fixed], sampling, on_texts=on_texts)
    drawn, sizes = tallies[: len(sampled)], tallies[len(sampled) :]
    ladder = [tally for tally in sizes if tally.setting.plan.verifier == FIXED]
    equal = {t.setting.plan.paths: t for t in drawn if t.setting.plan.draft_temperature == 1.0}

    def known(tally: Cell) -> dict[str, Any]:
        own = {"drafter": name, "temperature": temperature, "nodes": tally.mean_nodes}
        return {**own, "tokens": tally.estimate(), "verifier": tally.setting.plan.verifier}

    cells = []
    for tally in drawn:
        plan, places = tally.setting.plan, tally.steps
        tokens = of_size(ladder, tally.mean_nodes)
        cells.append(
            SampledCell(
                **known(tally),
                paths=plan.paths if temperature > 0 else 1,
                draft_temperature=plan.draft_temperature,
                fixed=sum(tokens) / sum(places),
                over_fixed=bootstrap_ratio(tally.tokens, places, tokens, places),
                over_equal=tally.over(equal[plan.paths]),
            )
        )
    return tuple(cells), tuple(FixedCell(**known(tally)) for tally in sizes)


def shape_cells(
    name: str,
    pair: Pair,
    texts: Sequence[Text],
    temperature: float,
    settings: StudySettings,
    *,
    on_texts: Callable[[int], object] = lambda _: None,
) -> tuple[ShapeCell, ...]:
    """Measure the shapes with one drafter on texts that the target wrote at ``temperature``.

    Trees of shapes are compared with mixtures of paths, and of fixed trees, with as many nodes.
    """
    shapes = [
        Setting(plan=settings.shape_plan(shape), temperature=temperature)
        for shape in settings.shapes
    ]
    base = Plan(draft_sampling=DraftSampling.IID, draft_width=settings.draft_width)
    lists = (SAMPLED,), settings.paths, (settings.depth,), (temperature,)
    paths = grid(*lists, base=base).settings
    _, fixed = settings.trees(temperature)
    sampling = Sampling(settings.places, settings.judgements, BATCH)
    tallies = same_drafts(pair, texts, [*shapes, *paths, *fixed[:-1]], sampling, on_texts=on_texts)
    drawn = tallies[: len(shapes)]
    of_paths = tallies[len(shapes) :][: len(paths)]
    of_fixed = tallies[len(shapes) + len(paths) :]

    most = max(tally.mean_nodes for tally in of_paths)

    def over(tally: Cell, ladder: Sequence[Cell]) -> Estimate:
        tokens = of_size(ladder, tally.mean_nodes)
        return bootstrap_ratio(tally.tokens, tally.steps, tokens, tally.steps)

    return tuple(
        ShapeCell(
            drafter=name,
            temperature=temperature,
            nodes=tally.mean_nodes,
            tokens=tally.estimate(),
            verifier=tally.setting.plan.verifier,
            tree=shape,
            over_paths=over(tally, of_paths) if tally.mean_nodes <= most else None,
            over_fixed=over(tally, of_fixed),
        )
        for shape, tally in zip(settings.shapes, drawn, strict=True)
    )


def of_size(ladder: Sequence[Cell], nodes: float) -> list[float]:
    """Return, for each text, the tokens of a mixture of trees with a mean of ``nodes`` nodes.

    The mixture takes the next larger tree with the probability that makes the means equal. Below
    the smallest tree, the other part is plain decoding: one token a step with no node.

    Raises:
        InvalidArgument: No tree is large enough.
    """
    places = ladder[0].steps
    known = [(0.0, np.array(places, dtype=np.float64))]
    known += [(tally.mean_nodes, np.array(tally.tokens)) for tally in ladder]
    known.sort(key=lambda pair: pair[0])
    for (less, low), (more, high) in pairwise(known):
        if less <= nodes <= more and less < more:
            share = (nodes - less) / (more - less)
            return list(((1 - share) * low + share * high).tolist())
    raise InvalidArgument("nodes", nodes, f"at most {known[-1][0]}, the largest tree's")


# Its tables, findings and picture.


WORDS = ("more tokens", "fewer tokens", "not told apart")


def study_table(study: Study) -> list[list[str]]:
    """Return one row for each drafter, temperature and K, headings first."""
    rows = [
        [
            *("drafter", "T", "K", "nodes", "sampled", "fixed, as many nodes", "ratio"),
            *("best draft T", "sampled so", "over 1x", "over fixed, as many nodes"),
        ]
    ]
    for group in _groups(study):
        own, top = _equal(group), _best(group)
        k = str(own.paths) if own.temperature > 0 else "any"
        tokens = [f"{own.tokens.value:.3f}", f"{own.fixed:.3f}", with_interval(own.over_fixed, 3)]
        ratios = [with_interval(top.over_equal, 3), with_interval(top.over_fixed, 3)]
        better = [f"{top.draft_temperature:g}x", f"{top.tokens.value:.3f}", *ratios]
        known = [own.drafter, f"{own.temperature:g}", k, f"{own.nodes:.1f}"]
        rows.append([*known, *tokens, *better])
    return rows


def shapes_table(study: Study) -> list[list[str]]:
    """Return one row for each drafter, temperature and shape, headings first."""
    against = "over paths, as many nodes", "over fixed, as many nodes"
    rows = [["drafter", "T", "tree", "nodes", "tokens a step", *against]]
    for cell in study.shapes:
        paths = "none as large" if cell.over_paths is None else with_interval(cell.over_paths, 3)
        row = [cell.drafter, f"{cell.temperature:g}", cell.tree, f"{cell.nodes:.1f}"]
        rows.append([*row, with_interval(cell.tokens, 3), paths, with_interval(cell.over_fixed, 3)])
    return rows


def shape_findings(study: Study) -> list[str]:
    """Return sentences on which shapes win over independent paths, and over fixed trees."""
    found: list[str] = []
    trees = grouped(study.shapes, lambda cell: (cell.drafter, cell.tree))
    for (drafter, tree), cells in trees.items():
        paths = [(c.temperature, c.over_paths) for c in cells if c.over_paths is not None]
        fixed = [(c.temperature, c.over_fixed) for c in cells]
        for against, ratios in (("paths", paths), ("fixed", fixed)):
            if ratios:
                found.append(
                    f"{drafter}, {tree}: against {against}, as many nodes: {_by_side(ratios)}"
                )
    return found


def tree_findings(study: Study) -> list[str]:
    """Return sentences on where sampled trees win over deterministic ones of as many nodes."""
    return [
        f"{drafter}, K = {k}: sampled at the target's own temperature against fixed, as many "
        f"nodes: {_by_side([(c.temperature, c.over_fixed) for c in map(_equal, groups)])}"
        for drafter, k, groups in _by_paths(study)
        if k > 1
    ]


def temperature_findings(study: Study) -> list[str]:
    """Return sentences on which draft temperatures pay."""
    found = []
    for drafter, k, groups in _by_paths(study):
        for name, colder in (("hotter", False), ("colder", True)):
            turned = [
                [c for c in g if c.draft_temperature != 1 and (c.draft_temperature < 1) == colder]
                for g in groups
            ]
            ratios = [(c.temperature, c.over_equal) for c in map(_best, filter(None, turned))]
            if ratios:
                found.append(
                    f"{drafter}, K = {k}: sampled {name}, at the best such multiple, against "
                    f"at the target's own temperature: {_by_side(ratios)}"
                )
        multiples = [
            f"{c.draft_temperature:g} at T = {c.temperature:g}" for c in map(_best, groups)
        ]
        found.append(f"{drafter}, K = {k}: best of all multiples {', '.join(multiples)}")
    return found


def _by_paths(study: Study) -> Iterator[tuple[str, int, list[list[SampledCell]]]]:
    """Yield the groups of each drafter and number of paths, without temperature 0."""
    for drafter in study.drafters:
        own = [g for g in _groups(study) if g[0].drafter == drafter and g[0].temperature > 0]
        for k, groups in sorted(grouped(own, lambda group: group[0].paths).items()):
            yield drafter, k, groups


def _by_side(ratios: Sequence[tuple[float, Estimate]]) -> str:
    parts = []
    for words in WORDS:
        at = [f"{temperature:g}" for temperature, ratio in ratios if ratio.told(*WORDS) == words]
        if at:
            parts.append(f"{words} at T = {', '.join(at)}")
    return "; ".join(parts)


def _groups(study: Study) -> list[list[SampledCell]]:
    cells = grouped(study.sampled, lambda cell: (cell.drafter, cell.temperature, cell.paths))
    return list(cells.values())


def _best(group: Sequence[SampledCell]) -> SampledCell:
    return max(group, key=lambda cell: cell.tokens.value)


def _equal(group: Sequence[SampledCell]) -> SampledCell:
    return next(cell for cell in group if cell.draft_temperature == 1.0)


def study_canvas(study: Study) -> "Canvas":
    """Draw each drafter above by temperature, and below by draft temperature."""
    most = max(study.settings.paths)
    above, below = [], []
    for drafter in study.drafters:
        own = [group for group in _groups(study) if group[0].drafter == drafter]
        groups = [g for g in own if g[0].paths == most or g[0].temperature == 0]
        title = f"{drafter}, K = {most}"
        above.append(plots.Panel(lines=_by_temperature(groups), x="temperature", title=title))
        x = "draft temperature, multiple of the target's"
        below.append(plots.Panel(lines=_by_draft_temperature(groups), x=x))
    canvas = plots.draw_panels([*above, *below], "tokens a step", columns=len(above))
    caption = (
        f"{study.suite}, {len(study.questions)} questions, L = {study.settings.depth}; "
        f"{study.model}; {study.environment.started[:10]}"
    )
    plots.add_caption(canvas, caption)
    return canvas


def _by_temperature(groups: Sequence[Sequence[SampledCell]]) -> list[plots.Line]:
    own, colour = [_equal(group) for group in groups], plots.colour_of(SAMPLED)
    tops = [(group[0].temperature, Estimate.exactly(_best(group).tokens.value)) for group in groups]
    fixed = [(cell.temperature, Estimate.exactly(cell.fixed)) for cell in own]
    return [
        plots.Line("sampled (otbv)", [(cell.temperature, cell.tokens) for cell in own], colour),
        plots.Line("sampled, best draft temperature", tops, colour, ":"),
        plots.Line("fixed, as many nodes", fixed, plots.colour_of(FIXED)),
    ]


def _by_draft_temperature(groups: Sequence[Sequence[SampledCell]]) -> list[plots.Line]:
    from matplotlib import colormaps

    warm = [group for group in groups if group[0].temperature > 0]
    lines = []
    for number, group in enumerate(warm):
        cells = sorted(group, key=lambda cell: cell.draft_temperature)
        points = [(c.draft_temperature, Estimate.exactly(c.tokens.value)) for c in cells]
        colour = colormaps["viridis"](number / len(warm))
        lines.append(plots.Line(f"T = {group[0].temperature:g}", points, colour))
    return lines

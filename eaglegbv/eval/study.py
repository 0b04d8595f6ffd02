"""Sampled against deterministic draft trees, and the draft temperature, at equal nodes verified.

What is compared with what is in docs/study/benchmarks.md, and in :meth:`Sums.mixture`. At
temperature 0 all sampled paths coincide: a sampled tree is one path, whatever K.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import pictures
from eaglegbv.eval.experiment import Sheet
from eaglegbv.eval.figures import ACCEPTANCE, NODES, RATIO_DIGITS, Estimate, Figure, Sums
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Cell, Table
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import DRAFT_WIDTH, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SAMPLED = "otbv"
FIXED = "target_only"
EAGLE1 = "eagle1"  # the name of EAGLE-1's tree
WORDS = ("more tokens", "fewer tokens", "not told apart")
TOKENS = Figure("tokens a step", "tokens", "steps", digits=RATIO_DIGITS)


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
        many = bool(names)
        usual = {
            "shapes": names,
            "paths": self.paths or (1, 2, 4, *((8, 16) if many else ())),
            "sizes": self.sizes or (1, 2, 4, 6, 8, 12, 16, *((24, 32, 48, 64) if many else ())),
        }
        for name, values in usual.items():
            msgspec.structs.force_setattr(self, name, values)
        needed = max(self.paths) * self.depth
        if names:
            needed = max(self.shape_plan(name).fixed_nodes for name in names)
        ascending = list(self.sizes) == sorted(set(self.sizes))
        if not ascending or self.sizes[0] < 1 or self.sizes[-1] < needed:
            expected = f"ascending numbers of nodes up to {needed} or more"
            raise InvalidArgument("sizes", self.sizes, expected)

    def settings(self, drafters: Sequence[str]) -> tuple[Setting, ...]:
        """Return all trees of all drafters, by temperature."""
        return tuple(
            Setting(plan=plan, temperature=temperature, who=drafter)
            for temperature in self.temperatures
            for drafter in drafters
            for plan in dict.fromkeys(self._plans(temperature))
        )

    def _plans(self, temperature: float) -> Iterator[Plan]:
        sampled = Plan(
            verifier=SAMPLED,
            depth=self.depth,
            draft_sampling=DraftSampling.IID,
            draft_width=self.draft_width,
        )
        fixed = msgspec.structs.replace(
            sampled,
            verifier=FIXED,
            paths=max(self.paths),
            draft_sampling=DraftSampling.FIXED,
            beam=self.beam,
        )
        multiples = (1.0,) if self.shapes else self.draft_temperatures
        if temperature == 0:
            yield msgspec.structs.replace(fixed, beam=1, nodes=self.depth)
            multiples = ()
        yield from map(self.shape_plan, self.shapes)
        for times in multiples:
            for paths in self.paths:
                yield msgspec.structs.replace(sampled, paths=paths, draft_temperature=times)
        for nodes in self.sizes:
            yield msgspec.structs.replace(fixed, nodes=nodes)

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


def study(settings: tuple[Setting, ...]) -> Sheet:
    """Return the study of these trees, by drafter and temperature."""
    of_shapes = any(_shape(setting) for setting in settings)
    return Sheet(
        name="trees",
        unit="text",
        settings=settings,
        tables=shape_tables if of_shapes else study_tables,
        pictures=lambda sums, own: {} if of_shapes else {"trees": lambda: canvas(sums, own)},
    )


def _shape(setting: Setting) -> str:
    """Return the name of a tree that is neither paths nor a fixed one of the ladder."""
    plan = setting.plan
    if plan.shape:
        return EAGLE1
    widths = "x".join(map(str, plan.widths))
    return f"{widths} {plan.draft_sampling or ''}".rstrip() if widths else ""


@dataclass(frozen=True, slots=True)
class _Trees:
    """The trees of a drafter at a temperature."""

    sums: Sums
    drafter: str
    temperature: float
    settings: Sequence[Setting]

    @property
    def ladder(self) -> list[str]:
        """The fixed trees by size."""
        plain = (own for own in self.settings if own.plan.verifier == FIXED and not own.plan.shape)
        return [own.name for own in plain if own.plan.beam != 1]

    @property
    def sampled(self) -> Mapping[int, list[Setting]]:
        """The sampled trees of each number of paths; at temperature 0 all are one."""
        if self.temperature == 0:
            return {1: [own for own in self.settings if own.plan.beam == 1]}
        paths = [s for s in self.settings if s.plan.verifier == SAMPLED and not s.plan.widths]
        return dict(sorted(grouped(paths, lambda own: own.plan.paths).items()))

    def nodes(self, name: str) -> float:
        """Return the mean nodes of a tree."""
        return self.sums.value(NODES, name)

    def over(self, name: str, ladder: Sequence[str] = ()) -> Estimate:
        """Return the tokens of a tree over those of a mixture of as many nodes, usually fixed."""
        mixture = self.sums.mixture(ladder or self.ladder, self.nodes(name))
        return self.sums.over(ACCEPTANCE, name, mixture)

    def by_tokens(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return settings, those with the most tokens first."""
        return sorted(settings, key=lambda own: -self.sums.value(ACCEPTANCE, own.name))


def _trees(sums: Sums, settings: Sequence[Setting]) -> list[_Trees]:
    measured = [own for own in settings if sums.has(own.name)]
    groups = grouped(measured, lambda own: (own.temperature, own.who))
    return [_Trees(sums, who, temperature, own) for (temperature, who), own in groups.items()]


def _equal(members: Sequence[Setting]) -> str:
    """Return the name of the tree that is drafted at the target's own temperature."""
    return next(own.name for own in members if own.plan.draft_temperature == 1)


Ratios = dict[tuple[str, int, str], list[tuple[float, Estimate]]]
"""Ratios by temperature, for each drafter, number of paths, and what is compared."""

SAMPLED_OVER_FIXED = "sampled at the target's own temperature against fixed, as many nodes: {}"
TURNED = "sampled {}, at the best such multiple, against at the target's own temperature: {{}}"
HOTTER = TURNED.format("hotter")
COLDER = TURNED.format("colder")


def study_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and K, and where which tree wins."""
    rows: list[list[Cell]] = [["drafter", "T", "K", "nodes", "sampled", "fixed, as many nodes"]]
    rows[0] += ["ratio", "best draft T", "sampled so", "over 1x", "over fixed, as many nodes"]
    ratios_of: Ratios = {}
    best: dict[tuple[str, int], list[str]] = {}
    for trees in _trees(sums, settings):
        for paths, members in trees.sampled.items():
            row, top = _row(trees, paths, members)
            rows.append(row)
            if trees.temperature > 0:
                times = f"{top.plan.draft_temperature:g} at T = {trees.temperature:g}"
                best.setdefault((trees.drafter, paths), []).append(times)
                for what, ratio in _ratios(trees, paths, members):
                    key = trees.drafter, paths, what
                    ratios_of.setdefault(key, []).append((trees.temperature, ratio))
    of_trees = [
        f"{who}, K = {paths}: {what.format(_by_side(ratios))}"
        for (who, paths, what), ratios in sorted(ratios_of.items())
        if what == SAMPLED_OVER_FIXED
    ]
    of_multiples = []
    for (who, paths), multiples in best.items():
        turned = {what: ratios_of.get((who, paths, what)) for what in (HOTTER, COLDER)}
        words = [what.format(_by_side(ratios)) for what, ratios in turned.items() if ratios]
        words.append(f"best of all multiples {', '.join(multiples)}")
        of_multiples += [f"{who}, K = {paths}: {word}" for word in words]
    return [Table(rows=rows), *_as_lines([*of_trees, *of_multiples])]


def _row(trees: _Trees, paths: int, members: Sequence[Setting]) -> tuple[list[Cell], Setting]:
    sums = trees.sums
    equal = _equal(members)
    top = trees.by_tokens(members)[0]
    fixed = sums.mixture(trees.ladder, trees.nodes(equal))
    names = (equal, fixed, top.name)
    tokens = [Estimate.exactly(sums.value(TOKENS, name), RATIO_DIGITS) for name in names]
    row: list[Cell] = [trees.drafter, f"{trees.temperature:g}"]
    row += [str(paths) if trees.temperature > 0 else "any"]
    row += [Estimate.exactly(trees.nodes(equal), 1), *tokens[:2], trees.over(equal)]
    row += [f"{top.plan.draft_temperature:g}x", tokens[2], sums.over(ACCEPTANCE, top.name, equal)]
    return [*row, trees.over(top.name)], top


def _ratios(
    trees: _Trees, paths: int, members: Sequence[Setting]
) -> Iterator[tuple[str, Estimate]]:
    """Yield which ratios tell whether sampled trees win, and which draft temperatures pay."""
    equal = _equal(members)
    if paths > 1:
        yield SAMPLED_OVER_FIXED, trees.over(equal)
    for what, side in ((HOTTER, 1), (COLDER, -1)):
        turned = [own for own in members if side * (own.plan.draft_temperature - 1) > 0]
        for top in trees.by_tokens(turned)[:1]:
            yield what, trees.sums.over(ACCEPTANCE, top.name, equal)


def _as_lines(sentences: Sequence[str]) -> list[Table]:
    rows = [["seen"], *([sentence] for sentence in sentences)]
    return [Table(rows=rows)] if sentences else []


def _by_side(ratios: Sequence[tuple[float, Estimate]]) -> str:
    by_words = grouped(ratios, lambda one: one[1].told(*WORDS))
    parts = ((words, by_words.get(words, ())) for words in WORDS)
    listed = ((words, ", ".join(f"{at:g}" for at, _ in own)) for words, own in parts if own)
    return "; ".join(f"{words} at T = {at}" for words, at in listed)


def shape_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and shape, and which win over what."""
    against = {"paths": "over paths, as many nodes", "fixed": "over fixed, as many nodes"}
    rows: list[list[Cell]] = [["drafter", "T", "tree", "nodes", TOKENS.name, *against.values()]]
    ratios_of: dict[tuple[str, str, str], list[tuple[float, Estimate]]] = {}
    for trees in _trees(sums, settings):
        paths = [own.name for of_paths in trees.sampled.values() for own in of_paths]
        most = max(map(trees.nodes, paths))
        for own in filter(_shape, trees.settings):
            nodes = trees.nodes(own.name)
            over = {"fixed": trees.over(own.name)}
            if nodes <= most:
                over["paths"] = trees.over(own.name, paths)
            for word, ratio in over.items():
                key = trees.drafter, _shape(own), word
                ratios_of.setdefault(key, []).append((trees.temperature, ratio))
            facts: list[Cell] = [trees.drafter, f"{trees.temperature:g}", _shape(own)]
            facts += [Estimate.exactly(nodes, 1), sums.estimate(TOKENS, own.name)]
            rows.append([*facts, *(over.get(word, "none as large") for word in against)])
    sentences = [
        f"{who}, {tree}: against {word}, as many nodes: {_by_side(own)}"
        for (who, tree, word), own in ratios_of.items()
    ]
    return [Table(rows=rows), *_as_lines(sentences)]


def canvas(sums: Sums, settings: Sequence[Setting]) -> "Canvas":
    """Draw each drafter above by temperature, and below by draft temperature."""
    above = []
    below = []
    for drafter, own in grouped(_trees(sums, settings), lambda trees: trees.drafter).items():
        own.sort(key=lambda trees: trees.temperature)
        most = max(max(trees.sampled) for trees in own)
        title = f"{drafter}, K = {most}"
        above.append(pictures.Panel(lines=_by_temperature(own), x="temperature T", title=title))
        x = "draft temperature, multiple of the target's"
        below.append(pictures.Panel(lines=_by_draft_temperature(own), x=x))
    return pictures.draw_panels([*above, *below], "tokens a step", columns=len(above))


def _by_temperature(of_drafter: Sequence[_Trees]) -> list[pictures.Line]:
    points: dict[str, list[tuple[float, Estimate]]] = {}
    for trees in of_drafter:
        members = trees.sampled[max(trees.sampled)]
        sums = trees.sums
        names = {
            "sampled (otbv)": _equal(members),
            "sampled, best draft temperature": trees.by_tokens(members)[0].name,
            "fixed, as many nodes": sums.mixture(trees.ladder, trees.nodes(_equal(members))),
        }
        for label, name in names.items():
            point = trees.temperature, sums.estimate(ACCEPTANCE, name)
            points.setdefault(label, []).append(point)
    colours = [pictures.colour_of(rule) for rule in (SAMPLED, SAMPLED, FIXED)]
    lines = zip(points.items(), colours, ("", ":", ""), strict=True)
    return [pictures.Line(label, own, colour, style) for (label, own), colour, style in lines]


def _by_draft_temperature(of_drafter: Sequence[_Trees]) -> list[pictures.Line]:
    from matplotlib import colormaps

    warm = [trees for trees in of_drafter if trees.temperature > 0]
    lines = []
    for number, trees in enumerate(warm):
        members = trees.sampled[max(trees.sampled)]
        points = sorted(
            (own.plan.draft_temperature, trees.sums.estimate(ACCEPTANCE, own.name))
            for own in members
        )
        colour = colormaps["viridis"](number / len(warm))
        lines.append(pictures.Line(f"T = {trees.temperature:g}", points, colour))
    return lines

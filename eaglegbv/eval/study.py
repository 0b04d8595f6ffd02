"""Sampled against deterministic draft trees, and the draft temperature, at equal nodes verified.

What is compared with what is in docs/study/benchmarks.md, and in :meth:`Sums.mixture`. At
temperature 0 all sampled paths coincide: a sampled tree is one path, whatever K.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

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
        shapes: Trees to compare instead with paths and fixed trees of as many nodes, at the
            target's own temperature: widths such as 3x2x2x1 or 3x2x2x1 greedy, and eagle1;
            separated by commas.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    draft_temperatures: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)
    paths: tuple[int, ...] = ()
    depth: int = 4
    sizes: tuple[int, ...] = ()
    beam: int = 8
    draft_width: int = DRAFT_WIDTH
    shapes: tuple[str, ...] = ()

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
        try:
            plan = Plan.parse(f"{SAMPLED} widths {name}")
        except ValueError:
            expected = f"widths such as 3x2x2x1 or '3x2x2x1 greedy', or {EAGLE1}"
            raise InvalidArgument("shapes", name, expected) from None
        return msgspec.structs.replace(plan, draft_width=self.draft_width)


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
        fixed = (own for own in self.settings if own.plan.verifier == FIXED and not own.plan.shape)
        return [own.name for own in fixed if own.plan.beam != 1]

    @property
    def sampled(self) -> Mapping[int, list[Setting]]:
        """The sampled trees of each number of paths; at temperature 0 all are one."""
        if self.temperature == 0:
            return {1: [own for own in self.settings if own.plan.beam == 1]}
        paths = [s for s in self.settings if s.plan.verifier == SAMPLED and not s.plan.widths]
        return dict(sorted(grouped(paths, lambda own: own.plan.paths).items()))

    def as_large(self, name: str, ladder: Sequence[str] = ()) -> str:
        """Return the mixture, usually of fixed trees, of as many nodes as a tree has."""
        return self.sums.mixture(ladder or self.ladder, self.sums.value(NODES, name))

    def over(self, name: str, ladder: Sequence[str] = ()) -> Estimate:
        """Return the tokens of a tree over those of a mixture of as many nodes."""
        return self.sums.over(ACCEPTANCE, name, self.as_large(name, ladder))

    def best(self, settings: Sequence[Setting]) -> Setting:
        """Return the setting with the most tokens."""
        return max(settings, key=lambda own: self.sums.value(ACCEPTANCE, own.name))


def _trees(sums: Sums, settings: Sequence[Setting]) -> list[_Trees]:
    measured = [own for own in settings if sums.has(own.name)]
    groups = grouped(measured, lambda own: (own.temperature, own.who))
    return [_Trees(sums, who, temperature, own) for (temperature, who), own in groups.items()]


def _equal(members: Sequence[Setting]) -> str:
    """Return the name of the tree that is drafted at the target's own temperature."""
    return next(own.name for own in members if own.plan.draft_temperature == 1)


Seen: TypeAlias = dict[str, list[tuple[float, Estimate]]]
"""Ratios by temperature, by what is compared."""

SAMPLED_OVER_FIXED = "sampled at the target's own temperature against fixed, as many nodes"
TURNED = "sampled {}, at the best such multiple, against at the target's own temperature"


def study_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and K, and where which tree wins."""
    rows: list[list[Cell]] = [["drafter", "T", "K", "nodes", "sampled", "fixed, as many nodes"]]
    rows[0] += ["ratio", "best draft T", "sampled so", "over 1x", "over fixed, as many nodes"]
    of_trees: Seen = {}
    of_multiples: dict[tuple[str, int], tuple[Seen, list[str]]] = {}
    for trees in _trees(sums, settings):
        for paths, members in trees.sampled.items():
            top = trees.best(members)
            rows.append(_row(trees, paths, _equal(members), top))
            if trees.temperature == 0:
                continue
            who = f"{trees.drafter}, K = {paths}"
            if paths > 1:
                ratio = trees.temperature, trees.over(_equal(members))
                of_trees.setdefault(f"{who}: {SAMPLED_OVER_FIXED}", []).append(ratio)
            turned, best = of_multiples.setdefault((trees.drafter, paths), ({}, []))
            best.append(f"{top.plan.draft_temperature:g} at T = {trees.temperature:g}")
            for word, side in (("hotter", 1), ("colder", -1)):
                such = [own for own in members if side * (own.plan.draft_temperature - 1) > 0]
                if such:
                    over = sums.over(ACCEPTANCE, trees.best(such).name, _equal(members))
                    what = f"{who}: {TURNED.format(word)}"
                    turned.setdefault(what, []).append((trees.temperature, over))
    lines = _lines(dict(sorted(of_trees.items())))
    for (drafter, paths), (turned, best) in of_multiples.items():
        lines += _lines(dict(sorted(turned.items(), reverse=True)))
        lines.append(f"{drafter}, K = {paths}: best of all multiples {', '.join(best)}")
    return [Table(rows=rows), *_as_table(lines)]


def _row(trees: _Trees, paths: int, equal: str, top: Setting) -> list[Cell]:
    sums = trees.sums
    names = (equal, trees.as_large(equal), top.name)
    sampled, fixed, best = (Estimate.exactly(sums.value(TOKENS, n), RATIO_DIGITS) for n in names)
    return [
        trees.drafter,
        f"{trees.temperature:g}",
        str(paths) if trees.temperature > 0 else "any",
        Estimate.exactly(sums.value(NODES, equal), 1),
        sampled,
        fixed,
        trees.over(equal),
        f"{top.plan.draft_temperature:g}x",
        best,
        sums.over(ACCEPTANCE, top.name, equal),
        trees.over(top.name),
    ]


def _lines(seen: Seen) -> list[str]:
    """Return a sentence on each comparison: at which temperatures it comes out how."""
    lines = []
    for what, ratios in seen.items():
        by_words = grouped(ratios, lambda one: one[1].told(*WORDS))
        listed = [
            f"{words} at T = {', '.join(f'{at:g}' for at, _ in by_words[words])}"
            for words in WORDS
            if words in by_words
        ]
        lines.append(f"{what}: {'; '.join(listed)}")
    return lines


def _as_table(lines: Sequence[str]) -> list[Table]:
    return [Table(rows=[["seen"], *([line] for line in lines)])] if lines else []


def shape_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and shape, and which win over what."""
    rows: list[list[Cell]] = [["drafter", "T", "tree", "nodes", TOKENS.name]]
    rows[0] += ["over paths, as many nodes", "over fixed, as many nodes"]
    seen: Seen = {}
    for trees in _trees(sums, settings):
        paths = [own.name for of_paths in trees.sampled.values() for own in of_paths]
        most = max(sums.value(NODES, name) for name in paths)
        for own in filter(_shape, trees.settings):
            nodes = sums.value(NODES, own.name)
            over = {"fixed": trees.over(own.name)}
            if nodes <= most:
                over["paths"] = trees.over(own.name, paths)
            for word, ratio in over.items():
                what = f"{trees.drafter}, {_shape(own)}: against {word}, as many nodes"
                seen.setdefault(what, []).append((trees.temperature, ratio))
            row: list[Cell] = [trees.drafter, f"{trees.temperature:g}", _shape(own)]
            row += [Estimate.exactly(nodes, 1), sums.estimate(TOKENS, own.name)]
            rows.append([*row, over.get("paths", "none as large"), over["fixed"]])
    return [Table(rows=rows), *_as_table(_lines(seen))]


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
        names = {
            "sampled (otbv)": _equal(members),
            "sampled, best draft temperature": trees.best(members).name,
            "fixed, as many nodes": trees.as_large(_equal(members)),
        }
        for label, name in names.items():
            point = trees.temperature, trees.sums.estimate(ACCEPTANCE, name)
            points.setdefault(label, []).append(point)
    colours = [pictures.colour_of(rule) for rule in (SAMPLED, SAMPLED, FIXED)]
    lines = zip(points.items(), colours, ("", ":", ""), strict=True)
    return [pictures.Line(label, own, colour, style) for (label, own), colour, style in lines]


def _by_draft_temperature(of_drafter: Sequence[_Trees]) -> list[pictures.Line]:
    lines = []
    for trees in of_drafter:
        if trees.temperature > 0:
            members = trees.sampled[max(trees.sampled)]
            points = [
                (own.plan.draft_temperature, trees.sums.estimate(ACCEPTANCE, own.name))
                for own in sorted(members, key=lambda own: own.plan.draft_temperature)
            ]
            lines.append(pictures.Line(f"T = {trees.temperature:g}", points))
    return lines

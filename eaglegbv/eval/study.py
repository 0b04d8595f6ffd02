"""Sampled against deterministic draft trees, and the draft temperature, at equal nodes verified.

What is compared with what is in docs/study/benchmarks.md, and in :meth:`Sums.mixture`. At
temperature 0 all sampled paths coincide: a sampled tree is one path, whatever K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from eaglegbv.config import EAGLE1_SHAPE, Plan
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import pictures
from eaglegbv.eval.experiment import Experiment, Sheet
from eaglegbv.eval.figures import ACCEPTANCE, NODES, Estimate, Sums
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Table, shown
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import DRAFT_WIDTH, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

SAMPLED, FIXED = "otbv", "target_only"
EAGLE1 = "eagle1"  # the name of EAGLE-1's tree
WORDS = ("more tokens", "fewer tokens", "not told apart")


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

    def settings(self, drafters: Sequence[str]) -> tuple[Setting, ...]:
        """Return all trees of all drafters, by temperature."""
        return tuple(
            Setting(plan=plan, temperature=temperature, who=drafter)
            for temperature in self.temperatures
            for drafter in drafters
            for plan in dict.fromkeys(self._plans(temperature))
        )

    def _plans(self, temperature: float) -> Iterator[Plan]:
        if temperature == 0:
            yield self._fixed(self.depth, beam=1)
        elif self.shapes:
            yield from map(self.shape_plan, self.shapes)
            yield from (self._sampled(k, 1.0) for k in self.paths)
        else:
            yield from (self._sampled(k, t) for t in self.draft_temperatures for k in self.paths)
        yield from map(self._fixed, self.sizes)

    def _sampled(self, paths: int, draft_temperature: float) -> Plan:
        return Plan(
            verifier=SAMPLED,
            paths=paths,
            depth=self.depth,
            draft_sampling=DraftSampling.IID,
            draft_width=self.draft_width,
            draft_temperature=draft_temperature,
        )

    def _fixed(self, nodes: int, beam: int | None = None) -> Plan:
        return Plan(
            verifier=FIXED,
            paths=max(self.paths),
            depth=self.depth,
            draft_sampling=DraftSampling.FIXED,
            draft_width=self.draft_width,
            beam=beam or self.beam,
            nodes=nodes,
        )

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


def study(settings: tuple[Setting, ...]) -> Experiment:
    """Return the study of these trees, by drafter and temperature."""
    of_shapes = any(_shape(setting) for setting in settings)
    sheet = Sheet(
        name="trees",
        way="trees",
        title="text",
        settings=settings,
        tables=shape_tables if of_shapes else study_tables,
        pictures=lambda sums, own: {} if of_shapes else {"trees": lambda: canvas(sums, own)},
    )
    return Experiment(name="study", sheets=(sheet,))


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

    drafter: str
    temperature: float
    settings: Sequence[Setting]

    @property
    def ladder(self) -> list[str]:
        """The fixed trees by size."""
        return [
            own.name
            for own in self.settings
            if own.plan.verifier == FIXED and own.plan.beam != 1 and not own.plan.shape
        ]

    @property
    def sampled(self) -> dict[int, list[Setting]]:
        """The sampled trees of each number of paths; at temperature 0 all are one."""
        if self.temperature == 0:
            return {1: [own for own in self.settings if own.plan.beam == 1]}
        iid = (own for own in self.settings if own.plan.draft_sampling is DraftSampling.IID)
        paths = [own for own in iid if not own.plan.widths]
        return dict(sorted(grouped(paths, lambda own: own.plan.paths).items()))


@dataclass(frozen=True, slots=True)
class _Row:
    """The sampled trees of one number of paths, beside fixed ones of as many nodes."""

    sums: Sums
    trees: _Trees
    paths: int
    members: Sequence[Setting]

    @property
    def equal(self) -> Setting:
        """Drafted at the target's own temperature."""
        return next(own for own in self.members if own.plan.draft_temperature == 1)

    def best(self, *, than: float | None = None, colder: bool = False) -> Setting | None:
        """Return the one with the most tokens, of all or of the colder or hotter ones."""
        kept = [
            own
            for own in self.members
            if than is None
            or (
                own.plan.draft_temperature != than and (own.plan.draft_temperature < than) == colder
            )
        ]
        return max(kept, key=lambda own: self.sums.value(ACCEPTANCE, own.name), default=None)

    def fixed(self, setting: Setting) -> str:
        """Return the name of a mixture of fixed trees with as many nodes."""
        return self.sums.mixture(self.trees.ladder, self.sums.value(NODES, setting.name))

    def over(self, setting: Setting, base: str) -> Estimate:
        """Return how many times as many tokens a tree commits."""
        return self.sums.ratio(ACCEPTANCE, [setting.name], [base])


def _rows(sums: Sums, settings: Sequence[Setting]) -> list[_Row]:
    measured = [own for own in settings if sums.has(own.name)]
    groups = grouped(measured, lambda own: (own.temperature, own.who))
    trees = (_Trees(who, heat, own) for (heat, who), own in groups.items())
    return [_Row(sums, one, paths, own) for one in trees for paths, own in one.sampled.items()]


def study_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and K, and where which tree wins."""
    headings = ["drafter", "T", "K", "nodes", "sampled", "fixed, as many nodes", "ratio"]
    headings += ["best draft T", "sampled so", "over 1x", "over fixed, as many nodes"]
    rows = _rows(sums, settings)
    sentences = [*tree_findings(rows), *temperature_findings(rows)]
    return [Table(rows=[headings, *map(_cells, rows)]), *_as_lines(sentences)]


def _cells(row: _Row) -> list[str]:
    equal, best = row.equal, row.best()
    assert best is not None  # it is one of those it is compared with
    fixed = row.fixed(equal)
    value = row.sums.value
    return [
        row.trees.drafter,
        f"{row.trees.temperature:g}",
        str(row.paths) if row.trees.temperature > 0 else "any",
        f"{value(NODES, equal.name):.1f}",
        f"{value(ACCEPTANCE, equal.name):.3f}",
        f"{value(ACCEPTANCE, fixed):.3f}",
        row.over(equal, fixed).text(3),
        f"{best.plan.draft_temperature:g}x",
        f"{value(ACCEPTANCE, best.name):.3f}",
        row.over(best, equal.name).text(3),
        row.over(best, row.fixed(best)).text(3),
    ]


def _as_lines(sentences: Sequence[str]) -> list[Table]:
    rows = [["seen"], *([sentence] for sentence in sentences)]
    return [Table(rows=rows)] if sentences else []


def tree_findings(rows: Sequence[_Row]) -> list[str]:
    """Return sentences on where sampled trees win over deterministic ones of as many nodes."""
    found = []
    for drafter, k, own in _by_paths(rows):
        ratios = [(r.trees.temperature, r.over(r.equal, r.fixed(r.equal))) for r in own]
        if k > 1:
            found.append(
                f"{drafter}, K = {k}: sampled at the target's own temperature against fixed, as "
                f"many nodes: {_by_side(ratios)}"
            )
    return found


def temperature_findings(rows: Sequence[_Row]) -> list[str]:
    """Return sentences on which draft temperatures pay."""
    found = []
    for drafter, k, own in _by_paths(rows):
        for name, colder in (("hotter", False), ("colder", True)):
            turned = [(row, row.best(than=1, colder=colder)) for row in own]
            ratios = [
                (row.trees.temperature, row.over(best, row.equal.name))
                for row, best in turned
                if best is not None
            ]
            if ratios:
                found.append(
                    f"{drafter}, K = {k}: sampled {name}, at the best such multiple, against "
                    f"at the target's own temperature: {_by_side(ratios)}"
                )
        multiples = [
            f"{best.plan.draft_temperature:g} at T = {row.trees.temperature:g}"
            for row in own
            if (best := row.best()) is not None
        ]
        found.append(f"{drafter}, K = {k}: best of all multiples {', '.join(multiples)}")
    return found


def _by_paths(rows: Sequence[_Row]) -> Iterator[tuple[str, int, list[_Row]]]:
    """Yield the rows of each drafter and number of paths, without temperature 0."""
    warm = [row for row in rows if row.trees.temperature > 0]
    for drafter, own in grouped(warm, lambda row: row.trees.drafter).items():
        for paths, of_paths in sorted(grouped(own, lambda row: row.paths).items()):
            yield drafter, paths, of_paths


def _by_side(ratios: Sequence[tuple[float, Estimate]]) -> str:
    parts = []
    for words in WORDS:
        at = [f"{temperature:g}" for temperature, ratio in ratios if ratio.told(*WORDS) == words]
        if at:
            parts.append(f"{words} at T = {', '.join(at)}")
    return "; ".join(parts)


# Shapes beside paths and fixed trees of as many nodes.


def shape_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return one row for each drafter, temperature and shape, and which win over what."""
    against = "over paths, as many nodes", "over fixed, as many nodes"
    table = [["drafter", "T", "tree", "nodes", "tokens a step", *against]]
    ratios: dict[tuple[str, str, str], list[tuple[float, Estimate]]] = {}
    groups = grouped(
        (own for own in settings if sums.has(own.name)), lambda own: (own.temperature, own.who)
    )
    for (temperature, who), members in groups.items():
        trees = _Trees(who, temperature, members)
        paths = [own.name for of_paths in trees.sampled.values() for own in of_paths]
        most = max(sums.value(NODES, name) for name in paths)
        for own in (one for one in members if _shape(one)):
            nodes = sums.value(NODES, own.name)
            over: dict[str, Estimate] = {}
            for word, ladder in (("paths", paths), ("fixed", trees.ladder)):
                if word == "fixed" or nodes <= most:
                    base = sums.mixture(ladder, nodes)
                    over[word] = sums.ratio(ACCEPTANCE, [own.name], [base])
                    key = (who, _shape(own), word)
                    ratios.setdefault(key, []).append((temperature, over[word]))
            beside = over["paths"].text(3) if "paths" in over else "none as large"
            accepted = shown(sums.estimate(ACCEPTANCE, own.name), 3)
            facts = [who, f"{temperature:g}", _shape(own), f"{nodes:.1f}", accepted]
            table.append([*facts, beside, over["fixed"].text(3)])
    sentences = [
        f"{who}, {tree}: against {word}, as many nodes: {_by_side(own)}"
        for (who, tree, word), own in ratios.items()
    ]
    return [Table(rows=table), *_as_lines(sentences)]


# Its picture.


def canvas(sums: Sums, settings: Sequence[Setting]) -> "Canvas":
    """Draw each drafter above by temperature, and below by draft temperature."""
    rows = _rows(sums, settings)
    most = max(row.paths for row in rows)
    above, below = [], []
    for drafter, own in grouped(rows, lambda row: row.trees.drafter).items():
        shown_rows = [row for row in own if row.paths == most or row.trees.temperature == 0]
        title = f"{drafter}, K = {most}"
        lines = _by_temperature(shown_rows)
        above.append(pictures.Panel(lines=lines, x="temperature T", title=title))
        x = "draft temperature, multiple of the target's"
        below.append(pictures.Panel(lines=_by_draft_temperature(shown_rows), x=x))
    return pictures.draw_panels([*above, *below], "tokens a step", columns=len(above))


def _by_temperature(rows: Sequence[_Row]) -> list[pictures.Line]:
    sampled: list[tuple[float, Estimate]] = []
    best: list[tuple[float, Estimate]] = []
    fixed: list[tuple[float, Estimate]] = []
    for row in sorted(rows, key=lambda row: row.trees.temperature):
        heat, equal, top = row.trees.temperature, row.equal, row.best()
        assert top is not None  # as above
        sampled.append((heat, row.sums.estimate(ACCEPTANCE, equal.name)))
        best.append((heat, row.sums.estimate(ACCEPTANCE, top.name)))
        fixed.append((heat, row.sums.estimate(ACCEPTANCE, row.fixed(equal))))
    colour = pictures.colour_of(SAMPLED)
    return [
        pictures.Line("sampled (otbv)", sampled, colour),
        pictures.Line("sampled, best draft temperature", best, colour, ":"),
        pictures.Line("fixed, as many nodes", fixed, pictures.colour_of(FIXED)),
    ]


def _by_draft_temperature(rows: Sequence[_Row]) -> list[pictures.Line]:
    from matplotlib import colormaps

    warm = [row for row in rows if row.trees.temperature > 0]
    lines = []
    for number, row in enumerate(warm):
        points = sorted(
            (own.plan.draft_temperature, row.sums.estimate(ACCEPTANCE, own.name))
            for own in row.members
        )
        colour = colormaps["viridis"](number / len(warm))
        lines.append(pictures.Line(f"T = {row.trees.temperature:g}", points, colour))
    return lines

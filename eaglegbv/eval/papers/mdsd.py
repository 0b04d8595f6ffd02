"""Hu et al., Towards Optimal Multi-draft Speculative Decoding (arXiv 2502.18779).

Its Tables 1 and 2 and Figures 1 and 2: acceptance of rules and draft distributions at one node,
against their optimum, by temperature and by number of drafts, and what trees of such drafts come
to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.eval.collect_probs import Harvest, lead_ratio
from eaglegbv.eval.node_acceptance import RULES
from eaglegbv.eval.papers.base import Finding, Paper, Report, Site, Table
from eaglegbv.eval.papers.cells import Cell, CellStore, Way, measure_cells
from eaglegbv.eval.records import Setting
from eaglegbv.eval.report import pivot, with_interval
from eaglegbv.eval.statistics import Estimate
from eaglegbv.tree import DraftSampling

_SOURCE = "Hu et al., arXiv 2502.18779"
_NOTES = "notes on it (temperature is not monotone; greedy drafts may lose their lead when hot)"
_THEOREM = "a theorem: no rule is above its drafts' optimum"
USUAL_TEMPERATURE, USUAL_DRAFTS = 0.7, 3
"""The paper's own, by public notes on it."""

ORDERS = (
    # better, worse, who says so
    ("optimum", "RRS", _THEOREM),
    ("optimum", "K-SEQ", _THEOREM),
    ("optimum w/o", "RRS w/o", _THEOREM),
    ("optimum w/o", "optimum", f"{_SOURCE}, abstract"),
    ("optimum w/o", "greedy", "no claim of the paper that was seen: a question of our own"),
)

NOT_SEEN = (
    "the paper's figures were not at hand: of its text only the abstract could be read, and public "
    "notes on its settings; none stand beside ours"
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Acceptance at every place, by rule and number of drafts."""

    harvest: Harvest  # the places
    by_rule: Mapping[tuple[str, int], Tensor]  # [places] by rule and n

    def mean(self, rule: str, drafts: int) -> Estimate:
        """Return a rule's mean acceptance."""
        return self.harvest.mean(self.by_rule[rule, drafts])

    def ratio(self, above: tuple[str, int], below: tuple[str, int]) -> Estimate:
        """Return the ratio of two mean acceptances, paired by question."""
        return self.harvest.ratio(self.by_rule[above], self.by_rule[below])


def accepted(places: Harvest, drafts: Sequence[int]) -> Accepted:
    """Return the acceptance of every rule at every place, for every number of drafts."""
    found = {(name, n): rule(places.probs, n) for n in drafts for name, rule in RULES.items()}
    return Accepted(places, found)


@dataclass(frozen=True)
class NodePaper(Paper):
    """Acceptance at one node, and trees of such drafts."""

    temperatures: tuple[float, ...]  # where n is the usual one
    drafts: tuple[int, ...]  # where the temperature is the usual one
    width: int  # most likely tokens that draft distributions keep
    trees: tuple[Setting, ...]  # trees whose nodes have such drafts

    def measure(self, site: Site) -> Report:
        """Compute acceptances, judge trees; write ``nodes.json`` and ``cells.json``."""
        store = CellStore(site, self.name)
        found: dict[float, Accepted] = {}
        with site.progress("nodes", len(self.temperatures)) as bar:
            for temperature in self.temperatures:
                more = self.drafts if temperature == USUAL_TEMPERATURE else ()
                places = site.harvest(temperature, self.width)
                found[temperature] = accepted(places, list(dict.fromkeys((USUAL_DRAFTS, *more))))
                bar.update(1)
        site.write(
            "nodes.json",
            places={f"{t:g}": own.harvest.probs.count for t, own in found.items()},
            width=self.width,
            cells=[
                {"temperature": t, "drafts": n, "rule": rule, "acceptance": own.mean(rule, n)}
                for t, own in found.items()
                for rule, n in own.by_rule
            ],
        )
        cells = measure_cells(site, store, "trees", Way.SAME_DRAFTS, self.trees)
        store.publish({"trees": cells})
        return self.report(found, cells)

    def report(self, found: Mapping[float, Accepted], cells: Sequence[Cell]) -> Report:
        """Return tables and directions."""
        usual = found[USUAL_TEMPERATURE]
        by_temperature = {f"T = {t:g}": (own, USUAL_DRAFTS) for t, own in found.items()}
        by_drafts = {f"n = {n}": (usual, n) for n in self.drafts}
        return Report(
            tables=(
                _table(f"By temperature, n = {USUAL_DRAFTS}", by_temperature),
                _table(f"By number of drafts, T = {USUAL_TEMPERATURE:g}", by_drafts),
                _trees(cells),
            ),
            findings=tuple(_findings(found, self.drafts)),
            notes=(
                NOT_SEEN,
                "acceptance is exact at every place but for RRS without replacement, which is "
                "averaged over drawn rejections; intervals are over questions",
                f"draft distributions keep their {self.width} most likely tokens",
            ),
        )


def _findings(found: Mapping[float, Accepted], drafts: Sequence[int]) -> Iterator[Finding]:
    """Test the orders in every cell, that more drafts accept more, and greedy drafts when hot."""
    usual = found[USUAL_TEMPERATURE]
    for temperature, own in found.items():
        yield from order_findings(own, temperature, USUAL_DRAFTS)
    for n in drafts:
        if n != USUAL_DRAFTS:
            yield from order_findings(usual, USUAL_TEMPERATURE, n)
    few, many = min(drafts), max(drafts)
    for rule in RULES:
        if rule != "one draft":
            yield Finding(
                statement=f"{rule}, n = {many} at least n = {few}, T = {USUAL_TEMPERATURE:g}",
                source=_SOURCE,
                ratio=usual.ratio((rule, many), (rule, few)),
            )
    cold, hot = min(found), max(found)
    for other in ("optimum", "optimum w/o"):
        sides = [
            (own.harvest, (own.by_rule["greedy", USUAL_DRAFTS], own.by_rule[other, USUAL_DRAFTS]))
            for own in (found[cold], found[hot])
        ]
        yield Finding(
            statement=f"greedy / {other} at T = {cold:g} at least at T = {hot:g}",
            source=_NOTES,
            ratio=lead_ratio(*sides[0], *sides[1]),
        )


def order_findings(found: Accepted, temperature: float, drafts: int) -> list[Finding]:
    """Test which of two rules should accept more."""
    where = f"T = {temperature:g}, n = {drafts}"
    return [
        Finding(
            statement=f"{better} at least {worse}, {where}",
            source=source,
            ratio=found.ratio((better, drafts), (worse, drafts)),
        )
        for better, worse, source in ORDERS
    ]


def _table(title: str, columns: Mapping[str, tuple[Accepted, int]]) -> Table:
    means = {
        (rule, column): with_interval(own.mean(rule, n), 3)
        for rule in RULES
        for column, (own, n) in columns.items()
    }
    return Table(title=title, rows=pivot("acceptance", means))


def _trees(cells: Sequence[Cell]) -> Table:
    rows = [["tokens a step", "draft_sampling", "K", "L", "measured"]]
    for cell in cells:
        plan = cell.setting.plan
        figure = with_interval(cell.estimate(), 3)
        rows.append(
            [plan.verifier, str(plan.draft_sampling), str(plan.paths), str(plan.depth), figure]
        )
    return Table(
        title=f"Trees on the same texts, T = {USUAL_TEMPERATURE:g}",
        rows=rows,
        notes=(
            "K paths of L tokens from the root on, not K children of every node as in the paper; "
            "wor and greedy concern the first token of the paths",
        ),
    )


_JUDGED = (
    ("specinfer", DraftSampling.IID),
    ("spectr", DraftSampling.IID),
    ("global_resolution", DraftSampling.IID),
    ("otbv", DraftSampling.IID),
    ("specinfer", DraftSampling.WOR),
    ("greedy_draft", DraftSampling.GREEDY),
    ("otbv", DraftSampling.GREEDY),
)

MDSD = NodePaper(
    name="mdsd",
    title=f"Optimal multi-draft speculative decoding ({_SOURCE}): acceptance by draft distribution",
    temperatures=(0.2, 0.4, 0.6, 0.7, 0.8, 1.0, 1.2),
    drafts=(2, 3, 4, 6, 8),
    width=1024,
    trees=tuple(
        Setting(
            plan=Plan(verifier=verifier, draft_sampling=draft_sampling, paths=paths, depth=depth),
            temperature=USUAL_TEMPERATURE,
        )
        for paths, depth in ((2, 4), (4, 3))
        for verifier, draft_sampling in _JUDGED
    ),
)

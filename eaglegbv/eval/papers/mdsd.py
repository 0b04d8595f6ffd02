"""Hu et al., Towards Optimal Multi-draft Speculative Decoding (arXiv 2502.18779).

Its Tables 1 and 2 and Figures 1 and 2: acceptance of rules and draft distributions at one node,
    against
their optimum, by temperature and by number of drafts, and what trees of such drafts come to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.eval.collect_probs import Harvest, harvest, lead_ratio
from eaglegbv.eval.node_acceptance import RULES
from eaglegbv.eval.paired_comparison import Sampling, collect
from eaglegbv.eval.papers.base import Finding, Paper, Report, Site, Table
from eaglegbv.eval.papers.cells import Cell, CellStore, Way, measure_cells
from eaglegbv.eval.records import Environment, Setting, describe_environment, name_of_model
from eaglegbv.eval.report import with_interval
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


class NodeCell(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance of one rule.

    Attributes:
        temperature: Of both models.
        drafts: n.
        rule: Name of the rule.
        acceptance: Its mean over the places, with an interval over questions.
    """

    temperature: float
    drafts: int
    rule: str
    acceptance: Estimate


class NodeCells(msgspec.Struct, frozen=True, kw_only=True):
    """What ``nodes.json`` holds.

    Attributes:
        model: The target.
        drafter: The drafter.
        suite: The questions' suite.
        questions: How many questions.
        places: Places at each temperature.
        width: Most likely tokens that draft distributions keep.
        environment: Where and when.
        cells: What was measured.
    """

    model: str
    drafter: str | None
    suite: str
    questions: int
    places: dict[str, int]
    width: int
    environment: Environment
    cells: tuple[NodeCell, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """Acceptance at every place, by rule and number of drafts.

    Attributes:
        harvest: The places.
        by_rule: ``[places]`` by rule and n.
    """

    harvest: Harvest
    by_rule: Mapping[tuple[str, int], Tensor]

    def mean(self, rule: str, drafts: int) -> Estimate:
        """Return a rule's mean acceptance."""
        return self.harvest.mean(self.by_rule[rule, drafts])

    def ratio(self, above: tuple[str, int], below: tuple[str, int]) -> Estimate:
        """Return the ratio of two mean acceptances, paired by question."""
        return self.harvest.ratio(self.by_rule[above], self.by_rule[below])

    def lead(self, rule: str, over: str, drafts: int) -> tuple[Harvest, tuple[Tensor, Tensor]]:
        """Return the places, and what a rule accepts there beside another."""
        return self.harvest, (self.by_rule[rule, drafts], self.by_rule[over, drafts])


def accepted(places: Harvest, drafts: Sequence[int]) -> Accepted:
    """Return the acceptance of every rule at every place, for every number of drafts."""
    found = {(name, n): rule(places.probs, n) for n in drafts for name, rule in RULES.items()}
    return Accepted(places, found)


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


@dataclass(frozen=True)
class NodePaper(Paper):
    """Acceptance at one node, and trees of such drafts.

    Attributes:
        name: Short name, that of the command.
        title: Paper and what is compared.
        temperatures: Where n is the usual one.
        drafts: Where the temperature is the usual one.
        width: Most likely tokens that draft distributions keep.
        trees: Trees whose nodes have such drafts.
    """

    name: str
    title: str
    temperatures: tuple[float, ...]
    drafts: tuple[int, ...]
    width: int
    trees: tuple[Setting, ...]

    def measure(self, site: Site) -> Report:
        """Compute acceptances, judge trees; write ``nodes.json`` and ``cells.json``."""
        store = CellStore(site, self.name)
        by_temperature: dict[float, Accepted] = {}
        with site.progress("nodes", len(self.temperatures)) as bar:
            for temperature in self.temperatures:
                more = self.drafts if temperature == USUAL_TEMPERATURE else ()
                numbers = dict.fromkeys((USUAL_DRAFTS, *more))
                places = self._harvest(site, temperature)
                by_temperature[temperature] = accepted(places, list(numbers))
                bar.update(1)
        self._write(site, by_temperature)
        cells = measure_cells(site, store, "trees", Way.SAME_DRAFTS, self.trees)
        store.publish({"trees": cells})
        return self.report(by_temperature, cells)

    def report(self, found: Mapping[float, Accepted], cells: Sequence[Cell]) -> Report:
        """Return tables and directions."""
        usual = found[USUAL_TEMPERATURE]
        findings = [
            *(f for t, own in found.items() for f in order_findings(own, t, USUAL_DRAFTS)),
            *(
                f
                for n in self.drafts
                if n != USUAL_DRAFTS
                for f in order_findings(usual, USUAL_TEMPERATURE, n)
            ),
            *_rises(usual, self.drafts),
            *_greedy_when_hot(found),
        ]
        return Report(
            tables=(
                _by("T", f"By temperature, n = {USUAL_DRAFTS}", found, USUAL_DRAFTS),
                _by_drafts(usual, self.drafts),
                _trees(cells),
            ),
            findings=tuple(findings),
            notes=(
                NOT_SEEN,
                "acceptance is exact at every place but for RRS without replacement, which is "
                "averaged over drawn rejections; intervals are over questions",
                f"draft distributions keep their {self.width} most likely tokens",
            ),
        )

    def _harvest(self, site: Site, temperature: float) -> Harvest:
        options = site.options
        texts = collect(
            site.llm,
            site.questions.questions,
            temperature=temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        return harvest(
            site.llm.pair,
            texts,
            temperature=temperature,
            width=self.width,
            sampling=Sampling(places=options.places),
        )

    def _write(self, site: Site, found: Mapping[float, Accepted]) -> None:
        llm = site.llm
        whole = NodeCells(
            model=name_of_model(llm.model_name),
            drafter=llm.drafter_name,
            suite=site.questions.suite,
            questions=len(site.questions.questions),
            places={f"{t:g}": own.harvest.probs.count for t, own in found.items()},
            width=self.width,
            environment=describe_environment(str(llm.device)),
            cells=tuple(
                NodeCell(temperature=temperature, drafts=n, rule=rule, acceptance=own.mean(rule, n))
                for temperature, own in found.items()
                for rule, n in own.by_rule
            ),
        )
        (site.folder / "nodes.json").write_bytes(msgspec.json.encode(whole) + b"\n")


def _rises(usual: Accepted, drafts: Sequence[int]) -> list[Finding]:
    few, many = min(drafts), max(drafts)
    return [
        Finding(
            statement=f"{rule}, n = {many} at least n = {few}, T = {USUAL_TEMPERATURE:g}",
            source=_SOURCE,
            ratio=usual.ratio((rule, many), (rule, few)),
        )
        for rule in RULES
        if rule != "one draft"
    ]


def _greedy_when_hot(found: Mapping[float, Accepted]) -> list[Finding]:
    cold, hot = (found[t] for t in (min(found), max(found)))
    return [
        Finding(
            statement=f"greedy / {other} at T = {min(found):g} at least at T = {max(found):g}",
            source=_NOTES,
            ratio=lead_ratio(
                *cold.lead("greedy", other, USUAL_DRAFTS), *hot.lead("greedy", other, USUAL_DRAFTS)
            ),
        )
        for other in ("optimum", "optimum w/o")
    ]


def _by(letter: str, title: str, found: Mapping[float, Accepted], drafts: int) -> Table:
    rows = [["acceptance", *(f"{letter} = {t:g}" for t in found)]]
    for rule in RULES:
        means = [with_interval(own.mean(rule, drafts), 3) for own in found.values()]
        rows.append([rule, *means])
    return Table(title=title, rows=rows)


def _by_drafts(usual: Accepted, drafts: Sequence[int]) -> Table:
    lines = [[rule, *(with_interval(usual.mean(rule, n), 3) for n in drafts)] for rule in RULES]
    return Table(
        title=f"By number of drafts, T = {USUAL_TEMPERATURE:g}",
        rows=[["acceptance", *(f"n = {n}" for n in drafts)], *lines],
    )


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


def _tree_settings() -> tuple[Setting, ...]:
    judged = (
        ("specinfer", DraftSampling.IID),
        ("spectr", DraftSampling.IID),
        ("global_resolution", DraftSampling.IID),
        ("otbv", DraftSampling.IID),
        ("specinfer", DraftSampling.WOR),
        ("greedy_draft", DraftSampling.GREEDY),
        ("otbv", DraftSampling.GREEDY),
    )
    return tuple(
        Setting(
            plan=Plan(verifier=verifier, draft_sampling=draft_sampling, paths=paths, depth=depth),
            temperature=USUAL_TEMPERATURE,
        )
        for paths, depth in ((2, 4), (4, 3))
        for verifier, draft_sampling in judged
    )


MDSD = NodePaper(
    name="mdsd",
    title=f"Optimal multi-draft speculative decoding ({_SOURCE}): acceptance by draft distribution",
    temperatures=(0.2, 0.4, 0.6, 0.7, 0.8, 1.0, 1.2),
    drafts=(2, 3, 4, 6, 8),
    width=1024,
    trees=_tree_settings(),
)

"""What every paper is here: something to measure, and directions in which its figures differ."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec

from eaglegbv.eval.collect_probs import Harvest, harvest
from eaglegbv.eval.paired_comparison import Sampling, collect
from eaglegbv.eval.questions import QuestionSet
from eaglegbv.eval.records import describe_environment, name_of_model
from eaglegbv.eval.report import with_interval
from eaglegbv.eval.statistics import Estimate, SideOfOne
from eaglegbv.llm import LLM

AGREES, AGAINST, OPEN = "agrees", "against", "not told apart"
VERDICTS = {SideOfOne.ABOVE: AGREES, SideOfOne.BELOW: AGAINST, SideOfOne.OPEN: OPEN}
SAME = 1e-6  # ratios nearer to 1 are rounding, and those of solvers to their tolerance


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A direction a paper gives, and what was measured."""

    statement: str  # the direction, with the cell it is about
    source: str  # who says so
    # The figure that should be higher over the other, with its paired interval; None where nothing
    # can be compared.
    ratio: Estimate | None

    @property
    def verdict(self) -> str:
        """Whether the interval lies above equality, below it, or on both sides."""
        return OPEN if self.ratio is None else VERDICTS[self.ratio.side_of_one(SAME)]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it is printed."""

    title: str  # what it shows
    rows: list[list[str]]  # headings first, rows of one width
    notes: tuple[str, ...] = ()  # what a reader has to know


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of measuring a paper's comparison."""

    tables: tuple[Table, ...]  # our tables, the paper's figures beside ours where they are known
    findings: tuple[Finding, ...] = ()  # the directions, tested
    notes: tuple[str, ...] = ()  # what a reader has to know

    @property
    def exceptions(self) -> tuple[Finding, ...]:
        """The directions that are contradicted."""
        return tuple(one for one in self.findings if one.verdict == AGAINST)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user sets; a run is resumed only with the same."""

    seed: int = 0  # of texts, drafts and judgements
    max_tokens: int = 128  # tokens of an answer at most
    places: int = 5  # places of each text at which all verifiers judge the same drafts
    judgements: int = 4  # how often each judges each tree
    engine_questions: int = 16  # questions that whole engines answer, for what one step cannot tell
    engine: bool = False  # measure in the engine as well what the same drafts tell


class Bar(Protocol):
    """A progress bar."""

    def update(self, count: int) -> object:
        """Move on."""


@dataclass
class Site:
    """Where a paper's comparison is measured: models, questions, a folder."""

    folder: Path  # where results are kept as they are measured; made if it is not there
    questions: QuestionSet  # what the models answer
    options: Options  # how much is measured
    load: Callable[[], LLM]  # loads target and drafter
    # Shows a bar, given what is measured and how many steps it takes.
    progress: Callable[[str, int], AbstractContextManager[Bar]]
    # Parts of the comparison, by name; all that the options ask for where none is named.
    sheets: Sequence[str] = ()

    @cached_property
    def llm(self) -> LLM:
        """Target and drafter, loaded when they are first wanted."""
        return self.load()

    def harvest(self, temperature: float, width: int) -> Harvest:
        """Return distributions of the pair, at places of texts that the target writes.

        Args:
            temperature: Of both models.
            width: Most likely tokens that draft distributions keep.
        """
        options = self.options
        texts = collect(
            self.llm,
            self.questions.questions,
            temperature=temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        sampling = Sampling(places=options.places)
        return harvest(
            self.llm.pair, texts, temperature=temperature, width=width, sampling=sampling
        )

    def write(self, name: str, *packages: str, **measured: object) -> None:
        """Write ``measured`` into a file of the folder, with what was measured where.

        Args:
            name: Of the file.
            packages: Further packages whose versions matter.
            measured: JSON values by name.
        """
        about = {
            "model": name_of_model(self.llm.model_name),
            "drafter": self.llm.drafter_name,
            "suite": self.questions.suite,
            "questions": len(self.questions.questions),
            "environment": describe_environment(str(self.llm.device), packages),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(msgspec.json.encode(about | measured) + b"\n")


@dataclass(frozen=True)
class Paper(ABC):
    """A paper's comparison, by command."""

    name: str  # short name, that of the command
    title: str  # paper and what is compared

    @abstractmethod
    def measure(self, site: Site) -> Report:
        """Measure what is not measured yet in ``site.folder``, and report."""


def findings_table(found: Sequence[Finding]) -> list[list[str]]:
    """Return findings as rows, headings first."""
    rows = [["should be", "ratio", "measured"]]
    for one in found:
        ratio = "-" if one.ratio is None else with_interval(one.ratio, 3)
        rows.append([one.statement, ratio, one.verdict])
    return rows

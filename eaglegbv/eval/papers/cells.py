"""The cells of a paper's tables: measured in parts, each kept as soon as it is measured."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from eaglegbv.devices import dtype_name
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval import records
from eaglegbv.eval.paired_comparison import (
    Sampling,
    Text,
    collect,
    first_answers,
    same_drafts,
)
from eaglegbv.eval.papers.base import Options, Site
from eaglegbv.eval.questions import Question
from eaglegbv.eval.statistics import Estimate, bootstrap_ratio
from eaglegbv.llm import LLM
from eaglegbv.metrics import Phase
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import write_whole

CELLS = "cells.json"  # what a run publishes: every cell, question by question
CHUNK = 16  # questions of a part


class Way(StrEnum):
    """How cells are measured."""

    SAME_DRAFTS = "same drafts"  # every verifier judges the same trees, at places of plain texts
    ENGINE = "engine"  # whole answers, several requests together
    TIMED = "engine, one request at a time"


class Figure(StrEnum):
    """What of two cells is compared; more is better."""

    TOKENS_A_STEP = "tokens a step"
    TOKENS_A_SECOND = "tokens a second"
    VERIFYING = "tokens a second of verifying"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting came to."""

    setting: records.Setting  # which
    tokens: tuple[float, ...]  # for each question, tokens committed in its steps
    steps: tuple[int, ...]  # for each question, steps: places, or decoding forwards of the target
    # For each phase, seconds of each question; nothing where no engine ran.
    seconds: dict[Phase, tuple[float, ...]] = {}

    def estimate(self) -> Estimate:
        """Return tokens a step with its 95% bootstrap interval over questions."""
        return bootstrap_ratio(self.tokens, self.steps)

    def over(self, other: "Cell", figure: Figure = Figure.TOKENS_A_STEP) -> Estimate:
        """Return the ratio of a figure to another cell's, paired by question."""
        return bootstrap_ratio(
            self.tokens, self.denominators(figure), other.tokens, other.denominators(figure)
        )

    def denominators(self, figure: Figure) -> Sequence[float]:
        """Return what the figure divides each question's tokens by."""
        if figure is Figure.TOKENS_A_STEP:
            return self.steps
        wanted = [Phase.VERIFY] if figure is Figure.VERIFYING else list(self.seconds)
        if not self.seconds:
            raise InvalidArgument("figure", str(figure), "a figure of steps: nothing was timed")
        columns = np.array([self.seconds[phase] for phase in wanted])
        return [float(total) for total in columns.sum(axis=0)]

    @classmethod
    def joined(cls, parts: "Sequence[Cell]") -> "Cell":
        """Return the cell of all questions of ``parts``."""
        return cls(
            setting=parts[0].setting,
            tokens=tuple(x for part in parts for x in part.tokens),
            steps=tuple(x for part in parts for x in part.steps),
            seconds={
                phase: tuple(x for part in parts for x in part.seconds[phase])
                for phase in parts[0].seconds
            },
        )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder's parts were measured with."""

    paper: str
    options: Options
    model: str
    drafter: str | None
    dtype: str
    suite: str
    origin: str
    question_ids: tuple[str, ...]
    questions_sha256: str

    @property
    def summary(self) -> str:
        """What a reader has to know of it, in a sentence."""
        options = self.options
        return (
            f"Target {Path(self.model).name}, drafter {Path(self.drafter or 'none').name}, "
            f"{self.dtype}; {len(self.question_ids)} questions of {self.suite}, answers of at most "
            f"{options.max_tokens} tokens, {options.places} places of each, {options.judgements} "
            f"judgements of each tree; engines answer {options.engine_questions}; seed "
            f"{options.seed}."
        )


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of some questions of a sheet."""

    sheet: str
    key: str
    cells: list[Cell]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What ``cells.json`` holds: all that a report follows from."""

    run: Run  # what was measured with what
    environment: records.Environment  # where and when
    sheets: dict[str, list[Cell]]  # cells by the name of their sheet


def measured_so_far(folder: Path) -> Measured:
    """Return what a run has measured, finished or not: cells of as many questions as were done.

    Nothing is written: the run may be going on in another process.

    Raises:
        InvalidArgument: The folder holds no run, or its parts cannot be read.
    """
    expected = "cells of a paper"
    begun = records.read_json(
        folder / "run.json", records.Head[Run], argument="cells", expected=expected
    )
    sheets: dict[str, dict[records.Setting, list[Cell]]] = {}
    for part in _journal(folder).read():
        for cell in part.cells:
            sheets.setdefault(part.sheet, {}).setdefault(cell.setting, []).append(cell)
    joined = {name: [Cell.joined(parts) for parts in s.values()] for name, s in sheets.items()}
    return Measured(run=begun.settings, environment=begun.environment, sheets=joined)


class CellStore(records.Folder[Run, _Part]):
    """A folder of parts; see :class:`eaglegbv.eval.records.Folder`."""

    def __init__(self, site: Site, paper: str) -> None:
        """Open ``site.folder`` for ``paper``."""
        llm, questions = site.llm, site.questions
        run = Run(
            paper=paper,
            options=site.options,
            model=llm.model_name,
            drafter=llm.drafter_name,
            dtype=dtype_name(llm.dtype),
            suite=questions.suite,
            origin=questions.origin,
            question_ids=tuple(question.id for question in questions.questions),
            questions_sha256=questions.sha256,
        )
        environment = records.describe_environment(str(llm.device))
        super().__init__(site.folder, run, environment, records.Head[Run], _journal(site.folder))
        self._parts = {(part.sheet, part.key): part.cells for part in self.records}

    def publish(self, sheets: dict[str, list[Cell]]) -> None:
        """Write whole sheets to ``cells.json``."""
        content = Measured(run=self.settings, environment=self.environment, sheets=sheets)
        write_whole(self.path / CELLS, msgspec.json.encode(content) + b"\n")

    def part(self, sheet: str, key: str, measure: Callable[[], list[Cell]]) -> list[Cell]:
        """Return a part; it is measured now, and kept, unless it was before."""
        if (sheet, key) not in self._parts:
            self._parts[sheet, key] = measure()
            self.add(_Part(sheet=sheet, key=key, cells=self._parts[sheet, key]))
        return self._parts[sheet, key]


def _journal(folder: Path) -> records.Journal[_Part]:
    return records.Journal(folder / "parts.jsonl", _Part, "parts of a run")


def measure_cells(
    site: Site, store: CellStore, sheet: str, way: Way, settings: Sequence[records.Setting]
) -> list[Cell]:
    """Return the cells of ``settings``, in their order, measuring those that ``store`` lacks."""
    if way is Way.SAME_DRAFTS:
        return _same_drafts(site, store, sheet, settings)
    return _engine(site, store, sheet, settings, together=CHUNK if way is Way.ENGINE else 1)


def _same_drafts(
    site: Site, store: CellStore, sheet: str, settings: Sequence[records.Setting]
) -> list[Cell]:
    questions, options = site.questions.questions, site.options
    by_temperature: dict[float, list[records.Setting]] = {}
    for setting in settings:
        by_temperature.setdefault(setting.temperature, []).append(setting)
    sampling = Sampling(places=options.places, judgements=options.judgements, batch=CHUNK)

    def judged(temperature: float, first: int) -> list[Cell]:
        texts = _texts(site, temperature, first)
        tallies = same_drafts(site.llm.pair, texts, by_temperature[temperature], sampling)
        return [Cell(setting=t.setting, tokens=t.tokens, steps=t.places) for t in tallies]

    found: dict[records.Setting, list[Cell]] = {}
    with site.progress(sheet, len(by_temperature) * len(questions)) as bar:
        for first in range(0, len(questions), CHUNK):
            for temperature in by_temperature:
                measure = partial(judged, temperature, first)
                cells = store.part(sheet, f"T{temperature:g} {first}", measure)
                bar.update(len(cells[0].steps))
                for cell in cells:
                    found.setdefault(cell.setting, []).append(cell)
    return [Cell.joined(found[setting]) for setting in settings]


def _texts(site: Site, temperature: float, first: int) -> list[Text]:
    """Return the answers to the questions from ``first`` on, decoded once for all sheets."""
    kept = site.folder / f"texts-T{temperature:g}-{first}.json"
    if kept.is_file():
        return records.read_json(kept, list[Text], argument="out", expected="texts of a run")
    texts = collect(
        site.llm,
        site.questions.questions[first : first + CHUNK],
        temperature=temperature,
        max_tokens=site.options.max_tokens,
        seed=request_seed(site.options.seed, first),
    )
    write_whole(kept, msgspec.json.encode(texts))
    return texts


def _engine(
    site: Site, store: CellStore, sheet: str, settings: Sequence[records.Setting], *, together: int
) -> list[Cell]:
    chosen = site.questions.first(min(site.options.engine_questions, len(site.questions.questions)))
    questions = chosen.questions

    found: dict[records.Setting, list[Cell]] = {}
    with site.progress(sheet, len(settings) * len(questions)) as bar:
        for first in range(0, len(questions), together):
            asked = dict(enumerate(questions[first : first + together], start=first))
            # Another setting begins each time, so that a slow spell hits all of them alike.
            start = first // together % len(settings)
            for setting in [*settings[start:], *settings[:start]]:
                measure = partial(answer_all, site.llm, asked, setting, site.options)
                cells = store.part(sheet, f"{setting.name} {first}", measure)
                bar.update(len(asked))
                found.setdefault(setting, []).extend(cells)
    return [Cell.joined(found[setting]) for setting in settings]


def answer_all(
    llm: LLM, questions: Mapping[int, Question], setting: records.Setting, options: Options
) -> list[Cell]:
    """Have the engine answer the first turns of ``questions``, by number, together.

    Raises:
        EagleGBVError: A question is not answered.
    """
    seeds = [request_seed(options.seed, number) for number in questions]
    params = SamplingParams(temperature=setting.temperature, max_tokens=options.max_tokens)
    answers = first_answers(llm, [*questions.values()], params, seeds, setting.plan)
    metrics = [answer.metrics for answer in answers]
    phases = [phase for phase in Phase if phase is not Phase.PREFILL]
    cell = Cell(
        setting=setting,
        tokens=tuple(float(m.committed_tokens) for m in metrics),
        steps=tuple(m.target_forwards for m in metrics),
        seconds={
            phase: tuple(round(m.seconds.get(phase, 0.0), 6) for m in metrics) for phase in phases
        },
    )
    return [cell]

"""The cells of a paper's tables: measured in parts, each kept as soon as it is measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from eaglegbv.devices import dtype_name
from eaglegbv.eval import records
from eaglegbv.eval.collect_probs import node_cells, solver_cells
from eaglegbv.eval.paired_comparison import (
    Cell,
    Sampling,
    Text,
    collect,
    first_answers,
    same_drafts,
)
from eaglegbv.eval.questions import Question, QuestionSet
from eaglegbv.llm import LLM
from eaglegbv.metrics import Phase
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.utils import grouped, write_whole

CHUNK = 16  # questions of a part


class Way(StrEnum):
    """How cells are measured."""

    SAME_DRAFTS = "same drafts"  # every verifier judges the same trees, at places of plain texts
    NODES = "nodes"  # acceptance of rules at single nodes, at such places
    SOLVERS = "solvers"  # solvers of optimal transport at some of these nodes, timed
    ENGINE = "engine"  # whole answers, several requests together
    TIMED = "engine, one request at a time"


AT_PLACES = {Way.SAME_DRAFTS: same_drafts, Way.NODES: node_cells, Way.SOLVERS: solver_cells}
"""What measures settings of one temperature on texts, by way."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user sets; a run is resumed only with the same.

    Attributes:
        seed: Seed of texts, drafts and judgements.
        max_tokens: Most tokens of an answer.
        places: Places of a text at which all verifiers judge the same drafts.
        judgements: How many times each verifier judges each tree.
        engine_questions: Questions that the engine answers, for what one step cannot tell.
        engine: Measure in the engine as well what the same drafts tell.
    """

    seed: int = 0
    max_tokens: int = 128
    places: int = 5
    judgements: int = 4
    engine_questions: int = 16
    engine: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """Where a paper's comparison is measured: models, questions, a folder."""

    folder: Path  # where results are kept as they are measured; made if it is not there
    questions: QuestionSet  # what the models answer
    options: Options  # how much is measured
    llm: LLM  # target and drafter
    # Shows a bar, given what is measured and how many steps it takes.
    progress: Callable[[str, int], AbstractContextManager[Any]]


class Run(records.Asked, frozen=True, kw_only=True):
    """What a folder's parts were measured with."""

    paper: str
    options: Options

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
    """What ``cells.json`` holds, question by question: all that a report follows from."""

    run: Run  # what was measured with what
    environment: records.Environment  # where and when
    sheets: dict[str, list[Cell]]  # cells by the name of their sheet


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
        environment = records.describe_environment(str(llm.device), ("scipy",))
        journal = records.Journal(site.folder / "parts.jsonl", _Part, "parts of a run")
        super().__init__(site.folder, run, environment, records.Head[Run], journal)
        self._parts = {(part.sheet, part.key): part.cells for part in self.records}

    def publish(self, sheets: dict[str, list[Cell]]) -> None:
        """Write whole sheets to ``cells.json``."""
        content = Measured(run=self.settings, environment=self.environment, sheets=sheets)
        write_whole(self.path / "cells.json", msgspec.json.encode(content) + b"\n")

    def part(self, sheet: str, key: str, measure: Callable[[], list[Cell]]) -> list[Cell]:
        """Return a part; it is measured now, and kept, unless it was before."""
        if (sheet, key) not in self._parts:
            self._parts[sheet, key] = measure()
            self.add(_Part(sheet=sheet, key=key, cells=self._parts[sheet, key]))
        return self._parts[sheet, key]


Measure = tuple[str, int, Callable[[], list[Cell]]]
"""A part to measure: its key, the number of its questions, and what measures it."""


def measure_cells(
    site: Site, store: CellStore, sheet: str, way: Way, settings: Sequence[records.Setting]
) -> list[Cell]:
    """Return the cells of ``settings``, in their order, measuring those that ``store`` lacks."""
    parts = _at_places if way in AT_PLACES else _in_the_engine
    todo = list(parts(site, way, settings))
    found: dict[records.Setting, list[Cell]] = {}
    with site.progress(sheet, sum(count for _, count, _ in todo)) as bar:
        for key, count, measure in todo:
            for cell in store.part(sheet, key, measure):
                found.setdefault(cell.setting, []).append(cell)
            bar.update(count)
    return [Cell.joined(found[setting]) for setting in settings]


def _at_places(site: Site, way: Way, settings: Sequence[records.Setting]) -> Iterator[Measure]:
    options, total = site.options, len(site.questions.questions)
    by_temperature = grouped(settings, lambda setting: setting.temperature)
    sampling = Sampling(places=options.places, judgements=options.judgements, batch=CHUNK)

    def measure(temperature: float, first: int) -> list[Cell]:
        texts = _texts(site, temperature, first)
        return AT_PLACES[way](site.llm.pair, texts, by_temperature[temperature], sampling)

    for first in range(0, total, CHUNK):
        for temperature in by_temperature:
            count = min(CHUNK, total - first)
            yield f"T{temperature:g} {first}", count, partial(measure, temperature, first)


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


def _in_the_engine(site: Site, way: Way, settings: Sequence[records.Setting]) -> Iterator[Measure]:
    total = min(site.options.engine_questions, len(site.questions.questions))
    questions = site.questions.first(total).questions
    together = CHUNK if way is Way.ENGINE else 1
    for first in range(0, total, together):
        asked = dict(enumerate(questions[first : first + together], start=first))
        # Another setting begins each time, so that a slow spell hits all of them alike.
        start = first // together % len(settings)
        for setting in [*settings[start:], *settings[:start]]:
            measure = partial(_answer_all, site.llm, asked, setting, site.options)
            yield f"{setting.name} {first}", len(asked), measure


def _answer_all(
    llm: LLM, questions: Mapping[int, Question], setting: records.Setting, options: Options
) -> list[Cell]:
    seeds = [request_seed(options.seed, number) for number in questions]
    params = SamplingParams(temperature=setting.temperature, max_tokens=options.max_tokens)
    answers = first_answers(llm, [*questions.values()], params, seeds, setting.plan)
    metrics = [answer.metrics for answer in answers]
    seconds: dict[Phase, tuple[float, ...]] = {
        phase: tuple(round(m.seconds.get(phase, 0.0), 6) for m in metrics)
        for phase in Phase
        if phase is not Phase.PREFILL
    }
    tokens = tuple(float(m.committed_tokens) for m in metrics)
    steps = tuple(m.target_forwards for m in metrics)
    return [Cell(setting=setting, tokens=tokens, steps=steps, seconds=seconds)]

"""Cells are measured in parts, kept as they come, and measured once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.paired_comparison import Sampling, Tally, Text
from eaglegbv.eval.papers import cells as module
from eaglegbv.eval.papers.base import Options, Site
from eaglegbv.eval.papers.cells import CellStore, Way, load_measured, measure_cells, measured_so_far
from eaglegbv.eval.questions import Question, QuestionSet
from eaglegbv.eval.records import Setting
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion

QUESTIONS = QuestionSet(
    "test",
    "here",
    tuple(Question(id=f"q{n}", category="c", turns=("hi",), source="s") for n in range(20)),
)
SETTINGS = tuple(
    Setting(plan=Plan(verifier=name, paths=1), temperature=temperature)
    for temperature in (0.5, 1.0)
    for name in ("block", "otbv")
)


@dataclass
class FakeLLM:
    """Answers every question with as many tokens as its plan's verifier has letters."""

    model_name: str = "target"
    drafter_name: str = "drafter"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    pair: object = None
    fails: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], *, plan: Plan
    ) -> list[Completion]:
        self.asked.append((plan.verifier, len(prompts)))
        metrics = RequestMetrics(
            committed_tokens=len(plan.verifier),
            target_forwards=2,
            seconds={Phase.PREFILL: 5.0, Phase.VERIFY: 0.25, Phase.FORWARD: 1.0},
        )
        return [
            Completion(
                text="",
                token_ids=[],
                prompt_token_ids=[],
                finish_reason=FinishReason.ERROR if self.fails else FinishReason.LENGTH,
                error="too long" if self.fails else None,
                metrics=metrics,
            )
            for _ in prompts
        ]


@contextmanager
def quiet(what: str, steps: int) -> Iterator[Any]:
    bar = Counter(what, steps)
    yield bar
    assert bar.done == steps


@dataclass
class Counter:
    what: str
    steps: int
    done: int = 0

    def update(self, count: int) -> None:
        self.done += count


def site(folder: Path, llm: FakeLLM, **options: Any) -> Site:
    load: Any = lambda: llm  # noqa: E731
    return Site(folder, QUESTIONS, Options(**options), load, quiet)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Stand-ins for reading texts and judging drafts; the names of the texts judged."""
    judged: list[tuple[str, ...]] = []

    def collect(
        llm: object, questions: Sequence[Question], *, temperature: float, **rest: Any
    ) -> list[Text]:
        del llm, rest
        judged.append((f"texts of T{temperature:g}", questions[0].id))
        return [Text(name=q.id, seed=0, prompt_ids=(1,), token_ids=(1, 2)) for q in questions]

    def judge(
        pair: object, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling
    ) -> list[Tally]:
        del pair
        if len(judged) == 5:
            judged.append(())
            raise KeyboardInterrupt
        judged.append(tuple(text.name for text in texts))
        return [
            Tally(
                setting=s,
                tokens=tuple(len(s.plan.verifier) + s.temperature for _ in texts),
                places=(sampling.places,) * len(texts),
                nodes=(0.0,) * len(texts),
            )
            for s in settings
        ]

    monkeypatch.setattr(module, "collect", collect)
    monkeypatch.setattr(module, "same_drafts", judge)
    return judged


def test_a_killed_run_goes_on_where_it_stopped(
    tmp_path: Path, drafts: list[tuple[str, ...]]
) -> None:
    here = site(tmp_path, FakeLLM(), places=3)

    def measure() -> list[module.Cell]:
        store = CellStore(here, "bv")
        cells = measure_cells(here, store, "sheet", Way.SAME_DRAFTS, SETTINGS)
        store.publish({"sheet": cells})
        return cells

    names = tuple(q.id for q in QUESTIONS.questions)
    with pytest.raises(KeyboardInterrupt):
        measure()
    # Texts are read part by part, and the third was not judged any more.
    assert drafts == [
        ("texts of T0.5", "q0"),
        names[:16],
        ("texts of T1", "q0"),
        names[:16],
        ("texts of T0.5", "q16"),
        (),
    ]
    so_far = measured_so_far(tmp_path).sheets["sheet"]
    assert [cell.setting for cell in so_far] == list(SETTINGS)
    assert {cell.steps for cell in so_far} == {(3,) * 16}
    # A line that a kill cut short is measured again.
    with (tmp_path / "parts.jsonl").open("ab") as file:
        file.write(b'{"sheet": "sh')
    cells = measure()
    assert drafts[6:] == [names[16:], ("texts of T1", "q16"), names[16:]]
    assert [cell.setting for cell in cells] == list(SETTINGS)
    for cell in cells:
        plan, temperature = cell.setting.plan, cell.setting.temperature
        assert cell.tokens == (len(plan.verifier) + temperature,) * 20
        assert cell.steps == (3,) * 20
    assert measure() == cells
    assert len(drafts) == 9
    assert measured_so_far(tmp_path).sheets == {"sheet": cells}
    found = load_measured(tmp_path / "cells.json")
    assert found.sheets == {"sheet": cells}
    assert found.run.paper == "bv"
    assert found.run.questions_sha256 == QUESTIONS.sha256
    assert found.environment.versions["torch"]


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    CellStore(site(tmp_path, FakeLLM()), "bv")
    CellStore(site(tmp_path, FakeLLM()), "bv")
    with pytest.raises(InvalidArgument, match="holds another"):
        CellStore(site(tmp_path, FakeLLM(), seed=1), "bv")
    with pytest.raises(InvalidArgument, match=r"model .*, now other"):
        CellStore(site(tmp_path, FakeLLM(model_name="other")), "bv")
    with pytest.raises(InvalidArgument, match="cells of a paper"):
        load_measured(tmp_path / "nothing.json")


def test_reading_a_run_changes_nothing_of_it(tmp_path: Path) -> None:
    here = site(tmp_path, FakeLLM(), engine_questions=18)
    cells = measure_cells(here, CellStore(here, "bv"), "sheet", Way.ENGINE, SETTINGS)
    parts = tmp_path / "parts.jsonl"
    torn = parts.read_bytes() + b'{"sheet": "sh'  # as a writer's last line may be found
    parts.write_bytes(torn)
    assert measured_so_far(tmp_path).sheets == {"sheet": cells}
    assert parts.read_bytes() == torn
    CellStore(here, "bv")
    assert parts.read_bytes() == torn[:-13]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    here = site(tmp_path, FakeLLM())
    CellStore(here, "bv")
    parts = tmp_path / "parts.jsonl"
    for strange in (b'{"sheet": 1}\n', b"no JSON\n{"):
        parts.write_bytes(strange)
        with pytest.raises(InvalidArgument, match=r"out=.*parts of a run"):
            measured_so_far(tmp_path)
        with pytest.raises(InvalidArgument, match=r"out=.*parts of a run"):
            CellStore(here, "bv")
        assert parts.read_bytes() == strange
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"out=.*the head of a run"):
        CellStore(here, "bv")


@pytest.mark.parametrize(("way", "together"), [(Way.ENGINE, 16), (Way.TIMED, 1)])
def test_engines_answer_every_question_in_every_setting(
    tmp_path: Path, way: Way, together: int
) -> None:
    llm = FakeLLM()
    here = site(tmp_path, llm, engine_questions=18)
    cells = measure_cells(here, CellStore(here, "bv"), "sheet", way, SETTINGS)
    assert sum(count for _, count in llm.asked) == 18 * len(SETTINGS)
    assert max(count for _, count in llm.asked) == together
    # The setting that begins changes.
    assert llm.asked[0][0] != llm.asked[len(SETTINGS)][0]
    for cell in cells:
        assert cell.tokens == (float(len(cell.setting.plan.verifier)),) * 18
        assert cell.steps == (2,) * 18
        assert Phase.PREFILL not in cell.seconds
        assert cell.seconds[Phase.VERIFY] == (0.25,) * 18
        assert cell.seconds[Phase.DRAFT] == (0.0,) * 18
    asked = len(llm.asked)
    again = measure_cells(here, CellStore(here, "bv"), "sheet", way, SETTINGS)
    assert again == cells
    assert len(llm.asked) == asked


def test_a_question_that_is_not_answered_is_an_error(tmp_path: Path) -> None:
    here = site(tmp_path, FakeLLM(fails=True))
    with pytest.raises(EagleGBVError, match="q0: too long"):
        measure_cells(here, CellStore(here, "bv"), "sheet", Way.TIMED, SETTINGS)

"""Drafters side by side: counts by depth and category, the same questions for all."""

from pathlib import Path

import msgspec
import pytest
from support.cli import run
from support.saved_pair import save_pair

from eaglegbv.config import EngineConfig, Plan
from eaglegbv.eval.drafters import converse, drafter_report
from eaglegbv.eval.questions import Question, QuestionSet
from eaglegbv.eval.results import DrafterResults
from eaglegbv.eval.statistics import Acceptance
from eaglegbv.llm import LLM
from eaglegbv.metrics import RequestMetrics
from eaglegbv.sampling import SamplingParams

QUESTIONS = tuple(
    Question(id=str(n), category=("maths", "prose")[n % 2], turns=turns, source="test")
    for n, turns in enumerate([("One?", "Two?"), ("Three?",), ("Four?",), ("Five?", "x" * 300)])
)


def counted(accepted: list[int]) -> RequestMetrics:
    metrics = RequestMetrics()
    for number in accepted:
        metrics.count_forward(
            offered=3, accepted=number, committed=number + 1, nodes=3, plan="test"
        )
    return metrics


def test_acceptance_is_pooled_over_requests() -> None:
    found = Acceptance.of([counted([0, 3, 1]), counted([2]), RequestMetrics()], 4)
    assert found.forwards == 4
    assert found.by_depth == (3, 2, 1, 0)
    assert found.length == 6 / 4
    assert found.shares == (3 / 4, 2 / 4, 1 / 4, 0)
    assert sum(found.shares) == found.length
    nothing = Acceptance.of([], 2)
    assert (nothing.forwards, nothing.length, nothing.shares) == (0, 0, (0, 0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_two_drafters_of_the_same_questions(pair: tuple[Path, Path]) -> None:
    target, head = pair
    plan = Plan(paths=1, depth=3)
    params = SamplingParams(max_tokens=8, seed=0)
    engine = EngineConfig(kv_slots=1024)
    chosen, ended = QuestionSet("test", "here", QUESTIONS), []
    own = LLM(target, head, plan=plan, engine=engine)
    held = converse(own, plan, chosen, params, 3, ended.append)
    assert [record.question_id for record in held] == ["0", "1", "2", "3"]
    assert len(ended) == 4
    alone = converse(own, plan, chosen, params, 1)
    assert [r.turns[0].text for r in alone] == [r.turns[0].text for r in held]
    first = drafter_report("head", plan, held)
    same = LLM(target, target, plan=plan, engine=engine)
    second = drafter_report("target", plan, converse(same, plan, chosen, params, 3), held)

    for report in (first, second):
        # The last question's second turn is longer than the model's context.
        assert report.errors == 1
        assert set(report.by_category) == {"maths", "prose"}
        parts = report.by_category.values()
        assert sum(part.forwards for part in parts) == report.acceptance.forwards
        assert report.length.value == pytest.approx(report.acceptance.length)
        assert report.length.low <= report.length.value <= report.length.high
    assert first.ratio is None
    assert second.ratio is not None
    # The target itself drafts best: nearly every token is accepted.
    assert second.ratio.value == pytest.approx(second.length.value / first.length.value)
    assert second.acceptance.shares[0] > 0.9
    assert msgspec.json.decode(msgspec.json.encode(first), type=type(first)) == first


def test_the_command(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f"{msgspec.json.encode(q).decode()}\n" for q in QUESTIONS[:3]))
    arguments = [
        "bench", "drafters", "--model", str(pair[0]), "--data", str(data), "--paths", "1,2",
        "--depth", "2", "--max-tokens", "6", "--drafter", f"head={pair[1]}", "--drafter", "ngram",
        "--draft-sampling", "fixed",
    ]  # fmt: skip
    shown = run(capsys, *arguments)
    assert shown.status == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["drafter", "verifier", "K"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        [name, "otbv", k] for name in ("head", "ngram") for k in ("1", "2")
    ]
    assert "maths" in lines[6]
    printed = run(capsys, *arguments, "--json")
    found = msgspec.json.decode(printed.out, type=DrafterResults)
    assert found.origin == str(data)
    assert found.environment is not None
    assert found.environment.device == "cpu"
    assert [one.name for one in found.drafters] == ["head", "head", "ngram", "ngram"]
    assert found.drafters[0].report.ratio is None
    assert found.drafters[3].report.plan.paths == 2

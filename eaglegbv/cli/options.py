"""Options that several commands share, what they mean together, and how commands report.

Only functions import torch here, and only when they are called: help is printed without it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from tqdm import tqdm
from typer.models import OptionInfo

from eaglegbv.errors import InvalidArgument, one_of

if TYPE_CHECKING:
    from eaglegbv.config import EngineConfig, PlanChoices, Planning
    from eaglegbv.eval.questions import QuestionSet
    from eaglegbv.eval.records import RunSettings, Setting
    from eaglegbv.llm import LLM
    from eaglegbv.loading import NamedModels
    from eaglegbv.tree import DraftSampling

VERIFIERS = (
    "otbv, gbv, spectr_gbv, traversal, block, greedy_block, token, specinfer, spectr, spechub, "
    "greedy_draft, global_resolution or target_only"
)
"""Verifiers listed in help, without loading them; variants of a verifier are left out."""

QUESTION_SETS = (
    "mt-bench, spec-bench, gsm8k, humaneval, math-500, mgsm, mbpp, eagle-gsm8k, eagle-humaneval "
    "or builtin"
)
"""Sets of questions listed in help, without loading them."""

SAMPLINGS = "iid, wor, greedy, hub or fixed"
FITTING = "3, or as many as the verifier takes"
LOOKUP = "ngram"  # the drafter of a model for which none is named
LINE_SECONDS = 10.0  # seconds between two lines of progress where there is no terminal for a bar
Entry = TypeVar("Entry", str, int, float)
Kind = TypeVar("Kind", bound=StrEnum)
Made = TypeVar("Made")


def opt(text: str, *names: str, shown: bool | str = True) -> OptionInfo:
    """Return an option with a help text; ``shown`` replaces its default in help."""
    option: OptionInfo = typer.Option(*names, help=text, show_default=shown)
    return option


def make_app(text: str | None = None) -> typer.Typer:
    """Return an application, or a group of its commands; ``text`` is its help."""
    return typer.Typer(
        no_args_is_help=text is not None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # it would take brackets, as in .[bench], for markup
        help=text,
    )


Model = Annotated[
    str | None,
    opt(
        "Folder or hub name of the target; smollm2; or tiny, the packaged one.",
        shown="smollm2 if it is here, or tiny",
    ),
]
Drafter = Annotated[
    str | None,
    opt(
        "Folder or hub name of an EAGLE head, a small language model or a table; 'ngram'; "
        "'eagle1' or 'eagle3' of the tiny model.",
        shown=f"{LOOKUP}, prompt lookup; of tiny eagle3, of smollm2 its own",
    ),
]
Device = Annotated[str | None, opt("Device, such as cpu or cuda.", shown="cuda or cpu")]
Dtype = Annotated[
    str,
    opt(
        "One of float32, bfloat16, float16; auto: bfloat16 on a GPU and on a CPU that multiplies "
        "it faster, else float32."
    ),
]
CompileBackend = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="BACKEND",
        help="Compile the target first, in minutes: 'inductor'.",
        show_default="not compiled",
    ),
]
CudaGraphs = Annotated[
    str,
    opt(
        "Replay tree forwards and drafting as CUDA graphs: auto, on, off, or eager (the same "
        "padding without recording, on any device)."
    ),
]
TrustRemoteCode = Annotated[
    bool, opt("Run code that the model brings, if it needs any.", "--trust-remote-code")
]
GenerationConfig = Annotated[
    str,
    opt("Sampling settings that the model's generation_config.json recommends: auto, or none."),
]
Raw = Annotated[bool, opt("Continue the prompt as it is, without a chat template.", "--raw")]
Verifier = Annotated[str, opt("Verifier, as in generate.")]
Depth = Annotated[int, opt("Drafted tokens per path, L.")]
Widths = Annotated[
    str | None,
    opt(
        "Drafts of the nodes of each depth, such as 3x2x2x1, instead of paths and depth.",
        shown="K paths",
    ),
]
SamplingName = Annotated[str | None, opt(f"Draft sampling: {SAMPLINGS}.", shown="the verifier's")]
DraftWidth = Annotated[int, opt("Number of candidates a draft distribution keeps.")]
DraftTemperature = Annotated[
    float, opt("Temperature of the drafts, as a multiple of the request's; lossless at any value.")
]
Temperature = Annotated[float, opt("Sampling temperature; 0 is greedy.")]
Temperatures = Annotated[str, opt("Sampling temperatures.")]
Questions = Annotated[int | None, opt("Questions, spread evenly over the set.", shown="all")]
QuestionsSet = Annotated[str, opt(f"Set of questions: {QUESTION_SETS}; or a file of JSON lines.")]
QuestionData = Annotated[
    Path | None, opt("File or folder from which to read the set, instead of the usual places.")
]
MaxTokens = Annotated[int, opt("Most tokens of an answer.")]
Repeats = Annotated[int, opt("How many times to run everything.")]
Seed = Annotated[int, opt("Seed of all random numbers.")]
AsJson = Annotated[bool, opt("Print JSON.", "--json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models that the options name, and how they are loaded; see the options' help."""

    model: str | None = None
    drafter: str | None = None
    device: str | None = None
    dtype: str = "auto"
    compile_backend: str | None = None
    trust_remote_code: bool = False
    generation_config: str = "auto"

    @property
    def named(self) -> "NamedModels":
        """Target and drafter, with names resolved and defaults filled in."""
        from eaglegbv.devices import place_of
        from eaglegbv.loading import named_models

        _, dtype = place_of(self.device, self.dtype)
        return named_models(self.model, self.drafter, dtype)

    def or_lookup(self, plan: "Planning") -> "Models":
        """Return them with prompt lookup, and say so, where ``plan`` drafts and nothing could."""
        from eaglegbv.config import AutoPlan

        drafts = isinstance(plan, AutoPlan) or plan.speculative
        if not drafts or self.named.drafter is not None:
            return self
        typer.echo(f"no --drafter: drafts are looked up in the text itself ({LOOKUP})", err=True)
        return replace(self, drafter=LOOKUP)

    def load(self, plan: "Planning", engine: "EngineConfig | None" = None) -> "LLM":
        """Load them into an engine."""
        from transformers.utils.logging import disable_progress_bar

        from eaglegbv.llm import LLM

        models = self.or_lookup(plan)
        disable_progress_bar()
        return LLM(**asdict(models), plan=plan, engine=engine)


# What the texts of options mean.


def made_of(given: Mapping[str, Any], make: Callable[..., Made], **more: object) -> Made:
    """Call ``make`` with those of a command's options that it takes, and with ``more``.

    Args:
        given: The command's options by name, its ``locals()`` at its beginning.
        make: A function or a class whose arguments are called like the options.
        more: Arguments instead of options of the same name, or that are none.
    """
    taken = signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in taken} | more)


def run_settings(
    given: Mapping[str, Any],
    questions: "QuestionSet",
    models: Models,
    settings: "tuple[Setting, ...]",
    **more: object,
) -> "RunSettings":
    """Return the settings of a run by a command's options, of one repeat unless they say more."""
    from eaglegbv.eval.records import RunSettings

    named = models.named
    return made_of(
        {"system": None, "repeats": 1, **given},
        RunSettings,
        suite=questions.suite,
        origin=questions.origin,
        question_ids=tuple(question.id for question in questions.questions),
        questions_sha256=questions.sha256,
        model=named.name,
        drafter=named.drafter_name,
        settings=settings,
        compile_backend=given.get("compile_backend") or "",
        **more,
    )


def entries(option: str, text: str, kind: Callable[[str], Entry]) -> list[Entry]:
    """Return the entries of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if all(parts):
            return [kind(part) for part in parts]
    except ValueError:
        pass
    wanted = "integers" if kind is int else "numbers" if kind is float else "names"
    raise InvalidArgument(option, text, f"{wanted} separated by commas")


def member(option: str, name: str, kind: type[Kind]) -> Kind:
    """Return the member of ``kind`` that an option names."""
    if name not in set(kind):
        raise InvalidArgument(option, name, one_of(kind, name))
    return kind(name)


def widths_named(text: str | None) -> tuple[int, ...] | None:
    """Return the widths in a text such as 3x2x2x1; None without one."""
    if text is None:
        return None
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgument("widths", text, "numbers such as 3x2x2x1")
    return tuple(map(int, parts))


def paths_of_widths(text: str, reason: str) -> tuple[int, int]:
    """Return paths and depth of widths such as 3x1x1x1; raise for others, for a ``reason``."""
    from eaglegbv.config import Plan

    plan = Plan(widths=widths_named(text) or ())
    if plan.widths:
        raise InvalidArgument("widths", text, f"such as 3x1x1x1: {reason}")
    return plan.paths, plan.depth


def check_verifier(name: str) -> None:
    """Raise unless a verifier has this name; ``none`` is plain decoding."""
    from eaglegbv.verifiers.registry import STATEFUL_VERIFIERS, VERIFIERS

    found = {"none", *VERIFIERS, *STATEFUL_VERIFIERS}
    if name not in found:
        raise InvalidArgument("verifier", name, one_of(sorted(found), name))


def verifier_names(text: str) -> list[str]:
    """Return the verifiers in a comma-separated list."""
    found = entries("verifiers", text, str)
    for name in found:
        check_verifier(name)
    return found


def draft_sampling_named(name: str | None) -> "DraftSampling | None":
    """Return the draft sampling with a name; None stays the verifier's own."""
    from eaglegbv.tree import DraftSampling

    return None if name is None else member("draft_sampling", name, DraftSampling)


def plan_choices(
    verifier: str | None = None,
    paths: int | None = None,
    depth: int | None = None,
    *,
    draft_sampling: str | None,
    draft_width: int,
    draft_temperature: float,
    widths: str | None = None,
) -> "PlanChoices":
    """Return these choices, with as many paths as a verifier takes where it alone is named."""
    from eaglegbv.config import PlanChoices
    from eaglegbv.verifiers.registry import with_fitting_paths

    if verifier is not None:
        check_verifier(verifier)
    sampling = draft_sampling_named(draft_sampling)
    tree = verifier, paths, depth, sampling
    choices = PlanChoices(*tree, draft_width, draft_temperature, widths_named(widths))
    return with_fitting_paths(choices)


def check_out(path: Path | None, option: str = "out") -> None:
    """Raise if a file cannot be written, before what is to be written takes minutes to measure."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise InvalidArgument(option, str(path), "a file in a folder that can be written to")


# How commands report.


def print_json(content: object) -> None:
    """Print a JSON object on a line."""
    typer.echo(msgspec.json.encode(content).decode())


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table: under each heading an entry that rows have, in a format; "-" for none."""
    from eaglegbv.eval.report import plain_text

    def cell(value: object, layout: str) -> str:
        return "-" if value is None else format(value, layout)

    shown = {key: how for key, how in columns.items() if any(how[0] in row for row in rows)}
    lines = ([cell(row.get(name), layout) for name, layout in shown.values()] for row in rows)
    typer.echo(plain_text([list(shown), *lines]))


class Progress:
    """A bar on standard error; where that is no terminal, a line every :data:`LINE_SECONDS`."""

    def __init__(self, bar: "tqdm[NoReturn]", total: int, unit: str, what: str, done: int) -> None:
        self._bar, self._total, self._unit, self._what = bar, total, unit, what
        self._begun = self._told = time.monotonic()
        self._first = self._done = done

    def update(self, count: int = 1, note: str = "") -> None:
        """Count units that are done; ``note`` says what was last done, or how it went."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count)
        self._done += count
        now = time.monotonic()
        if self._bar.disable and now - self._told >= LINE_SECONDS:
            self._told = now
            rest = (now - self._begun) / (self._done - self._first) * (self._total - self._done)
            about = f"{self._done}/{self._total} {self._unit}s, about {rest:.0f} s to go"
            typer.echo("; ".join(filter(None, (self._what, about, note))), err=True)


@contextmanager
def progress(
    total: int, unit: str, what: str = "", *, done: int = 0, leave: bool = True
) -> Iterator[Progress]:
    """Show how many of ``total`` units are done within this context; ``what`` they are for."""
    with tqdm(
        total=total, initial=done, desc=what, unit=unit, leave=leave, file=sys.stderr, disable=None
    ) as bar:
        yield Progress(bar, total, unit, what, done)

"""What several commands take, and how they report.

Only functions import torch here, and only when they are called: help is printed without it.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.models import OptionInfo

from eaglegbv.cli.structs import NAMES, App, entries
from eaglegbv.cli.terminal import print_note
from eaglegbv.config import PLAIN, AutoPlan, EngineConfig, PlanChoices
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from eaglegbv.config import Planning
    from eaglegbv.eval.questions import QuestionSet
    from eaglegbv.llm import LLM
    from eaglegbv.loading import NamedModels
    from eaglegbv.text import Prompt

TRIAL_TOKENS = 16  # of an answer that is timed to say how long others take
LOOKUP = "ngram"  # the drafter of a model for which none is named
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
UNCACHED = EngineConfig(prefix_cache=False)
"""For measurements: every way answers the same prompts, and must read them itself."""
_log = logging.getLogger(__name__)


def opt(text: str, *names: str, shown: bool | str = True) -> OptionInfo:
    """Return an option with a help text; ``shown`` replaces its default in help."""
    option: OptionInfo = typer.Option(*names, help=text, show_default=shown)
    return option


def make_app(text: str | None = None) -> App:
    """Return an application, or a group of its commands; ``text`` is its help."""
    return App(
        no_args_is_help=text is not None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # it would take brackets, as in .[bench], for markup
        help=text,
    )


Verifier = Annotated[str, opt("Verifier, as in generate.")]
Temperatures = Annotated[tuple[float, ...], opt("Sampling temperatures.", *NAMES["temperature"])]
Seed = Annotated[int, opt("Seed of all random numbers.")]
MaxTokens = Annotated[int, opt("Most tokens of an answer.")]
AsJson = Annotated[bool, opt("Print JSON.", "--json")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models that a command runs, and how they are loaded.

    Attributes:
        model: Folder or hub name of the target; smollm2; or tiny, the packaged one. By default
            smollm2 if it is here, or tiny.
        drafter: Folder or hub name of an EAGLE head, a small language model or a table; 'ngram';
            'eagle1' or 'eagle3' of the tiny model. By default ngram, prompt lookup; of tiny eagle3,
            of smollm2 its own.
        device: Device, such as cpu or cuda; by default cuda where there is one.
        dtype: One of float32, bfloat16, float16; auto: bfloat16 on a GPU and on a CPU that
            multiplies it faster, else float32.
        compile_backend: Compile the target first, in minutes: 'inductor'.
        trust_remote_code: Run code that the model brings, if it needs any.
        generation_config: Sampling settings that the model's generation_config.json recommends:
            auto, or none.
    """

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
        drafts = isinstance(plan, AutoPlan) or plan.speculative
        if not drafts or self.named.drafter is not None:
            return self
        _log.warning("no --drafter: drafts are looked up in the text itself (%s)", LOOKUP)
        return replace(self, drafter=LOOKUP)

    def load(
        self,
        plan: "Planning",
        engine: EngineConfig | None = None,
        **more: Any,  # noqa: ANN401  further arguments of LLM
    ) -> "LLM":
        """Load them into an engine."""
        from transformers.utils.logging import disable_progress_bar

        from eaglegbv.llm import LLM

        models = self.or_lookup(plan)
        disable_progress_bar()
        return LLM(**asdict(models), plan=plan, engine=engine, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions that a command asks.

    Attributes:
        questions: How many, spread evenly over the set; by default all, but 8 in mt-bench.
        questions_set: Set of questions: mt-bench, spec-bench, gsm8k, humaneval, math-500, mgsm,
            mbpp, dolly, eagle-gsm8k, eagle-humaneval or builtin; or a file of JSON lines.
        category: Categories of the set, such as translation,summarization; by default all.
        data: File or folder from which to read the set, instead of the usual places.
    """

    questions: int | None = None
    questions_set: str = "mt-bench"
    category: str | None = None
    data: Path | None = None

    def load(self, usual: int | None = None) -> "QuestionSet":
        """Read them; offline, in place of MT-Bench's the packaged ones, which a line says.

        ``usual`` is the most where no number was asked for.
        """
        from eaglegbv.eval.questions import load_questions

        count, fewer = self.questions, False
        try:
            known = load_questions(self.questions_set, self.data)
        except InvalidArgument as error:
            away = error.argument == "questions-set" and self.questions_set == "mt-bench"
            if not away or self.data is not None:
                raise
            print_note(f"{error}; the packaged questions are asked instead")
            known, fewer = load_questions("builtin"), True
        if self.category is not None:
            known = known.only(entries("category", self.category, str))
        most = len(known.questions)
        if count is None:
            return known if usual is None else known.first(min(usual, most))
        return known.first(min(count, most) if fewer else count)


# What the texts of options mean.


def check_verifier(name: str) -> None:
    """Raise unless a verifier has this name; ``none`` is plain decoding."""
    from eaglegbv.verifiers.registry import ALL_VERIFIERS

    known = {"none", *ALL_VERIFIERS}
    if name not in known:
        raise InvalidArgument("verifier", name, one_of(sorted(known), name))


def verifier_names(text: str) -> list[str]:
    """Return the verifiers in a comma-separated list."""
    names = entries("verifiers", text, str)
    for name in names:
        check_verifier(name)
    return names


def planning_of(choices: PlanChoices) -> "Planning":
    """Return the plan that options come to, or the engine's own choice."""
    from eaglegbv.verifiers.registry import choose

    if choices.verifier is not None:
        check_verifier(choices.verifier)
    return choose(None, choices)


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def check_out(path: Path | None, option: str = "out") -> None:
    """Raise if a file cannot be written, before what is to be written takes minutes to measure."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise InvalidArgument(option, str(path), "a file in a folder that can be written to")


# How commands report.


def print_expected(llm: "LLM", tokens: int, prompts: "Sequence[Prompt]") -> None:
    """Say how long about so many tokens take, by a trial of plain decoding that is not counted."""
    params = SamplingParams(max_tokens=TRIAL_TOKENS, ignore_eos=True)
    llm.generate(prompts[0], params, plan=PLAIN)  # raises if it is wrong; first forwards are slower
    start = time.perf_counter()
    llm.generate([*prompts], params, plan=PLAIN)
    rate = len(prompts) * TRIAL_TOKENS / (time.perf_counter() - start)
    print_note(f"up to {tokens:,} tokens: about {tokens / rate:,.0f} s at plain decoding's speed")


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Log nothing but errors within this context, if ``quiet``."""
    logging.disable(logging.WARNING if quiet else logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def print_json(content: object) -> None:
    """Print a JSON object on a line."""
    typer.echo(msgspec.json.encode(content).decode())


def print_rows(rows: Sequence[Any], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table: under each heading a field that structs have, in a format; "-" for none."""
    from eaglegbv.eval.tables import plain_text

    def cell(value: object, layout: str) -> str:
        return "-" if value is None else format(value, layout)

    facts = [row if isinstance(row, Mapping) else msgspec.structs.asdict(row) for row in rows]
    shown = {key: how for key, how in columns.items() if any(how[0] in row for row in facts)}
    lines = ([cell(row.get(name), layout) for name, layout in shown.values()] for row in facts)
    typer.echo(plain_text([list(shown), *lines]))


def print_results(
    items: Sequence[Any],
    columns: Mapping[str, tuple[str, str]],
    *,
    as_json: bool,
    rows: Sequence[Any] | None = None,
) -> None:
    """Print each item as JSON on a line; or the table of ``rows``, by default of the items."""
    if not as_json:
        print_rows(items if rows is None else rows, columns)
        return
    for item in items:
        print_json(item)


def print_wrote(*paths: Path) -> None:
    """Say which files were written."""
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def print_broken(errors: Mapping[str, int]) -> None:
    """Say how many conversations broke off, by what answered, if any did."""
    broken = ", ".join(f"{name}: {count}" for name, count in errors.items() if count)
    if broken:
        typer.echo(f"conversations that broke off, counted in no figure: {broken}", err=True)

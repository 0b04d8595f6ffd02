"""``eaglegbv serve``: an OpenAI-compatible server, SGLang's or this package's own."""

import os
import secrets
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.options import Models, opt
from eaglegbv.cli.serve_local import Endpoint, LocalServer, serve_local
from eaglegbv.cli.structs import Fields, GroupedCommand
from eaglegbv.cli.terminal import print_note
from eaglegbv.config import EngineConfig, Plan, PlanChoices
from eaglegbv.errors import InvalidArgument

if TYPE_CHECKING:
    from typer.core import TyperOption

    from eaglegbv.backends.sglang.launch import Launch
    from eaglegbv.backends.sglang.settings import Settings

DRAFTING = ("verifier", "paths", "depth", "draft_width", "draft_temperature")
SGLANGS = (
    *("host", "port", "served_model_name", "api_key", "log_level", "chat_template", "revision"),
    *("device", "dtype", "trust_remote_code"),
)
"""Options that SGLang has under the same names, to which they are passed on."""


class Backend(StrEnum):
    """What serves."""

    AUTO = "auto"
    SGLANG = "sglang"
    LOCAL = "local"


BOTH = {"model", "backend", "drafter", "seed", *DRAFTING, *SGLANGS}
ONLY_SGLANG = {"plans", "dry_run"}


def owner(name: str) -> Backend | None:
    """Return the backend that alone has an option; None if both have it."""
    if name in BOTH:
        return None
    return Backend.SGLANG if name in ONLY_SGLANG else Backend.LOCAL


class Serve(GroupedCommand):
    """The command, whose help tells which server has an option."""

    def group(self, option: "TyperOption") -> str:
        """Return whose an option is."""
        backend = owner(str(option.name))
        if backend is None:
            return "Options"
        whose = "SGLang" if backend is Backend.SGLANG else "This package's engine"
        return f"{whose} (--backend {backend})"


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Folder or hub name of the target; or tiny, or smollm2.")
    ],
    backend: Annotated[
        Backend,
        opt("What serves; auto: SGLang if it is installed and has an accelerator, else local."),
    ] = Backend.AUTO,
    *,
    models: Annotated[Models, Fields(without=("model",))],
    choices: PlanChoices,
    seed: Annotated[
        int | None, opt("Seed of requests without one; by default another at every start.")
    ] = None,
    endpoint: Endpoint,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must give.", envvar="EAGLEGBV_API_KEY"),
    ] = None,
    local: LocalServer,
    engine: Annotated[EngineConfig, Fields(without=("seed",), max_batch=64)],
    plans: Annotated[
        str | None,
        opt(
            "Plans to choose among by load, such as 6x6,4x6,3x4,1x4,none.",
            shown="auto, those; one with --paths or --depth, or a rule of one path or with state",
        ),
    ] = None,
    dry_run: Annotated[
        bool, opt("Check all that needs no accelerator, print the command and stop.", "--dry-run")
    ] = False,
) -> None:
    """Serve MODEL over HTTP with OpenAI's endpoints.

    SGLang takes its own options too (--tp, --mem-fraction-static, ...), which are passed on to it.

    \b
    Examples:
      eaglegbv serve smollm2 --port 8000
      eaglegbv serve MODEL --drafter HEAD --backend sglang --tp 2
    """
    chosen, why = _choose(backend, dry_run=dry_run)
    _refuse(context, chosen, why)
    if chosen is Backend.LOCAL:
        planning = opts.planning_of(choices)
        seed = secrets.randbits(63) if seed is None else seed
        engine = msgspec.structs.replace(engine, seed=seed)
        print_note(f"served by this package's engine, --backend local: {why}")
        serve_local(model, endpoint, api_key, local, planning, models, engine)
        return
    given = [*opts.given_options(context)]
    others = [*context.args, *_passed_on(context, given, api_key)]
    start = _sglang(model, models, choices, plans, seed, given, others, dry_run=dry_run)
    print_note(f"served by SGLang, --backend sglang: {why}")
    sys.stdout.flush()
    if dry_run:
        variables = (f"{name}='{value}'" for name, value in start.environment.items())
        typer.echo(" ".join([*variables, *start.command]))
    else:
        os.execve(start.command[0], start.command, os.environ | start.environment)


def _choose(backend: Backend, *, dry_run: bool) -> tuple[Backend, str]:
    """Return what serves, and why."""
    if backend is not Backend.AUTO:
        return backend, "as asked"
    if find_spec("sglang") is None:
        return Backend.LOCAL, "SGLang is not installed"
    from eaglegbv.backends.sglang.ready import accelerator_exists

    if dry_run:
        return Backend.SGLANG, "it is installed, and a dry run needs no accelerator"
    if accelerator_exists():
        return Backend.SGLANG, "it is installed, and there is an accelerator"
    return Backend.LOCAL, "there is no accelerator for SGLang"


def _refuse(context: typer.Context, chosen: Backend, why: str) -> None:
    """Raise InvalidArgument for an option that only the other backend has."""
    for name in opts.given_options(context):
        other = owner(name)
        if other not in (None, chosen):
            expected = f"none with --backend {chosen} ({why}); --backend {other} has it"
            raise InvalidArgument(name, context.params[name], expected)
    if chosen is Backend.LOCAL and context.args:
        expected = f"no such option with --backend local ({why}); --backend sglang passes it on"
        raise InvalidArgument("arguments", " ".join(context.args), expected)


def _passed_on(context: typer.Context, given: Sequence[str], api_key: str | None) -> list[str]:
    """Return the options that SGLang has under the same names."""
    values = {name: context.params[name] for name in SGLANGS if name in given}
    if api_key is not None:
        values["api_key"] = api_key
    words = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


def _sglang(
    model: str,
    models: Models,
    choices: PlanChoices,
    plans: str | None,
    seed: int | None,
    given: Sequence[str],
    others: Sequence[str],
    *,
    dry_run: bool,
) -> "Launch":
    """Return the command that starts SGLang's server, after all checks that can be made here."""
    from eaglegbv.backends.sglang.ready import check_ready

    check_ready(others, accelerator=not dry_run)
    from eaglegbv.backends.sglang.launch import launch
    from eaglegbv.backends.sglang.server_args import check_command
    from eaglegbv.loading import named_models
    from eaglegbv.verifiers.registry import chosen_plan

    settings = _settings(choices, plans, seed, fixed=bool({"paths", "depth"} & {*given}))
    plan = chosen_plan(choices)
    pair = named_models(model, models.drafter)
    drafting = [name for name in given if name in DRAFTING]
    if pair.drafter is None and drafting:
        raise InvalidArgument("drafter", None, f"an EAGLE head, for {drafting[0]}")
    paths, depth = plan.paths, plan.depth
    start = launch(
        pair.target, pair.drafter, paths=paths, depth=depth, settings=settings, others=others
    )
    if dry_run:
        check_command(start)
    return start


def _settings(
    choices: PlanChoices, plans: str | None, seed: int | None, *, fixed: bool
) -> "Settings":
    from eaglegbv.backends.sglang.settings import Settings, takes_plans

    if plans and fixed:
        raise InvalidArgument("plans", plans, "no --paths and --depth beside them")
    verifier = choices.verifier or Plan().verifier
    if plans is None:
        plans = "auto" if not fixed and takes_plans(verifier) else ""
    return Settings(
        verifier=verifier,
        plans=plans,
        draft_width=choices.draft_width,
        draft_temperature=choices.draft_temperature,
        seed=seed,
    )

"""``eaglegbv bench served``: acceptance by verifier, through SGLang's OpenAI endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglegbv.cli.measuring import run_settings
from eaglegbv.cli.options import (
    Drafter,
    DraftWidth,
    MaxTokens,
    Model,
    QuestionData,
    Questions,
    QuestionsSet,
    numbers,
    verifier_names,
)
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import DRAFT_WIDTH

if TYPE_CHECKING:
    from eaglegbv.backends.sglang.launch import Launch
    from eaglegbv.config import Plan
    from eaglegbv.eval.questions import Question
    from eaglegbv.eval.records import Record, Setting
    from eaglegbv.eval.runner import RunFolder
    from eaglegbv.loading import NamedModels


def served(
    context: typer.Context,
    questions: Questions = None,
    questions_set: QuestionsSet = "mt-bench",
    data: QuestionData = None,
    verifiers: Annotated[
        str,
        typer.Option(help="Verifiers of sampled trees, as in generate; 'none' is plain decoding."),
    ] = "block,gbv,otbv,spectr,specinfer,traversal",
    eagle: Annotated[
        str | None,
        typer.Option(
            help="Temperatures at which to run SGLang's own EAGLE trees; on a CPU only 0.",
            show_default="none",
        ),
    ] = None,
    paths: Annotated[int, typer.Option(help="Drafted paths, K; top-k of EAGLE.")] = 3,
    depth: Annotated[int, typer.Option(help="Drafted tokens per path, L; steps of EAGLE.")] = 4,
    temperature: Annotated[str, typer.Option(help="Sampling temperatures.")] = "1.0",
    draft_width: DraftWidth = DRAFT_WIDTH,
    max_tokens: MaxTokens = 128,
    at_once: Annotated[int, typer.Option(help="Number of conversations at a time.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed that every request's seed is derived from.")] = 0,
    model: Model = None,
    drafter: Drafter = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for records, logs and the table; a run in it is resumed.",
            show_default="runs/served-SET",
        ),
    ] = None,
) -> None:
    """Serve the pair with SGLang, one server per verifier, and hold all conversations in each.

    Other options are passed on to SGLang. SGLang's own EAGLE drafts trees with the same head and
    the same number of nodes. To continue an interrupted run, give the same command again.
    """
    from eaglegbv.backends.sglang.launch import check_ready
    from eaglegbv.config import Plan
    from eaglegbv.eval.grid import grid
    from eaglegbv.eval.questions import load_questions
    from eaglegbv.eval.records import describe_environment
    from eaglegbv.eval.runner import RunFolder
    from eaglegbv.loading import named_models
    from eaglegbv.utils import require_integer

    check_ready(context.args)
    require_integer("at-once", at_once, 1, 1024)
    chosen = load_questions(questions_set, data).first(questions)
    sampled = grid(
        verifier_names(verifiers),
        [paths],
        [depth],
        numbers("temperature", temperature),
        base=Plan(draft_width=draft_width),
    ).settings
    shape = Plan(paths=paths, depth=depth)
    models = named_models(model, drafter)
    settings = run_settings(
        chosen,
        models,
        sampled + _eagle(shape, eagle),
        max_tokens=max_tokens,
        seed=seed,
        backend="sglang server",
        backend_arguments={"arguments": " ".join(context.args), "at_once": at_once},
    )
    folder = RunFolder(
        out or Path("runs") / f"served-{chosen.suite}",
        settings,
        describe_environment("SGLang's", ("sglang",)),
    )
    servers = _servers(settings.settings, models, shape)
    _hold(servers, chosen.questions, folder, others=context.args, at_once=at_once)
    _report(folder)


def _eagle(shape: "Plan", temperatures: str | None) -> "tuple[Setting, ...]":
    """Return the settings of SGLang's own EAGLE."""
    from eaglegbv.config import PLAIN
    from eaglegbv.eval.records import Setting

    if temperatures is None:
        return ()
    name = f"eagle K{shape.paths} L{shape.depth}"
    return tuple(
        Setting(plan=PLAIN, temperature=temperature, baseline=name)
        for temperature in numbers("eagle", temperatures)
    )


def _hold(
    servers: "Sequence[_Server]",
    questions: "Sequence[Question]",
    folder: "RunFolder",
    *,
    others: "Sequence[str]",
    at_once: int,
) -> None:
    """Hold all conversations that are not yet in the folder of a run, server by server."""
    from tqdm import tqdm

    from eaglegbv.backends.sglang.client import Endpoint
    from eaglegbv.backends.sglang.launch import running
    from eaglegbv.eval.served import hold_at_once

    total = sum(1 for _ in folder.settings.keys(folder.settings.settings))
    known = len(folder.records)
    with tqdm(total=total, initial=known, unit="conversation", disable=None) as bar:

        def keep(record: "Record") -> None:
            folder.add(record)
            bar.update()

        for server in servers:
            if folder.has_all(server.settings):
                continue
            log = folder.path / "logs" / f"{server.settings[0].name}.txt"
            with running(server.launch(others), log) as url:
                hold_at_once(
                    Endpoint(url, server.shape),
                    questions,
                    folder.settings,
                    own=server.settings,
                    at_once=at_once,
                    done=folder.done,
                    on_record=keep,
                )


def _report(folder: "RunFolder") -> None:
    """Write the table into the folder of a run, and print it."""
    from eaglegbv.eval.report import plain_text
    from eaglegbv.eval.served import HEADINGS, accepted

    found = accepted(folder.settings, folder.records)
    text = plain_text([list(HEADINGS), *(figures.row for figures in found)])
    (folder.path / "table.txt").write_text(text + "\n", encoding="utf-8")
    typer.echo(text)


@dataclass(frozen=True, slots=True)
class _Server:
    """A server, and the settings in which it answers.

    Attributes:
        settings: Settings of one plan, or of SGLang's own EAGLE, at several temperatures.
        target: Folder or hub name of the target.
        head: Folder or name of the EAGLE head, or None.
        shape: Plan with the shape of its trees.
    """

    settings: tuple["Setting", ...]
    target: str
    head: str | Path | None
    shape: "Plan"

    def launch(self, others: "Sequence[str]") -> "Launch":
        """Return the command that starts it."""
        from eaglegbv.backends.sglang.launch import launch
        from eaglegbv.backends.sglang.settings import Settings

        K, L = self.shape.paths, self.shape.depth
        if self.settings[0].baseline is not None:
            if self.head is None:
                raise InvalidArgument("drafter", None, "a folder with an EAGLE head, for --eagle")
            return launch(self.target, self.head, paths=K, depth=L, settings=None, others=others)
        plan = self.settings[0].plan
        if not plan.speculative:
            return launch(self.target, None, paths=K, depth=L, settings=Settings(), others=others)
        settings = Settings(verifier=plan.verifier, draft_width=plan.draft_width)
        return launch(self.target, self.head, paths=K, depth=L, settings=settings, others=others)


def _servers(settings: "Sequence[Setting]", models: "NamedModels", eagle: "Plan") -> list[_Server]:
    """Return the servers of a run; ``eagle`` has the shape of SGLang's own trees."""
    own = dict.fromkeys((setting.baseline, setting.plan) for setting in settings)
    return [
        _Server(
            tuple(s for s in settings if (s.baseline, s.plan) == (baseline, plan)),
            str(models.target),
            models.drafter,
            plan if baseline is None else eagle,
        )
        for baseline, plan in own
    ]

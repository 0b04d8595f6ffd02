"""``eaglegbv chat``: a conversation in the terminal; and drafted tokens in colours."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaglegbv.cli import options as opts
from eaglegbv.cli.answers import Messages, answer, messages, print_text, request_params
from eaglegbv.cli.options import Models, opt
from eaglegbv.cli.structs import Fields
from eaglegbv.cli.terminal import has_colours, print_note, styled
from eaglegbv.config import PlanChoices
from eaglegbv.errors import EagleGBVError
from eaglegbv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from eaglegbv.llm import LLM
    from eaglegbv.metrics import StepRecord, TreeRecord
    from eaglegbv.text import Delta

COMMANDS = {
    "/clear": "forget the conversation",
    "/drafts": "colour drafted tokens, or do so no more",
    "/help": "show this",
    "/quit": "end, as Ctrl-D does; Ctrl-C ends an answer",
}
ACCEPTED: dict[str, Any] = {"fg": "green"}
REJECTED: dict[str, Any] = {"fg": "red", "strikethrough": True}


class DraftColours:
    """Prints answers with their drafts in colours, where standard output has colours.

    An observer of steps with trees, for one request at a time. After the tokens of a step come the
    drafts that were rejected where it stopped, then the token of the target's own.
    """

    def __init__(self, llm: "LLM") -> None:
        from eaglegbv.trace import RecordTexts

        self._texts = RecordTexts(partial(llm.decode, skip_special_tokens=True))
        self._trees: SimpleQueue[TreeRecord] = SimpleQueue()

    def on_step(self, record: "StepRecord") -> None:
        """Keep a step's tree until its tokens are shown."""
        for tree in record.trees:
            self._trees.put(tree)

    def show(self, delta: "Delta") -> None:
        """Print the steps since the last piece of an answer."""
        while not self._trees.empty():
            text = self._coloured(self._trees.get())
            typer.echo(text, nl=False, color=has_colours())
        if delta.completion is not None:
            typer.echo()

    def _coloured(self, tree: "TreeRecord") -> str:
        texts = self._texts.of_committed(tree)
        count = len(tree.accepted)
        accepted = styled("".join(texts[:count]), **ACCEPTED)
        rejected = ""
        if has_colours() and len(texts) > count:
            rejected = styled("".join(self._rejected(tree)), **REJECTED)
        return accepted + rejected + "".join(texts[count:])

    def _rejected(self, tree: "TreeRecord") -> Iterator[str]:
        stop = tree.accepted[-1] if tree.accepted else 0
        for node in range(1, len(tree.parents)):
            if tree.parents[node] == stop and tree.token_ids[node] != tree.next_token:
                yield self._texts.added([tree.token_ids[stop]], [tree.token_ids[node]])


def legend() -> str:
    """Return what the colours say."""
    accepted = styled("drafted and accepted", **ACCEPTED)
    return f"{accepted}, {styled('rejected', **REJECTED)}, the model's own"


@dataclass
class Conversation:
    """A conversation so far, and how it goes on."""

    llm: "LLM"
    params: SamplingParams
    system: str | None
    colours: DraftColours
    shows_drafts: bool = False
    quiet: bool = False
    said: Messages = field(default_factory=list)

    def switch_drafts(self) -> None:
        """Show drafts from now on, or no more; say which."""
        self.shows_drafts = not self.shows_drafts
        if self.shows_drafts:
            self.llm.observe(self.colours, trees=True)
        else:
            self.llm.unobserve(self.colours)
        typer.echo(f"({legend() if self.shows_drafts else 'drafts are not shown'})", err=True)

    def obey(self, command: str) -> None:
        """Do what a line says that begins with a slash."""
        if command == "/clear":
            self.said.clear()
        elif command == "/drafts":
            self.switch_drafts()
        else:
            typer.echo(help_text(), err=True)

    def ask(self, text: str) -> None:
        """Print the answer to a message; one that breaks off leaves the conversation as it was."""
        first = messages(text, None if self.said else self.system)
        show = self.colours.show if self.shows_drafts else print_text
        try:
            shown = answer(self.llm, self.said + first, self.params, show)
        except EagleGBVError as error:
            typer.echo(f"{error} (/clear forgets the conversation)", err=True)
            return
        reply = {"role": "assistant", "content": shown.completion.text}
        self.said += [*first, reply]
        if not self.quiet:
            print_note(f"[{shown.footer(self.llm.plan)}]")


def help_text() -> str:
    """Return what can be typed that is no message."""
    return "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or hub name of the target; smollm2; or tiny."),
    ] = None,
    system: Annotated[str | None, opt("System message before the conversation.")] = None,
    show_drafts: Annotated[
        bool, opt("Colour accepted, rejected and own tokens as they come.", "--show-drafts")
    ] = False,
    quiet: Annotated[
        bool, opt("Print answers alone: no lines on loading, no footers.", "--quiet", "-q")
    ] = False,
    *,
    sampling: Annotated[
        dict[str, Any],
        Fields(
            *("temperature", "top_p", "top_k", "seed"),
            of=SamplingParams,
            shown="the model's own, or {}",
            max_tokens=512,
        ),
    ],
    models: Annotated[Models, Fields(without=("model",))],
    plan: Annotated[PlanChoices, Fields("verifier", "paths", "depth")],
) -> None:
    """Talk with a model in the terminal; answers come as they are written.

    \b
    Examples:
      eaglegbv chat
      eaglegbv chat MODEL --drafter HEAD --show-drafts
    """
    SamplingParams(**sampling)  # what is wrong is found before minutes go by with loading
    planning = opts.planning_of(plan)
    with opts.quietly(quiet):
        chosen = replace(models, model=model)
        llm, name = chosen.load(planning), chosen.named.name
        llm.encode(messages("Hello", system))  # raises where the model has no chat template
        talk = Conversation(llm, request_params(llm, sampling), system, DraftColours(llm))
        talk.quiet = quiet
        if not quiet:
            typer.echo(f"{name}; a line is a message, and\n{help_text()}", err=True)
        if show_drafts:
            talk.switch_drafts()
        for line in _lines():
            if line == "/quit":
                break
            if line.startswith("/") and " " not in line:
                talk.obey(line)
            elif line:
                talk.ask(line)


def _lines() -> Iterator[str]:
    """Yield what is typed until Ctrl-D, or Ctrl-C at an empty line."""
    with suppress(ImportError):
        import_module("readline")  # lines can be edited, and called back, where there is one
    typed = sys.stdin.isatty()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> " if typed else "").strip()

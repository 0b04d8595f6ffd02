"""A conversation in the terminal, and drafted tokens in colours."""

import io
import re
import sys
from collections.abc import Callable

import pytest
from support.cli import Result

from eaglegbv.cli.chat import ACCEPTED, REJECTED
from eaglegbv.errors import EagleGBVError
from eaglegbv.llm import LLM

Talk = Callable[..., Result]
COLOURS = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def talk(cli, pair, monkeypatch) -> Talk:
    """Types lines into a chat with the tiny random pair."""

    def talked(*lines: str, options: tuple[str, ...] = ()) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        fixed = ("--seed", "3", "-n", "8", "--verifier", "otbv")
        return cli("chat", *pair[1:], *fixed, *options)

    return talked


@pytest.fixture
def prompts(monkeypatch) -> list[list[dict[str, str]]]:
    """The conversations that the model is given."""
    given = []
    stream = LLM.stream

    def kept(llm, prompt, *rest):
        given.append(list(prompt))
        return stream(llm, prompt, *rest)

    monkeypatch.setattr(LLM, "stream", kept)
    return given


def roles(conversation: list[dict[str, str]]) -> str:
    return "".join(message["role"][0] for message in conversation)


def test_a_conversation_goes_on_until_it_is_cleared(talk, prompts):
    result = talk(
        "Hello", "", "More", "/clear", "Again", "/quit", "never", options=("--system", "Hi")
    )
    assert [roles(prompt) for prompt in prompts] == ["su", "suau", "su"]
    assert prompts[1][:2] == prompts[0]
    assert prompts[1][2]["content"] in result.out
    footers = re.findall(r"\[\d+ forwards? wrote \d+ tokens? .*plan otbv 3x4.*\]", result.err)
    assert len(footers) == 3


def test_quiet_leaves_answers_alone_and_help_shows_the_commands(talk):
    assert talk("Hello", options=("--quiet",)).err == ""
    said = talk("/what").err
    assert said.count("/clear") == said.count("/drafts") == 2


def test_a_message_that_breaks_off_leaves_the_conversation_as_it_was(talk, prompts, monkeypatch):
    stream = LLM.stream

    def failing(llm, prompt, *rest):
        if prompt[-1]["content"] == "bad":
            raise EagleGBVError("too long")
        return stream(llm, prompt, *rest)

    monkeypatch.setattr(LLM, "stream", failing)
    assert "too long" in talk("Hello", "bad", "good").err
    assert [roles(prompt) for prompt in prompts] == ["u", "uau"]


def test_drafts_are_coloured_and_the_text_is_the_same(talk, monkeypatch):
    long = ("-n", "60")
    plain = talk("Hello", options=long).out
    assert talk("Hello", options=("--show-drafts", *long)).out == plain  # no terminal, no colours
    monkeypatch.setattr("eaglegbv.cli.chat.has_colours", lambda **_: True)
    monkeypatch.setattr("eaglegbv.cli.terminal.has_colours", lambda **_: True)
    coloured = talk("Hello", options=("--show-drafts", *long)).out
    rejected = re.compile(r"\x1b\[31m\x1b\[9m(.*?)\x1b\[0m", re.DOTALL)
    assert rejected.search(coloured)
    assert COLOURS.sub("", rejected.sub("", coloured)) == plain
    assert (ACCEPTED["fg"], REJECTED["fg"]) == ("green", "red")


def test_drafts_can_be_shown_from_some_message_on(talk, monkeypatch):
    monkeypatch.setattr("eaglegbv.cli.chat.has_colours", lambda **_: True)
    monkeypatch.setattr("eaglegbv.cli.terminal.has_colours", lambda **_: True)
    result = talk("Hello", "/drafts", "/drafts", "Hello")
    assert not COLOURS.search(result.out)
    assert "drafts are not shown" in result.err

"""Chat messages as users and OpenAI's clients write them: the same in prompts and in training rows.

Templates expect otherwise: arguments of a call as a mapping, which clients send as JSON; a content
that is text, which clients leave out beside calls; and nothing where clients send null.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

WORDLESS = ("assistant", "tool", "function")
"""Roles whose messages may do without content: a call needs no words, and a tool may give none."""


class Arguments(dict[str, Any]):
    """Arguments of a call: a mapping to templates that read it, JSON to those that print it."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def plain_message(message: Mapping[str, object]) -> Message | None:
    """Return a message as chat templates take it; None if it has no role or no text.

    Its content may be text or parts with text; keys that are null are left out.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str):
        return None
    text = _text_of(plain.get("content", "" if role in WORDLESS else None))
    if text is None:
        return None
    calls = plain.pop("tool_calls", None)
    plain["content"] = text
    if isinstance(calls, list | tuple) and calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: object) -> object:
    """Return a call of a tool with its arguments as a mapping, if they are JSON of one."""
    if not isinstance(call, Mapping):
        return call
    plain = {name: value for name, value in call.items() if value is not None}
    if "function" in plain:
        return {**plain, "function": _plain_call(plain["function"])}
    if "arguments" in call:
        plain["arguments"] = _arguments(call["arguments"])
    return plain


def _arguments(given: object) -> object:
    """Return arguments as a mapping that prints as JSON; what is no JSON object stays as it is."""
    if isinstance(given, Mapping):
        return Arguments(given, json.dumps(given, ensure_ascii=False, default=str))
    if given is not None and not isinstance(given, str):
        return given
    text = (given or "").strip() or "{}"  # a call without arguments
    try:
        values = json.loads(text)
    except ValueError:
        return given
    return Arguments(values, text) if isinstance(values, dict) else given


def _text_of(content: object) -> str | None:
    """Return a content as one text; None if it is neither text nor, as services take it, parts."""
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else None
    text = ""
    for part in content:
        piece = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(piece, str):
            return None
        text += piece
    return text

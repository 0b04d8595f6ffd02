"""Calls of tools: what makes a model write one, and how one is read in its text."""

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from transformers.utils.chat_parsing import ResponseParser

Tools: TypeAlias = Sequence[Mapping[str, Any]]  # descriptions of functions, as OpenAI has them

CONTENT, TAGGED, BARE = "content", "tagged", "bare"
FORMATS: Mapping[str, Any] = {
    "fields": {
        CONTENT: {},
        # Hermes, Qwen 2.5 and 3, SmolLM2 and 3, Granite: between tags, one call or a list.
        TAGGED: {
            "open_pattern": r"\s*<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
        },
        # Llama 3.1 and Mistral: after a mark, which may be a special token and no part of the text.
        BARE: {
            "open_pattern": r"\A(?=\s*(?:[\[{]|<\|python_tag\|>))",
            "repeats": True,
        },
    },
    "start_anchor_pattern": r"(?!)",  # the answer alone is read, no prompt before it
}
"""How models write calls, for the parser of transformers."""
_AROUND = {TAGGED: ("<tool_call>", "</tool_call>"), BARE: ("", "")}  # what the parser leaves out


class Found(NamedTuple):
    """What the next text of an answer comes to."""

    content: str
    calls: list[dict[str, Any]]


class Parser:
    """Reads an answer's text as it comes; this one finds words alone."""

    def feed(self, text: str) -> Found:
        """Return what is certain with more text."""
        return Found(text, [])

    def end(self) -> Found:
        """Return the rest: nothing more will come."""
        return Found("", [])


class CallParser(Parser):
    """Finds calls where the model writes them; what may be one is held back."""

    def __init__(self, names: Collection[str]) -> None:
        """Take the names of the tools: what calls none of them is content."""
        self._names, self._held = names, ""
        self._parser = ResponseParser(dict(FORMATS), prefix="")

    def feed(self, text: str) -> Found:
        """See :meth:`Parser.feed`."""
        return self._found(self._parser.feed(text))

    def end(self) -> Found:
        """See :meth:`Parser.end`."""
        return self._found(self._parser.finalize()[1])

    def _found(self, events: Sequence[Mapping[str, Any]]) -> Found:
        content, calls = "", []
        for event in events:
            if event["type"] == "region_chunk":
                self._held += event["text"]
            if event["field"] == CONTENT:
                content, self._held = content + self._held, ""
            elif event["type"] == "region_close":
                text, self._held = self._held, ""
                read = read_calls(text, self._names)
                calls += read
                if not read:
                    before, after = _AROUND[event["field"]]
                    content += f"{before}{text}{after}"
        return Found(content, calls)


class ArgumentsParser(Parser):
    """Reads an answer that a grammar makes the arguments of a tool: all is held back."""

    def __init__(self, name: str) -> None:
        """Take the name of the tool that must be called."""
        self._name, self._text = name, ""

    def feed(self, text: str) -> Found:
        """See :meth:`Parser.feed`."""
        self._text += text
        return Found("", [])

    def end(self) -> Found:
        """See :meth:`Parser.end`."""
        return Found("", [_call(self._name, self._text)])


_MARKS = re.compile(r"\A\s*(\[TOOL_CALLS\]|<\|python_tag\|>)?\s*")


def read_calls(text: str, names: Collection[str]) -> list[dict[str, Any]]:
    """Return the calls in JSON, one or several after another or in a list; none if it has others.

    Arguments may be called parameters, and be JSON within a string.
    """
    decoder, rest, calls = json.JSONDecoder(), _MARKS.sub("", text), []
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            rest = rest[end:].lstrip("; \n\t")
            entries = value if isinstance(value, list) else [value]
            calls += [_read(entry, names) for entry in entries]
    except (ValueError, msgspec.ValidationError):
        return []
    return calls


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    parameters: str | dict[str, Any] | None = None


class _Called(msgspec.Struct):
    function: _Function


def _read(entry: Any, names: Collection[str]) -> dict[str, Any]:  # noqa: ANN401  what JSON has
    """Return a call of a tool; ValueError or ValidationError if it is none."""
    if isinstance(entry, dict) and "function" not in entry:
        entry = {"function": entry}
    function = msgspec.convert(entry, _Called).function
    if function.name not in names:
        raise ValueError(function.name)
    arguments = function.arguments or function.parameters or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return _call(function.name, arguments)


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def call_schema(tools: Tools, name: str | None, *, parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of an answer that calls tools: the arguments of the one of a ``name``.

    Without a name, a list of calls of any, or one call unless ``parallel``.
    """
    if name is not None:
        return next(_parameters(tool) for tool in tools if name_of(tool) == name)
    calls, homes = [], {}
    for number, tool in enumerate(tools):
        # References within a tool's schema are to its own definitions, wherever it stands.
        home = f"#/$defs/{number}"
        schema = msgspec.json.encode(_parameters(tool))
        schema = schema.replace(b'"$ref":"#', b'"$ref":"' + home.encode())
        homes[str(number)] = msgspec.json.decode(schema)
        fields = {"name": {"const": name_of(tool)}, "arguments": {"$ref": home}}
        call = {"type": "object", "properties": fields, "required": list(fields)}
        calls.append({**call, "additionalProperties": False})
    most = {} if parallel else {"maxItems": 1}
    listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
    return {**listed, "$defs": homes}


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool; KeyError or TypeError if it is none."""
    name = tool["function"]["name"]
    if not isinstance(name, str):
        raise TypeError(name)
    return name


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | (tool["function"].get("parameters") or {})

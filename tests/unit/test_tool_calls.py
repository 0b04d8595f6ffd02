"""Calls of tools in answers' texts, as models write them, read whole and piece by piece."""

import json

import pytest
from llguidance import LLMatcher

from eaglegbv.tool_calls import ArgumentsParser, CallParser, call_schema, read_calls

NAMES = ["weather", "add"]
ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "add", "parameters": {"a": 1}}'
WEATHER, ADD = ("weather", {"city": "Oslo"}), ("add", {"a": 1})

ANSWERS = {
    "words": ("It rains.", "It rains.", []),
    "hermes": (f"<tool_call>\n{ONE}\n</tool_call>", "", [WEATHER]),
    "hermes, two": (
        f"<tool_call>{ONE}</tool_call>\n<tool_call>{OTHER}</tool_call>\n",
        "",
        [WEATHER, ADD],
    ),
    "words before": (f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.", [WEATHER]),
    "a list": (f"<tool_call>[{ONE}, {OTHER}]</tool_call>", "", [WEATHER, ADD]),
    "llama": ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [WEATHER]),
    "llama, two": (f"<|python_tag|>{ONE}; {OTHER}", "", [WEATHER, ADD]),
    "mistral": (f"[TOOL_CALLS][{ONE}]", "", [WEATHER]),
    "mistral, bare": (f" [{ONE}]", "", [WEATHER]),
    "function within": (f'{{"type": "function", "function": {ONE}}}', "", [WEATHER]),
    "text of arguments": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [ADD]),
    "no arguments": ('{"name": "add"}', "", [("add", {})]),
    "no tool": ('{"name": "nobody", "arguments": {}}', '{"name": "nobody", "arguments": {}}', []),
    "JSON": ('{"answer": 42}', '{"answer": 42}', []),
    "no JSON": ("[1] is a source.", "[1] is a source.", []),
    "broken": ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": </tool_call>', []),
    "not ended": (f"<tool_call>{ONE}", "", [WEATHER]),
    "a tag like it": ("a <tool_calm> b < c", "a <tool_calm> b < c", []),
    "nothing": ("", "", []),
}


def read(parser: CallParser | ArgumentsParser, text: str, size: int) -> tuple[str, list[object]]:
    found = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    found.append(parser.end())
    calls = [call for part in found for call in part.calls]
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    told = [(each["name"], json.loads(each["arguments"])) for each in functions]
    return "".join(part.content for part in found), told


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_however_they_come(text, content, calls, size):
    assert read(CallParser(NAMES), text, size) == (content, calls)


def test_words_are_not_held_back():
    parser = CallParser(NAMES)
    assert parser.feed("It rains").content == "It rains"
    assert parser.feed(" <tool").content == ""
    assert parser.feed("s> here").content == " <tools> here"


def test_an_answer_that_must_be_a_call_is_one():
    assert read(ArgumentsParser("weather"), '{"city": "Oslo"}', 4) == ("", [WEATHER])
    assert read(CallParser(NAMES), f"[{ONE},{OTHER}]", 4) == ("", [WEATHER, ADD])
    assert read(CallParser(NAMES), '[{"name": "we', 4) == ('[{"name": "we', [])


def tool(name: str, parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/Place"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["Oslo", "Rome"]}},
}
COUNT = CITY | {"$defs": {"Place": {"type": "integer"}}}


def test_schemas_keep_their_own_definitions(byte_tokenizer):
    tools = [tool("weather", CITY), tool("add", COUNT), tool("now", None)]
    for text, fits in (
        ('[{"name":"weather","arguments":{"city":"Oslo"}}]', True),
        ('[{"name":"add","arguments":{"city":7}},{"name":"now","arguments":{}}]', True),
        ('[{"name":"weather","arguments":{"city":7}}]', False),
        ('[{"name":"add","arguments":{"city":"Oslo"}}]', False),
        ('[{"name":"nobody","arguments":{}}]', False),
        ("[]", False),
    ):
        assert accepts(byte_tokenizer, call_schema(tools, None, parallel=True), text) == fits
    two = '[{"name":"now","arguments":{}},{"name":"now","arguments":{}}]'
    assert not accepts(byte_tokenizer, call_schema(tools, None, parallel=False), two)
    named = call_schema(tools, "add", parallel=True)
    assert accepts(byte_tokenizer, named, '{"city":7}')
    assert not accepts(byte_tokenizer, named, '{"city":"Oslo"}')


@pytest.fixture(scope="module")
def byte_tokenizer():
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    from eaglegbv.loading import TINY_TARGET

    tokenizer = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    return tokenizer, from_tokenizer(tokenizer)


def accepts(spell, schema, text) -> bool:
    tokenizer, spellings = spell
    matcher = LLMatcher(spellings, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return (
        matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
        and matcher.is_accepting()
    )


def test_what_calls_nothing_is_none():
    for text in ("", "3", '{"name": "add", "arguments": 3}', '[{"name": "add"}, 3]'):
        assert read_calls(text, NAMES) == []

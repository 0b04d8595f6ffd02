"""JSON by a schema: what whitespace it may have."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from eaglegbv.grammars import _read_json_schema
from eaglegbv.loading import TINY_TARGET

VALUE = {"a": True, "b": [{"c": [1, 2]}]}
LIST = {"type": "array", "items": {"type": "object"}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": LIST},
    "required": ["a", "b"],
}


@pytest.fixture(scope="module")
def spell() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    return tokenizer, from_tokenizer(tokenizer)


def fits(spell: Any, schema: object, text: str) -> bool:
    """Whether a text may begin like this by a schema."""
    tokenizer, spellings = spell
    ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = LLMatcher(spellings, _read_json_schema(json.dumps(schema)))
    return matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    "how", [{}, {"indent": 1}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}]
)
def test_json_may_be_written_as_usual(spell, how):
    assert fits(spell, SCHEMA, json.dumps(VALUE, **how))
    assert fits(spell, SCHEMA, json.dumps(VALUE, **how).replace("\n", "\r\n"))


@pytest.mark.parametrize("blanks", ["  ", "\n\n", " \n", "\n" + 17 * " ", "\n \t", "\t"])
@pytest.mark.parametrize("text", ['{{{}"a"', '{{"a"{}:', '{{"a":{}', '{{"a": true{},'])
def test_whitespace_has_an_end(spell, text, blanks):
    assert fits(spell, SCHEMA, text.format(" "))
    assert not fits(spell, SCHEMA, text.format(blanks))


def test_a_schema_may_wish_for_other_whitespace(spell):
    wide, narrow = '{          "a":', '{ "a":'
    for wishes, texts in (
        ({"whitespace_pattern": "[ ]*"}, (True, True)),
        ({"whitespace_flexible": True}, (True, True)),
        ({"whitespace_flexible": False}, (False, False)),
        ({"lenient": True}, (False, True)),
    ):
        schema = {**SCHEMA, "x-guidance": wishes}
        assert tuple(fits(spell, schema, text) for text in (wide, narrow)) == texts
    assert fits(spell, True, "[1, 2]")

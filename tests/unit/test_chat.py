"""What OpenAI's wire format says otherwise than chat templates expect."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eaglegbv.chat import plain_message
from eaglegbv.errors import InvalidArgument
from eaglegbv.loading import TINY_TARGET
from eaglegbv.text import encode_prompt

TEXT = '{"city": "Oslo",  "days": [1, 2]}'
QUESTION = {"role": "user", "content": "Weather?"}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def call(arguments: object = TEXT, **more: object) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    asked = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [asked], **more}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(TINY_TARGET))


def rendered(tokenizer: PreTrainedTokenizerBase, template: str, chat: object) -> str:
    """Return what the model reads of a chat that begins an answer, by a template."""
    tokenizer.chat_template = template
    return tokenizer.decode(encode_prompt(tokenizer, chat, "tiny"))


BEGIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for t in m.tool_calls or [] %}"
    "{% set a = t.function.arguments %}"
)
END = "{% endfor %};{% endfor %}"
WAYS = {
    "as JSON": ("{{ a | tojson }}", '{"city": "Oslo", "days": [1, 2]}'),
    "by key": (
        "{% for k, v in a | items %}<{{ k }}={{ v }}>{% endfor %}",
        "<city=Oslo><days=[1, 2]>",
    ),
    "by items()": ("{% for k, v in a.items() %}<{{ k }}>{% endfor %}", "<city><days>"),
    "one": ("{{ a.city }}", "Oslo"),
    "printed": ("{{ a }}", TEXT),
    "joined": ("{{ '(' + a + ')' }}", f"({TEXT})"),
    "asked for": ("{{ a if a is string else a | tojson }}", '{"city": "Oslo", "days": [1, 2]}'),
    "mapping": ("{{ 'yes' if a is mapping }}", "yes"),
}


@pytest.mark.parametrize(("way", "expected"), WAYS.values(), ids=WAYS.keys())
def test_arguments_reach_any_template(tokenizer, way, expected):
    template = BEGIN + way + END
    for given in (TEXT, {"city": "Oslo", "days": [1, 2]}):
        if way == "{{ a }}" or "+" in way:
            expected = expected.replace(",  ", ", ") if isinstance(given, dict) else expected
        text = rendered(tokenizer, template, [QUESTION, call(given), ANSWER])
        assert f"assistant:{expected};tool:rain" in text


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_without_arguments_has_none(tokenizer, arguments):
    text = rendered(tokenizer, BEGIN + "{{ a | tojson }}" + END, [QUESTION, call(arguments)])
    assert "assistant:{};" in text


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    [asked] = plain_message(call(arguments))["tool_calls"]
    assert asked["function"]["arguments"] == arguments


DUMPED = {"refusal": None, "audio": None, "function_call": None, "name": None, "annotations": None}


@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}",
    ],
    ids=["joined", "printed", "trimmed"],
)
def test_a_call_needs_no_words(tokenizer, template, more):
    text = rendered(tokenizer, template, [QUESTION, call(**more, **DUMPED), ANSWER])
    assert text == "<user>Weather?\n<assistant>\n<tool>rain\n"


def test_what_is_null_or_empty_is_not_there():
    dumped = {"role": "assistant", "content": "Hello.", "tool_calls": [], **DUMPED}
    assert plain_message(dumped) == {"role": "assistant", "content": "Hello."}
    assert plain_message(dumped | {"tool_calls": None}) == plain_message(dumped)
    assert plain_message({"role": "assistant", "content": None}) == {
        "role": "assistant",
        "content": "",
    }
    assert plain_message({"role": "tool", "tool_call_id": "c", "content": None})["content"] == ""
    assert plain_message({"role": "user", "content": None}) is None
    assert plain_message({"role": "user"}) is None
    assert plain_message({"role": None, "content": "a"}) is None


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tokenizer, tools):
    template = "{{ 'none' if tools is none or tools is not defined else 'tools' }}"
    assert rendered(tokenizer, template, {"messages": [QUESTION], "tools": tools}) == "none"


def test_a_developer_is_the_system_of_templates_that_know_no_other(tokenizer):
    chat = [{"role": "developer", "content": "Be kind."}, QUESTION]
    printed = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    assert rendered(tokenizer, printed, chat) == "<system><user>"
    knows = "{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{% endfor %}"
    assert rendered(tokenizer, knows, chat) == "<user>"


def test_pictures_are_refused(tokenizer):
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(InvalidArgument, match="both text"):
        encode_prompt(tokenizer, [{"role": "user", "content": image}], "tiny")

"""The events of other servers' streams, as the benchmark of endpoints reads them."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval.ways.clients import _answer

WORD = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}


class Chunks(httpx.AsyncByteStream):
    """A body that comes in pieces of one size, wherever they break an event."""

    def __init__(self, body: bytes, size: int) -> None:
        self._body, self._size = body, size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def read(body: str, size: int = 7) -> dict[str, float]:
    """Return what is read of a streamed answer."""

    async def asked() -> dict[str, float]:
        answers = httpx.MockTransport(
            lambda _: httpx.Response(200, stream=Chunks(body.encode(), size))
        )
        async with httpx.AsyncClient(base_url="http://server", transport=answers) as client:
            return await _answer(client, {})

    return asyncio.run(asked())


def stream(*events: object, form: str = "data: {}\n\n", last: str = "data: [DONE]\n\n") -> str:
    return "".join(form.format(json.dumps(e, ensure_ascii=False)) for e in events) + last


FORMS = {
    "plain": "data: {}\n\n",
    "no space": "data:{}\n\n",
    "comments": ": keep-alive\n\ndata: {}\n\n:\n",
    "names": "event: message\nid: 1\nretry: 10\ndata: {}\n\n",
    "name after": "data: {}\nevent: message\n\n",
    "carriage returns": "data: {}\r\n\r\n",
    "old line ends": "data: {}\r\r",
    "empty data": "data\n\ndata:\n\ndata: {}\n\n",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_however_they_are_written(form, size):
    answer = read(stream(WORD, WORD, USAGE, form=form), size)
    assert answer["answer_tokens"] == 4
    assert answer["first_token"] > 0
    assert answer["between_tokens"] >= 0


DELTAS = {
    "thoughts": {"reasoning_content": "hm"},
    "reasoning": {"reasoning": "hm", "content": None},
    "call": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    "line separator": {"content": "a\u2028b\u0085c"},
}


@pytest.mark.parametrize("delta", DELTAS.values(), ids=DELTAS.keys())
def test_whatever_brings_tokens_counts(delta):
    assert read(stream({"choices": [{"index": 0, "delta": delta}]}, USAGE))["answer_tokens"] == 4


OTHERS = [
    {"object": "ping"},
    {"choices": None},
    {"choices": [{"index": 0, "delta": None}]},
    {"error": None},
]


@pytest.mark.parametrize("other", OTHERS, ids=json.dumps)
def test_events_without_choices_are_passed_over(other):
    assert read(stream(other, WORD, other, USAGE, other))["answer_tokens"] == 4


def test_the_last_event_may_end_with_the_stream():
    assert read(stream(WORD, last=f"data: {json.dumps(USAGE)}"))["answer_tokens"] == 4


def test_data_of_several_lines_are_one_event():
    split = 'data: {"usage":\ndata: {"completion_tokens": 4}}\n\n'
    assert read(stream(WORD) + split)["answer_tokens"] == 4


@pytest.mark.parametrize(
    "error", [{"message": "too hot", "type": "server_error"}, "too hot"], ids=["object", "text"]
)
def test_an_error_is_told(error):
    with pytest.raises(StepFailed, match="too hot"):
        read(stream(WORD, {"error": error}))


def test_what_is_no_event_is_told():
    with pytest.raises(InvalidArgument, match="nonsense"):
        read("data: nonsense\n\n")
    with pytest.raises(StepFailed, match="without text, or without its usage"):
        read(stream(WORD))

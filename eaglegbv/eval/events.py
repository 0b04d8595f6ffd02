"""Events of a streamed answer over HTTP, as servers of OpenAI's protocol write them."""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from eaglegbv.errors import StepFailed
from eaglegbv.utils import decode_json


async def events(chunks: AsyncIterator[str]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield what a stream's events say; StepFailed for one that is an error, or no JSON object.

    Fields other than ``data`` and comments are skipped (HTML standard, section 9.2.6).
    """
    data: list[str] = []
    async for line in _lines(chunks):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        if line or not data:
            continue
        text = "\n".join(data)
        data = []
        if text.strip() in ("", "[DONE]"):
            continue
        event = decode_json(text.encode(), dict[str, Any], argument="event", place=text[:100])
        if error := event.get("error"):
            message = error.get("message", error) if isinstance(error, Mapping) else error
            raise StepFailed(0, str(message))
        yield event


async def _lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield lines that end as those of events do; Python's own also end at U+2028 and its like."""
    rest = ""
    async for chunk in chunks:
        *lines, rest = re.split(r"\r\n|\n|\r(?!\Z)", rest + chunk)
        for line in lines:
            yield line
    for line in (rest.removesuffix("\r"), ""):  # the last event may lack its blank line
        yield line

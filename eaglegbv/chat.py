"""Chat messages as users write them: the same in prompts and in rows to train on."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


def plain_message(message: Mapping[str, object]) -> Message | None:
    """Return a message whose content is text, given as text or as parts; None if it is no such.

    One that calls tools may do without content, and stays as it is.
    """
    if not isinstance(message.get("role"), str):
        return None
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    text = _text_of(content)
    return None if text is None else {**message, "content": text}


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

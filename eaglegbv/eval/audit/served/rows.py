"""What servers say of the tokens of an answer, in the forms of those that are known."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

Token: TypeAlias = int | str
"""A token's id where a server tells it, else its text."""

NONE_BELOW = -9998.0  # what servers write for the logarithm of 0 is smaller
NAMED = "token_id:"  # what precedes ids in the place of texts


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of one token."""

    token: Token
    logprob: float | None
    listed: list[tuple[Token, float | None]] | None = None  # None: the server listed nothing


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan."""

    part: str  # of the plan
    number: int  # in its part
    prompt: str
    tokens: int  # of each answer
    copies: int = 1  # answers
    seed: int | None = None
    changed: dict[str, Any] = {}  # settings other than the audit's
    prompt_ids: list[int] = []  # where they are known
    after: list[Token] = []  # ids of tokens that follow the prompt

    @property
    def text(self) -> str | list[Token]:
        """The text before the answer, as completion endpoints take it."""
        before: list[Token] = [*self.prompt_ids] or [self.prompt]
        return before + self.after if self.after else self.prompt


class Answer(msgspec.Struct, kw_only=True):
    """One answer, as far as it came; a line of JSON in a file."""

    ask: Ask
    choice: int = 0  # number of the answer among the request's
    rows: list[Row] = []  # of its tokens, also of the last one
    prompt_ids: list[int] = []  # where the server tells them
    error: str | None = None  # why nothing, or not all of it, came
    forwards: int | None = None  # of the target, where the server counts them
    accepted: int | None = None  # drafted tokens, where the server counts them
    told: int | None = None  # how many tokens the server says it has

    @property
    def tokens(self) -> list[Token]:
        """Its tokens."""
        return [row.token for row in self.rows]


def finite(logprob: float | None) -> float:
    """Return a log-probability as a number: NaN for none, -inf for what stands for it."""
    if logprob is None:
        return math.nan
    return -math.inf if logprob <= NONE_BELOW else logprob


def rows_of(logprobs: Mapping[str, Any] | Sequence[Any] | None) -> list[Row]:
    """Read the rows of a choice's ``logprobs``, or of llama.cpp's ``completion_probabilities``.

    Raises:
        KeyError, TypeError, ValueError: It has not the form of any known server.
    """
    if not logprobs:
        return []
    if not isinstance(logprobs, Mapping):
        return [_row(entry) for entry in logprobs]
    if "tokens" not in logprobs:
        return [_row(entry) for entry in logprobs["content"] or ()]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    rows = []
    for token, logprob, top in zip(*columns, strict=True):
        listed = [{"token": text, "logprob": value} for text, value in (top or {}).items()]
        rows.append(_row({"token": token, "logprob": logprob, "top_logprobs": listed}))
    return rows


def sglang_rows(meta: Mapping[str, Any]) -> list[Row]:
    """Read the rows of ``meta_info`` of SGLang's own ``/generate``."""
    columns = (meta["output_token_logprobs"], meta["output_top_logprobs"])
    rows = []
    for (logprob, token, *_), top in zip(*columns, strict=True):
        listed = [{"id": other, "logprob": value} for value, other, *_ in top or ()]
        rows.append(_row({"id": token, "logprob": logprob, "top_logprobs": listed}))
    return rows


def _row(entry: Mapping[str, Any]) -> Row:
    top = entry.get("top_logprobs", entry.get("top_probs"))
    return Row(*_entry(entry), [_entry(other) for other in top] if top else None)


def _entry(entry: Mapping[str, Any]) -> tuple[Token, float | None]:
    token = token_of(entry)
    if "prob" not in entry:
        return token, entry["logprob"]
    prob = entry["prob"]  # after llama.cpp's whole chain
    return token, math.log(prob) if prob > 0 else -math.inf


def token_of(entry: Mapping[str, Any]) -> Token:
    """Return what tells a listed token best: its id; its bytes, as texts may be alike; its text."""
    text = str(entry.get("token", ""))
    if isinstance(entry.get("id"), int):
        return int(entry["id"])
    if text.startswith(NAMED):
        return int(text.removeprefix(NAMED))
    return bytes(entry["bytes"]).hex() if entry.get("bytes") else text

"""What servers say of the tokens of an answer, in the forms of those that are known."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import msgspec

Entry: TypeAlias = tuple[int, float]
"""A token and its log-probability: its id where the server tells it, else a number below -1."""

NONE = -9999.0  # stands for the logarithm of 0
SLACK = 1e-5  # what float32 may lose when probabilities are added
NAMED = "token_id:"  # precedes ids in the place of texts


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of one token."""

    token: int
    logprob: float | None
    listed: list[Entry] | None = None  # None: no list of log-probabilities


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan."""

    part: str  # of the plan
    number: int  # in its part
    prompt: str
    tokens: int  # of each answer
    copies: int = 1  # answers
    seed: int | None = None
    changed: dict[str, Any] = {}  # settings other than the audit's
    after: list[int | str] = []  # ids of a text that begins with the prompt: asked in its place


class Answer(msgspec.Struct, kw_only=True):
    """One answer, as far as it came; a line of JSON in a file."""

    ask: Ask
    choice: int = 0  # number of the answer among the request's
    rows: list[Row] = []  # of its tokens, also of the last one
    prompt_ids: list[int] = []  # where the server tells them
    error: str | None = None  # why nothing, or not all of it, came
    usage: dict[str, Any] = {}  # counts of the server

    @property
    def tokens(self) -> list[int]:
        """Its tokens."""
        return [row.token for row in self.rows]


def rows_of(said: Mapping[str, Any] | Sequence[Any] | None) -> list[Row]:
    """Read a choice's ``logprobs``, llama.cpp's ``completion_probabilities``, SGLang's own rows.

    Raises:
        KeyError, TypeError, ValueError: It has not the form of any known server.
    """
    entries = said or ()
    if isinstance(entries, Mapping):
        if "tokens" not in entries:
            return rows_of(entries["content"])
        columns = (entries[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        rows = zip(*columns, strict=True)
        return [_row((token, value), (top or {}).items()) for token, value, top in rows]
    return [_row(entry, entry.get("top_logprobs", entry.get("top_probs"))) for entry in entries]


def sglang_rows(meta: Mapping[str, Any]) -> list[Row]:
    """Read the rows of ``meta_info`` of SGLang's own ``/generate``."""
    rows = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    return [_row(drawn[1::-1], (entry[1::-1] for entry in top or ())) for drawn, top in rows]


def _row(drawn: Any, top: Iterable[Any] | None) -> Row:  # noqa: ANN401
    token, logprob = _entry(drawn)
    listed = [_entry(entry) for entry in top or ()]
    usable = listed and all(value is not None and value <= SLACK for _, value in listed)
    return Row(token, logprob, listed if usable else None)


def _entry(entry: Any) -> tuple[int, Any]:  # noqa: ANN401
    """Read a pair, or an entry with ``prob`` after llama.cpp's whole chain, or ``logprob``."""
    if not isinstance(entry, Mapping):
        token, logprob = entry
        return token_of({"id": token, "token": token}), logprob
    if "prob" in entry:
        return token_of(entry), math.log(entry["prob"]) if entry["prob"] > 0 else NONE
    return token_of(entry), entry["logprob"]


def token_of(entry: Mapping[str, Any]) -> int:
    """Return a token's id, or a number of its bytes, as texts may be alike, or of its text."""
    text = str(entry.get("token", ""))
    if isinstance(entry.get("id"), int):
        return int(entry["id"])
    if text.startswith(NAMED):
        return int(text.removeprefix(NAMED))
    return -2 - crc32(bytes(entry.get("bytes") or text.encode()))

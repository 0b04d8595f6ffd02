"""Asking a server: requests decided beforehand, of which no token that came is lost.

An answer that were left out because it was slow, or cut off, would be left out because of its
tokens: so what came counts, and only requests that gave no token are asked again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from eaglegbv.errors import EagleGBVError, InvalidArgument, first_line, one_of
from eaglegbv.eval.audit.served.laws import Settings
from eaglegbv.eval.audit.served.rows import Answer, Ask, rows_of, sglang_rows
from eaglegbv.eval.endpoint import Refused, asked, connected

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "sglang": "/generate",
    "llama.cpp": "/completion",
}
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
PROGRESS = 2000  # tokens after which it is said how many there are
BROKEN = (httpx.HTTPError, EagleGBVError, LookupError, TypeError, ValueError, AttributeError)
"""What ends an answer: no connection, a server's error, events that cannot be read."""
NAMES = {
    "sglang": {"max_tokens": "max_new_tokens", "seed": "sampling_seed"},
    "llama.cpp": {
        "max_tokens": "n_predict",
        "repetition_penalty": "repeat_penalty",
        "logprobs": "n_probs",
    },
}
"""What settings are called where they are not called as usual."""

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
}
"""Settings that change nothing: without them a server takes the defaults of its model."""
OPENAI: dict[str, Any] = {
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
"""Fields that some servers of that protocol know."""


class Stopped(EagleGBVError):
    """No more requests are sent: the budget is spent, or the server gives nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, and how it is asked."""

    url: str
    kind: str = "completions"
    model: str | None = None
    key: str = "none"
    settings: Settings = field(default_factory=Settings)
    top: int = 20  # tokens listed at each place
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of every request
    neutral: Mapping[str, Any] = field(default_factory=dict)  # fields that change no draw

    def __post_init__(self) -> None:
        if self.kind not in PATHS:
            raise InvalidArgument("kind", self.kind, one_of(PATHS, self.kind))

    @property
    def without_settings(self) -> dict[str, Any]:
        """Values of the settings that are asked for which change nothing."""
        return {name: NEUTRAL.get(name, {}) for name in self.settings.asked}

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the request's JSON."""
        sampling = {**self.neutral, **self.settings.asked, **ask.changed, "max_tokens": ask.tokens}
        if ask.seed is not None:
            sampling["seed"] = ask.seed
        if ask.copies > 1:
            sampling["n"] = ask.copies
        names, text = NAMES.get(self.kind, {}), ask.after or ask.prompt
        sampling = {names.get(name, name): value for name, value in sampling.items()}
        body = {
            "stream": True,
            **self.extra,
            **({} if self.model is None else {"model": self.model}),
        }
        if self.kind == "sglang":
            body |= {"sampling_params": sampling, "return_logprob": True}
            body["input_ids" if ask.after else "text"] = text
            # From 0 on, so that the prompt's ids are told.
            return {**body, "top_logprobs_num": self.top, "logprob_start_len": 0}
        body |= sampling
        if self.kind == "chat":
            messages = [{"role": "user", "content": text}]
            return {**body, "messages": messages, "logprobs": True, "top_logprobs": self.top}
        return {**body, "prompt": text, names.get("logprobs", "logprobs"): self.top}


def take(event: Mapping[str, Any], ask: Ask, answers: dict[int, Answer]) -> None:
    """Add what an event brings to the answers of a request, by their numbers.

    It may raise what is in :data:`BROKEN`.
    """
    for choice in event.get("choices", [event]) or ():
        index = choice.get("index", 0)
        answer = answers.setdefault(index, Answer(ask=ask, choice=index))
        prompt_ids = choice.get("prompt_token_ids")
        if meta := choice.get("meta_info"):
            rows = sglang_rows(meta)
            prompt_ids = [token for _, token, *_ in meta.get("input_token_logprobs") or ()]
            if len(rows) == meta["completion_tokens"]:
                answer.rows = []  # some versions give all rows so far with every event
        else:
            rows = rows_of(choice.get("logprobs", choice.get("completion_probabilities")))
        answer.rows = answer.rows + rows
        answer.prompt_ids = prompt_ids or answer.prompt_ids
    if len(answers) == 1 and (usage := event.get("usage")):
        for answer in answers.values():
            answer.usage = usage | (usage.get("completion_tokens_details") or {})


@dataclass(slots=True)
class Store:
    """The answers of an audit, kept in a file from which it goes on."""

    path: Path | None = None
    say: Callable[[str], object] = id
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            # A line that was being written has no end.
            *lines, _ = self.path.read_bytes().split(b"\n")
            self.path.write_bytes(b"".join(line + b"\n" for line in lines))
            self.answers = [msgspec.json.decode(line, type=Answer) for line in lines]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(len(answer.rows) for answer in self.answers)

    def keep(self, answers: Sequence[Answer]) -> None:
        """Keep the answers of a request."""
        before = self.tokens // PROGRESS
        self.answers += answers
        if self.tokens // PROGRESS > before:
            self.say(f"{self.tokens:,} tokens")
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(answers))

    def of(self, *parts: str) -> list[Answer]:
        """Return the answers of parts of the plan, in their order."""
        kept = [answer for answer in self.answers if answer.ask.part in parts]
        return sorted(kept, key=lambda answer: (answer.ask.part, answer.ask.number, answer.choice))


def key_of(ask: Ask) -> tuple[Any, ...]:
    """Return what tells a request from the others of a plan."""
    return ask.part, ask.number, ask.prompt, *ask.after


@dataclass(slots=True, kw_only=True)
class Client:
    """Asks a server politely: few requests at once, and pauses after those that gave nothing."""

    server: Server
    concurrency: int = 8
    timeout: float = 120.0  # seconds without an event after which an answer counts as cut off
    retries: int = 5
    most_failures: int = 8  # requests in a row that give nothing, after which no more are sent
    most_requests: int = 100_000
    until: float = float("inf")  # of time.monotonic: no request is begun after it
    transport: httpx.AsyncBaseTransport | None = None
    requests: int = 0  # sent so far, those that were asked again included
    failures: int = 0  # in a row

    async def collect(self, asks: Iterable[Ask], store: Store) -> None:
        """Ask for what a store lacks; it keeps answers as soon as they ended or broke off.

        Raises:
            Refused: The server refuses a request.
            Stopped: It gives nothing any more, or a budget is spent.
        """
        have = {key_of(answer.ask) for answer in store.answers if answer.rows}
        queue = (ask for ask in asks if key_of(ask) not in have)

        async def work(http: httpx.AsyncClient) -> None:
            for ask in queue:
                store.keep(await self._answers(http, ask, store))

        async with connected(
            self.server.url,
            self.server.key,
            connections=self.concurrency,
            timeout=self.timeout,
            transport=self.transport,
        ) as http:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.concurrency):
                        group.create_task(work(http))
            except BaseExceptionGroup as errors:  # the others were stopped, and kept what they had
                raise errors.exceptions[0] from None

    async def _answers(self, http: httpx.AsyncClient, ask: Ask, store: Store) -> list[Answer]:
        """Return the answers to a request; an empty one where it gave nothing, asked repeatedly."""
        error: str | None = None
        for number in range(self.retries + 1):
            if time.monotonic() > self.until or self.requests >= self.most_requests:
                raise Stopped("the budget is spent")
            self.requests += 1
            answers: dict[int, Answer] = {}
            error, pause = None, FIRST_PAUSE * 2**number
            try:
                async for event in asked(http, PATHS[self.server.kind], self.server.body(ask)):
                    take(event, ask, answers)
            except asyncio.CancelledError:
                store.keep(_ended(answers, "cut off, as the audit stopped"))
                raise
            except BROKEN as broken:
                error = f"{type(broken).__name__}: {first_line(broken)}"
                if isinstance(broken, Refused):
                    if not broken.busy:
                        raise
                    pause = max(pause, broken.wait)
            if answers and (error is None or any(answer.rows for answer in answers.values())):
                self.failures = 0
                return _ended(answers, error)
            await asyncio.sleep(min(pause, LONGEST_PAUSE))
        self.failures += 1
        if self.failures >= self.most_failures:
            raise Stopped(f"{self.failures} requests in a row gave nothing: {error}")
        return _ended({0: Answer(ask=ask)}, error or "no event with tokens")


def _ended(answers: Mapping[int, Answer], error: str | None) -> list[Answer]:
    for answer in answers.values():
        answer.error = error
    return [answer for _, answer in sorted(answers.items())]

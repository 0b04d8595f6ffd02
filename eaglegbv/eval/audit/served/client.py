"""Asking a server: requests decided beforehand, of which no token that came is lost.

An answer that were left out because it was slow, or cut off, would be left out because of its
tokens: so what came counts, and only requests that gave no token are asked again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

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
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError)
NAMES = {
    "sglang": {"max_tokens": "max_new_tokens", "seed": "sampling_seed"},
    "llama.cpp": {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"},
}
"""What settings are called where they are not called as usual."""

Keep = Callable[[Sequence[Answer]], object]


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
    neutral: Mapping[str, Any] = field(default_factory=dict)  # settings that are not asked for

    def __post_init__(self) -> None:
        if self.kind not in PATHS:
            raise InvalidArgument("kind", self.kind, one_of(PATHS, self.kind))

    @property
    def is_openai(self) -> bool:
        """Whether it is asked by OpenAI's protocol."""
        return PATHS[self.kind].startswith("/v1")

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the request's JSON."""
        sampling = {**self.neutral, **self.settings.asked, **ask.changed, "max_tokens": ask.tokens}
        if ask.seed is not None:
            sampling["seed"] = ask.seed
        if ask.copies > 1:
            sampling["n"] = ask.copies
        names = NAMES.get(self.kind, {})
        sampling = {names.get(name, name): value for name, value in sampling.items()}
        body = {"stream": True, **self.extra}
        if self.model is not None:
            body["model"] = self.model
        if self.kind == "sglang":
            given = "input_ids" if ask.after else "text"
            body |= {given: ask.text, "sampling_params": sampling, "return_logprob": True}
            # From 0 on, so that the prompt's ids are told.
            return {**body, "top_logprobs_num": self.top, "logprob_start_len": 0}
        if self.kind == "chat":
            messages = [{"role": "user", "content": ask.prompt}]
            listed: dict[str, Any] = {"logprobs": True, "top_logprobs": self.top}
            return {**body, **sampling, **listed, "messages": messages}
        logprobs = "n_probs" if self.kind == "llama.cpp" else "logprobs"
        return {**body, **sampling, logprobs: self.top, "prompt": ask.text}


def take(event: Mapping[str, Any], ask: Ask, answers: dict[int, Answer]) -> None:
    """Add what an event brings to the answers of a request, by their numbers.

    It may raise what is in :data:`UNREADABLE`.
    """
    for choice in _choices(event):
        index = choice.get("index", 0)
        answer = answers.setdefault(index, Answer(ask=ask, choice=index))
        rows = choice["rows"]
        # Some servers give all rows so far with every event, not the new ones alone.
        answer.rows = rows if choice.get("whole") else answer.rows + rows
        answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
    usage = event.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    if len(answers) == 1 and usage:
        (answer,) = answers.values()
        answer.told = usage["completion_tokens"]
        answer.forwards = details.get("target_forwards")
        answer.accepted = details.get("accepted_prediction_tokens")


def _choices(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "meta_info" in event:
        meta = event["meta_info"]
        rows = sglang_rows(meta)
        whole = len(rows) == meta["completion_tokens"]
        before = [token for _, token, *_ in meta.get("input_token_logprobs") or ()]
        yield {**event, "rows": rows, "whole": whole, "prompt_token_ids": before}
        return
    for choice in event.get("choices", [event]) or ():
        logprobs = choice.get("logprobs", choice.get("completion_probabilities"))
        yield {**event, **choice, "rows": rows_of(logprobs)}


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

    async def collect(self, asks: Iterable[Ask], keep: Keep) -> None:
        """Ask for all; ``keep`` the answers of each as soon as they have ended or broken off.

        Raises:
            Refused: The server refuses a request.
            Stopped: It gives nothing any more, or a budget is spent.
        """
        queue = iter(asks)
        url, key = self.server.url, self.server.key
        limits: dict[str, Any] = {"connections": self.concurrency, "timeout": self.timeout}

        async def work(http: httpx.AsyncClient) -> None:
            for ask in queue:
                await self._kept(http, ask, keep)

        async with connected(url, key, transport=self.transport, **limits) as http:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.concurrency):
                        group.create_task(work(http))
            except BaseExceptionGroup as errors:  # the others were stopped, and kept what they had
                raise errors.exceptions[0] from None

    async def _kept(self, http: httpx.AsyncClient, ask: Ask, keep: Keep) -> None:
        pause = FIRST_PAUSE
        for _ in range(self.retries + 1):
            answers: dict[int, Answer] = {}
            wait, error = pause, await self._asked(http, ask, answers, keep)
            if isinstance(error, Refused):
                wait = max(pause, error.wait)
            if error is None or any(answer.rows for answer in answers.values()):
                self.failures = 0
                keep(_ended(answers, error))
                return
            await asyncio.sleep(min(wait, LONGEST_PAUSE))
            pause *= 2
        keep(_ended({0: Answer(ask=ask)}, error))
        self.failures += 1
        if self.failures >= self.most_failures:
            raise Stopped(f"{self.failures} requests in a row gave nothing: {_said(error)}")

    async def _asked(
        self, http: httpx.AsyncClient, ask: Ask, answers: dict[int, Answer], keep: Keep
    ) -> Exception | None:
        """Ask once, and return why not all came."""
        if time.monotonic() > self.until or self.requests >= self.most_requests:
            raise Stopped("the budget is spent")
        self.requests += 1
        try:
            path = PATHS[self.server.kind]
            async for event in asked(http, path, self.server.body(ask)):
                take(event, ask, answers)
        except asyncio.CancelledError:
            keep(_ended(answers, Stopped("cut off, as the audit stopped")))
            raise
        except (httpx.HTTPError, EagleGBVError, *UNREADABLE) as error:
            if isinstance(error, Refused) and not error.busy:
                raise
            return error
        return None if answers else ValueError("no event with tokens")


def _ended(answers: Mapping[int, Answer], error: Exception | None) -> list[Answer]:
    for answer in answers.values():
        answer.error = _said(error)
    return [answer for _, answer in sorted(answers.items())]


def _said(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {first_line(error)}"

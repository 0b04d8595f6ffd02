"""A server with OpenAI's endpoints under load: time to the first token and tokens a second."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from time import perf_counter
from typing import Any, TypeAlias

import httpx
import msgspec
import numpy as np

from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval.endpoint import asked, connected
from eaglegbv.eval.figures import ACCEPTANCE, WALL_SPEED, Estimate, Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Cell, Column, valued
from eaglegbv.utils import require_integer, require_integers


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is asked.

    Attributes:
        clients: Numbers of clients that ask at once, each one question after another.
        each: Questions of a client that are counted; one before them is not.
        max_tokens: Tokens of an answer; an end of sequence does not end it.
        temperature: Sampling temperature; 0 is greedy.
        seed: Seed of the first answer; others have the next ones. Without one, none has a seed: a
            server may answer those that have one by other plans than the rest.
    """

    clients: tuple[int, ...] = (1, 4, 16, 64)
    each: int = 4
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for count in self.clients:
            require_integer("clients", count, 1, 1024)
        require_integers(self, ("seed",), each=(1, None), max_tokens=(2, None), seed=(0, None))

    @property
    def settings(self) -> tuple[Setting, ...]:
        """One for each number of clients."""
        return tuple(
            Setting(who="server", batch=count, temperature=self.temperature)
            for count in self.clients
        )


Answer: TypeAlias = dict[str, float]
"""Tokens, forwards and times in seconds of one answer."""


@dataclass(frozen=True, slots=True)
class Clients:
    """A server's answers, by clients at once."""

    url: str
    key: str
    messages: Sequence[Sequence[Mapping[str, str]]]
    load: Load

    def measure(self, setting: Setting) -> list[Observation]:
        """Measure a number of clients.

        Raises:
            InvalidArgument: Nothing answers, or a request is refused.
            StepFailed: An answer broke off.
        """
        try:
            answers, seconds = asyncio.run(self._level(setting.batch))
        except httpx.HTTPError as error:
            expected = f"the address of a server ({error or type(error).__name__})"
            raise InvalidArgument("url", self.url, expected) from error
        return [
            Observation(
                setting=setting.name,
                unit=str(number),
                # Clients are answered side by side: each answer has its share of the whole time.
                sums=answer | {"wall_seconds": seconds / len(answers)},
            )
            for number, answer in enumerate(answers)
        ]

    async def _level(self, clients: int) -> tuple[list[Answer], float]:
        """Return the answers to a number of clients, and how long they took together."""
        load = self.load
        async with connected(self.url, self.key, connections=clients) as client:
            served = await client.get("/v1/models")
            questions = enumerate(cycle(self.messages))
            shared = {
                "model": served.json()["data"][0]["id"],
                "max_tokens": load.max_tokens,
                "temperature": load.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }

            async def ask(count: int) -> list[Answer]:
                answers = []
                for _ in range(count):
                    number, messages = next(questions)
                    seeded = {} if load.seed is None else {"seed": load.seed + number}
                    body = {**shared, "messages": messages, **seeded}
                    answers.append(await _answer(client, body))
                return answers

            await asyncio.gather(*(ask(1) for _ in range(clients)))
            start = perf_counter()
            by_client = await asyncio.gather(*(ask(load.each) for _ in range(clients)))
            seconds = perf_counter() - start
            return list(chain(*by_client)), seconds


def _quantile(name: str, share: float, digits: int) -> Column:
    """Return the column of the value that a share of the answers is within."""

    def cell(sums: Sums, setting: Setting) -> Cell:
        values = sums.column(setting.name, name)
        value = float(np.quantile(values, share, method="inverted_cdf"))
        return Estimate.exactly(value, digits)

    return cell


LOAD_COLUMNS: Mapping[str, Column] = {
    "clients": lambda _, setting: setting.batch,
    "answers": lambda sums, setting: sums.count(setting.name),
    "first token, s": _quantile("first_token", 0.5, 3),
    "95 of 100": _quantile("first_token", 0.95, 3),
    "between tokens, s": _quantile("between_tokens", 0.5, 4),
    "tokens/s": valued(WALL_SPEED),
    ACCEPTANCE.name: valued(ACCEPTANCE),
}
"""What a table shows of each number of clients."""


async def _answer(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    start = perf_counter()
    times: list[float] = []
    usage: Any = {}
    async for event in asked(client, "/v1/chat/completions", body):
        usage = event.get("usage") or usage
        if any(_says(choice.get("delta") or {}) for choice in event.get("choices") or ()):
            times.append(perf_counter() - start)
    tokens = usage.get("completion_tokens", 0)
    if not times or tokens < 2:
        raise StepFailed(0, "an answer without text, or without its usage")
    between = (times[-1] - times[0]) / (tokens - 1)
    sums = {"answer_tokens": tokens, "first_token": times[0], "between_tokens": between}
    details = usage.get("completion_tokens_details") or {}
    if forwards := details.get("target_forwards"):
        # The first token of an answer comes from the prompt's own forward.
        sums |= {"tokens": tokens - 1, "steps": forwards}
    return {name: float(value) for name, value in sums.items()}


def _says(delta: Mapping[str, Any]) -> bool:
    """Whether a piece of an answer brings tokens: text, thoughts or a call."""
    kinds = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(map(delta.get, kinds))

"""An OpenAI endpoint under load: time to the first token and tokens a second, by clients."""

import asyncio
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple

import httpx
import msgspec

from eaglegbv.errors import InvalidArgument, StepFailed
from eaglegbv.eval.events import events
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

    clients: tuple[int, ...] = (1, 8, 32)
    each: int = 4
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for count in self.clients:
            require_integer("clients", count, 1, 1024)
        require_integers(self, ("seed",), each=(1, None), max_tokens=(2, None), seed=(0, None))


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with a number of clients; times are seconds."""

    clients: int
    answers: int
    first_token: float  # median time to the first token
    first_token_95: float  # 95 of 100 answers begin within this time
    between_tokens: float  # median over answers of the mean time between two tokens
    tokens_per_second: float  # of all clients together
    tokens_per_forward: float | None  # None where the server does not count forwards


class Answer(NamedTuple):
    """One answer; times are seconds after the question."""

    first: float
    last: float
    tokens: int
    forwards: int | None


def measure(
    url: str,
    key: str,
    messages: Sequence[Sequence[Mapping[str, str]]],
    load: Load,
    on_answer: Callable[[], object],
) -> Iterator[LoadRow]:
    """Ask the endpoint at ``url`` with each number of clients in turn; yield what was measured.

    Raises:
        InvalidArgument: Nothing answers there, or it refuses a request.
        StepFailed: An answer broke off.
    """
    for clients in load.clients:
        try:
            answers, seconds = asyncio.run(_level(url, key, messages, load, clients, on_answer))
        except httpx.HTTPError as error:
            expected = f"the address of a server ({error or type(error).__name__})"
            raise InvalidArgument("url", url, expected) from error
        yield _row(clients, answers, seconds)


def _row(clients: int, answers: Sequence[Answer], seconds: float) -> LoadRow:
    firsts = sorted(answer.first for answer in answers)
    tokens = sum(answer.tokens for answer in answers)
    forwards = [answer.forwards for answer in answers if answer.forwards]
    # The first token of an answer comes from the prompt's own forward.
    decoded = tokens - len(answers)
    return LoadRow(
        clients=clients,
        answers=len(answers),
        first_token=statistics.median(firsts),
        first_token_95=firsts[-(-95 * len(firsts) // 100) - 1],
        between_tokens=statistics.median((a.last - a.first) / (a.tokens - 1) for a in answers),
        tokens_per_second=tokens / seconds,
        tokens_per_forward=decoded / sum(forwards) if len(forwards) == len(answers) else None,
    )


async def _level(
    url: str,
    key: str,
    messages: Sequence[Sequence[Mapping[str, str]]],
    load: Load,
    clients: int,
    on_answer: Callable[[], object],
) -> tuple[list[Answer], float]:
    """Return the answers to a number of clients, and how long they took together."""
    limits = httpx.Limits(max_connections=clients)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=600, limits=limits
    ) as client:
        served = await client.get("/v1/models")
        _check(served)
        questions = enumerate(cycle(messages))
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
                number, asked = next(questions)
                seed = {} if load.seed is None else {"seed": load.seed + number}
                body = {**shared, "messages": asked, **seed}
                answers.append(await _answer(client, body))
                on_answer()
            return answers

        await asyncio.gather(*(ask(1) for _ in range(clients)))
        start = perf_counter()
        by_client = await asyncio.gather(*(ask(load.each) for _ in range(clients)))
        seconds = perf_counter() - start
        return [answer for answers in by_client for answer in answers], seconds


async def _answer(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    start = perf_counter()
    first = last = None
    usage: Mapping[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        _check(response)
        async for event in events(response.aiter_text()):
            usage = event.get("usage") or usage
            if any(_says(choice.get("delta") or {}) for choice in event.get("choices") or ()):
                last = perf_counter() - start
                first = last if first is None else first
    if first is None or last is None or usage.get("completion_tokens", 0) < 2:
        raise StepFailed(0, "an answer without text, or without its usage")
    details = usage.get("completion_tokens_details") or {}
    return Answer(first, last, usage["completion_tokens"], details.get("target_forwards"))


def _says(delta: Mapping[str, Any]) -> bool:
    """Whether a piece of an answer brings tokens: text, thoughts or a call."""
    return any(
        delta.get(kind) for kind in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _check(response: httpx.Response) -> None:
    if response.is_error:
        expected = f"a server that answers ({response.status_code}: {response.text})"
        raise InvalidArgument("url", str(response.url), expected)

"""Asking a server: requests decided beforehand, of which no token that came is lost.

An answer that were left out because it was slow, or cut off, would be left out because of its
tokens: so what came counts, and only requests that gave no token are asked again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from eaglegbv.errors import EagleGBVError, InvalidArgument, first_line, one_of
from eaglegbv.eval.audit.served.places import Settings
from eaglegbv.eval.audit.served.reading import Answer, rows_of, sglang_rows
from eaglegbv.eval.events import events

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "sglang": "/generate",
    "llama.cpp": "/completion",
}
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses of requests that are asked again
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError)
SGLANG_NAMES = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a plan."""

    number: int
    part: str  # of the plan
    prompt: str
    ids: list[int] | None = None  # token ids to ask for instead of the prompt's text
    tokens: int  # of each answer
    copies: int = 1  # answers
    seed: int | None = None
    changed: dict[str, Any] = {}  # settings other than the audit's


class Stopped(EagleGBVError):
    """A server that gave nothing for so many requests that no more are sent."""


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

    def __post_init__(self) -> None:
        if self.kind not in PATHS:
            raise InvalidArgument("kind", self.kind, one_of(PATHS, self.kind))

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the request's JSON."""
        sampling = {**self.settings.asked, **ask.changed, "max_tokens": ask.tokens}
        if ask.seed is not None:
            sampling["seed"] = ask.seed
        if ask.copies > 1:
            sampling["n"] = ask.copies
        body: dict[str, Any] = {"stream": True, **self.extra}
        if self.kind == "sglang":
            names = {SGLANG_NAMES.get(name, name): value for name, value in sampling.items()}
            prompt = {"text": ask.prompt} if ask.ids is None else {"input_ids": ask.ids}
            body |= {**prompt, "sampling_params": names, "return_logprob": True}
            return {**body, "top_logprobs_num": self.top}
        if self.model is not None:
            body["model"] = self.model
        if self.kind == "llama.cpp":
            sampling["n_predict"] = sampling.pop("max_tokens")
            body |= {"n_probs": self.top, "cache_prompt": True}
        elif self.kind == "chat":
            messages = [{"role": "user", "content": ask.prompt}]
            listed = {"logprobs": True, "top_logprobs": self.top}
            return {**body, **sampling, **listed, "messages": messages}
        else:
            body["logprobs"] = self.top
        return {**body, **sampling, "prompt": ask.prompt if ask.ids is None else ask.ids}


@dataclass(slots=True)
class Reading:
    """The answers of a request, as their events come."""

    ask: Ask
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take what an event brings; it may raise what is in :data:`UNREADABLE`."""
        self.usage = event.get("usage") or self.usage
        if "meta_info" in event:
            self._take_sglang(event)
            return
        choices = event.get("choices", [event])
        for choice in choices:
            logprobs = choice.get("logprobs", choice.get("completion_probabilities"))
            told = choice.get("delta") or choice.get("message") or choice
            text = told.get("text") or told.get("content") or ""
            finish = choice.get("finish_reason") or choice.get("stop_type")
            self._add(choice.get("index", 0), rows_of(logprobs), text, finish)

    def _take_sglang(self, event: Mapping[str, Any]) -> None:
        meta = event["meta_info"]
        rows, index = sglang_rows(meta), event.get("index", 0)
        if len(rows) == meta["completion_tokens"]:  # all so far, not the new ones alone
            self.answers.pop(index, None)
        finish = meta.get("finish_reason") or {}
        self._add(index, rows, event.get("text") or "", finish.get("type"))
        details = {"target_forwards": meta.get("spec_verify_ct")}
        self.usage = {"completion_tokens_details": details}

    def _add(self, index: int, rows: list[Any], text: str, finish: str | None) -> None:
        new: dict[str, Any] = {"rows": [], "text": "", "finish": None}
        answer = self.answers.setdefault(index, new)
        answer["rows"] += rows
        answer["text"] += text
        answer["finish"] = finish if finish not in ("", "none") else answer["finish"]

    def result(self, error: str | None = None) -> list[Answer]:
        """Return the answers, as far as they came."""
        details = self.usage.get("completion_tokens_details") or {}
        alone = self.ask.copies == 1
        told = self.answers or {0: {"rows": []}}
        return [
            Answer(
                request=self.ask.number,
                choice=index,
                part=self.ask.part,
                prompt=self.ask.prompt,
                seed=self.ask.seed,
                error=error,
                forwards=details.get("target_forwards") if alone else None,
                accepted=details.get("accepted_prediction_tokens") if alone else None,
                said=self.usage.get("completion_tokens") if alone else None,
                **answer,
            )
            for index, answer in sorted(told.items())
        ]


@dataclass(slots=True, kw_only=True)
class Client:
    """Asks a server politely: few requests at once, and pauses after those that gave nothing."""

    server: Server
    concurrency: int = 8
    timeout: float = 120.0  # seconds without an event after which an answer counts as cut off
    retries: int = 5
    most_failures: int = 8  # requests in a row that give nothing, after which no more are sent
    transport: httpx.AsyncBaseTransport | None = None
    until: float = float("inf")  # of time.monotonic: no request is begun after it
    requests: int = 0  # sent so far, those that were asked again included
    failures: int = 0  # in a row

    async def collect(self, asks: Iterable[Ask], keep: Callable[[list[Answer]], object]) -> None:
        """Ask for all; ``keep`` the answers of each as soon as they have ended or broken off.

        Raises:
            InvalidArgument: The server refuses a request.
            Stopped: It gives nothing any more.
        """
        queue = iter(asks)
        async with self._http() as http:

            async def work() -> None:
                for ask in queue:
                    if time.monotonic() > self.until:
                        return
                    await self._kept(http, ask, keep)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.concurrency):
                        group.create_task(work())
            except BaseExceptionGroup as errors:  # the others were stopped, and kept what they had
                raise errors.exceptions[0] from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401  JSON
        """Return the JSON that answers a request; httpx.HTTPError where there is none."""
        async with self._http() as http:
            return (await http.post(path, json=body)).raise_for_status().json()

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.concurrency)
        headers = {"Authorization": f"Bearer {self.server.key}"}
        timeout = httpx.Timeout(self.timeout)
        url = self.server.url.rstrip("/").removesuffix("/v1")
        return httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=self.transport
        )

    async def _kept(
        self, http: httpx.AsyncClient, ask: Ask, keep: Callable[[list[Answer]], object]
    ) -> None:
        pause, error = FIRST_PAUSE, ""
        for _ in range(self.retries + 1):
            reading, wait = Reading(ask), pause
            try:
                await self._read(http, reading)
                error = "" if reading.answers else "no event with tokens"
            except Busy as busy:
                wait, error = max(pause, busy.wait), str(busy)
            except Refused:
                raise
            except asyncio.CancelledError:
                if reading.answers:
                    keep(reading.result("stopped"))
                raise
            except (httpx.HTTPError, EagleGBVError, *UNREADABLE) as cause:
                error = f"{type(cause).__name__}: {first_line(cause)}"
            if any(answer["rows"] for answer in reading.answers.values()) or not error:
                self.failures = 0
                keep(reading.result(error or None))
                return
            await asyncio.sleep(min(wait, LONGEST_PAUSE))
            pause *= 2
        keep(reading.result(error))
        self.failures += 1
        if self.failures >= self.most_failures:
            raise Stopped(f"{self.failures} requests in a row gave nothing: {error}")

    async def _read(self, http: httpx.AsyncClient, reading: Reading) -> None:
        self.requests += 1
        path, body = PATHS[self.server.kind], self.server.body(reading.ask)
        async with http.stream("POST", path, json=body) as response:
            if response.is_error:
                await response.aread()
            if response.status_code in AGAIN:
                raise Busy(response)
            if response.is_error:
                raise Refused(response)
            async for event in _events(response):
                reading.take(event)


class Busy(EagleGBVError):
    """A request that a server may answer later."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"status {response.status_code}")
        told = response.headers.get("retry-after", "")
        self.wait = float(told) if told.isdecimal() else 0.0


class Refused(InvalidArgument):
    """A request that a server will not answer however often it is asked."""

    def __init__(self, response: httpx.Response) -> None:
        expected = f"a server that answers ({response.status_code}: {response.text[:300]})"
        super().__init__("url", str(response.url), expected)


async def _events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the events of a stream; of a server that does not stream, its whole answer."""
    if "json" in response.headers.get("content-type", ""):
        yield msgspec.json.decode(await response.aread(), type=dict[str, Any])
        return
    async for event in events(response.aiter_text()):
        yield event

"""A server of OpenAI's protocol: an LLM behind HTTP."""

import asyncio
import hmac
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from eaglegbv import openai_api as api
from eaglegbv.errors import EagleGBVError, InvalidArgument, NotInstalled
from eaglegbv.llm import LLM
from eaglegbv.text import Completion, is_one

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as missing:
    raise NotInstalled("starlette", "serve") from missing

Value = TypeVar("Value")


@dataclass(slots=True)
class Server:
    """Answers requests of OpenAI's protocol by an LLM."""

    llm: LLM
    name: str  # what clients call the model
    key: str | None  # what clients must know, or None
    limit: int  # most answers that are computed or wait at once
    unfinished: int = 0  # answers that are computed or wait

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        errors = {Refused: _refused, EagleGBVError: _refused}
        return Starlette(routes=routes, exception_handlers=errors, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.llm.close)

    async def complete(self, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        return await self._answer(request, api.CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        return await self._answer(request, api.ChatRequest)

    async def models(self, request: Request) -> Response:
        """Answer ``/v1/models``."""
        self._check_key(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "eaglegbv"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, _: Request) -> Response:
        """Answer ``/health``: whether the engine takes requests."""
        try:
            self.llm.check_health()
        except EagleGBVError as error:
            raise Refused(503, str(error), kind="server_error") from error
        return JSONResponse({"status": "ok", "unfinished": self.unfinished})

    async def metrics(self, _: Request) -> Response:
        """Answer ``/metrics``, in Prometheus' format."""
        return PlainTextResponse(self.llm.metrics.exposition(), media_type=_METRICS)

    async def _answer(self, http: Request, kind: type[api.Request]) -> Response:
        self._check_key(http)
        request = kind.of(await http.body(), self.llm.sampling_defaults)
        if request.model not in (None, self.name):
            raise Refused(404, f"no model {request.model!r}, only {self.name!r}", "model")
        name = f"{request.KIND.partition('.')[0]}-{uuid.uuid4().hex}"
        if request.stream:
            # The first piece comes before the head of the response: what is refused has a status.
            events = self._events(request, name)
            first = await _unless_gone(http, anext(events))
            return StreamingResponse(_resumed(first, events), media_type="text/event-stream")
        with self._counted(request):
            answers = self.llm.generate_async(request.prompts, request.sampling)
            answered = await _unless_gone(http, answers)
        prompts = answered if isinstance(answered, list) else [answered]
        for prompt in prompts:
            for choice in prompt.choices:
                _check_end(choice)
        return JSONResponse(api.answer(request, prompts, name, self.name, self.llm.decode))

    async def _events(self, request: api.Request, name: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer; one that breaks off ends by an error event."""
        begun: set[int] = set()
        ended: dict[int, Completion] = {}
        try:
            answers = self.llm.stream_async(request.prompts, request.sampling)
            with self._counted(request):
                async with aclosing(answers) as pieces:
                    async for piece in pieces:
                        if piece.completion is not None:
                            _check_end(piece.completion)
                            ended[piece.index] = piece.completion
                        if piece.index not in begun:
                            begun.add(piece.index)
                            yield _events_of(api.first_chunk(request, piece.index, name, self.name))
                        yield _events_of(api.chunk(request, piece, name, self.name))
        except EagleGBVError as error:
            if not begun:
                raise
            yield _events_of(_error(error)[1])
            return
        if request.usage_streamed:
            prompts = _by_prompt(ended, request.sampling.n)
            yield _events_of(api.usage_chunk(request, prompts, name, self.name))
        yield b"data: [DONE]\n\n"

    @contextmanager
    def _counted(self, request: api.Request) -> Iterator[None]:
        """Count the answers of a request while they are unfinished; refuse too many."""
        prompts = request.prompts
        count = request.sampling.n * (1 if is_one(prompts) else len(prompts))
        if count > self.limit:
            raise Refused(400, f"{count} answers: expected at most {self.limit} in one request")
        if self.unfinished + count > self.limit:
            waiting = f"{self.unfinished} answers are computed or wait, {count} more are too many"
            raise Refused(429, waiting, kind="rate_limit_exceeded")
        self.unfinished += count
        try:
            yield
        finally:
            self.unfinished -= count

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Refused(401, "the API key is missing or wrong", kind="invalid_api_key")


_METRICS = "text/plain; version=0.0.4"


class Refused(EagleGBVError):
    """A request that is answered by an error of HTTP's."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.kind = kind


def _error(error: EagleGBVError) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error."""
    if isinstance(error, Refused):
        return error.status, api.error_body(str(error), error.kind, error.parameter)
    if isinstance(error, InvalidArgument):
        return 400, api.error_body(str(error), "invalid_request_error", error.argument)
    return 500, api.error_body(str(error), "server_error")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, EagleGBVError)
    status, body = _error(error)
    return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 429 else None)


def _check_end(completion: Completion) -> None:
    """Raise unless a client may take the answer for whole."""
    if completion.error is not None:
        read = bool(completion.prompt_token_ids)  # if it was read, the client is not to blame
        raise Refused(500 if read else 400, completion.error)
    if not api.ended_well(completion):
        raise Refused(503, f"the answer was {completion.finish_reason}", kind="server_error")


def _by_prompt(ended: Mapping[int, Completion], n: int) -> list[Completion]:
    """Return each prompt's first answer with its others, of the answers by their index."""
    choices = [ended[index] for index in sorted(ended)]
    return [
        msgspec.structs.replace(choices[first], others=choices[first + 1 : first + n])
        for first in range(0, len(choices), n)
    ]


def _events_of(content: Mapping[str, Any] | None) -> bytes:
    """Return the event of a chunk, or nothing."""
    return b"" if content is None else b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _resumed(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Yield the first event, then the others; whoever stops iterating stops them too."""
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()


async def _unless_gone(http: Request, answers: Awaitable[Value]) -> Value:
    """Wait for answers; cancel them if the client goes away meanwhile."""
    answering = asyncio.ensure_future(answers)
    leaving = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Refused(499, "the client has gone")
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


async def _gone(http: Request) -> None:
    """Return once the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass

"""A server of OpenAI's protocol: an LLM behind HTTP."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from eaglegbv import __version__
from eaglegbv import openai_api as api
from eaglegbv.errors import EagleGBVError, InvalidArgument, NotInstalled
from eaglegbv.llm import LLM
from eaglegbv.request import FinishReason
from eaglegbv.text import Completion, Delta, TokenTexts, is_one

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from eaglegbv.server_metrics import ServerMetrics, Timing
except ImportError as missing:
    raise NotInstalled("starlette, or prometheus_client,", "serve") from missing

Value = TypeVar("Value")

WARNING = "X-Eaglegbv-Warning"
"""Header of a response that says what of a request was not heeded, in ASCII."""

LONGEST_WARNING = 4000
"""Characters of that header; some clients refuse more than 8,190. The log has the rest."""

ENDPOINTS: Mapping[tuple[str, str], str] = {
    ("POST", "/v1/completions"): "complete",
    ("POST", "/v1/chat/completions"): "chat",
    ("GET", "/v1/models"): "models",
    ("GET", "/v1/models/{name:path}"): "model",
    ("POST", "/tokenize"): "tokenize",
    ("POST", "/detokenize"): "detokenize",
    ("GET", "/version"): "version",
    ("GET", "/health"): "health",
    ("GET", "/metrics"): "exposition",
}
"""Methods of :class:`Server` by what they answer."""

_log = logging.getLogger(__name__)


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A request to ``/tokenize``: text, or messages as of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A request to ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class JSON(JSONResponse):
    """A response whose content may have structs."""

    def render(self, content: object) -> bytes:
        """Return the content's JSON."""
        return msgspec.json.encode(content)


@dataclass(slots=True)
class Server:
    """Answers requests of OpenAI's protocol by an LLM."""

    llm: LLM
    name: str  # what clients call the model
    key: str | None  # what clients must know, or None
    limit: int  # most answers that are computed or wait at once
    origins: Sequence[str] = ("*",)  # pages of which a browser may ask
    spec_metrics: str | None = None  # vLLM's record of speculation: summary, detailed or None
    unfinished: int = 0  # answers that are computed or wait
    started: float = field(default_factory=time.time)  # seconds of the clock
    texts: TokenTexts = field(init=False)
    metrics: ServerMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.llm.tokenizer)
        self.metrics = ServerMetrics(self.name, self.llm.metrics)

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route(path, getattr(self, name), methods=[method])
            for (method, path), name in ENDPOINTS.items()
        ]
        kinds = (HTTPException, EagleGBVError, Exception)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[WARNING],
        )
        return Starlette(
            routes=routes,
            exception_handlers=dict.fromkeys(kinds, _refused),
            lifespan=self._lifespan,
            middleware=[cors],
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        reporting = asyncio.create_task(self.metrics.report())
        yield
        reporting.cancel()
        await asyncio.to_thread(self.llm.close)

    async def complete(self, request: Request) -> Response:
        """Answer text or token ids, one prompt or a list."""
        return await self._answer(request, api.CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """Answer messages, through the model's chat template."""
        return await self._answer(request, api.ChatRequest)

    async def models(self, request: Request) -> Response:
        """Give the model, as a list of one."""
        self._check_key(request)
        return JSON({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Give the model: its name, context (``max_model_len``) and when it was loaded."""
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSON(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "eaglegbv",
            "root": self.llm.model_name,
            "max_model_len": self.llm.max_model_len,
        }

    async def tokenize(self, http: Request) -> Response:
        """Give the token ids of a text, or of messages, as vLLM does."""
        asked = await self._read(http, Tokenize)
        tokenizer = self.llm.tokenizer
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidArgument("prompt", asked.prompt, "text, or messages instead")
        if asked.prompt is not None:
            ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        else:
            names = ("messages", "tools", "add_generation_prompt")
            ids = self.llm.encode({name: getattr(asked, name) for name in names})
        pieces = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        told = {"count": len(ids), "max_model_len": self.llm.max_model_len, "tokens": ids}
        return JSON({**told, "token_strs": pieces})

    async def detokenize(self, http: Request) -> Response:
        """Give the text of token ids, as vLLM does."""
        asked = await self._read(http, Detokenize)
        return JSON({"prompt": self.llm.decode(asked.tokens)})

    async def _read(self, http: Request, kind: type[Value]) -> Value:
        self._check_key(http)
        fields = api.read_json(await http.body())
        self._check_model(fields.get("model"))
        return api.convert(fields, kind)

    async def version(self, _: Request) -> Response:
        """Give this package's version."""
        return JSON({"version": __version__})

    async def health(self, _: Request) -> Response:
        """Say whether the engine takes requests (else 503), and how many answers are unfinished."""
        try:
            self.llm.check_health()
        except EagleGBVError as error:
            raise HTTPException(503, str(error)) from error
        return JSON({"status": "ok", "unfinished": self.unfinished})

    async def exposition(self, _: Request) -> Response:
        """Give counters, gauges and histograms in Prometheus' format."""
        return Response(*self.metrics.exposition())

    async def _answer(self, http: Request, kind: type[api.AnyRequest]) -> Response:
        self._check_key(http)
        asked = api.read_request(kind, await http.body(), self.llm.sampling_defaults)
        self._check_model(asked.request.model)
        warning, headers = ascii("; ".join(asked.warnings))[1:-1], None
        if warning:
            _log.warning("%s", warning)
            headers = {WARNING: warning[:LONGEST_WARNING]}
        names = {"model": self.name, "system_fingerprint": f"eaglegbv-{__version__}"}
        answers = api.Answers(asked, self.texts, self.spec_metrics, **names)
        if not asked.request.stream:
            whole = await _unless_gone(http, self._whole(asked, answers))
            return JSON(whole, headers=headers)
        # The first piece comes before the head of the response: what is refused has a status.
        events = self._events(asked, answers)
        first = await _unless_gone(http, anext(events))
        return StreamingResponse(
            _resumed(first, events), headers=headers, media_type="text/event-stream"
        )

    async def _whole(self, asked: api.Asked, answers: api.Answers) -> Mapping[str, Any]:
        async with aclosing(self._pieces(asked)) as pieces:
            parts = [part async for piece in pieces for part in answers.parts(piece)]
        return answers.whole(parts)

    async def _pieces(self, asked: api.Asked) -> AsyncGenerator[Delta, None]:
        """Yield pieces of all answers, counted and timed; raise if one has not ended well."""
        timings: dict[int, Timing] = {}
        begin = time.perf_counter()
        answers = self.llm.stream_async(asked.request.prompts, asked.sampling)
        with self._counted(asked):
            async with aclosing(answers) as pieces:
                async for piece in pieces:
                    timing = timings.setdefault(piece.index, Timing(self.metrics, begin))
                    timing.observe(len(piece.token_ids), piece.completion)
                    _check_end(piece.completion)
                    yield piece.without_answer() if asked.scored else piece

    async def _events(self, asked: api.Asked, answers: api.Answers) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer; one that breaks off ends by an error event."""
        begun = False
        try:
            async with aclosing(self._pieces(asked)) as pieces:
                async for piece in pieces:
                    for part in answers.parts(piece):
                        yield _event(answers.chunk(part))
                        begun = True
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, EagleGBVError | HTTPException):
                _log.exception("an answer broke off")
            yield b"event: error\n" + _event(_error(error)[1])
            return
        if asked.request.usage_streamed:
            yield _event(answers.last_chunk())
        yield b"data: [DONE]\n\n"

    @contextmanager
    def _counted(self, asked: api.Asked) -> Iterator[None]:
        """Count the answers of a request while they are unfinished; refuse too many."""
        prompts, each = asked.request.prompts, asked.sampling.n
        count = each * (1 if is_one(prompts) else len(prompts))
        if count > self.limit:
            expected = f"at most {self.limit} answers to all prompts of a request, not {count}"
            raise InvalidArgument("n", each, expected)
        if self.unfinished + count > self.limit:
            waiting = f"{self.unfinished} answers are computed or wait, {count} more are too many"
            raise HTTPException(429, waiting, {"Retry-After": "1"})
        self.unfinished += count
        try:
            yield
        finally:
            self.unfinished -= count

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.name):
            raise NoSuchModel("model", name, repr(self.name))

    def _check_key(self, request: Request) -> None:
        if self.key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if scheme.lower() != "bearer" or not right:
            raise HTTPException(401, "the API key is missing or wrong")


class NoSuchModel(InvalidArgument):
    """Another model than the one that is served."""


KINDS = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""OpenAI's names of errors, other than those of wrong requests and of the server."""


def _error(error: Exception, place: str = "") -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error."""
    status, parameter, message = 500, None, f"{type(error).__name__}: {error}"
    if isinstance(error, InvalidArgument):
        status, parameter = (404 if isinstance(error, NoSuchModel) else 400), error.argument
        message = str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, place + error.detail
    usual = "server_error" if status >= 500 else "invalid_request_error"
    return status, api.error_body(message, KINDS.get(status, usual), parameter)


async def _refused(request: Request, error: Exception) -> Response:
    unrouted = isinstance(error, HTTPException) and error.status_code in (404, 405)
    status, body = _error(error, f"{request.method} {request.url.path}: " if unrouted else "")
    return JSON(body, status, getattr(error, "headers", None))


def _check_end(completion: Completion | None) -> None:
    """Raise if an answer has ended that a client may not take for whole."""
    if completion and completion.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise HTTPException(503, f"the answer was {completion.finish_reason}")


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


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
            raise HTTPException(499, "the client has gone")
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


async def _gone(http: Request) -> None:
    """Return once the client has closed its connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass

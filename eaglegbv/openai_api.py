"""OpenAI's protocol: what a request asks of an LLM, and its answer as the client reads it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import msgspec

from eaglegbv.arguments import refuse_unknown
from eaglegbv.errors import InvalidArgument
from eaglegbv.logprobs import Logprob, TokenLogprobs
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import ChatPrompt, Completion, Delta, is_one

IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
"""Fields that a client may send and that change no answer."""

NOT_OFFERED = ("functions", "function_call")
"""Fields that are refused."""

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options`` of a request."""

    include_usage: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common; settings of the sampling are beside it."""

    KIND: ClassVar[str]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)

    @classmethod
    def of(cls, body: bytes, defaults: SamplingParams) -> Self:
        """Read a request's body; its settings of the sampling become a SamplingParams.

        What it does not set is as in ``defaults``.

        Raises:
            InvalidArgument: It is no JSON object, or a field is unknown or not usable.
        """
        try:
            given = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidArgument(
                "body", f"{len(body)} bytes", f"a JSON object ({error})"
            ) from error
        fields = {name: value for name, value in given.items() if value is not None}
        for name in IGNORED:
            fields.pop(name, None)
        for name in NOT_OFFERED:
            if name in fields:
                expected = "nothing: this server does not offer it"
                raise InvalidArgument(name, fields[name], expected)
        settings = msgspec.to_builtins(defaults) | cls.settings(fields) | _structure(fields)
        sampling = {
            name: fields.pop(name)
            for name in SamplingParams.__struct_fields__
            if name in fields and name not in cls.__struct_fields__
        }
        known = {*cls.__struct_fields__, *SamplingParams.__struct_fields__} - {"sampling"}
        refuse_unknown(fields, known)
        if isinstance(stop := sampling.get("stop"), str):
            sampling["stop"] = [stop]
        try:
            params = msgspec.convert(settings | sampling, SamplingParams)
            request = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidArgument):  # it names the field and its value
                raise error.__cause__ from None
            raise InvalidArgument("body", "JSON", f"other values: {error}") from error
        if request.stream and params.prompt_logprobs is not None:
            expected = "None in a streamed answer"
            raise InvalidArgument("prompt_logprobs", params.prompt_logprobs, expected)
        return msgspec.structs.replace(request, sampling=params)

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Take from ``fields`` what the sampling calls otherwise; return it with our names."""
        raise NotImplementedError

    @property
    def prompts(self) -> Any:  # noqa: ANN401  whatever LLM takes
        """The prompts, as :meth:`eaglegbv.llm.LLM.generate` takes them."""
        raise NotImplementedError

    @property
    def usage_streamed(self) -> bool:
        """Whether a last chunk says what was used."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/completions``."""

    KIND: ClassVar[str] = "text_completion"

    prompt: str | list[str | int | list[int]]  # text or ids, of one prompt or of several
    echo: bool = False  # give the prompt before the answer

    def __post_init__(self) -> None:
        if self.prompt == []:
            raise InvalidArgument("prompt", self.prompt, "at least one prompt")
        if self.echo and self.stream:
            raise InvalidArgument("echo", self.echo, "false in a streamed answer")

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`Request.settings`."""
        for name, usual in (("suffix", ""), ("best_of", fields.get("n", 1))):
            value = fields.pop(name, usual)
            if value != usual:
                raise InvalidArgument(name, value, f"{usual!r}: there is no {name} here")
        settings = {"max_tokens": fields.pop("max_tokens", 16)}  # OpenAI's default
        if fields.get("echo") and "logprobs" in fields:
            settings["prompt_logprobs"] = fields["logprobs"]
        return settings

    @property
    def prompts(self) -> Any:  # noqa: ANN401
        """See :meth:`Request.prompts`."""
        return self.prompt


class ChatRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/chat/completions``."""

    KIND: ClassVar[str] = "chat.completion"

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        if self.tool_choice not in ("auto", "none"):
            expected = "'auto' or 'none': nothing here makes a model use a tool"
            raise InvalidArgument("tool_choice", self.tool_choice, expected)

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`Request.settings`."""
        most = fields.pop("max_completion_tokens", None)  # the newer name
        settings = {"max_tokens": fields.pop("max_tokens", None) if most is None else most}
        top = fields.pop("top_logprobs", 0)
        if fields.pop("logprobs", False):
            settings["logprobs"] = top
        elif top:
            raise InvalidArgument("top_logprobs", top, "0 without logprobs")
        return settings

    @property
    def prompts(self) -> Any:  # noqa: ANN401
        """See :meth:`Request.prompts`."""
        shared = {name: getattr(self, name) for name in ChatPrompt.__struct_fields__}
        if self.tool_choice == "none":
            shared["tools"] = None
        return shared


def _usage(prompts: Sequence[Completion]) -> dict[str, Any]:
    """Return the counts of answers; those of one prompt count its tokens once.

    The details are OpenAI's where it has names for them.
    """
    choices = [choice for answer in prompts for choice in answer.choices]
    read = sum(len(answer.prompt_token_ids) for answer in prompts)
    cached = sum(answer.metrics.cached_tokens for answer in prompts)
    written = sum(len(choice.token_ids) for choice in choices)
    drafted = sum(choice.metrics.drafted_nodes for choice in choices)
    accepted = sum(choice.metrics.accepted_tokens for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "drafted_tokens": drafted,
            "target_forwards": sum(choice.metrics.target_forwards for choice in choices),
        },
    }


def answer(
    request: Request,
    prompts: Sequence[Completion],
    name: str,
    model: str,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Return the answer to a request that is not streamed, under the ``name`` it is given.

    ``decode`` makes text of token ids, for prompts that are to be given back.
    """
    choices: list[dict[str, Any]] = []
    for place, completion in enumerate(prompts):
        for choice in completion.choices:
            content = _choice(request, choice)
            if isinstance(request, CompletionRequest) and request.echo:
                content = _echo(request, content, place, choice, decode)
            choices.append({"index": len(choices), **content})
    chat = isinstance(request, ChatRequest)
    return {
        **_head(request, name, model),
        "choices": choices,
        **({"prompt_logprobs": _prompt_logprobs(prompts[0])} if chat else {}),
        "usage": _usage(prompts),
    }


def _choice(request: Request, choice: Completion) -> dict[str, Any]:
    ended = {
        "logprobs": _logprobs(request, choice),
        "finish_reason": str(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }
    if isinstance(request, ChatRequest):
        return {"message": {"role": "assistant", "content": choice.text}, **ended}
    return {"text": choice.text, "prompt_logprobs": _prompt_logprobs(choice), **ended}


def _echo(
    request: CompletionRequest,
    content: dict[str, Any],
    place: int,
    choice: Completion,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Return a choice behind its prompt, the request's at a ``place``, and that one's logprobs."""
    prompts: Any = [request.prompt] if is_one(request.prompt) else request.prompt
    prompt = prompts[place]
    text = prompt if isinstance(prompt, str) else decode(prompt)
    echoed = content | {"text": text + choice.text}
    if choice.prompt_logprobs and content["logprobs"] is not None:
        first, *others = choice.prompt_token_ids
        whole: dict[str, list[Any]] = {
            "tokens": [decode([first])],
            "token_logprobs": [None],
            "top_logprobs": [None],
        }
        read = msgspec.structs.replace(
            choice, token_ids=others, logprobs=choice.prompt_logprobs[1:]
        )
        for part in (_logprobs(request, read) or {}, content["logprobs"]):
            for name, values in part.items():
                whole[name] = [*whole[name], *values]
        echoed["logprobs"] = whole
    return echoed


def _prompt_logprobs(choice: Completion) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt's tokens as vLLM writes them, by token id."""
    if choice.prompt_logprobs is None:
        return None
    return [
        None if place is None else {str(token): _plain(entry) for token, entry in place.items()}
        for place in choice.prompt_logprobs
    ]


def _plain(entry: Logprob) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry), "logprob": _number(entry)}


def _structure(fields: dict[str, Any]) -> dict[str, Any]:
    """Take ``response_format`` from ``fields``; return it as a setting of the sampling."""
    asked = fields.pop("response_format", {"type": "text"})
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema" and isinstance(asked.get("json_schema"), Mapping):
        return {"json_schema": asked["json_schema"].get("schema", {"type": "object"})}
    expected = "a type of text, json_object, or json_schema with a json_schema"
    raise InvalidArgument("response_format", asked, expected)


def _logprobs(request: Request, answer: Completion | Delta) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens, or of a piece's, where asked for."""
    if answer.logprobs is None:
        return None
    places = list(zip(answer.token_ids, answer.logprobs, strict=True))
    if isinstance(request, ChatRequest):
        count = request.sampling.logprobs or 0
        return {"content": [_chat_place(token, place, count) for token, place in places]}
    return {
        "tokens": [_text(place[token]) for token, place in places],
        "token_logprobs": [_number(place[token]) for token, place in places],
        "top_logprobs": [
            {_text(entry): _number(entry) for entry in place.values()} for _, place in places
        ],
    }


def _chat_place(token: int, place: TokenLogprobs, count: int) -> dict[str, Any]:
    """Return the log-probabilities at one place: the chosen token's, and the ``count`` largest."""
    likely = sorted(place.values(), key=_number, reverse=True)
    return {**_told(place[token]), "top_logprobs": [_told(entry) for entry in likely[:count]]}


def _told(entry: Logprob) -> dict[str, Any]:
    text = _text(entry)
    return {"token": text, "logprob": _number(entry), "bytes": list(text.encode())}


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def first_chunk(request: Request, index: int, name: str, model: str) -> dict[str, Any] | None:
    """Return the chunk that begins a choice of a chat; completions have none."""
    if not isinstance(request, ChatRequest):
        return None
    beginning = {"delta": {"role": "assistant", "content": ""}}
    choice = {"index": index, **beginning, "logprobs": None, "finish_reason": None}
    return {**_chunk_head(request, name, model), "choices": [choice]}


def chunk(request: Request, piece: Delta, name: str, model: str) -> dict[str, Any]:
    """Return a piece of a streamed answer."""
    chat = isinstance(request, ChatRequest)
    text = {"delta": {"content": piece.text}} if chat else {"text": piece.text}
    ended = None if piece.completion is None else str(piece.completion.finish_reason)
    logprobs = _logprobs(request, piece)
    choice = {"index": piece.index, **text, "logprobs": logprobs, "finish_reason": ended}
    return {**_chunk_head(request, name, model), "choices": [choice]}


def usage_chunk(
    request: Request, prompts: Sequence[Completion], name: str, model: str
) -> dict[str, Any]:
    """Return the last chunk of a stream whose client wants to know what was used."""
    head = _chunk_head(request, name, model)
    return {**head, "choices": [], "usage": _usage(prompts)}


def _head(request: Request, name: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": request.KIND, "created": int(time.time()), "model": model}


def _chunk_head(request: Request, name: str, model: str) -> dict[str, Any]:
    head = _head(request, name, model)
    return {**head, "object": f"{request.KIND}.chunk"} if isinstance(request, ChatRequest) else head


def error_body(message: str, kind: str, parameter: str | None = None) -> Mapping[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}


def ended_well(completion: Completion) -> bool:
    """Whether an answer is one that a client may take for whole."""
    return completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

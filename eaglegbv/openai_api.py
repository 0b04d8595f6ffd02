"""OpenAI's protocol: what a request asks of an LLM, and its answer as the client reads it."""

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from eaglegbv.arguments import ELSEWHERE
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.logprobs import Logprob, TokenLogprobs
from eaglegbv.metrics import RequestMetrics
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import (
    REPLACEMENT,
    ChatPrompt,
    Completion,
    Delta,
    TextDecoder,
    TokenTexts,
    is_one,
)
from eaglegbv.tool_calls import ArgumentsParser, CallParser, Found, Parser, call_schema, name_of

Kind = TypeVar("Kind")

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity", "moderation"),
)
"""Fields that a client may send and that change no answer."""

REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "suffix": ("",),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "use_beam_search": (False,),
    }
)
"""Fields of what is not offered, and the values of each that ask for nothing."""

OF_PROMPT = ("prompt_logprobs", "prompt_token_ids")
"""What vLLM tells of a prompt: in each choice, and in chats beside them too."""

NOTHING = Found("", [])

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options`` of a request."""

    include_usage: bool | None = False


class Token(msgspec.Struct, frozen=True):
    """A token's log-probability, as chats have it."""

    id: int
    token: str
    logprob: float
    bytes: list[int]


class Place(NamedTuple):
    """The log-probabilities at one place of a text."""

    chosen: Token
    likely: list[Token]  # the chosen one first
    length: int  # characters that the chosen one adds to the text


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common; settings of the sampling are beside it."""

    KIND: ClassVar[str]
    ID: ClassVar[str]  # how ids of answers begin
    CHUNK: ClassVar[str]  # the kind of chunks
    NAMES: ClassVar[Mapping[str, str]]  # what clients call settings of the sampling

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_spec_tokens_details: bool = False
    response_format: dict[str, Any] | None = None

    @property
    def usage_streamed(self) -> bool:
        """Whether a last chunk says what was used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def schema(self) -> object:
        """The JSON schema that the answers must follow, or None for any text."""
        return _schema_of(self.response_format)

    def parser(self) -> Parser:
        """Return what reads an answer's text."""
        return Parser()


class CompletionRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/completions``."""

    KIND: ClassVar[str] = "text_completion"
    ID: ClassVar[str] = "cmpl"
    CHUNK: ClassVar[str] = KIND
    NAMES: ClassVar[Mapping[str, str]] = {"prompt_logprobs": "logprobs"}

    prompt: str | list[str | int | list[int]]  # text or ids, of one prompt or of several
    echo: bool = False  # give the prompt before the answer

    def __post_init__(self) -> None:
        if self.prompt == []:
            raise InvalidArgument("prompt", self.prompt, "at least one prompt")

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Take from ``fields`` what the sampling calls otherwise; return it with our names."""
        best, count = fields.pop("best_of", 1), fields.get("n", 1)
        if best not in (1, count):
            raise InvalidArgument("best_of", best, f"{count}, as n: all answers are given")
        settings = {"max_tokens": fields.pop("max_tokens", 16)}  # OpenAI's default
        if fields.get("logprobs") is False:
            del fields["logprobs"]
        if fields.get("echo") and "logprobs" in fields:
            settings["prompt_logprobs"] = fields["logprobs"]
        return settings

    @property
    def prompts(self) -> Any:  # noqa: ANN401  whatever LLM takes
        """The prompts, as :meth:`eaglegbv.llm.LLM.generate` takes them."""
        return self.prompt

    def said(self, found: Found, **_: str) -> dict[str, Any]:
        """Return the part of a choice with its text and calls; chats may say whose they are."""
        return {"text": found.content}

    def logprobs(self, places: Sequence[Place], start: int) -> dict[str, list[Any]]:
        """Return the log-probabilities of a text that begins at a character of its answer."""
        lengths = accumulate((place.length for place in places), initial=start)
        return {
            "tokens": [place.chosen.token for place in places],
            "token_logprobs": [place.chosen.logprob for place in places],
            "top_logprobs": [_by_name(place.likely) for place in places],
            "text_offset": list(lengths)[:-1],
        }


class ChatRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/chat/completions``."""

    KIND: ClassVar[str] = "chat.completion"
    ID: ClassVar[str] = "chatcmpl"
    CHUNK: ClassVar[str] = "chat.completion.chunk"
    NAMES: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_completion_tokens",
        "logprobs": "top_logprobs",
    }

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        for tool in self.tools or ():
            try:
                name_of(tool)
            except (KeyError, TypeError):
                raise InvalidArgument("tools", tool, "a function with a name") from None
        choices = ["auto", "none", *(["required"] if self.tools else [])]
        if self.called not in self.names and self.tool_choice not in choices:
            expected = f"{one_of(choices)}, or a function of tools, which are {self.names}"
            raise InvalidArgument("tool_choice", self.tool_choice, expected)
        if self.forced and self.response_format is not None:
            expected = "'auto' or 'none' beside response_format"
            raise InvalidArgument("tool_choice", self.tool_choice, expected)

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`CompletionRequest.settings`."""
        older = fields.pop("max_tokens", None)
        settings = {"max_tokens": fields.pop("max_completion_tokens", older)}
        top = fields.pop("top_logprobs", 0)
        if fields.pop("logprobs", False):
            settings["logprobs"] = top
        elif top:
            raise InvalidArgument("top_logprobs", top, "0 without logprobs")
        return settings

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return [name_of(tool) for tool in self.tools or ()]

    @property
    def called(self) -> str | None:
        """The name of the tool that must be called, or None."""
        if isinstance(self.tool_choice, str):
            return None
        function = self.tool_choice.get("function")
        return str(function.get("name")) if isinstance(function, dict) else ""

    @property
    def forced(self) -> bool:
        """Whether a tool must be called."""
        return self.tool_choice not in ("auto", "none")

    @property
    def prompts(self) -> Any:  # noqa: ANN401
        """See :meth:`CompletionRequest.prompts`."""
        shared = {name: getattr(self, name) for name in ChatPrompt.__struct_fields__}
        return shared | ({"tools": None} if self.tool_choice == "none" else {})

    @property
    def schema(self) -> object:
        """See :meth:`Request.schema`."""
        if not self.forced:
            return super().schema
        return call_schema(self.tools or (), self.called, parallel=self.parallel_tool_calls)

    def parser(self) -> Parser:
        """See :meth:`Request.parser`."""
        if self.called is not None:
            return ArgumentsParser(self.called)
        return CallParser(self.names) if self.tools and self.tool_choice != "none" else Parser()

    def said(self, found: Found, **role: str) -> dict[str, Any]:
        """See :meth:`CompletionRequest.said`."""
        calls = {"tool_calls": found.calls} if found.calls else {}
        content = None if found.calls and not found.content else found.content
        return {"delta" if self.stream else "message": {**role, "content": content, **calls}}

    def logprobs(self, places: Sequence[Place], start: int) -> dict[str, list[Any]]:
        """See :meth:`CompletionRequest.logprobs`."""
        del start
        content = []
        for chosen, likely, _ in places:
            likely = sorted(likely, key=lambda token: token.logprob, reverse=True)
            top = {"top_logprobs": likely[:-1]}
            content.append(msgspec.structs.asdict(chosen) | top)
        return {"content": content}


def _by_name(tokens: Sequence[Token]) -> dict[str, float]:
    """Return log-probabilities by texts, where those of equal texts are told apart by their ids."""
    named: dict[str, float] = {}
    for token in tokens:
        named[f"token_id:{token.id}" if token.token in named else token.token] = token.logprob
    return named


AnyRequest: TypeAlias = CompletionRequest | ChatRequest


class Asked(NamedTuple):
    """What a request's body comes to."""

    request: AnyRequest
    sampling: SamplingParams
    scored: bool  # whether the prompt alone is given back, with nothing written after it
    warnings: Sequence[str]  # what was not heeded


def read_request(kind: type[AnyRequest], body: bytes, defaults: SamplingParams) -> Asked:
    """Read a request's body; what it does not set of the sampling is as in ``defaults``.

    Raises:
        InvalidArgument: It is no JSON object, or a field is not usable.
    """
    given = read_json(body)
    fields = {name: _whole(value) for name, value in given.items() if name not in IGNORED}
    for name, harmless in REFUSED.items():
        value = fields.pop(name, None)
        if value is not None and value not in harmless:
            raise InvalidArgument(name, value, "nothing: this server does not offer it")
    known = set(kind.__struct_fields__)
    names = {ours: theirs for ours, theirs in kind.NAMES.items() if theirs in fields}
    settings = kind.settings(fields)
    for name in fields.keys() & {*SamplingParams.__struct_fields__} - known:
        settings[name] = fields.pop(name)
    request = convert(fields, kind)
    if request.schema is not None:
        settings["json_schema"] = request.schema
    scored = settings["max_tokens"] == 0 and (given.get("echo") or "prompt_logprobs" in given)
    if scored:
        settings |= {"max_tokens": 1, "min_tokens": 0}
    warnings = [_warning(name, kind) for name in sorted(fields.keys() - known)]
    return Asked(request, _sampling(settings, defaults, names), scored, warnings)


def _sampling(
    given: dict[str, Any], defaults: SamplingParams, names: Mapping[str, str]
) -> SamplingParams:
    """Return the settings of a request; errors call them by their ``names`` there."""
    settings = msgspec.structs.asdict(defaults) | given
    seed = settings["seed"]
    if isinstance(seed, int) and seed < 0:
        settings["seed"] = seed % 2**64  # OpenAI's are of 64 bits with a sign
    try:
        return SamplingParams(**settings)
    except InvalidArgument as error:
        name = names.get(error.argument, error.argument)
        raise InvalidArgument(name, error.value, error.expected) from error


def read_json(body: bytes) -> dict[str, Any]:
    """Return what is not null of a JSON object; InvalidArgument if it is none."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidArgument("body", f"{len(body)} bytes", f"a JSON object ({error})") from error
    return {name: value for name, value in fields.items() if value is not None}


def convert(fields: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Return a struct of such fields; InvalidArgument names the one that is missing or wrong."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidArgument):
            raise error.__cause__ from None
        said, _, place = str(error).partition(" - at `$.")
        # A missing one: "Object missing required field `messages`".
        name = re.split(r"[\[.`]", place)[0] or said.split("`")[-2]
        told = f"{said.removeprefix('Expected ')} at {place.rstrip('`')}"
        expected = told if place else "a value"
        raise InvalidArgument(name, fields.get(name), expected) from error


def _whole(value: object) -> object:
    """Return a number as an integer if it is one: some clients have no other numbers than 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _warning(name: str, kind: type[AnyRequest]) -> str:
    known = (*kind.__struct_fields__, *SamplingParams.__struct_fields__)
    close = [f"{field}, perhaps" for field in get_close_matches(name, known, n=1)]
    meant = [ELSEWHERE[name]] if name in ELSEWHERE else close
    return ": ".join([f"{name} is not known and was ignored", *meant])


def _schema_of(form: Mapping[str, Any] | None) -> object:
    """Return the JSON schema of a ``response_format``, or None for any text."""
    match form:
        case None:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_object", "schema": dict(schema)}:
            return schema
        case {"type": "json_object" | "text"} if not form.keys() & {"schema", "json_schema"}:
            return {"type": "object"} if form["type"] == "json_object" else None
    expected = "a type of text, json_object, or json_schema with a json_schema that has a schema"
    raise InvalidArgument("response_format", form, expected)


# Answers.
Part: TypeAlias = dict[str, Any]
"""Something of a choice: its beginning, some text, or its end. Joined, the parts are the choice."""


class Answers:
    """The answers to a request, as they are written."""

    def __init__(
        self, asked: Asked, texts: TokenTexts, spec_metrics: str | None, **more: object
    ) -> None:
        """Begin under a new id, and with ``more``.

        ``spec_metrics`` is as vLLM's ``--per-request-spec-decode-metrics``, or None.
        """
        self.request = request = asked.request
        self._texts, self._spec_metrics = texts, spec_metrics
        self._each = asked.sampling.n  # choices of a prompt
        kind = request.CHUNK if request.stream else request.KIND
        name = f"{request.ID}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), **more}
        self._choices: dict[int, Choice] = {}
        self._ended: dict[int, Completion] = {}

    def parts(self, piece: Delta) -> Iterator[Part]:
        """Yield what a piece adds to its choice."""
        index = piece.index
        if index not in self._choices:
            self._choices[index] = Choice(self, index)
        if piece.completion is not None:
            self._ended[index] = piece.completion
        for part in self._choices[index].parts(piece):
            yield {"index": index, "logprobs": None, "finish_reason": None, **part}

    def chunk(self, part: Part) -> dict[str, Any]:
        """Return a part as a chunk of a stream."""
        return {**self._head, "choices": [part]}

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk of a stream that says what was used."""
        return {**self._head, "choices": [], **self._counts()}

    def whole(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        choices: dict[int, Part] = {}
        for part in parts:
            _join(choices.setdefault(part["index"], {}), part)
        written = [choices[index] for index in sorted(choices)]
        for message in (choice.get("message", {}) for choice in written):
            if "tool_calls" in message:
                message["content"] = message["content"] or None
        first = written[0] if isinstance(self.request, ChatRequest) else {}
        told = {name: first[name] for name in OF_PROMPT if name in first}
        return {**self._head, "choices": written, **told, **self._counts()}

    def echo(self, index: int, piece: Delta) -> dict[str, Any]:
        """Return the text and log-probabilities of an answer's prompt, where they are asked for."""
        if not isinstance(self.request, CompletionRequest) or not self.request.echo:
            return {}
        prompts: Any = self.request.prompt
        prompt = prompts if is_one(prompts) else prompts[index // self._each]
        text = prompt if isinstance(prompt, str) else str(self._texts.tokenizer.decode(prompt))
        if piece.prompt_logprobs is None or piece.logprobs is None:
            return {"text": text, "logprobs": None}
        first, *_ = piece.prompt_token_ids
        beginning = TextDecoder(self._texts.tokenizer).add(first) or self._texts.of(first)
        alone = {first: Logprob(logprob=0.0, rank=1, decoded_token=beginning)}
        places = [place or alone for place in piece.prompt_logprobs]
        logprobs = self.request.logprobs(self._places(text, piece.prompt_token_ids, places), 0)
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        return {"text": text, "logprobs": logprobs}

    def of_prompt(self, piece: Delta) -> Part:
        """Return what is told of an answer's prompt, as vLLM writes it."""
        places = piece.prompt_logprobs
        told: Part = {"prompt_logprobs": places and [place and _finite(place) for place in places]}
        if self.request.return_token_ids:
            told |= {"prompt_token_ids": piece.prompt_token_ids, "token_ids": []}
        return told

    def logprobs(self, piece: Delta, start: int) -> dict[str, Any] | None:
        """Return the log-probabilities of a piece's tokens, where they are asked for.

        The piece begins at the character ``start`` of its answer.
        """
        if piece.logprobs is None:
            return None
        places = self._places(piece.text, piece.token_ids, piece.logprobs)
        return self.request.logprobs(places, start)

    def _places(
        self, text: str, ids: Sequence[int], places: Sequence[TokenLogprobs]
    ) -> list[Place]:
        listed, at = [], 0
        for token, place in zip(ids, places, strict=True):
            likely = [self._token(*each, chosen=token) for each in _finite(place).items()]
            piece = place[token].decoded_token or ""
            length = len(piece) if text.startswith(piece, at) else 0  # not those that are left out
            listed.append(Place(likely[0], likely, length))
            at += length
        return listed

    def _token(self, token: int, known: Logprob, *, chosen: int) -> Token:
        """Return a token by its text, or by the bytes of a part of a character."""
        name = text = known.decoded_token or ""
        spelled = self._texts.bytes_of(token, text)
        if self.request.return_tokens_as_token_ids:
            name = f"token_id:{token}"
        elif token != chosen and REPLACEMENT in text:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        return Token(token, name, known.logprob, list(spelled))

    def _counts(self) -> dict[str, Any]:
        """Return the counts of answers, and records of speculation where they are asked for."""
        choices = [self._ended[index] for index in sorted(self._ended)]
        counts: dict[str, Any] = {"usage": _usage(choices, self._each)}
        if self._spec_metrics is not None and len(choices) == 1:
            record = vllm_record(choices[0].metrics, steps=self._spec_metrics == "detailed")
            counts["metrics"] = {"speculative_decoding": record}
        if self.request.return_spec_tokens_details:
            details = [sglang_record(choice.metrics) for choice in choices]
            counts["sglext"] = {"spec_tokens_details": details if details[1:] else details[0]}
        return counts


class Choice:
    """One of the answers, part by part."""

    def __init__(self, answers: Answers, index: int) -> None:
        self._answers, self._index = answers, index
        self._parser = answers.request.parser()
        self._at = self._calls = 0

    def parts(self, piece: Delta) -> Iterator[Part]:
        """Yield the parts of a piece; the one with the finish reason is the last, and has no text.

        What may be a call of a tool comes when it is certain.
        """
        request, answers = self._answers.request, self._answers
        if piece.prompt_token_ids:
            echo = answers.echo(self._index, piece)
            self._at = len(echo.get("text", ""))
            yield request.said(NOTHING, role="assistant") | answers.of_prompt(piece) | echo
        found = self._parser.feed(piece.text)
        if piece.token_ids or found.content:
            ids = {"token_ids": piece.token_ids} if request.return_token_ids else {}
            yield {**self._said(found), "logprobs": answers.logprobs(piece, self._at), **ids}
        self._at += len(piece.text)
        if piece.completion is not None:
            rest = self._parser.end()
            if rest.content or rest.calls:
                yield self._said(rest)
            yield request.said(NOTHING) | ended(piece.completion, calls=self._calls > 0)

    def _said(self, found: Found) -> Part:
        calls = found.calls
        if self._answers.request.stream:
            calls = [{"index": at, **call} for at, call in enumerate(calls, self._calls)]
        self._calls += len(calls)
        return self._answers.request.said(Found(found.content, calls))


def _join(whole: Part, part: Part) -> None:
    """Add a part to those before it: texts and lists go on, and what was not told yet is set."""
    for name, value in part.items():
        before = whole.get(name)
        if before is None:
            whole[name] = value
        elif isinstance(value, dict):
            _join(before, value)
        elif isinstance(value, str | list):
            whole[name] = before + value


def ended(choice: Completion, *, calls: bool) -> dict[str, Any]:
    """Return how a choice ended that has calls of tools or none."""
    stopped = calls and choice.finish_reason is FinishReason.STOP
    reason = "tool_calls" if stopped else choice.finish_reason
    return {"finish_reason": reason, "stop_reason": choice.stop_reason}


def _finite(place: TokenLogprobs) -> TokenLogprobs:
    return {
        token: msgspec.structs.replace(known, logprob=max(known.logprob, LEAST_LOGPROB))
        for token, known in place.items()
    }


# Counts.
def _usage(choices: Sequence[Completion], count: int) -> dict[str, Any]:
    """Return the counts of answers; those of one prompt, ``count`` of them, count it once.

    The details are OpenAI's where it has names for them.
    """
    first, metrics = choices[::count], [choice.metrics for choice in choices]
    read = sum(len(choice.prompt_token_ids) for choice in first)
    written = sum(len(choice.token_ids) for choice in choices)
    drafted = sum(each.drafted_nodes for each in metrics)
    accepted = sum(each.accepted_tokens for each in metrics)
    cached = sum(choice.metrics.cached_tokens for choice in first)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "drafted_tokens": drafted,
            "target_forwards": sum(each.target_forwards for each in metrics),
        },
    }


def vllm_record(metrics: RequestMetrics, *, steps: bool) -> dict[str, Any]:
    """Return vLLM's record of a request's speculation, with each step if asked.

    ``num_spec_tokens`` is the depth of the deepest tree and ``num_draft_tokens`` counts nodes, so
    the rate is per node.
    """
    record = {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.accepted_tokens / max(1, metrics.drafted_nodes),
        "acceptance_histogram": metrics.acceptance_histogram,
        "num_spec_steps": len(metrics.accepted_by_step),
        "num_accepted_draft_tokens": metrics.accepted_tokens,
        "num_draft_tokens": metrics.drafted_nodes,
        "num_spec_tokens": len(metrics.offered_by_depth),
    }
    each = {
        "per_step_accepted": metrics.accepted_by_step,
        "per_step_drafted": metrics.drafted_by_step,
    }
    return {**record, **(each if steps else {})}


def sglang_record(metrics: RequestMetrics) -> dict[str, Any]:
    """Return SGLang's record of a request's speculation; it has caps, which nothing here has."""
    return {
        "spec_accept_rate": metrics.accepted_tokens / max(1, metrics.drafted_nodes),
        "spec_accept_length": metrics.mean_acceptance_length,
        "spec_cap_length": 0.0,
        "spec_block_accept_length": 0.0,
        "spec_num_correct_drafts": metrics.accepted_tokens,
        "spec_num_proposed_drafts": metrics.drafted_nodes,
        "spec_verify_ct": len(metrics.accepted_by_step),
        "spec_correct_drafts_histogram": metrics.acceptance_histogram,
        "spec_cap_lens_histogram": [],
    }


def error_body(message: str, kind: str, parameter: str | None = None) -> Mapping[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}

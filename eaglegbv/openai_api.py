"""OpenAI's protocol: what a request asks of an LLM, and its answer as the client reads it."""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

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
from eaglegbv.tool_calls import CallParser, ForcedParser, Found, Tools, call_schema, name_of

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

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, which JSON has no number for."""

_log = logging.getLogger(__name__)


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options`` of a request."""

    include_usage: bool | None = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common; settings of the sampling are beside it."""

    KIND: ClassVar[str]
    ID: ClassVar[str]  # how ids of answers begin
    NAMES: ClassVar[Mapping[str, str]]  # what clients call settings of the sampling

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_spec_tokens_details: bool = False

    @property
    def prompts(self) -> Any:  # noqa: ANN401  whatever LLM takes
        """The prompts, as :meth:`eaglegbv.llm.LLM.generate` takes them."""
        raise NotImplementedError

    @property
    def usage_streamed(self) -> bool:
        """Whether a last chunk says what was used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Take from ``fields`` what the sampling calls otherwise; return it with our names."""
        raise NotImplementedError

    @property
    def structure(self) -> dict[str, Any] | None:
        """The JSON schema that the answers must follow, beside ``response_format``; or None."""
        return None

    def parser(self) -> CallParser | ForcedParser | None:
        """Return what reads calls of tools in an answer; None if it has none."""
        return None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/completions``."""

    KIND: ClassVar[str] = "text_completion"
    ID: ClassVar[str] = "cmpl"
    NAMES: ClassVar[Mapping[str, str]] = {"prompt_logprobs": "logprobs"}

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
    def prompts(self) -> Any:  # noqa: ANN401
        """See :meth:`Request.prompts`."""
        return self.prompt


class ChatRequest(Request, frozen=True, kw_only=True):
    """A request to ``/v1/chat/completions``."""

    KIND: ClassVar[str] = "chat.completion"
    ID: ClassVar[str] = "chatcmpl"
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
        known = choices if self.called is None else self.names
        if (self.tool_choice if self.called is None else self.called) not in known:
            expected = f"{one_of(choices)}, or a function of tools, which are {self.names}"
            raise InvalidArgument("tool_choice", self.tool_choice, expected)

    @classmethod
    def settings(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`Request.settings`."""
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
        """See :meth:`Request.prompts`."""
        shared = {name: getattr(self, name) for name in ChatPrompt.__struct_fields__}
        if self.tool_choice == "none":
            shared["tools"] = None
        return shared

    @property
    def structure(self) -> dict[str, Any] | None:
        """See :meth:`Request.structure`."""
        if not self.forced:
            return None
        tools: Tools = self.tools or ()
        return call_schema(tools, self.called, parallel=self.parallel_tool_calls)

    def parser(self) -> CallParser | ForcedParser | None:
        """See :meth:`Request.parser`."""
        if not self.tools or self.tool_choice == "none":
            return None
        return ForcedParser(self.names, self.called) if self.forced else CallParser(self.names)


class Asked(NamedTuple):
    """What a request's body comes to."""

    request: Request
    sampling: SamplingParams
    scored: bool  # whether the prompt alone is given back, with nothing written after it
    warnings: Sequence[str]  # what was not heeded


def read_request(kind: type[Request], body: bytes, defaults: SamplingParams) -> Asked:
    """Read a request's body; what it does not set of the sampling is as in ``defaults``.

    Raises:
        InvalidArgument: It is no JSON object, or a field is not usable.
    """
    fields = {name: _whole(value) for name, value in read_json(body).items() if value is not None}
    for name in IGNORED:
        fields.pop(name, None)
    for name, harmless in REFUSED.items():
        value = fields.pop(name, None)
        if value is not None and value not in harmless:
            raise InvalidArgument(name, value, "nothing: this server does not offer it")
    names = {ours: theirs for ours, theirs in kind.NAMES.items() if theirs in fields}
    settings = msgspec.structs.asdict(defaults) | kind.settings(fields)
    schema = _response_format(fields.pop("response_format", {"type": "text"}))
    settings |= {} if schema is None else {"json_schema": schema}
    for name in SamplingParams.__struct_fields__:
        if name in fields and name not in kind.__struct_fields__:
            settings[name] = fields.pop(name)
    unknown = fields.keys() - set(kind.__struct_fields__)
    warnings = [_warning(name, kind) for name in sorted(unknown)]
    request = convert({name: fields[name] for name in fields.keys() - unknown}, kind)
    if request.structure is not None:
        if schema is not None:
            expected = "'auto' or 'none' beside response_format"
            raise InvalidArgument("tool_choice", fields["tool_choice"], expected)
        settings["json_schema"] = request.structure
    scored = settings["max_tokens"] == 0 and isinstance(request, CompletionRequest)
    if scored and (request.echo or settings["prompt_logprobs"] is not None):  # type: ignore[attr-defined]
        settings |= {"max_tokens": 1, "min_tokens": 0}
    seed = settings["seed"]
    if isinstance(seed, int) and seed < 0:
        settings["seed"] = seed % 2**64  # OpenAI's are of 64 bits with a sign
    try:
        params = SamplingParams(**settings)
    except InvalidArgument as error:
        name = names.get(error.argument, error.argument)
        raise InvalidArgument(name, error.value, error.expected) from error
    if request.stream and params.prompt_logprobs is not None:
        expected = "None in a streamed answer"
        raise InvalidArgument("prompt_logprobs", params.prompt_logprobs, expected)
    return Asked(request, params, scored, warnings)


def read_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object; InvalidArgument if it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidArgument("body", f"{len(body)} bytes", f"a JSON object ({error})") from error


def convert(fields: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Return a struct of such fields; InvalidArgument names the one that is missing or wrong."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidArgument):
            raise error.__cause__ from None
        said, _, place = str(error).partition(" - at `$.")
        if not place:  # "Object missing required field `messages`"
            raise InvalidArgument(said.split("`")[-2], None, "a value") from error
        name = place.rstrip("`").partition("[")[0].partition(".")[0]
        expected = f"{said.removeprefix('Expected ')} at {place.rstrip('`')}"
        raise InvalidArgument(name, fields[name], expected) from error


def _whole(value: object) -> object:
    """Return a number as an integer if it is one: some clients have no other numbers than 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _warning(name: str, kind: type[Request]) -> str:
    known = {*kind.__struct_fields__, *SamplingParams.__struct_fields__}
    return f"{name} is not known and was ignored: {ELSEWHERE.get(name) or one_of(known, name)}"


def _response_format(asked: object) -> object:
    """Return the JSON schema of a ``response_format``, or None for any text."""
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if isinstance(asked, Mapping):
        named, schema = asked.get("json_schema"), asked.get("schema")
        if kind == "text" and schema is None and named is None:
            return None
        if kind == "json_object" and named is None:
            return {"type": "object"} if schema is None else schema
        if kind == "json_schema" and isinstance(named, Mapping) and named.get("schema") is not None:
            return named["schema"]
    expected = "a type of text, json_object, or json_schema with a json_schema that has a schema"
    raise InvalidArgument("response_format", asked, expected)


# Answers.
class Answers(NamedTuple):
    """What writes the answers to a request."""

    request: Request
    model: str
    texts: TokenTexts
    name: str  # the answer's id
    fingerprint: str
    spec_metrics: str | None = None  # as vLLM's --per-request-spec-decode-metrics, or None

    @classmethod
    def new(cls, request: Request, *others: Any) -> Self:  # noqa: ANN401
        """Begin the answer under a new id."""
        model, texts, fingerprint, spec_metrics = others
        name = f"{request.ID}-{uuid.uuid4().hex}"
        return cls(request, model, texts, name, fingerprint, spec_metrics)

    def whole(self, prompts: Sequence[Completion]) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        choices: list[dict[str, Any]] = []
        for place, completion in enumerate(prompts):
            for choice in completion.choices:
                choices.append({"index": len(choices), **self._choice(choice, place)})
        chat = isinstance(self.request, ChatRequest)
        more: dict[str, Any] = {}
        if chat:
            more["prompt_logprobs"] = _prompt_logprobs(prompts[0])
            if self.request.return_token_ids:
                more["prompt_token_ids"] = prompts[0].prompt_token_ids
        return {**self._head(), "choices": choices, **more, **self._counts(prompts)}

    def _choice(self, choice: Completion, place: int) -> dict[str, Any]:
        found = _found(self.request.parser(), choice.text)
        ended: dict[str, Any] = {
            "logprobs": self.logprobs(choice),
            "finish_reason": _reason(choice, calls=bool(found.calls)),
            "stop_reason": choice.stop_reason,
        }
        if self.request.return_token_ids:
            ended["token_ids"] = choice.token_ids
        if isinstance(self.request, ChatRequest):
            calls = {"tool_calls": found.calls} if found.calls else {}
            content = None if calls and not found.content else found.content
            return {"message": {"role": "assistant", "content": content, **calls}, **ended}
        assert isinstance(self.request, CompletionRequest)
        if self.request.return_token_ids:
            ended["prompt_token_ids"] = choice.prompt_token_ids
        told = {"text": choice.text, "prompt_logprobs": _prompt_logprobs(choice), **ended}
        return told | self._echo(choice, place) if self.request.echo else told

    def _echo(self, choice: Completion, place: int) -> dict[str, Any]:
        """Return what is told otherwise of a choice behind its prompt, the request's at a place."""
        assert isinstance(self.request, CompletionRequest)
        prompts: Any = [self.request.prompt] if is_one(self.request.prompt) else self.request.prompt
        prompt, tokenizer = prompts[place], self.texts.tokenizer
        before = prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt))
        text = before + choice.text
        if choice.prompt_logprobs is None or choice.logprobs is None:
            return {"text": text}
        first, *_ = ids = [*choice.prompt_token_ids, *choice.token_ids]
        beginning = TextDecoder(tokenizer).add(first) or self.texts.of(first)
        alone = {first: Logprob(logprob=0.0, rank=1, decoded_token=beginning)}
        places = [alone, *choice.prompt_logprobs[1:], *choice.logprobs]
        told = self._by_columns(text, ids, [place or {} for place in places], 0)
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return {"text": text, "logprobs": told}

    def logprobs(self, answer: Completion | Delta, start: int = 0) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's or a piece's tokens, where asked for.

        A piece begins at the character ``start`` of its answer.
        """
        if answer.logprobs is None:
            return None
        if isinstance(self.request, CompletionRequest):
            return self._by_columns(answer.text, answer.token_ids, answer.logprobs, start)
        places = zip(answer.token_ids, answer.logprobs, strict=True)
        return {"content": [self._chat_place(token, place) for token, place in places]}

    def _by_columns(
        self, text: str, ids: Sequence[int], places: Sequence[TokenLogprobs], start: int
    ) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        at = 0
        for token, place in zip(ids, places, strict=True):
            likely: dict[str, float] = {}
            for entry, known in place.items():
                name = self._name(entry, known, chosen=entry == token)
                likely[name if name not in likely else f"token_id:{entry}"] = _number(known)
            columns["tokens"].append(self._name(token, place[token], chosen=True))
            columns["token_logprobs"].append(_number(place[token]))
            columns["top_logprobs"].append(likely)
            columns["text_offset"].append(start + at)
            piece = place[token].decoded_token or ""
            at += len(piece) if text.startswith(piece, at) else 0  # not those that are left out
        return columns

    def _chat_place(self, token: int, place: TokenLogprobs) -> dict[str, Any]:
        """Return the log-probabilities at one place: the chosen token's, and the largest."""
        count = len(place) - 1
        likely = sorted(place.items(), key=lambda entry: _number(entry[1]), reverse=True)
        told = [self._told(entry, known, chosen=entry == token) for entry, known in likely]
        return {**self._told(token, place[token], chosen=True), "top_logprobs": told[:count]}

    def _told(self, token: int, known: Logprob, *, chosen: bool) -> dict[str, Any]:
        spelled = self.texts.bytes_of(token, known.decoded_token or "")
        name = self._name(token, known, chosen=chosen)
        return {"token": name, "logprob": _number(known), "bytes": list(spelled)}

    def _name(self, token: int, known: Logprob, *, chosen: bool) -> str:
        """Return what a token is called: its text, or the bytes of a part of a character."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        text = known.decoded_token or ""
        if chosen or REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.texts.bytes_of(token, text))

    def usage_chunk(self, prompts: Sequence[Completion]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client wants to know what was used."""
        return {**self.chunk_head(), "choices": [], **self._counts(prompts)}

    def _counts(self, prompts: Sequence[Completion]) -> dict[str, Any]:
        """Return the counts of answers, and records of speculation where they are asked for."""
        metrics = [choice.metrics for answer in prompts for choice in answer.choices]
        counts: dict[str, Any] = {"usage": _usage(prompts)}
        if self.spec_metrics is not None and len(metrics) == 1:
            record = vllm_record(metrics[0], steps=self.spec_metrics == "detailed")
            counts["metrics"] = {"speculative_decoding": record}
        if self.request.return_spec_tokens_details:
            details = [sglang_record(each) for each in metrics]
            details_of = details[0] if len(details) == 1 else details
            counts["sglext"] = {"spec_tokens_details": details_of}
        return counts

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": self.request.KIND,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def chunk_head(self) -> dict[str, Any]:
        """Return what every chunk of a stream begins with."""
        chat = isinstance(self.request, ChatRequest)
        return self._head() | ({"object": f"{self.request.KIND}.chunk"} if chat else {})


class StreamedChoice:
    """One of the answers of a stream, chunk by chunk."""

    def __init__(self, answers: Answers, index: int) -> None:
        self._answers, self._index = answers, index
        self._parser = answers.request.parser()
        self._begun = self._at = self._calls = 0

    def chunks(self, piece: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a piece; the one with the finish reason is the last, and has no text.

        What may be a call of a tool comes when it is certain.
        """
        chat = isinstance(self._answers.request, ChatRequest)
        if chat and not self._begun:
            yield self._chunk({"role": "assistant", "content": ""})
        self._begun = 1
        found = Found(piece.text, []) if self._parser is None else self._parser.feed(piece.text)
        logprobs = self._answers.logprobs(piece, self._at)
        self._at += len(piece.text)
        if found.content or piece.token_ids or not chat:
            yield from self._written(found, piece, logprobs)
        if piece.completion is None:
            return
        if self._parser is not None:
            yield from self._written(self._parser.end(), None, None)
        reason = _reason(piece.completion, calls=bool(self._calls))
        more: dict[str, Any] = {"stop_reason": piece.completion.stop_reason}
        if self._answers.request.return_token_ids:
            more["prompt_token_ids"] = piece.completion.prompt_token_ids
        yield self._chunk({} if chat else "", finish_reason=reason, **more)

    def _written(
        self, found: Found, piece: Delta | None, logprobs: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks of what was found in a piece, the first with what is of its tokens."""
        ids = self._answers.request.return_token_ids and piece is not None
        more: dict[str, Any] = {"token_ids": piece.token_ids} if ids and piece else {}
        chat = isinstance(self._answers.request, ChatRequest)
        if found.content or logprobs is not None or more:
            told = {"content": found.content} if chat else found.content
            yield self._chunk(told, logprobs=logprobs, **more)
        for call in found.calls:
            yield self._chunk({"tool_calls": [{"index": self._calls, **call}]})
            self._calls += 1

    def _chunk(self, told: object, **more: object) -> dict[str, Any]:
        chat = isinstance(self._answers.request, ChatRequest)
        ended = {"logprobs": None, "finish_reason": None, **more}
        choice = {"index": self._index, "delta" if chat else "text": told, **ended}
        return {**self._answers.chunk_head(), "choices": [choice]}


def _found(parser: CallParser | ForcedParser | None, text: str) -> Found:
    """Return the content of a whole text and its calls of tools."""
    if parser is None:
        return Found(text, [])
    first, last = parser.feed(text), parser.end()
    return Found(first.content + last.content, first.calls + last.calls)


def _reason(choice: Completion, *, calls: bool) -> str:
    ended = choice.finish_reason is FinishReason.STOP
    return "tool_calls" if calls and ended else str(choice.finish_reason)


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


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


# Counts.
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

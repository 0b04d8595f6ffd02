"""Text in, text out: prompts to token ids, token ids to text as they come, and the answer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self, TypeAlias, cast

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from eaglegbv.chat import Message as Message
from eaglegbv.chat import plain_message
from eaglegbv.errors import EagleGBVError, InvalidArgument, one_of
from eaglegbv.logprobs import TokenLogprobs
from eaglegbv.metrics import RequestMetrics
from eaglegbv.request import FinishReason, Request
from eaglegbv.sampling import SamplingParams

REPLACEMENT = "\ufffd"

Ids: TypeAlias = list[int] | np.ndarray | torch.Tensor
Prompt: TypeAlias = str | Ids | list[Message] | dict[str, Any]
"""One prompt: text, token ids, or chat messages with ``role`` and ``content``.

Or a dictionary with one of ``prompt`` (text), ``prompt_token_ids`` and ``messages``; beside
messages there may be arguments of :meth:`eaglegbv.llm.TextGenerator.chat` for the chat template.
"""

_FORMS = ("prompt", "prompt_token_ids", "messages")

_PROMPT = "text, token ids or chat messages"


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt.

    Attributes:
        text: The text, cut before a stop string or the token that ends it, without special tokens.
        token_ids: The tokens, including the one that ends the text.
        prompt_token_ids: The prompt as the model read it.
        finish_reason: ``stop`` (end of sequence or a stop string), ``length``, ``error``, or
            ``cancelled`` (a stream that was closed early).
        error: What went wrong, if the reason is ``error``.
        stop_reason: The stop string, or the one of ``stop_token_ids``, that ended the text; None
            where it ended otherwise, by an end of sequence too.
        logprobs: Log-probabilities at each token, by token id; None unless they were asked for.
        prompt_logprobs: The same of the prompt, None at its first token.
        metrics: Counts and times.
        others: The prompt's other answers, where ``n`` of them were asked for.
    """

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason
    error: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
    others: list["Completion"] = msgspec.field(default_factory=list)

    @property
    def choices(self) -> list["Completion"]:
        """All ``n`` answers to the prompt, this one first."""
        return [self, *self.others]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain dictionaries, lists, strings and numbers, as JSON has them."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What the target thinks of a text.

    Attributes:
        token_ids: The text as the model reads it.
        logprobs: Log-probabilities at each token, by token id; None at the first.
        error: What went wrong, or None.
    """

    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = msgspec.field(default_factory=list)
    error: str | None = None

    @property
    def total(self) -> float:
        """Log-probability of all tokens after the first."""
        places = zip(self.token_ids, self.logprobs, strict=True)
        return sum(place[token].logprob for token, place in places if place is not None)

    @classmethod
    def of(cls, completion: Completion) -> Self:
        """Return the score of the prompt of an answer."""
        return cls(
            token_ids=completion.prompt_token_ids,
            logprobs=completion.prompt_logprobs or [],
            error=completion.error,
        )


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed answer.

    Attributes:
        text: New text; may be empty while a character or a possible stop string is incomplete.
        token_ids: New tokens.
        logprobs: Log-probabilities at the new tokens; None unless they were asked for.
        completion: The complete answer, in its last piece only.
        index: Which of the stream's answers it belongs to: ``n`` for each prompt, in their order.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    completion: Completion | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a prompt: an answer as far as it got, and what went wrong, or None."""

    completion: Completion
    error: EagleGBVError | None = None

    @classmethod
    def of_error(cls, error: EagleGBVError) -> Self:
        """Return the result of a prompt that was never read."""
        return cls(Completion(finish_reason=FinishReason.ERROR, error=str(error)), error)


# Prompts as a user writes them, and as a model reads them.
def plain_ids(prompts: object) -> object:
    """Return ids of NumPy or torch, ``[tokens]`` or ``[prompts, tokens]``, as lists."""
    return prompts.tolist() if isinstance(prompts, np.ndarray | torch.Tensor) else prompts


def is_one(prompts: object) -> bool:
    """Tell one prompt (text, ids, messages) from a list of prompts; InvalidArgument if neither."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidArgument("prompts", prompts, "text, token ids, chat messages, or a list")
    if not prompts:
        return False
    first = prompts[0]
    message = isinstance(first, Mapping) and not any(form in first for form in _FORMS)
    return message or isinstance(first, Integral)


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Return the settings of each of ``count`` prompts; InvalidArgument if they are others."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    expected = "a SamplingParams, or one per prompt"
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidArgument("sampling_params", params, expected)
    for each in params:
        if not isinstance(each, SamplingParams):
            raise InvalidArgument("sampling_params", each, expected)
    if len(params) != count:
        raise InvalidArgument("sampling_params", len(params), f"one, or one per prompt: {count}")
    return list(params)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, model: str) -> list[int]:
    """Return a prompt as the model reads it; errors call that ``model``.

    Text is read as it is; messages go through the chat template.

    Raises:
        InvalidArgument: It is empty or no prompt, or the model takes no such chat messages.
    """
    plain = plain_ids(prompt)
    if isinstance(plain, Mapping):
        return _encode_form(tokenizer, plain, model)
    if isinstance(plain, str):
        if not plain:
            raise InvalidArgument("prompt", plain, "a text that is not empty")
        return list(tokenizer.encode(_sound(plain)))
    if not isinstance(plain, Sequence) or isinstance(plain, bytes | bytearray):
        raise InvalidArgument("prompt", plain, _PROMPT)
    if plain and all(isinstance(message, Mapping) for message in plain):
        return _apply_chat_template(tokenizer, ChatPrompt(messages=list(plain)), model)
    if any(isinstance(token, bool) or not isinstance(token, Integral) for token in plain):
        raise InvalidArgument("prompt", plain, _PROMPT)
    return [int(token) for token in plain]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chat messages, and how the chat template writes them."""

    messages: list[Message]
    tools: list[Any] | None = None  # descriptions of functions, as JSON schemas
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None  # None: unless the last message is continued

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            expected = "False where the last message is continued"
            raise InvalidArgument("add_generation_prompt", value=True, expected=expected)


def _encode_form(
    tokenizer: PreTrainedTokenizerBase, prompt: Mapping[str, Any], model: str
) -> list[int]:
    """Return a prompt given as a dictionary as the model reads it."""
    if "messages" in prompt:
        try:
            chat = msgspec.convert(dict(prompt), ChatPrompt)
        except msgspec.ValidationError as error:
            expected = f"chat messages and arguments of the chat template ({error})"
            raise InvalidArgument("prompt", dict(prompt), expected) from error
        return _apply_chat_template(tokenizer, chat, model)
    [name] = prompt.keys() if len(prompt) == 1 else [None]
    if name not in _FORMS:
        expected = f"a dictionary with {one_of(_FORMS)}"
        raise InvalidArgument("prompt", dict(prompt), expected)
    value = plain_ids(prompt[name])
    if isinstance(value, str) != (name == "prompt"):
        raise InvalidArgument(name, value, "text" if name == "prompt" else "token ids")
    return encode_prompt(tokenizer, cast("Prompt", value), model)


def _apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat: ChatPrompt, model: str
) -> list[int]:
    plain = [_plain_message(message) for message in chat.messages]
    if not plain:
        raise InvalidArgument("prompt", plain, "at least one chat message")
    generating = chat.add_generation_prompt
    if generating is None:
        generating = not chat.continue_final_message
    if tokenizer.chat_template is None:
        raise InvalidArgument("prompt", "chat messages", f"text: {model} has no chat template")
    try:
        encoded = tokenizer.apply_chat_template(
            plain,
            tools=cast("Any", chat.tools),
            add_generation_prompt=generating,
            continue_final_message=chat.continue_final_message,
            tokenize=True,
            return_dict=True,
            **chat.chat_template_kwargs,
        )
    except ImportError:
        raise
    except Exception as error:  # a template is a program, and its errors are those of any
        expected = f"messages that the chat template of {model} takes ({error})"
        raise InvalidArgument("prompt", plain, expected) from error
    return list(cast("Mapping[str, list[int]]", encoded)["input_ids"])


def _plain_message(message: Mapping[str, object]) -> Message:
    """Return a message with its content as text; InvalidArgument if it has none."""
    plain = plain_message(message)
    if plain is None:
        raise InvalidArgument("prompt", dict(message), "a message with role and content, both text")
    if isinstance(plain.get("content"), str):
        _sound(plain["content"])
    return plain


def _sound(text: str) -> str:
    """Return ``text``, which tokenizers take if it can be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("prompt", text, "text without halves of surrogate pairs") from error
    return text


@dataclass(slots=True)
class TextStream:
    """The growing text of one request.

    Text is held back while its last character is incomplete (a token may end within a character)
    and while it may be the beginning of a stop string.
    """

    tokenizer: PreTrainedTokenizerBase  # turns ids into text
    stop: Sequence[str] = ()  # strings that end the text
    ends: Collection[int] = ()  # tokens that end the text without being part of it
    includes_stop: bool = False  # whether the stop string that ends the text is part of it
    skips_special: bool = True  # whether special tokens are left out of the text
    min_tokens: int = 0  # number of tokens within which no stop string counts
    # Ids fed so far; those behind the one that completed a stop string are dropped.
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # the text of `token_ids`, cut before the first stop string
    stopped_by: str | None = None  # the stop string that was found, or None
    _shown: int = 0
    # The text of the first `_fixed` tokens is final. Only what follows is decoded again, together
    # with the tokens from `_anchor` on, because a token's text may depend on its predecessor
    # (leading spaces). Neither lies within a character: a tokenizer that falls back to bytes shows
    # a run of bytes as garbage if it begins within one.
    _anchor: int = 0
    _fixed: int = 0
    _fixed_text: str = ""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        ends: Collection[int] = (),
    ) -> Self:
        """Return the empty text of a request with such settings, which ``ends`` end."""
        included = params.include_stop_str_in_output
        return cls(
            tokenizer,
            stop=params.stop,
            ends=() if included else ends,
            includes_stop=included,
            skips_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return text that is now certain and was not returned before."""
        for token in token_ids:
            self.token_ids.append(token)
            if token not in self.ends:
                self._decode()
            if self.stopped:
                break
        return self._show(len(self.text) if self.stopped else self._certain())

    def flush(self) -> str:
        """Return the rest: nothing more will come."""
        return self._show(len(self.text))

    def _decode(self) -> None:
        searched = len(self._fixed_text)
        before = self._text_of(self.token_ids[self._anchor : self._fixed])
        after = self._text_of(self.token_ids[self._anchor :])
        self.text = self._fixed_text + after[len(before) :]
        if not after.endswith(REPLACEMENT):
            if len(after) > len(before):  # a token without text, a special one say, is no anchor
                self._anchor = self._fixed
            self._fixed, self._fixed_text = len(self.token_ids), self.text
        if len(self.token_ids) > self.min_tokens:
            self._search(searched)

    def _search(self, searched: int) -> None:
        """Look for stop strings; those that end in the first ``searched`` characters do not count.

        If there are several, the first to begin ends the text.
        """
        first = len(self.text)
        for stop in self.stop:
            at = self.text.find(stop, max(0, searched - len(stop) + 1))
            if 0 <= at < first:
                first, self.stopped_by = at, stop
        if self.stopped_by is not None:
            end = first + len(self.stopped_by) if self.includes_stop else first
            self.text = self.text[:end]

    def _text_of(self, token_ids: list[int]) -> str:
        how = {"skip_special_tokens": self.skips_special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(token_ids, **how))

    def _certain(self) -> int:
        """Return the length of the text that no later token can change or cut."""
        length = len(self._fixed_text)
        held = 0
        for stop in self.stop:
            overlaps = range(min(len(stop) - 1, length), held, -1)
            held = next((n for n in overlaps if self._fixed_text.endswith(stop[:n])), held)
        return length - held

    def _show(self, length: int) -> str:
        new = self.text[self._shown : length]
        self._shown = max(self._shown, length)
        return new


@dataclass(slots=True)
class Answer:
    """A request in the engine, and its text so far."""

    request: Request
    text: TextStream

    def follow(self) -> Delta | None:
        """Turn tokens that the request was given since into text; return them, if there are any."""
        before = self.kept
        new = self.request.token_ids[before:]
        if not new or self.text.stopped:
            return None
        text = self.text.feed(new)
        tokens = self.text.token_ids[before:]
        logprobs = self._logprobs(self.request.logprobs[before : self.kept])
        return Delta(text=text, token_ids=tokens, logprobs=logprobs)

    def _logprobs(self, places: Sequence[TokenLogprobs]) -> list[TokenLogprobs] | None:
        """Return log-probabilities with their tokens' texts, or None if nobody asked."""
        if self.request.params.logprobs is None:
            return None
        return [self._decoded(place) for place in places]

    def _decoded(self, place: TokenLogprobs) -> TokenLogprobs:
        return {
            token: msgspec.structs.replace(known, decoded_token=self.text.tokenizer.decode([token]))
            for token, known in place.items()
        }

    @property
    def stops_here(self) -> bool:
        """Whether a stop string ends the text, and the engine has not been told yet."""
        knows = self.request.finish_reason is FinishReason.STOP
        return self.text.stopped and not (knows and self.kept == len(self.request.token_ids))

    @property
    def kept(self) -> int:
        """Tokens that were turned into text: up to the one that completes a stop string."""
        return len(self.text.token_ids)

    def result(self) -> Result:
        """Return what came of a request that has ended."""
        request = self.request
        assert request.finish_reason is not None
        completion = Completion(
            text=self.text.text,
            token_ids=list(request.token_ids),
            prompt_token_ids=list(request.prompt_ids),
            finish_reason=request.finish_reason,
            error=None if request.error is None else str(request.error),
            stop_reason=self._stop_reason(),
            logprobs=self._logprobs(request.logprobs),
            prompt_logprobs=self._prompt_logprobs(),
            metrics=request.metrics,
        )
        return Result(completion, request.error)

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        known = self.request.prompt_logprobs
        return [None if place is None else self._decoded(place) for place in known]

    def _stop_reason(self) -> int | str | None:
        request = self.request
        if request.finish_reason is not FinishReason.STOP or self.text.stopped:
            return self.text.stopped_by
        last = request.token_ids[-1]
        return last if last in request.params.stop_token_ids else None

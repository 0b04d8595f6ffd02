"""Text in, text out: prompts to token ids, token ids to text as they come, and the answer."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral
from typing import Any, Self, TypeAlias, cast

import msgspec
import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

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

    def without_answer(self) -> Self:
        """Return it as if nothing had been written after the prompt."""
        logprobs: list[TokenLogprobs] | None = None if self.logprobs is None else []
        nothing = {"text": "", "token_ids": [], "logprobs": logprobs}
        ended = {"finish_reason": FinishReason.LENGTH, "stop_reason": None}
        return msgspec.structs.replace(self, **nothing, **ended)

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
        prompt_token_ids: The prompt as the model read it, in its first piece only.
        prompt_logprobs: Log-probabilities at its tokens, there too; None unless asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    completion: Completion | None = None
    index: int = 0
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def without_answer(self) -> Self:
        """See :meth:`Completion.without_answer`."""
        last = self.completion and self.completion.without_answer()
        logprobs: list[TokenLogprobs] | None = None if self.logprobs is None else []
        return msgspec.structs.replace(
            self, text="", token_ids=[], logprobs=logprobs, completion=last
        )


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
    if "developer" not in str(tokenizer.chat_template):  # OpenAI's newer name for the same
        plain = [m | {"role": "system"} if m["role"] == "developer" else m for m in plain]
    generating = chat.add_generation_prompt
    if generating is None:
        generating = not chat.continue_final_message
    if tokenizer.chat_template is None:
        raise InvalidArgument("prompt", "chat messages", f"text: {model} has no chat template")
    try:
        encoded = tokenizer.apply_chat_template(
            plain,
            tools=cast("Any", chat.tools or None),
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


class TextDecoder:
    """What each token adds to the text before it.

    A token's text may depend on its predecessors: words of some tokenizers carry a space, which is
    left out where a text begins; and a character may take several tokens, the last of which adds
    it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int] = (),
        *,
        skips_special: bool = True,
    ) -> None:
        """Begin after the tokens ``before``."""
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._anchor = self._end_of(before)  # tokens of final text, before those that are pending
        self._pending: list[int] = []
        self._given = 0  # characters that pending tokens have added already
        self._stream = self._begun()

    def add(self, token: int) -> str:
        """Return the text that is complete with one more token."""
        self._pending.append(token)
        text = self._complete(token)
        whole = text or self._pending_text().rstrip(REPLACEMENT)
        new = whole[self._given :]
        self._given += len(new)
        if text:
            self._anchor = self._pending
            self._pending = []
            self._given = 0
        return new

    def rest(self) -> str:
        """Return what the tokens since the last complete text show as: part of a character."""
        return self._pending_text()[self._given :]

    def _pending_text(self) -> str:
        """Return the text of the tokens that are pending, the last character's part included."""
        before = self._decode(self._anchor)
        return self._decode(self._anchor + self._pending)[len(before) :]

    def _complete(self, token: int) -> str:
        """Return the text of the tokens that are pending if it is complete, else nothing."""
        if self._stream is None:
            text = self._pending_text()
            return "" if text.endswith(REPLACEMENT) else text
        try:
            return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        except Exception:  # noqa: BLE001  bytes after this text made it another: it has no class
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=self._skips_special)
            return self._pending_text()

    def _begun(self) -> DecodeStream | None:
        """Return a stream after the anchor; None for tokenizers without one."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            return None
        return DecodeStream(ids=self._anchor, skip_special_tokens=self._skips_special)

    def _end_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return some last tokens that have a text and do not end within a character."""
        for count in range(_LEAST_CONTEXT, _MOST_CONTEXT):
            end = list(token_ids[-count:])
            text = self._decode(end)
            if text and not text.endswith(REPLACEMENT):
                return end
            if count >= len(token_ids):
                break
        return []

    def _decode(self, token_ids: list[int]) -> str:
        how = {"skip_special_tokens": self._skips_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(token_ids, **how))


_LEAST_CONTEXT, _MOST_CONTEXT = 4, 24  # tokens before a text that are decoded with it


class TokenTexts:
    """Texts and bytes of single tokens within a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._before = TextDecoder(tokenizer)._end_of(tokenizer.encode("a"))
        self.special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Return a token's text; it holds U+FFFD where it is a part of a character."""
        if token not in self._known:
            decoder = TextDecoder(self.tokenizer, self._before, skips_special=False)
            self._known[token] = decoder.add(token) or decoder.rest()
        return self._known[token]

    def bytes_of(self, token: int, text: str) -> bytes:
        """Return a token's bytes, given the text that it adds at its place."""
        if REPLACEMENT not in self.of(token):
            return text.encode()
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if fallback := _BYTE.fullmatch(piece):
            return bytes.fromhex(fallback[1])
        alphabet = _byte_alphabet()
        if alphabet.keys() >= set(piece):
            return bytes(alphabet[letter] for letter in piece)
        return text.encode()


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """Return which byte each letter of byte-level vocabularies stands for."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@dataclass(slots=True)
class TextStream:
    """The growing text of one request.

    Text is held back while its last character is incomplete (a token may end within a character)
    and while it may be the beginning of a stop string.
    """

    decoder: TextDecoder
    stop: Sequence[str] = ()  # strings that end the text
    ends: Collection[int] = ()  # tokens that end the text without being part of it
    includes_stop: bool = False  # whether the stop string that ends the text is part of it
    min_tokens: int = 0  # number of tokens within which no stop string counts
    # Ids fed so far; those behind the one that completed a stop string are dropped.
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # what each of them added, in whole characters
    text: str = ""  # the text of `token_ids`, cut before the first stop string
    stopped_by: str | None = None  # the stop string that was found, or None
    _shown: int = 0
    _flushed: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        ends: Collection[int] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Self:
        """Return the empty text, after a prompt, of a request with such settings and ``ends``."""
        included = params.include_stop_str_in_output
        return cls(
            TextDecoder(tokenizer, prompt_ids, skips_special=params.skip_special_tokens),
            stop=params.stop,
            ends=() if included else ends,
            includes_stop=included,
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
            self.pieces.append("" if token in self.ends else self.decoder.add(token))
            searched = len(self.text)
            self.text += self.pieces[-1]
            if len(self.token_ids) > self.min_tokens:
                self._search(searched)
            if self.stopped:
                break
        return self._show(len(self.text) if self.stopped else self._certain())

    def flush(self) -> str:
        """Return the rest: nothing more will come."""
        if not self.stopped and self.pieces and not self._flushed:
            rest = self.decoder.rest()
            self.text += rest
            self.pieces[-1] += rest
        self._flushed = True
        return self._show(len(self.text))

    def _search(self, searched: int) -> None:
        """Look for stop strings; those that end in the first ``searched`` characters do not count.

        If there are several, the first to begin ends the text.
        """
        first = len(self.text)
        for stop in self.stop:
            at = self.text.find(stop, max(0, searched - len(stop) + 1))
            if 0 <= at < first:
                first = at
                self.stopped_by = stop
        if self.stopped_by is not None:
            end = first + len(self.stopped_by) if self.includes_stop else first
            self.text = self.text[:end]

    def _certain(self) -> int:
        """Return the length of the text that no later token can cut."""
        length = len(self.text)
        held = 0
        for stop in self.stop:
            overlaps = range(min(len(stop) - 1, length), held, -1)
            held = next((n for n in overlaps if self.text.endswith(stop[:n])), held)
        return length - held

    def _show(self, length: int) -> str:
        new = self.text[self._shown : length]
        self._shown = max(self._shown, length)
        return new


@dataclass(slots=True)
class RequestText:
    """A request in the engine, and its text so far."""

    request: Request
    text: TextStream
    texts: TokenTexts
    # Log-probabilities at the prompt's tokens, since the first piece; None unless asked for.
    _of_prompt: list[TokenLogprobs | None] | None = None

    def follow(self) -> Delta | None:
        """Turn tokens that the request was given since into text; return them, if there are any."""
        before = self.kept
        new = self.request.token_ids[before:]
        if not new or self.text.stopped:
            return None
        text = self.text.feed(new)
        tokens = self.text.token_ids[before:]
        delta = Delta(text=text, token_ids=tokens, logprobs=self._logprobs(before, self.kept))
        if before:
            return delta
        self._of_prompt = self._prompt_logprobs()
        prompt = {"prompt_token_ids": list(self.request.prompt_ids)}
        return msgspec.structs.replace(delta, **prompt, prompt_logprobs=self._of_prompt)

    def _logprobs(self, start: int, end: int) -> list[TokenLogprobs] | None:
        """Return log-probabilities with their tokens' texts, or None if nobody asked."""
        if self.request.params.logprobs is None:
            return None
        known = self.request.logprobs[start:end]
        pieces = self.text.pieces[start:end]
        return [self._with_texts(*each) for each in zip(known, pieces, strict=True)]

    def _with_texts(self, place: TokenLogprobs, piece: str) -> TokenLogprobs:
        """Return log-probabilities at a place with texts; the chosen token's is what it added."""
        chosen, *others = place
        special = chosen in self.texts.special
        texts = {token: self.texts.of(token) for token in others}
        texts[chosen] = piece if piece or not special else self.texts.of(chosen)
        return {
            token: msgspec.structs.replace(known, decoded_token=texts[token])
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
            logprobs=self._logprobs(0, self.kept),
            prompt_logprobs=self._of_prompt or self._prompt_logprobs(),
            metrics=request.metrics,
        )
        return Result(completion, request.error)

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        decoder = TextDecoder(self.texts.tokenizer)
        pieces = [decoder.add(token) for token in self.request.prompt_ids]
        places = zip(self.request.prompt_logprobs, pieces, strict=True)
        return [
            None if place is None else self._with_texts(place, piece) for place, piece in places
        ]

    def _stop_reason(self) -> int | str | None:
        request = self.request
        if request.finish_reason is not FinishReason.STOP or self.text.stopped:
            return self.text.stopped_by
        last = request.token_ids[-1]
        return last if last in request.params.stop_token_ids else None

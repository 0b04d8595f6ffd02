"""Prompts as a user writes them, and as a model reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eaglegbv.errors import InvalidArgument
from eaglegbv.params import SamplingParams

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[int] | list[Message]
"""One prompt: text, token ids, or chat messages with ``role`` and ``content``."""

_PROMPT = "text, token ids or chat messages"

_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a template may raise: it is a program, and its errors are those of any."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns prompts into tokens.

    Attributes:
        tokenizer: The model's.
        model_name: What errors call the model.
    """

    tokenizer: PreTrainedTokenizerBase
    model_name: str

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt as the model reads it.

        Raises:
            InvalidArgument: It is empty or no prompt, or the model takes no such chat messages.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument("prompt", prompt, "a text that is not empty")
            return list(self.tokenizer.encode(_sound(prompt)))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidArgument("prompt", prompt, _PROMPT)
        if prompt and all(isinstance(message, Mapping) for message in prompt):
            return self._apply_chat_template(cast("list[Message]", prompt))
        if any(isinstance(token, bool) or not isinstance(token, Integral) for token in prompt):
            raise InvalidArgument("prompt", prompt, _PROMPT)
        return [int(token) for token in cast("list[int]", prompt)]

    def _apply_chat_template(self, messages: list[Message]) -> list[int]:
        plain = [_plain_message(message) for message in messages]
        if self.tokenizer.chat_template is None:
            raise InvalidArgument(
                "prompt", "chat messages", f"text: {self.model_name} has no chat template"
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except _TEMPLATE_ERRORS as error:
            expected = f"messages that the chat template of {self.model_name} takes ({error})"
            raise InvalidArgument("prompt", plain, expected) from error
        return list(cast("Mapping[str, list[int]]", encoded)["input_ids"])


def _plain_message(message: Mapping[str, object]) -> Message:
    """Return a message whose content is text, given as text or as parts of it.

    Raises:
        InvalidArgument: It is neither, or names no role.
    """
    content = message.get("content")
    if isinstance(content, list):  # as chat services take it
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [text for text in parts if isinstance(text, str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise InvalidArgument("prompt", dict(message), "a message with role and content, both text")
    return cast("Message", {**message, "content": _sound(content)})


def _sound(text: str) -> str:
    """Return ``text``, which tokenizers take if it can be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("prompt", text, "text without halves of surrogate pairs") from error
    return text


def is_one(prompts: object) -> bool:
    """Tell one prompt (text, ids, messages) from a list of prompts.

    Raises:
        InvalidArgument: It is neither.
    """
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidArgument("prompts", prompts, "text, token ids, chat messages, or a list")
    return bool(prompts) and isinstance(prompts[0], Integral | Mapping)


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the settings of each of ``count`` prompts.

    Raises:
        InvalidArgument: They are something else, or several, and not as many as prompts.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    expected = "a SamplingParams, or one per prompt"
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidArgument("sampling_params", params, expected)
    for own in params:
        if not isinstance(own, SamplingParams):
            raise InvalidArgument("sampling_params", own, expected)
    if len(params) != count:
        raise InvalidArgument("sampling_params", len(params), f"one, or one per prompt: {count}")
    return list(params)

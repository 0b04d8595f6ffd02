"""Prompts as a user writes them, and as a model reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from eaglegbv.errors import InvalidArgument
from eaglegbv.params import SamplingParams

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[int] | list[Message]
"""One prompt: text, token ids, or chat messages with ``role`` and ``content``."""


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
            InvalidArgument: It is empty or no prompt, or the model takes no chat messages.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument("prompt", prompt, "a text that is not empty")
            return list(self.tokenizer.encode(prompt))
        if prompt and all(isinstance(message, Mapping) for message in prompt):
            return self._apply_chat_template(cast("list[Message]", prompt))
        if any(isinstance(token, bool) or not isinstance(token, int) for token in prompt):
            raise InvalidArgument("prompt", prompt, "text, token ids or chat messages")
        return list(cast("list[int]", prompt))

    def _apply_chat_template(self, messages: list[Message]) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidArgument("prompt", dict(message), "a message with role and content")
        if self.tokenizer.chat_template is None:
            raise InvalidArgument(
                "prompt", "chat messages", f"text: {self.model_name} has no chat template"
            )
        encoded = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        return list(cast("Mapping[str, list[int]]", encoded)["input_ids"])


def is_one(prompts: object) -> bool:
    """Tell one prompt (text, ids, messages) from a list of prompts.

    Raises:
        InvalidArgument: It is neither.
    """
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidArgument("prompts", prompts, "text, token ids, chat messages, or a list")
    return bool(prompts) and isinstance(prompts[0], int | Mapping)


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the settings of each of ``count`` prompts.

    Raises:
        InvalidArgument: There are several, and not as many as prompts.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidArgument("sampling_params", len(params), f"one, or one per prompt: {count}")
    return list(params)

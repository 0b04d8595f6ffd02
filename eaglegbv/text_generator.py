"""What answers prompts by a model, whoever runs it: text in, text out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, overload

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eaglegbv.auto_plan import PlanName, Planning
from eaglegbv.completion import Completion, Delta, Result
from eaglegbv.errors import InvalidArgument
from eaglegbv.params import SamplingParams
from eaglegbv.prompts import Message, Prompt, PromptReader, is_one
from eaglegbv.targets.hf import load_config


class TextGenerator(ABC):
    """A model that is ready to answer.

    Attributes:
        model_name: Folder or hub name of the target.
        drafter_name: What drafts for it, or None.
        plan: How requests speculate that bring no plan of their own.
        device: Where the target runs.
        tokenizer: The target's.
    """

    def __init__(
        self,
        model_name: str,
        drafter_name: str | None,
        *,
        plan: Planning,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.model_name = model_name
        self.drafter_name = drafter_name
        self.plan = plan
        self.device = device
        self.tokenizer = tokenizer
        self._reader = PromptReader(self.tokenizer, model_name)

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: Planning | PlanName | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[list[Message]] | list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        plan: Planning | PlanName | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        plan: Planning | PlanName | None = None,
        priority: int = 0,
        progress: bool = False,
    ) -> Completion | list[Completion]:
        """Answer one prompt or many.

        Args:
            prompts: Text, token ids or chat messages (``[{"role": ..., "content": ...}]``), or a
                list of such prompts. Text is read as it is; messages go through the chat template.
            sampling_params: One for all, or one per prompt.
            plan: How to speculate, instead of its own plan.
            priority: Lower numbers are served first, where streams or other calls wait too.
            progress: Show a progress bar.

        Returns:
            A :class:`Completion` for one prompt, a list in the order of the prompts for many. Of
            many, one with bad input has ``finish_reason`` ``error``, and so has one that broke off,
            with the tokens it had; the others are answered.

        Raises:
            EagleGBVError: A single prompt is not usable, or the settings of the call are not.
        """
        self._check_plan(plan)
        if is_one(prompts):
            [only] = self._run(
                [cast("Prompt", prompts)], sampling_params, plan, priority, progress=progress
            )
            if only.error is not None:
                raise only.error
            return only.completion
        many = cast("Sequence[Prompt]", prompts)
        results = self._run(many, sampling_params, plan, priority, progress=progress)
        return [result.completion for result in results]

    @abstractmethod
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        plan: Planning | PlanName | None = None,
        priority: int = 0,
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece; see :meth:`generate` for the arguments.

        Raises:
            EagleGBVError: The prompt or the settings are not usable, or the model's output is not.
        """

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt as the model reads it; see :meth:`PromptReader.encode`."""
        return self._reader.encode(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text)

    @abstractmethod
    def _check_plan(self, plan: Planning | PlanName | None) -> None:
        """Raise unless requests can follow the plan; None is its own."""

    @abstractmethod
    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        plan: Planning | PlanName | None,
        priority: int,
        *,
        progress: bool,
    ) -> list[Result]:
        """Answer many prompts, or say what is wrong with each; see :meth:`generate`.

        Raises:
            EagleGBVError: The settings of the call are not usable.
        """


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or hub model.

    Raises:
        InvalidArgument: There is no such model, or no tokenizer that transformers can read.
        ModelNotSupported: There is no tokenizer, and transformers does not know the model's type.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        load_config(model)  # raises if it is the model that is missing
        reason = str(error).strip().splitlines()[0]
        expected = f"a model with a tokenizer beside its weights ({reason})"
        raise InvalidArgument("model", str(model), expected) from error
    return tokenizer

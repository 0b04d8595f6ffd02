"""What a run compares the engine with: SGLang's answers, and transformers' own ``generate``."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from eaglegbv.config import Plan
from eaglegbv.errors import EagleGBVError, InvalidArgument, StepFailed
from eaglegbv.metrics import Phase, RequestMetrics
from eaglegbv.models.hf import load_model
from eaglegbv.request import FinishReason
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion, Delta


def streamed(
    stream: Callable[..., Iterator[Delta]],
    prompts: list[dict[str, str]],
    sampling_params: SamplingParams,
    *,
    plan: Plan,
) -> Completion:
    """Answer one conversation, and record the time until the first tokens as prefill.

    ``stream`` is as that of `LLM`, of a backend that does not tell its phases.

    Raises:
        EagleGBVError: The prompt is invalid, or the backend could not answer it.
    """
    start = time.perf_counter()
    prefill: float | None = None
    completion: Completion | None = None
    try:
        for piece in stream(prompts, sampling_params, plan=plan):
            if prefill is None and piece.token_ids:
                prefill = time.perf_counter() - start
            completion = piece.completion or completion
    except EagleGBVError:
        raise
    except ValueError as error:  # SGLang raises it for requests it does not accept
        raise InvalidArgument("prompt", f"{len(prompts)} messages", str(error)) from error
    if completion is None or completion.error is not None or prefill is None:
        cause = "no answer" if completion is None else completion.error or "no token"
        raise StepFailed(0, cause)
    completion.metrics.add_seconds(Phase.PREFILL, prefill)
    return completion


# Transformers decodes plainly, or drafts (assisted generation): by prompt lookup, with the target's
# own first layers, or with a small model. Then it takes one prompt at a time.


PLAIN = "transformers"  # name of the baseline that does not draft

EXPECTED = (
    f"{PLAIN}, lookup:TOKENS, exit:LAYERS:TOKENS or assistant:FOLDER, for transformers' plain "
    "decoding or assisted generation"
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """One of transformers' ways to generate."""

    name: str  # name that users give
    options: Mapping[str, object] = field(default_factory=dict)  # arguments for `generate`
    # Number of tokens that early exit drafts at once; None for other baselines.
    draft_tokens: int | None = None
    assistant: str | None = None  # folder of the small model that drafts, or None

    @property
    def max_batch(self) -> int | None:
        """Most prompts at once: 1 for baselines that draft, None for any number."""
        return None if self.name == PLAIN else 1


def baseline(name: str, *, argument: str = "baselines") -> Baseline:
    """Return the baseline of this name.

    Raises:
        InvalidArgument: There is no such baseline; the message names ``argument``.
    """
    if name == PLAIN:
        return Baseline(name)
    if match := re.fullmatch(r"lookup:([1-9]\d*)", name):
        return Baseline(name, {"prompt_lookup_num_tokens": int(match[1])})
    if match := re.fullmatch(r"exit:([1-9]\d*):([1-9]\d*)", name):
        return Baseline(name, {"assistant_early_exit": int(match[1])}, int(match[2]))
    if match := re.fullmatch(r"assistant:(.+)", name):
        return Baseline(name, assistant=match[1])
    raise InvalidArgument(argument, name, EXPECTED)


class Library:
    """A target in transformers' own loop, loaded once for all baselines.

    Raises:
        InvalidArgument: There is no such model.
    """

    def __init__(self, model: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._model = self._load("model", model)
        self._eos = self._model.generation_config.eos_token_id

    def generation(self, chosen: Baseline, *, ends: bool) -> "Generation":
        """Return the generation by a baseline; if it ``ends``, an end-of-sequence token does so."""
        # Do not use the model's own settings: penalties or a top-k would change the distribution.
        config = GenerationConfig(pad_token_id=0, eos_token_id=self._eos if ends else None)
        if chosen.draft_tokens is not None:
            config.num_assistant_tokens = chosen.draft_tokens
        options = dict(chosen.options)
        if chosen.assistant is not None:
            options["assistant_model"] = self._load("baselines", chosen.assistant)
        return Generation(chosen, self._model, config, options)

    def _load(self, argument: str, name: str) -> PreTrainedModel:
        try:
            return load_model(name, dtype=self._dtype, device=self._device)
        except InvalidArgument as error:
            raise InvalidArgument(argument, name, error.expected) from error


@dataclass(frozen=True, slots=True)
class Generation:
    """transformers' ``generate`` with one baseline; prompts are padded on the left."""

    baseline: Baseline  # which
    model: PreTrainedModel  # the target; other baselines may share it
    config: GenerationConfig  # generation settings of the model while this baseline runs
    options: Mapping[str, object]  # further arguments of `generate`

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        temperature: float,
        seed: int,
        streamer: BaseStreamer | None = None,
    ) -> Tensor:
        """Return answers ``[prompts, most tokens]`` int64, drawn with the global generator.

        Answers have at most ``tokens``. For one prompt only, ``streamer`` receives the prompt and
        then the tokens of each forward.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        device = self.model.device
        self.model.generation_config = self.config
        generate: Any = self.model.generate
        with torch.inference_mode():
            out: Tensor = generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=tokens,
                streamer=streamer,
                **how,
                **self.options,
            )
        return out[:, longest:]


def chat(
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict[str, str]],
    sampling_params: SamplingParams,
    *,
    plan: Plan,
) -> Completion:
    """Answer one conversation by a baseline, for the benchmark's runner.

    The tokenizer is the target's, with a chat template. The first forward counts as prefill, with
    all that belongs to it: assisted generation drafts before the prompt is read. Prefill is the
    only phase whose time is known.

    Raises:
        InvalidArgument: The plan is not plain, or the prompt fills the model's context.
    """
    if plan.speculative:
        raise InvalidArgument("plan", plan, "plain decoding: a baseline drafts by itself")
    encoded: Any = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    prompt = list(encoded["input_ids"])
    room = int(generation.model.config.max_position_embeddings) - len(prompt)
    if room < 1:
        expected = f"at most {room + len(prompt) - 1} tokens, by the model's context"
        raise InvalidArgument("prompt", f"{len(prompt)} tokens", expected)
    most = min(sampling_params.max_tokens or room, room)
    watch = _Watch(generation.baseline.name, len(prompt))
    with watch.watching(generation.model):
        answer = generation(
            [prompt],
            most,
            temperature=sampling_params.temperature,
            seed=sampling_params.seed or 0,
            streamer=watch,
        )[0].tolist()
    eos = generation.config.eos_token_id
    ended = bool(answer) and answer[-1] in ([eos] if isinstance(eos, int) else eos or [])
    # The token that ends an answer is no part of its text, also where it is not a special one.
    of_text = answer[:-1] if ended else answer
    return Completion(
        text=str(tokenizer.decode(of_text, skip_special_tokens=True)),
        token_ids=answer,
        prompt_token_ids=prompt,
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        metrics=watch.metrics,
    )


class _Watch(BaseStreamer):
    """Counts the target's forwards and their drafts, from what ``generate`` sends a streamer."""

    def __init__(self, name: str, prompt_tokens: int) -> None:
        self._name = name
        self.metrics = RequestMetrics(prompt_tokens=prompt_tokens)
        self._rows = 0
        self._puts = 0
        self._start = time.perf_counter()

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Record how many tokens each whole forward of ``model`` reads, within the context.

        The hook is on the last layer, which the drafts of early exit do not reach.
        """
        decoder: Any = model.get_decoder()
        handle = decoder.layers[-1].register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, layer: nn.Module, rows: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        del layer
        hidden = rows[0] if rows else named["hidden_states"]
        self._rows = hidden.shape[1]

    def put(self, value: Tensor) -> None:
        """Record the prompt, then the tokens of each forward."""
        self._puts += 1
        if self._puts == 1:  # the prompt itself
            return
        if self._puts == 2:  # tokens of the forward that reads the prompt
            self.metrics.add_seconds(Phase.PREFILL, time.perf_counter() - self._start)
            return
        drafted = self._rows - 1
        committed = value.numel()
        self.metrics.count_forward(
            # A forward whose drafts all pass adds one more token, except at an answer's end.
            offered=drafted,
            accepted=min(drafted, committed - 1),
            committed=committed,
            nodes=drafted,
            plan=self._name,
        )

    def end(self) -> None:
        """Do nothing, because counts are recorded as they come."""

"""The texts that drafters are trained and measured on: the data's, or the target's own answers."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from eaglegbv.drafters.training.data import (
    Corpus,
    build_corpus,
    find_files,
    mixture_weights,
    read_rows,
)
from eaglegbv.drafters.training.mixture import FINAL_MIXTURE, OTHER_SHARE
from eaglegbv.drafters.training.samples import regenerate
from eaglegbv.errors import InvalidArgument
from eaglegbv.utils import replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Which texts to train and measure on.

    Attributes:
        target: Folder of the target, for its tokenizer.
        data: JSON-lines files, or folders of them.
        regenerate: Prompts the target answers itself; 0 takes the data's own answers.
        samples: File the target's answers are kept in, and read from where it exists.
        max_new_tokens: Longest answer of the target.
        generation_batch: Prompts answered together.
        window: Tokens of a text at most.
        held_out: Held-out prompts the target answers, at most.
        rows_per_source: Rows read of each file at most.
        seed: Seed of the draw and of the answers.
    """

    target: Path
    data: tuple[Path, ...]
    regenerate: int
    samples: Path
    max_new_tokens: int = 128
    generation_batch: int = 64
    window: int = 256
    held_out: int = 256
    rows_per_source: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens >= self.window:
            raise InvalidArgument("max_new_tokens", self.max_new_tokens, f"below {self.window=}")


@dataclass(frozen=True, slots=True)
class Texts:
    """What a drafter is trained on, ``weights`` ``[documents]`` float64, and measured on."""

    training: Corpus
    weights: Tensor
    held_out: Corpus


def gather_texts(settings: TextSettings, open_model: Callable[[], PreTrainedModel]) -> Texts:
    """Read the data and let the target answer, unless its answers are kept already.

    Args:
        settings: Which texts to gather.
        open_model: Opens the target, where it has to answer.
    """
    if settings.regenerate and settings.samples.exists():
        return _answered(**torch.load(settings.samples, weights_only=True))
    rows = list(read_rows(find_files(settings.data), settings.rows_per_source))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.target)
    training, held_out = (
        build_corpus([row for row in rows if row.held_out is kept], tokenizer, settings.window)
        for kept in (False, True)
    )
    weights, held_out_weights = (
        mixture_weights(corpus, FINAL_MIXTURE, OTHER_SHARE, settings.window)
        for corpus in (training, held_out)
    )
    if not settings.regenerate:
        return Texts(training, weights, held_out)
    model = open_model()
    number, seed = settings.regenerate, settings.seed
    training = _answers(settings, model, training, weights, number, seed)
    number = min(settings.held_out, number)
    held_out = _answers(settings, model, held_out, held_out_weights, number, seed + 1)
    # Whole or not at all, for a run may be killed at any time.
    with replacing(settings.samples) as partial:
        torch.save({"training": asdict(training), "held_out": asdict(held_out)}, partial)
    return Texts(training, _equal_weights(training), held_out)


def _answered(training: dict[str, object], held_out: dict[str, object]) -> Texts:
    answers, others = Corpus(**training), Corpus(**held_out)  # type: ignore[arg-type]
    return Texts(answers, _equal_weights(answers), others)


def _equal_weights(corpus: Corpus) -> Tensor:
    return torch.ones(len(corpus.lengths), dtype=torch.float64)


def _answers(
    settings: TextSettings,
    model: PreTrainedModel,
    corpus: Corpus,
    weights: Tensor,
    number: int,
    seed: int,
) -> Corpus:
    return regenerate(
        model,
        corpus,
        weights,
        number,
        max_prompt=settings.window - settings.max_new_tokens,
        max_new_tokens=settings.max_new_tokens,
        batch=settings.generation_batch,
        seed=seed,
    )

"""Pairs of tables, texts and questions: what comparisons measure, without networks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from eaglegbv.drafters.tabular import LookupTable, TabularDrafter
from eaglegbv.eval.questions import Question, QuestionSet
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.places import Sampling, Text, same_drafts
from eaglegbv.loading import Pair
from support.table_of import table_of
from support.tabular_target import TabularTarget

PROMPT = (0, 1)


def tables(vocab: int) -> tuple[TabularTarget, LookupTable]:
    """A target that looks at the last token, and a drafter's table: the target's with noise."""
    target = TabularTarget(vocab_size=vocab, order=1, seed=3, scale=2.0, max_slots=4096)
    noise = torch.randn((vocab + 1, vocab), generator=torch.Generator().manual_seed(4))
    logits = torch.stack([target.logits_after([state % vocab]) for state in range(vocab + 1)])
    return target, table_of(logits + noise)


def table_pair(vocab: int) -> Pair:
    target, table = tables(vocab)
    return Pair(target, TabularDrafter(table))


def random_texts(vocab: int, count: int, length: int) -> list[Text]:
    tokens = np.random.default_rng(5).integers(vocab, size=(count, length)).tolist()
    return [
        Text(name=f"q{n}", seed=n, prompt_ids=PROMPT, token_ids=tuple(own))
        for n, own in enumerate(tokens)
    ]


@dataclass(frozen=True)
class Tally:
    """What a setting came to, text by text."""

    setting: Setting
    tokens: tuple[float, ...]
    steps: tuple[float, ...]
    nodes: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.tokens) / sum(self.steps)


def judged(
    pair: Pair, texts: Sequence[Text], settings: Sequence[Setting], sampling: Sampling | None = None
) -> list[Tally]:
    """What all settings come to on the same drafts."""
    observed = same_drafts(pair, texts, settings, sampling or Sampling())
    return [
        Tally(
            setting,
            *(
                tuple(one.sums[name] for one in observed if one.setting == setting.name)
                for name in ("tokens", "steps", "nodes")
            ),
        )
        for setting in settings
    ]


def question_set(count: int) -> QuestionSet:
    own = (Question(id=f"q{n}", category="c", turns=("hi",), source="s") for n in range(count))
    return QuestionSet("test", "here", tuple(own))


@dataclass
class Bar:
    """A progress bar that is counted only."""

    done: int = 0

    def update(self, count: int, note: str = "") -> None:
        del note
        self.done += count


@contextmanager
def counted(what: str, steps: int) -> Iterator[Bar]:
    """A bar that must have been told of every step at its end."""
    bar = Bar()
    yield bar
    assert bar.done == steps, what

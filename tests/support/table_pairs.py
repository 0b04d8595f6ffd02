"""Pairs of tables, texts and questions: what comparisons measure, without networks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.eval.paired_comparison import Text
from eaglegbv.eval.questions import Question, QuestionSet
from eaglegbv.loading import Pair
from support.tabular_target import TabularTarget

PROMPT = (0, 1)


def tables(vocab: int) -> tuple[TabularTarget, Table]:
    """A target that looks at the last token, and a drafter's table: the target's with noise."""
    target = TabularTarget(vocab_size=vocab, order=1, seed=3, scale=2.0, max_slots=4096)
    noise = torch.randn((vocab + 1, vocab), generator=torch.Generator().manual_seed(4))
    logits = torch.stack([target.logits_after([state % vocab]) for state in range(vocab + 1)])
    return target, Table.of_logits(logits + noise)


def table_pair(vocab: int) -> Pair:
    target, table = tables(vocab)
    return Pair(target, TabularDrafter(table))


def random_texts(vocab: int, count: int, length: int) -> list[Text]:
    tokens = np.random.default_rng(5).integers(vocab, size=(count, length)).tolist()
    return [
        Text(name=f"q{n}", seed=n, prompt_ids=PROMPT, token_ids=tuple(own))
        for n, own in enumerate(tokens)
    ]


def question_set(count: int) -> QuestionSet:
    own = (Question(id=f"q{n}", category="c", turns=("hi",), source="s") for n in range(count))
    return QuestionSet("test", "here", tuple(own))


@dataclass
class Bar:
    """A progress bar that is counted only."""

    done: int = 0

    def update(self, count: int) -> None:
        self.done += count


@contextmanager
def counted(what: str, steps: int) -> Iterator[Bar]:
    """A bar that must have been told of every step at its end."""
    bar = Bar()
    yield bar
    assert bar.done == steps, what

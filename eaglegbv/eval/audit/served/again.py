"""The laws of answers' texts told anew: by the same server, by another, or by a model."""

import math
from collections.abc import Sequence
from itertools import repeat

from msgspec.structs import replace

from eaglegbv.eval.audit.served.client import Client, Store, key_of
from eaglegbv.eval.audit.served.rows import Answer, Entry, Row

Laws = Sequence[list[Entry] | None]
"""Lists of each token of an answer."""

FAR = 0.2  # total variation that rounding does not explain


async def reasked(client: Client, store: Store, answers: Sequence[Answer], part: str) -> list[Laws]:
    """Return the laws that a server tells for the texts of answers, without settings.

    Each text before a token is asked for one token, which is never drafted; equal texts once.
    ``part`` names these requests in the store.
    """
    without, texts = client.server.without_settings, []
    for answer in answers:
        before: list[int | str] = [*answer.prompt_ids] or [answer.ask.prompt]
        ask = replace(answer.ask, part=part, number=0, tokens=1, copies=1, changed=without)
        texts.append(
            [
                replace(ask, after=before + answer.tokens[:end] if end else [])
                for end in range(len(answer.rows))
            ]
        )
    unique = {key_of(ask): ask for asks in texts for ask in asks}
    await client.collect(unique.values(), store)
    lists = {key_of(answer.ask): answer.rows[0].listed for answer in store.of(part) if answer.rows}
    return [[lists.get(key_of(ask)) for ask in asks] for asks in texts]


def with_laws(answers: Sequence[Answer], laws: Sequence[Laws]) -> list[Answer]:
    """Return answers with other lists."""
    twins = []
    for answer, lists in zip(answers, laws, strict=True):
        rows = map(Row, answer.tokens, repeat(None), lists)
        twins.append(replace(answer, rows=[*rows]))
    return twins


def rescored(answers: Sequence[Answer], model: str, top: int) -> list[Laws]:
    """Return the laws of a model by transformers in float32, lists of ``top`` tokens.

    Args:
        answers: Answers whose tokens are ids.
        model: A folder, or a name on the hub.
        top: Tokens of a list.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eaglegbv.loading import find_target

    folder = find_target(model)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    laws: list[Laws] = []
    for answer in answers:
        before = answer.prompt_ids or tokenizer(answer.ask.prompt)["input_ids"]
        with torch.inference_mode():
            logits = network(torch.tensor([before + answer.tokens])).logits[0]
        values, ids = logits[len(before) - 1 : -1].log_softmax(dim=1).topk(top, dim=1)
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        laws.append([list(zip(*row, strict=True)) for row in rows])
    return laws


def far_apart(answers: Sequence[Answer], others: Sequence[Laws]) -> list[bool]:
    """Return of each place where two laws are told whether they differ by more than rounding."""
    far = []
    for answer, laws in zip(answers, others, strict=True):
        for row, law in zip(answer.rows, laws, strict=True):
            if row.listed and law:
                first, second = dict(row.listed), dict(law)
                shared = first.keys() & second.keys()
                apart = [math.exp(first[token]) - math.exp(second[token]) for token in shared]
                # What only one of the lists has is among all others.
                far.append(math.fsum(map(abs, apart)) + abs(math.fsum(apart)) > 2 * FAR)
    return far

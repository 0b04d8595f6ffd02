"""The laws of answers' texts told anew: by the same server, by another, or by a model."""

import math
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from eaglegbv.eval.audit.served.client import Client
from eaglegbv.eval.audit.served.plan import Store, key_of
from eaglegbv.eval.audit.served.rows import Answer, Ask, Row, Token, finite

FAR = 0.2  # total variation that rounding does not explain
MANY = 0.01  # share of places so far apart that weights or texts are not the same


async def reasked(
    client: Client, store: Store, answers: Sequence[Answer], part: str, neutral: dict[str, Any]
) -> list[Answer]:
    """Return answers with the laws that a server tells for their texts without settings.

    Each text before a token is asked for one token, which is never drafted; equal texts once.
    ``part`` names these requests in the store.
    """
    texts = [_texts(answer, part, neutral) for answer in answers]
    unique = {key_of(ask): ask for asks in texts for ask in asks}
    await client.collect(store.lacks(unique.values()), store.keep)
    lists = {key_of(answer.ask): answer.rows[0].listed for answer in store.of(part) if answer.rows}
    twins = []
    for answer, asks in zip(answers, texts, strict=True):
        twins.append(with_laws(answer, [lists.get(key_of(ask)) for ask in asks]))
    return twins


def _texts(answer: Answer, part: str, neutral: dict[str, Any]) -> list[Ask]:
    """Return requests for one token after each text of an answer."""
    first = replace(
        answer.ask,
        part=part,
        number=0,
        tokens=1,
        copies=1,
        changed=neutral,
        prompt_ids=answer.prompt_ids,
    )
    tokens = answer.tokens
    return [replace(first, after=tokens[:position]) for position in range(len(tokens))]


def with_laws(answer: Answer, laws: Sequence[Any]) -> Answer:
    """Return an answer whose rows have other lists."""
    rows = [Row(row.token, None, law) for row, law in zip(answer.rows, laws, strict=True)]
    return replace(answer, rows=rows)


def rescored(answers: Sequence[Answer], model: str, top: int) -> list[Answer]:
    """Return answers with the laws of a model by transformers, lists of ``top`` tokens.

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
    scored = []
    for answer in answers:
        before = answer.prompt_ids or tokenizer(answer.ask.prompt)["input_ids"]
        text = torch.tensor([before + answer.tokens])
        with torch.inference_mode():
            logits = network(text).logits[0, len(before) - 1 : -1]
        values, ids = logits.log_softmax(dim=1).topk(top, dim=1)
        rows = zip(ids.tolist(), values.tolist(), strict=True)
        scored.append(with_laws(answer, [list(zip(*row, strict=True)) for row in rows]))
    return scored


def distances(answers: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """Return the total variation, at least, of two laws at each place where both are told."""
    pairs = zip(answers, others, strict=True)
    rows = (pair for one, other in pairs for pair in zip(one.rows, other.rows, strict=True))
    return [_distance(one, other) for one, other in rows if one.listed and other.listed]


def _distance(one: Row, other: Row) -> float:
    first, second = _probs(one), _probs(other)
    apart = [first[token] - second[token] for token in first.keys() & second.keys()]
    # What only one of the lists has is among all others.
    return (sum(map(abs, apart)) + abs(sum(apart))) / 2


def _probs(row: Row) -> dict[Token, float]:
    return {token: math.exp(finite(value)) for token, value in row.listed or ()}

"""Penalties and minimum lengths at every node of SGLang's trees, against counting by hand."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eaglegbv.backends.sglang.penalties import TokenCounts, parents_of

VOCAB, NODES, LEVELS = 20, 7, 4
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def random_parents(rng: random.Random) -> list[int]:
    """The parents of a tree of at most so many levels; children have higher numbers."""
    parents, depth = [0], [0]
    for _ in range(1, NODES):
        parents.append(rng.choice([node for node, level in enumerate(depth) if level < LEVELS - 1]))
        depth.append(depth[parents[-1]] + 1)
    return parents


def linked(trees: list[list[int]], tokens: torch.Tensor) -> SimpleNamespace:
    """Trees as SGLang links them: a node to its first child, each child to the next."""
    first, siblings = torch.full((2, len(trees), NODES), -1)
    for row, parents in enumerate(trees):
        for node in range(1, NODES):
            elder = [other for other in range(1, node) if parents[other] == parents[node]]
            links, at = (siblings, elder[-1]) if elder else (first, parents[node])
            links[row, at] = node
    return SimpleNamespace(
        retrieve_next_token=first,
        retrieve_next_sibling=siblings,
        draft_token=tokens.flatten(),
        max_tree_depth=LEVELS,
    )


def request(rng: random.Random, **settings: Any) -> SimpleNamespace:
    params = NEUTRAL | {"min_new_tokens": 0, "stop_token_ids": {3, 5}} | settings
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**params),
        eos_token_ids={2},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7),
        output_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(4))],
    )


def expected(logits: torch.Tensor, said: list[int], params: SimpleNamespace) -> torch.Tensor:
    """What SGLang makes of ``[vocab]`` without speculation, after these tokens."""
    counts = torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=VOCAB)
    row = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if len(said) < params.min_new_tokens:
        row[[2, 3, 5, 7]] = -torch.inf
    factor = torch.where(counts > 0, params.repetition_penalty, 1.0)
    return torch.where(row < 0, row * factor, row / factor)


@pytest.mark.parametrize("seed", range(8))
def test_every_node_is_penalised_by_the_text_and_its_path(seed):
    rng = random.Random(seed)
    requests = [
        request(rng, frequency_penalty=1.5, min_new_tokens=4),
        request(rng),
        request(rng, presence_penalty=-0.5, repetition_penalty=1.3),
    ]
    generator = torch.Generator().manual_seed(seed)
    trees = [random_parents(rng) for _ in requests]
    tokens = torch.randint(0, VOCAB, (len(requests), NODES), generator=generator)
    drafted = linked(trees, tokens)
    links = drafted.retrieve_next_token, drafted.retrieve_next_sibling
    assert parents_of(*links).tolist() == trees
    batch = SimpleNamespace(
        reqs=requests,
        req_pool_indices=torch.tensor([2, 0, 1]),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 9)),
        chunked_req=None,
        sampling_info=SimpleNamespace(acc_additive_penalties=torch.zeros(1)),
    )
    counts, drawn = TokenCounts(VOCAB, "cpu"), [4, 5, 6]
    counts.start(batch, torch.tensor(drawn))
    committed = torch.tensor([[9, 8, 0], [9, 8, 0], [9, 8, 0]])
    counts.add(batch, committed.flatten(), torch.tensor([2, 1, 2]))
    logits = torch.randn((len(requests), NODES, VOCAB), generator=generator)
    penalised = logits.clone()
    counts.apply(batch, drafted, penalised)
    for row, one in enumerate(requests):
        text = [*one.output_ids, drawn[row], *committed[row, : 1 if row == 1 else 2].tolist()]
        for node in range(NODES):
            path, at = [], node
            while at:
                path.append(int(tokens[row, at]))
                at = trees[row][at]
            by_hand = expected(logits[row, node], [*text, *path], one.sampling_params)
            torch.testing.assert_close(penalised[row, node], by_hand)

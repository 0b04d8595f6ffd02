"""Distributions harvested from a pair of tables are the tables' own, place by place."""

import numpy as np
import pytest
import torch
from support.tabular_target import TabularTarget

from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.collect_probs import Harvest, harvest, lead_ratio
from eaglegbv.eval.node_acceptance import NodeProbs, optimum_iid
from eaglegbv.eval.paired_comparison import Sampling, Text
from eaglegbv.eval.solvers import exact, optimal_acceptance
from eaglegbv.loading import Pair

VOCAB = 5
TOKENS = ((0, 1, 2, 3, 4, 1), (2,), (3, 3, 0, 4))


def pair() -> tuple[TabularTarget, Table]:
    target = TabularTarget(vocab_size=VOCAB, order=1, seed=3, scale=2.0)
    noise = torch.Generator().manual_seed(4)
    return target, Table.of_logits(torch.randn((VOCAB + 1, VOCAB), generator=noise))


def texts() -> list[Text]:
    return [
        Text(name=str(n), seed=n, prompt_ids=(0, 1), token_ids=own) for n, own in enumerate(TOKENS)
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("width", [3, VOCAB])
def test_the_distributions_are_those_at_the_places(temperature: float, width: int) -> None:
    target, table = pair()
    found = harvest(
        Pair(target, TabularDrafter(table)),
        texts(),
        temperature=temperature,
        width=width,
        sampling=Sampling(places=9),
    )
    # Every token but the last is a place's root, the text's only one excepted.
    roots = [(0, token) for token in TOKENS[0][:-1]] + [(2, token) for token in TOKENS[2][:-1]]
    assert sorted(found.texts.tolist()) == [text for text, _ in roots]
    expected = {}
    for token in range(VOCAB):
        q = (table.logits([table.state((token,))])[0].double() / temperature).softmax(dim=0)
        p = (target.logits_after([token]).double() / temperature).softmax(dim=0)
        top = q.topk(width)
        expected[token] = (top.indices, top.values / top.values.sum(), p[top.indices])
    left = list(roots)
    for place, text in enumerate(found.texts.tolist()):
        ids, q, p = (x[place] for x in (found.probs.ids, found.probs.draft, found.probs.target))
        for root in left:
            wanted = expected[root[1]]
            if root[0] == text and torch.equal(ids, wanted[0]):
                torch.testing.assert_close(q, wanted[1], rtol=0, atol=1e-6)
                torch.testing.assert_close(p, wanted[2], rtol=0, atol=1e-6)
                left.remove(root)
                break
    assert left == []


def test_what_cannot_be_harvested_is_refused() -> None:
    target, table = pair()
    drafting = Pair(target, TabularDrafter(table))
    settings = {"width": 3, "sampling": Sampling()}
    with pytest.raises(InvalidArgument, match="temperature"):
        harvest(drafting, texts(), temperature=0.0, **settings)
    with pytest.raises(InvalidArgument, match="texts"):
        harvest(drafting, texts()[1:2], temperature=1.0, **settings)


def some_probs() -> Harvest:
    generator = torch.Generator().manual_seed(1)
    q, p = torch.rand((2, 4, VOCAB), generator=generator, dtype=torch.float64)
    ids = torch.arange(VOCAB).expand(4, -1)
    q = q / q.sum(dim=1, keepdim=True)
    p = 0.9 * p / p.sum(dim=1, keepdim=True)
    return Harvest(NodeProbs.of(ids, q, p), np.array([0, 0, 2, 1]))


def test_means_and_ratios_are_over_places_and_paired_by_text() -> None:
    found = some_probs()
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert found.mean(values).value == pytest.approx(3.0)
    double = found.ratio(2 * values, values)
    assert (double.value, double.low, double.high) == pytest.approx((2.0, 2.0, 2.0))
    lead = lead_ratio(found, (3 * values, values), found, (2 * values, values))
    assert (lead.value, lead.low, lead.high) == pytest.approx((1.5, 1.5, 1.5))


def test_solvers_get_the_harvested_distributions() -> None:
    """Truncated ones are renormalised; what they cannot propose is one token at the end."""
    found = some_probs()
    nodes = found.nodes(width=3, drafts=2, count=9, seed=0)
    probs = found.probs.top(3)
    assert [optimal_acceptance(node) for node in nodes] == pytest.approx(
        optimum_iid(probs, 2).tolist(), abs=1e-12
    )
    for node in nodes:
        assert node.target.sum() == pytest.approx(1.0)
        answer = exact(node)
        assert answer.deviation(node) < 1e-12
        assert answer.acceptance == pytest.approx(optimal_acceptance(node), abs=1e-12)
    assert len(found.nodes(width=3, drafts=2, count=2, seed=0)) == 2

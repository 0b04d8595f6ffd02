from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.table_pairs import table_pair, tables
from support.tables import (
    KINDS,
    Model,
    accepted_length,
    alpha_greedy,
    alpha_iid,
    alpha_wor,
    problem,
)

from eaglegbv.config import Plan
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.audit.problems import as_probs
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.ways.nodes import (
    RULES,
    NodeProbs,
    harvest,
    node_acceptance,
    optimum_iid,
    optimum_wor,
    rejection_wor,
)
from eaglegbv.eval.ways.places import Sampling, Text
from eaglegbv.eval.ways.solvers import exact, nodes_of, optimal_acceptance
from eaglegbv.loading import Pair
from eaglegbv.tree import DraftSampling
from eaglegbv.verifiers.proof.enumeration import Shape


def probs_of(p: Sequence[float], q: Sequence[float]) -> NodeProbs:
    ids = [x for x in range(len(q)) if q[x] > 0]
    return NodeProbs.of(
        torch.tensor([ids]),
        torch.tensor([[float(q[x]) for x in ids]], dtype=torch.float64),
        torch.tensor([[float(p[x]) for x in ids]], dtype=torch.float64),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_rules_against_enumeration(kind: str, n: int) -> None:
    """Every rule's reference, run over all of its drafts and decisions."""
    shape = Shape(4, 1, n)
    for seed in range(2):
        model = Model(4, kind, seed)
        p, q = model.p(()), model.q(())
        dists = probs_of([float(x) for x in p], [float(x) for x in q])
        found = {name: rule(dists, n).item() for name, rule in RULES.items()}
        iid = problem(DraftSampling.IID, model, shape)
        wor = problem(DraftSampling.WOR, model, shape)
        assert found["one draft"] == pytest.approx(float(alpha_iid(p, q, 1)), abs=1e-12)
        assert found["RRS"] == pytest.approx(accepted_length("specinfer", iid), abs=1e-9)
        assert found["K-SEQ"] == pytest.approx(accepted_length("spectr", iid), abs=1e-9)
        assert found["optimum"] == pytest.approx(float(alpha_iid(p, q, n)), abs=1e-12)
        assert found["optimum w/o"] == pytest.approx(float(alpha_wor(p, q, n)), abs=1e-12)
        assert found["greedy"] == pytest.approx(float(alpha_greedy(p, q, n)), abs=1e-12)
        many = rejection_wor(dists, n, chains=20_000).item()
        assert many == pytest.approx(accepted_length("specinfer", wor), abs=5e-3)


@pytest.mark.parametrize(("n", "vocab", "sharpness"), [(2, 40, 2.5), (4, 14, 1.0)])
def test_the_optimum_without_replacement_at_many_tokens(n, vocab, sharpness) -> None:
    """Prefix by prefix, by all orders in which the drafts may come."""
    rng = np.random.default_rng(n)
    weights = np.exp(sharpness * rng.standard_normal(vocab))
    p, q = as_probs(weights * np.exp(rng.standard_normal(vocab))), as_probs(weights)
    found = optimum_wor(probs_of(p, q), n).item()
    assert found == pytest.approx(alpha_wor(p, q, n), abs=1e-9)


def test_the_optimum_without_replacement_of_rare_tokens() -> None:
    """Rates of 1e-14: the second draft is drawn among tokens the first all but never is."""
    rare = (1e-14, 3e-14, 2e-9, 1e-3)
    q = (1 - sum(rare), *rare)
    p = (0.3, 0.4, 0.05, 0.2, 0.05)
    exact = alpha_wor(tuple(map(Fraction, p)), tuple(map(Fraction, q)), 3)
    assert optimum_wor(probs_of(p, q), 3).item() == pytest.approx(float(exact), abs=1e-12)


def test_nodes_of_different_supports_stand_side_by_side() -> None:
    """Padding changes nothing, nor do neighbours of smaller rates."""
    wide = probs_of((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))
    narrow = probs_of((0.9, 0.1), (1 - 1e-9, 1e-9))
    pad = torch.nn.functional.pad
    both = NodeProbs(
        torch.cat([wide.ids, pad(narrow.ids, (0, 2), value=3)]),
        torch.cat([wide.draft, pad(narrow.draft, (0, 2))]),
        torch.cat([wide.target, pad(narrow.target, (0, 2))]),
    )
    for name, rule in RULES.items():
        if name == "RRS w/o":
            continue
        apart = torch.cat([rule(wide, 2), rule(narrow, 2)])
        torch.testing.assert_close(rule(both, 2), apart, rtol=0, atol=1e-12)


def test_top_keeps_the_most_likely_tokens_as_a_distribution() -> None:
    dists = probs_of((0.1, 0.5, 0.4), (0.5, 0.1, 0.4)).top(2)
    assert dists.ids.tolist() == [[0, 2]]
    assert dists.draft.tolist() == [[pytest.approx(5 / 9), pytest.approx(4 / 9)]]
    assert dists.target.tolist() == [[0.1, 0.4]]


# --- distributions collected from a pair of tables are the tables' own, place by place
VOCAB = 5
TOKENS = ((0, 1, 2, 3, 4, 1), (2,), (3, 3, 0, 4))


def texts() -> list[Text]:
    return [
        Text(name=str(n), seed=n, prompt_ids=(0, 1), token_ids=own) for n, own in enumerate(TOKENS)
    ]


@pytest.mark.parametrize(("temperature", "width"), [(0.5, 3), (1.0, VOCAB)])
def test_the_distributions_are_those_at_the_places(temperature: float, width: int) -> None:
    target, table = tables(VOCAB)
    setting = Setting(plan=Plan(draft_width=width), temperature=temperature)
    pair = Pair(target, TabularDrafter(table))
    found = harvest(pair, texts(), [setting], Sampling(places=9))
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
    drafting = table_pair(VOCAB)
    with pytest.raises(InvalidArgument, match="temperature"):
        harvest(drafting, texts(), [Setting(plan=Plan(), temperature=0.0)], Sampling())
    with pytest.raises(InvalidArgument, match="texts"):
        harvest(drafting, texts()[1:2], [Setting(plan=Plan())], Sampling())


def some_probs() -> NodeProbs:
    generator = torch.Generator().manual_seed(1)
    q, p = torch.rand((2, 4, VOCAB), generator=generator, dtype=torch.float64)
    ids = torch.arange(VOCAB).expand(4, -1)
    q = q / q.sum(dim=1, keepdim=True)
    p = 0.9 * p / p.sum(dim=1, keepdim=True)
    return NodeProbs.of(ids, q, p)


def test_cells_are_sums_over_the_places_of_a_text() -> None:
    pair, sampling = table_pair(VOCAB), Sampling(places=9)
    plans = [Plan(verifier=rule, paths=n, draft_width=3) for rule in RULES for n in (1, 2)]
    settings = [Setting(plan=plan) for plan in plans]
    observed = node_acceptance(pair, texts(), settings, sampling)
    found = harvest(pair, texts(), [Setting(plan=Plan(draft_width=3))], sampling)
    for setting in settings:
        plan = setting.plan
        accepted = RULES[plan.verifier](found.probs.top(3), plan.paths)
        own = {one.unit: one.sums for one in observed if one.setting == setting.name}
        assert {name: sums["steps"] for name, sums in own.items()} == {"0": 5, "2": 3}
        for name, sums in own.items():
            there = accepted[found.texts == int(name)].sum().item()
            assert sums["tokens"] == pytest.approx(there)


def test_solvers_get_the_harvested_distributions() -> None:
    """Truncated ones are renormalised; what they cannot propose is one token at the end."""
    found = some_probs()
    nodes = nodes_of(found, width=3, drafts=2, count=9, seed=0)
    probs = found.top(3)
    assert [optimal_acceptance(node) for node in nodes] == pytest.approx(
        optimum_iid(probs, 2).tolist(), abs=1e-12
    )
    for node in nodes:
        assert node.target.sum() == pytest.approx(1.0)
        answer = exact(node)
        assert answer.deviation(node) < 1e-12
        assert answer.acceptance == pytest.approx(optimal_acceptance(node), abs=1e-12)
    assert len(nodes_of(found, width=3, drafts=2, count=2, seed=0)) == 2

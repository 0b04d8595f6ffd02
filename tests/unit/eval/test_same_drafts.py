"""Means on the same drafts against exact enumeration, and that the drafts are the same."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.tables import iterate
from support.tabular_target import TabularTarget

from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, SamplingMismatch
from eaglegbv.eval.paired_comparison import Sampling, Tally, Text, collect, same_drafts
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Setting, grid
from eaglegbv.eval.statistics import Estimate
from eaglegbv.llm import LLM
from eaglegbv.loading import Pair
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.block import BlockVerifier
from eaglegbv.verifiers.otbv import OtbvVerifier
from eaglegbv.verifiers.proof.enumeration import Problem, Shape
from eaglegbv.verifiers.registry import REFERENCES, VERIFIERS
from eaglegbv.verifiers.traversal import TraversalVerifier

VOCAB, LENGTH = 3, 2
PROMPT = (0, 1)


def tables(seed: int = 3) -> tuple[TabularTarget, Table]:
    target = TabularTarget(vocab_size=VOCAB, order=1, seed=seed, scale=2.0, max_slots=4096)
    noise = torch.Generator().manual_seed(seed + 1)
    logits = torch.stack([target.logits_after([state]) for state in range(VOCAB)] * 2)[: VOCAB + 1]
    return target, Table.of_logits(logits + torch.randn(logits.shape, generator=noise))


def texts_of(target: TabularTarget, count: int, length: int) -> list[Text]:
    engine = Engine(target, None, EngineConfig(prefix_cache=False, max_batch=64))
    requests = [
        engine.add(PROMPT, SamplingParams(max_tokens=length, seed=n), PLAIN) for n in range(count)
    ]
    while engine.has_work:
        engine.step()
    return [text_of(r.number, r.token_ids) for r in requests]


def text_of(number: int, token_ids: Sequence[int]) -> Text:
    return Text(name=str(number), seed=100 + number, prompt_ids=PROMPT, token_ids=tuple(token_ids))


def softmax(logits: torch.Tensor, temperature: float) -> tuple[float, ...]:
    return tuple((logits.double() / temperature).softmax(dim=0).tolist())


def moments(name: str, problem: Problem) -> tuple[float, float]:
    """Exact mean and variance of the tokens a step commits."""
    states = iterate(REFERENCES[name], [problem], problem.shape.length + 1)
    mean = sum(float(mass) * len(state.context) for state, mass in states.items())
    square = sum(float(mass) * len(state.context) ** 2 for state, mass in states.items())
    return mean, square - mean**2


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_means_agree_with_exact_expectations(temperature: float) -> None:
    """The yardstick is each place's exact distribution of tokens a step: all drafts, all decisions.

    Given the places, numbers at different ones are independent, with exactly known means and
    variances (judging a tree three times never raises the latter): the pooled mean strays by 5
    standard deviations with a chance of about 6e-7 for each of the 24 settings.
    """
    target, table = tables()
    texts = texts_of(target, count=30, length=51)
    settings = grid(
        ("token", "block", "gbv", "otbv", "specinfer", "spectr", "traversal"),
        (1, 2),
        (1, LENGTH),
        (temperature,),
        base=Plan(),
    ).settings
    sampling = Sampling(places=50, judgements=3, batch=30)
    tallies = same_drafts(Pair(target, TabularDrafter(table)), texts, settings, sampling)
    assert [tally.setting for tally in tallies] == list(settings)

    @cache
    def exact(name: str, paths: int, length: int, last: int) -> tuple[float, float]:
        return moments(
            name,
            Problem(
                DraftSampling.IID,
                lambda after: softmax(target.logits_after([last, *after]), temperature),
                lambda after: softmax(table.logits([table.state([last, *after])])[0], temperature),
                Shape(VOCAB, length, paths),
            ),
        )

    for tally in tallies:
        plan = tally.setting.plan
        # A root at every token but a text's last: which places were drawn is known.
        known = [
            exact(plan.verifier, plan.paths, plan.depth, token)
            for text in texts
            for token in text.token_ids[:-1]
        ]
        places = sum(tally.places)
        assert places == len(known) == 30 * 50
        bound = 5 * sum(variance for _, variance in known) ** 0.5 / places
        assert bound < 0.13
        assert abs(tally.mean - np.mean([mean for mean, _ in known])) < bound, tally.setting.name


def test_all_verifiers_judge_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, DraftTree, TargetProbs, VerifyUniforms]] = []
    for rule in (OtbvVerifier, TraversalVerifier, BlockVerifier):
        _watch(monkeypatch, rule, seen)
    target, table = tables()
    settings = grid(("otbv", "traversal", "block"), (1, 3), (2, 4), (1.0,), base=Plan()).settings
    texts = texts_of(target, count=2, length=6)
    pair = Pair(target, TabularDrafter(table))
    same_drafts(pair, texts, settings, Sampling(places=1, judgements=2))
    by_size: dict[tuple[int, int], list[tuple[str, DraftTree, TargetProbs, VerifyUniforms]]] = {}
    for one in seen:
        by_size.setdefault((one[1].paths, one[1].length), []).append(one)
    assert {size: len(judged) for size, judged in by_size.items()} == {
        (1, 2): 6,
        (1, 4): 6,
        (3, 2): 4,
        (3, 4): 4,
    }
    for judged in by_size.values():
        trees, dists = {id(j[1]) for j in judged}, {id(j[2]) for j in judged}
        assert len(trees) == len(dists) == 1
        # Every judgement has numbers of its own, which the verifiers share: of the two that decide
        # one thing, one lies in each half.
        first, second = {id(j[3]): j[3] for j in judged}.values()
        for name in ("selection", "acceptance", "correction"):
            one, other = getattr(first, name), getattr(second, name)
            assert bool(((one < 0.5) ^ (other < 0.5)).all())
            assert bool(((one >= 0) & (one < 1) & (other >= 0) & (other < 1)).all())
    whole = by_size[3, 4][0][1]
    for (_, length), judged in by_size.items():
        part = judged[0][1]
        for b in range(2):
            for k in range(part.paths):
                mine = part.token_ids[b, part.path_nodes[b, k]]
                assert torch.equal(mine, whole.token_ids[b, whole.path_nodes[b, k, :length]])


def _watch(monkeypatch: pytest.MonkeyPatch, rule: type[Verifier], seen: list[Any]) -> None:
    judge = rule.judge

    def watched(
        self: Verifier, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> Verdict:
        seen.append((rule.name, tree, target, uniforms))
        return judge(self, tree, target, uniforms)

    monkeypatch.setattr(rule, "judge", watched)


def test_one_path_rules_coincide_and_results_do_not_depend_on_the_batch() -> None:
    target, table = tables()
    texts = texts_of(target, count=5, length=9)
    settings = grid(("block", "gbv", "otbv", "traversal"), (1, 2), (3,), (1.0,), base=Plan())
    pair = Pair(target, TabularDrafter(table))
    tallies = {
        batch: same_drafts(pair, texts, settings.settings, Sampling(places=3, batch=batch))
        for batch in (2, 5)
    }
    assert tallies[2] == tallies[5]
    alone = [t for t in tallies[2] if t.setting.plan.paths == 1]
    assert len(alone) == 4
    assert len({t.tokens for t in alone}) == 1
    assert alone[1].over(alone[0]) == Estimate(1.0, 1.0, 1.0)
    assert target.allocator.num_free == target.allocator.num_slots


def test_other_distributions_and_temperature_zero() -> None:
    target, table = tables()
    pair = Pair(target, TabularDrafter(table))
    texts = texts_of(target, count=3, length=9)
    draft_samplings = (DraftSampling.FIXED, DraftSampling.WOR, DraftSampling.GREEDY)
    settings = [
        *(s for draft_sampling in draft_samplings for s in _of_probs(draft_sampling, 1.0)),
        *grid(("otbv", "gbv"), (2,), (3,), (0.0,), base=Plan()).settings,
    ]
    tallies = same_drafts(pair, texts, settings, Sampling(places=4))
    assert all(1 <= t.mean <= 4 and t.places == (4, 4, 4) for t in tallies)
    # At temperature 0 the greedy walk judges, whatever verifier is named.
    assert tallies[-1].tokens == tallies[-2].tokens
    assert all(count == int(count) for count in tallies[-1].tokens)


def _of_probs(draft_sampling: DraftSampling, temperature: float) -> tuple[Setting, ...]:
    verifiers = [name for name, rule in VERIFIERS.items() if draft_sampling in rule.draft_samplings]
    return grid(
        verifiers, (2,), (3,), (temperature,), base=Plan(draft_sampling=draft_sampling)
    ).settings


def test_the_ratio_is_paired_by_text() -> None:
    setting = Setting(plan=Plan())
    low = Tally(setting=setting, tokens=(4.0, 10.0, 7.0), places=(2, 2, 2), nodes=(8.0,) * 3)
    high = Tally(setting=setting, tokens=(6.0, 15.0, 10.5), places=(2, 2, 2), nodes=(8.0,) * 3)
    assert low.mean == pytest.approx(3.5)
    ratio = high.over(low)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert low.estimate().low < 3.5 < low.estimate().high


def test_what_cannot_be_measured_is_refused() -> None:
    target, table = tables()
    pair = Pair(target, TabularDrafter(table))
    texts = texts_of(target, count=1, length=4)
    with pytest.raises(InvalidArgument, match="verifier"):
        same_drafts(pair, texts, [Setting(plan=Plan(verifier="spectr_gbv"))])
    with pytest.raises(InvalidArgument, match="settings"):
        same_drafts(pair, texts, [Setting(plan=PLAIN)])
    with pytest.raises(InvalidArgument, match="drafter"):
        same_drafts(Pair(target, None), texts, [Setting(plan=Plan())])
    with pytest.raises(InvalidArgument, match="texts"):
        same_drafts(pair, [text_of(0, (1,))], [Setting(plan=Plan())])
    with pytest.raises(SamplingMismatch, match="draft_sampling"):
        same_drafts(
            pair, texts, [Setting(plan=Plan(verifier="gbv", draft_sampling=DraftSampling.FIXED))]
        )
    with pytest.raises(InvalidArgument, match="places"):
        Sampling(places=0)


def test_a_text_of_one_token_has_no_place() -> None:
    target, table = tables()
    pair = Pair(target, TabularDrafter(table))
    texts = [text_of(7, (1,)), *texts_of(target, count=1, length=3)]
    [tally] = same_drafts(pair, texts, [Setting(plan=Plan())], Sampling(places=9))
    assert tally.places == (0, 2)
    assert tally.tokens[0] == 0


def test_the_tiny_pair_reads_texts_as_its_engine_does() -> None:
    """A place reached in two strides drafts the tree that a place reached in one does."""
    llm = LLM(engine=EngineConfig(prefix_cache=False, max_batch=2, kv_slots=1024))
    question = Question(id="q", category="none", turns=("Say something.",), source="here")
    [text] = collect(llm, [question], temperature=1.0, max_tokens=12)
    assert text.name == "q"
    assert text.prompt_ids == tuple(llm.encode([{"role": "user", "content": "Say something."}]))
    setting = Setting(plan=Plan(paths=2, depth=3))
    count = len(text.token_ids) - 1
    assert count > 1
    [all_places] = same_drafts(llm.pair, [text], [setting], Sampling(places=count))
    each = [
        same_drafts(
            llm.pair,
            [msgspec.structs.replace(text, token_ids=text.token_ids[: 1 + place])],
            [setting],
            Sampling(places=place),
        )[0].tokens[0]
        for place in range(1, count + 1)
    ]
    assert all_places.tokens[0] == pytest.approx(each[-1])
    steps = np.diff([0.0, *each])
    assert ((steps >= 1) & (steps <= 4)).all()
    llm.generate("again", SamplingParams(max_tokens=2), plan=PLAIN)

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import create_autospec

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.batched_trees import target_of
from support.grown_trees import Candidates, Prefix, check_tree, grown
from support.table_pairs import PROMPT, judged, random_texts, table_pair, tables
from support.tables import iterate
from support.tabular_target import TabularTarget
from support.tiny_engine import served

from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.drafters.host_drafting import trimmed
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, InvalidProbabilities, SamplingMismatch
from eaglegbv.eval.questions import Question
from eaglegbv.eval.settings import Setting, sweep
from eaglegbv.eval.ways import places
from eaglegbv.eval.ways.places import Offer, Sampling, Text, collect
from eaglegbv.llm import LLM
from eaglegbv.loading import Pair
from eaglegbv.models.target import TargetOutput
from eaglegbv.sampling import SamplingParams
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers.block import BlockVerifier
from eaglegbv.verifiers.otbv import OtbvVerifier
from eaglegbv.verifiers.proof.enumeration import Problem, Shape
from eaglegbv.verifiers.registry import REFERENCES, VERIFIERS
from eaglegbv.verifiers.traversal import TraversalVerifier

VOCAB, LENGTH = 3, 2


def texts_of(target: TabularTarget, count: int, length: int) -> list[Text]:
    engine = Engine(target, None, EngineConfig(prefix_cache=False, max_batch=64))
    params = [SamplingParams(max_tokens=length, seed=n) for n in range(count)]
    requests = served(engine, [(PROMPT, own, PLAIN) for own in params])
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


def test_means_agree_with_exact_expectations() -> None:
    """The yardstick is each place's exact distribution of tokens a step: all drafts, all decisions.

    Given the places, numbers at different ones are independent, with exactly known means and
    variances (judging a tree three times never raises the latter): the pooled mean strays by 5
    standard deviations, 0.13 tokens at most, with a chance of about 6e-7 for each of the settings.
    """
    temperature = 0.5
    target, table = tables(VOCAB)
    texts = texts_of(target, count=30, length=51)
    rules = ("block", "otbv", "specinfer")
    settings = sweep(f"{{{','.join(rules)}}} {{1,2}}x{LENGTH}", (temperature,))
    sampling = Sampling(places=50, judgements=3, batch=30)
    tallies = judged(Pair(target, TabularDrafter(table)), texts, settings, sampling)
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
        places = sum(tally.steps)
        assert places == len(known) == 30 * 50
        bound = 5 * sum(variance for _, variance in known) ** 0.5 / places
        assert bound < 0.13
        assert abs(tally.mean - np.mean([mean for mean, _ in known])) < bound, tally.setting.name


def test_all_verifiers_judge_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (OtbvVerifier, TraversalVerifier, BlockVerifier)
    judges = [create_autospec(rule.judge, side_effect=rule.judge) for rule in rules]
    for rule, judge in zip(rules, judges, strict=True):
        monkeypatch.setattr(rule, "judge", judge)
    pair = table_pair(VOCAB)
    settings = sweep("{otbv,traversal,block} {1,3}x{2,4}")
    texts = texts_of(pair.target, count=2, length=6)
    judged(pair, texts, settings, Sampling(places=1, judgements=2))
    by_size: dict[tuple[int, int], list[Any]] = {}
    for one in (call.args for judge in judges for call in judge.call_args_list):
        by_size.setdefault((one[1].drafts, one[1].length), []).append(one)
    counts = {size: len(calls) for size, calls in by_size.items()}
    assert counts == {(1, 2): 6, (1, 4): 6, (3, 2): 4, (3, 4): 4}
    for calls in by_size.values():
        trees, dists = {id(j[1]) for j in calls}, {id(j[2]) for j in calls}
        assert len(trees) == len(dists) == 1
        # Every judgement has numbers of its own, which the verifiers share: of the two that decide
        # one thing, one lies in each half.
        first, second = {id(j[3]): j[3] for j in calls}.values()
        for name in ("selection", "acceptance", "correction"):
            one, other = getattr(first, name), getattr(second, name)
            assert bool(((one < 0.5) ^ (other < 0.5)).all())
            assert bool(((one >= 0) & (one < 1) & (other >= 0) & (other < 1)).all())
    whole = by_size[3, 4][0][1]
    for (_, length), calls in by_size.items():
        part = calls[0][1]
        for b in range(2):
            for k in range(part.drafts):
                mine = part.token_ids[b, part.draws[b, :, k]]
                assert torch.equal(mine, whole.token_ids[b, whole.draws[b, :length, k]])


def test_one_path_rules_coincide_and_results_do_not_depend_on_the_batch() -> None:
    pair = table_pair(VOCAB)
    texts = texts_of(pair.target, count=5, length=9)
    settings = sweep("{block,gbv,otbv,traversal} {1,2}x3")
    tallies = {
        batch: judged(pair, texts, settings, Sampling(places=3, batch=batch)) for batch in (2, 5)
    }
    assert tallies[2] == tallies[5]
    alone = [t for t in tallies[2] if t.setting.plan.paths == 1]
    assert len(alone) == 4
    assert len({t.tokens for t in alone}) == 1
    assert pair.target.allocator.num_free == pair.target.allocator.num_slots


def test_other_distributions_and_temperature_zero() -> None:
    pair = table_pair(VOCAB)
    texts = texts_of(pair.target, count=3, length=9)
    draft_samplings = (DraftSampling.FIXED, DraftSampling.WOR, DraftSampling.GREEDY)
    settings = [
        Setting(plan=Plan(verifier=name, paths=2, depth=3, draft_sampling=draft_sampling))
        for draft_sampling in draft_samplings
        for name, rule in VERIFIERS.items()
        if draft_sampling in rule.draft_samplings
    ]
    settings += sweep("{otbv,gbv} 2x3", (0.0,))
    tallies = judged(pair, texts, settings, Sampling(places=4))
    assert all(1 <= t.mean <= 4 and t.steps == (4, 4, 4) for t in tallies)
    # At temperature 0 the greedy walk judges, whatever verifier is named.
    assert tallies[-1].tokens == tallies[-2].tokens
    assert all(count == int(count) for count in tallies[-1].tokens)


def test_numbers_follow_from_the_seeds() -> None:
    """Whatever reads the texts, drafts and scores, on tables, which do not round."""
    texts = random_texts(6, count=5, length=9)
    sampled = sweep("{otbv,traversal} 3x{2,4}")
    greedy = sweep("gbv 2x3", (0.0,))
    sampling = Sampling(places=3, judgements=2, batch=2)
    cells = judged(table_pair(6), texts, [*sampled, *greedy], sampling)
    assert [(cell.tokens, cell.nodes) for cell in cells] == [
        ((7.0, 7.5, 8.5, 5.5, 7.0), (10, 8, 14, 6, 8)),
        ((10.5, 10.0, 9.0, 10.0, 9.0), (22, 20, 30, 14, 18)),
        ((6.5, 6.0, 7.5, 5.5, 6.0), (10, 8, 14, 6, 8)),
        ((9.0, 10.0, 9.5, 9.5, 8.0), (22, 20, 30, 14, 18)),
        ((12, 12, 12, 12, 12), (18, 18, 18, 18, 18)),
    ]


def test_a_comparison_that_breaks_off_leaves_the_pool_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN logits, and a pool that does not hold all texts of a batch; then it goes on as ever."""
    pair, texts = table_pair(VOCAB), random_texts(VOCAB, count=3, length=40)
    allocator, forward = pair.target.allocator, pair.target.forward
    settings, sampling = [Setting(plan=Plan(paths=2, depth=3))], Sampling(places=2, judgements=1)
    expected = judged(pair, texts, settings, sampling)

    def spoilt(*arguments: Any, **named: Any) -> TargetOutput:
        output = forward(*arguments, **named)
        output.logits[:] = torch.nan
        return output

    monkeypatch.setattr(pair.target, "forward", spoilt)
    with pytest.raises(InvalidProbabilities, match="logits of request 0"):
        judged(pair, texts, settings, sampling)
    monkeypatch.undo()
    assert allocator.num_free == allocator.num_slots
    taken = allocator.allocate(allocator.num_free - 100)
    with pytest.raises(InvalidArgument, match="KV pool"):
        judged(pair, texts, settings, sampling)
    assert allocator.num_free == 100
    allocator.release(taken)
    assert judged(pair, texts, settings, sampling) == expected


def test_what_cannot_be_measured_is_refused() -> None:
    pair = table_pair(VOCAB)
    texts = texts_of(pair.target, count=1, length=4)
    for own, read, plan, name in (
        (pair, texts, Plan(verifier="spectr_gbv"), "verifier"),
        (pair, texts, PLAIN, "settings"),
        (Pair(pair.target, None), texts, Plan(), "drafter"),
        (pair, [text_of(0, (1,))], Plan(), "texts"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            judged(own, read, [Setting(plan=plan)])
    fixed = Plan(verifier="gbv", draft_sampling=DraftSampling.FIXED)
    with pytest.raises(SamplingMismatch, match="draft_sampling"):
        judged(pair, texts, [Setting(plan=fixed)])
    with pytest.raises(InvalidArgument, match="places"):
        Sampling(places=0)


def test_a_text_of_one_token_has_no_place() -> None:
    pair = table_pair(VOCAB)
    texts = [text_of(7, (1,)), *texts_of(pair.target, count=1, length=3)]
    [tally] = judged(pair, texts, [Setting(plan=Plan())], Sampling(places=9))
    assert tally.steps == (2,)


def test_the_tiny_pair_reads_texts_as_its_engine_does() -> None:
    """A place reached in two strides drafts the tree that a place reached in one does."""
    engine = EngineConfig(prefix_cache=False, max_batch=2, kv_slots=1024)
    llm = LLM("tiny", plan=Plan(), engine=engine)
    question = Question(id="q", category="none", turns=("Say something.",), source="here")
    [text] = collect(llm, [question], temperature=1.0, max_tokens=6)
    assert text.name == "q"
    assert text.prompt_ids == tuple(llm.encode([{"role": "user", "content": "Say something."}]))
    setting = Setting(plan=Plan(paths=2, depth=3))
    count = len(text.token_ids) - 1
    assert count > 1
    [all_places] = judged(llm.pair, [text], [setting], Sampling(places=count))
    each = [
        judged(
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
    # Flat positions are a single path's own, and others of a tree that forks.
    for paths, same in ((1, True), (3, False)):
        settings = sweep(f"{{otbv,traversal}} {paths}x4")
        usual = places.same_drafts(llm.pair, [text], settings, Sampling())
        flat = places.flat_drafts(llm.pair, [text], settings, Sampling())
        assert [one.sums["nodes"] for one in flat] == [one.sums["nodes"] for one in usual]
        tokens = [[one.sums["tokens"] for one in observed] for observed in (usual, flat)]
        assert (tokens[0] == pytest.approx(tokens[1], abs=1e-6)) is same
    one, three = sweep("otbv {1,3}x4")  # sizes do not share a tree
    [alone] = places.flat_drafts(llm.pair, [text], [one], Sampling())
    assert places.flat_drafts(llm.pair, [text], [one, three], Sampling())[0] == alone


# --- numbers of several judgements lie in different parts, and each judgement's alone are uniform
BATCH, LONG, MANY = 3, 40, 5


def test_numbers_are_a_latin_hypercube() -> None:
    def columns(count: int, step: int = 7) -> torch.Tensor:
        """All numbers, ``[judgements, numbers]``, of the right shapes."""
        seeds = [(n, step) for n in range(BATCH)]
        found = places.latin_hypercube(seeds, count, drafts=MANY, length=LONG)
        parts = [(own.selection, own.acceptance, own.correction) for own in found]
        shapes = [(BATCH, LONG, MANY, 2), (BATCH, LONG * MANY), (BATCH,)]
        assert [[x.shape for x in own] for own in parts] == [shapes] * count
        return torch.stack([torch.cat([x.flatten() for x in own]) for own in parts])

    parts = (columns(4) * 4).floor().sort(dim=0).values
    assert (parts == torch.arange(4.0).unsqueeze(1)).all()
    for own in columns(4):
        assert ((own >= 0) & (own < 1)).all()
        assert stats.kstest(own.numpy(), "uniform").pvalue > 1e-4
        assert stats.pearsonr(own[:-1].numpy(), own[1:].numpy()).pvalue > 1e-4
    assert torch.equal(columns(3), columns(3))
    assert not torch.equal(columns(3), columns(3, step=8))


# --- a part of an offer is the tree that fewer and shorter paths make
def probs_after(prefix: Prefix) -> Candidates:
    """A draft distribution for every prefix."""
    weights = np.random.default_rng([7, *prefix]).random(VOCAB)
    return range(VOCAB), (weights / weights.sum()).tolist()


def drafted(uniforms: np.ndarray, min_confidence: float = 0.0) -> DraftTree:
    """Trees of numbers ``[batch, paths, length]``."""
    batch, paths, length = uniforms.shape
    plan = Plan(paths=paths, depth=length, min_confidence=min_confidence)
    return trimmed(grown(plan, DraftSampling.IID, [probs_after] * batch, uniforms))


def offer_of(tree: DraftTree) -> Offer:
    """The target's distribution at a node is drawn from the node's own text."""
    probs = torch.zeros((tree.batch, tree.nodes, VOCAB), dtype=torch.float64)
    for b in range(tree.batch):
        texts: list[list[int]] = [[]]
        for node in range(1, tree.nodes):
            text = texts[int(tree.parents[b, node])]
            texts.append([*text, int(tree.token_ids[b, node])])
        for node, text in enumerate(texts):
            weights = np.random.default_rng([11, *text]).random(VOCAB)
            probs[b, node] = torch.from_numpy(weights / weights.sum())
    return Offer(tree, target_of(probs))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.2]),
    st.data(),
)
def test_a_part_is_the_tree_of_fewer_and_shorter_paths(seed, paths, length, min_confidence, data):
    few = data.draw(st.integers(1, paths))
    short = data.draw(st.integers(1, length))
    uniforms = np.random.default_rng(seed).random((2, paths, length))
    whole = offer_of(drafted(uniforms, min_confidence))
    part = whole.part(few, short)
    check_tree(part.tree)
    direct = drafted(uniforms[:, :few, :short], min_confidence)
    assert part.tree.draft_sampling is direct.draft_sampling
    for name, theirs in direct.tensors.items():
        if name in {"draft_ids", "draft_probs"}:
            _assert_equal_probs(part.tree, direct)
        else:
            assert torch.equal(part.tree.tensors[name], theirs), name
    expected = offer_of(direct).target
    for b in range(direct.batch):
        nodes = range(int(direct.num_nodes[b]))
        rows, wanted = part.target.rows[b, nodes], expected.rows[b, nodes]
        assert torch.equal(part.target.logits[rows], expected.logits[wanted])


def _assert_equal_probs(mine: DraftTree, theirs: DraftTree) -> None:
    """Below the last level nothing is drawn: no distribution is compared, none is left."""
    for b in range(mine.batch):
        for node in range(int(mine.num_nodes[b])):
            inner = bool((theirs.parents[b, 1:] == node).any())
            if inner:
                assert torch.equal(mine.draft_probs[b, node], theirs.draft_probs[b, node])
                assert torch.equal(mine.draft_ids[b, node], theirs.draft_ids[b, node])
            elif int(mine.depth[b, node]) == mine.length:
                assert not mine.draft_probs[b, node].any()


def test_the_whole_is_a_part_and_other_distributions_have_none() -> None:
    offer = offer_of(drafted(np.full((1, 2, 2), 0.5)))
    assert offer.part(2, 2) is offer
    tree = offer.tree
    other = replace(tree, draft_sampling=DraftSampling.WOR)
    with pytest.raises(SamplingMismatch, match="iid"):
        Offer(other, offer.target).part(1, 2)

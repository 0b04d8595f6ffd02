from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
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
from support.runs import ENVIRONMENT
from support.table_pairs import PROMPT, random_texts, table_pair, tables
from support.tables import iterate
from support.tabular_target import TabularTarget
from support.tiny_engine import served

from eaglegbv.config import PLAIN, EngineConfig, Plan
from eaglegbv.drafters.host_drafting import trimmed
from eaglegbv.drafters.tabular import TabularDrafter
from eaglegbv.engine import Engine
from eaglegbv.errors import InvalidArgument, InvalidProbabilities, SamplingMismatch
from eaglegbv.eval import paired_comparison
from eaglegbv.eval import study as studies
from eaglegbv.eval.paired_comparison import Cell, Offer, Sampling, Text, collect, same_drafts
from eaglegbv.eval.questions import Question
from eaglegbv.eval.records import Setting, grid
from eaglegbv.eval.statistics import Estimate
from eaglegbv.eval.study import SampledCell, StudySettings, of_size, shape_cells, study_cells
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
    settings = grid(rules, (1, 2), (LENGTH,), (temperature,), base=Plan()).settings
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
    settings = grid(("otbv", "traversal", "block"), (1, 3), (2, 4), (1.0,), base=Plan()).settings
    texts = texts_of(pair.target, count=2, length=6)
    same_drafts(pair, texts, settings, Sampling(places=1, judgements=2))
    by_size: dict[tuple[int, int], list[Any]] = {}
    for one in (call.args for judge in judges for call in judge.call_args_list):
        by_size.setdefault((one[1].drafts, one[1].length), []).append(one)
    counts = {size: len(judged) for size, judged in by_size.items()}
    assert counts == {(1, 2): 6, (1, 4): 6, (3, 2): 4, (3, 4): 4}
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
            for k in range(part.drafts):
                mine = part.token_ids[b, part.draws[b, :, k]]
                assert torch.equal(mine, whole.token_ids[b, whole.draws[b, :length, k]])


def test_one_path_rules_coincide_and_results_do_not_depend_on_the_batch() -> None:
    pair = table_pair(VOCAB)
    texts = texts_of(pair.target, count=5, length=9)
    settings = grid(("block", "gbv", "otbv", "traversal"), (1, 2), (3,), (1.0,), base=Plan())
    tallies = {
        batch: same_drafts(pair, texts, settings.settings, Sampling(places=3, batch=batch))
        for batch in (2, 5)
    }
    assert tallies[2] == tallies[5]
    alone = [t for t in tallies[2] if t.setting.plan.paths == 1]
    assert len(alone) == 4
    assert len({t.tokens for t in alone}) == 1
    assert alone[1].over(alone[0]) == Estimate(1.0, 1.0, 1.0)
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
    settings += [*grid(("otbv", "gbv"), (2,), (3,), (0.0,), base=Plan()).settings]
    tallies = same_drafts(pair, texts, settings, Sampling(places=4))
    assert all(1 <= t.mean <= 4 and t.steps == (4, 4, 4) for t in tallies)
    # At temperature 0 the greedy walk judges, whatever verifier is named.
    assert tallies[-1].tokens == tallies[-2].tokens
    assert all(count == int(count) for count in tallies[-1].tokens)


def test_numbers_follow_from_the_seeds() -> None:
    """Whatever reads the texts, drafts and scores, on tables, which do not round."""
    texts = random_texts(6, count=5, length=9)
    sampled = grid(("otbv", "traversal"), (3,), (2, 4), (1.0,), base=Plan()).settings
    greedy = grid(("gbv",), (2,), (3,), (0.0,), base=Plan()).settings
    sampling = Sampling(places=3, judgements=2, batch=2)
    cells = same_drafts(table_pair(6), texts, [*sampled, *greedy], sampling)
    assert [(cell.tokens, cell.nodes) for cell in cells] == [
        ((7.5, 7.5, 8.0, 6.0, 7.5), (10, 8, 14, 6, 8)),
        ((9.0, 10.0, 11.0, 9.0, 8.0), (22, 20, 30, 14, 18)),
        ((7.0, 7.5, 8.5, 6.5, 6.5), (10, 8, 14, 6, 8)),
        ((8.5, 10.5, 6.5, 7.5, 8.0), (22, 20, 30, 14, 18)),
        ((12, 12, 12, 12, 12), (18, 18, 18, 18, 18)),
    ]


def test_a_comparison_that_breaks_off_leaves_the_pool_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN logits, and a pool that does not hold all texts of a batch; then it goes on as ever."""
    pair, texts = table_pair(VOCAB), random_texts(VOCAB, count=3, length=40)
    allocator, forward = pair.target.allocator, pair.target.forward
    settings, sampling = [Setting(plan=Plan(paths=2, depth=3))], Sampling(places=2, judgements=1)
    expected = same_drafts(pair, texts, settings, sampling)

    def spoilt(*arguments: Any, **named: Any) -> TargetOutput:
        output = forward(*arguments, **named)
        output.logits[:] = torch.nan
        return output

    monkeypatch.setattr(pair.target, "forward", spoilt)
    with pytest.raises(InvalidProbabilities, match="logits of request 0"):
        same_drafts(pair, texts, settings, sampling)
    monkeypatch.undo()
    assert allocator.num_free == allocator.num_slots
    taken = allocator.allocate(allocator.num_free - 100)
    with pytest.raises(InvalidArgument, match="KV pool"):
        same_drafts(pair, texts, settings, sampling)
    assert allocator.num_free == 100
    allocator.release(taken)
    assert same_drafts(pair, texts, settings, sampling) == expected


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
            same_drafts(own, read, [Setting(plan=plan)])
    fixed = Plan(verifier="gbv", draft_sampling=DraftSampling.FIXED)
    with pytest.raises(SamplingMismatch, match="draft_sampling"):
        same_drafts(pair, texts, [Setting(plan=fixed)])
    with pytest.raises(InvalidArgument, match="places"):
        Sampling(places=0)


def test_a_text_of_one_token_has_no_place() -> None:
    pair = table_pair(VOCAB)
    texts = [text_of(7, (1,)), *texts_of(pair.target, count=1, length=3)]
    [tally] = same_drafts(pair, texts, [Setting(plan=Plan())], Sampling(places=9))
    assert tally.steps == (0, 2)
    assert tally.tokens[0] == 0


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


# --- numbers of several judgements lie in different parts, and each judgement's alone are uniform
BATCH, LONG, MANY = 3, 40, 5


def test_numbers_are_a_latin_hypercube() -> None:
    def columns(count: int, step: int = 7) -> torch.Tensor:
        """All numbers, ``[judgements, numbers]``, of the right shapes."""
        seeds = [(n, step) for n in range(BATCH)]
        found = paired_comparison.latin_hypercube(seeds, count, drafts=MANY, length=LONG)
        parts = [(own.selection, own.acceptance, own.correction) for own in found]
        shapes = [(BATCH, LONG, MANY, 2), (BATCH, LONG * MANY), (BATCH,)]
        assert [[x.shape for x in own] for own in parts] == [shapes] * count
        return torch.stack([torch.cat([x.flatten() for x in own]) for own in parts])

    places = (columns(4) * 4).floor().sort(dim=0).values
    assert (places == torch.arange(4.0).unsqueeze(1)).all()
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


# --- sampled and fixed trees at equal nodes: the comparison and its findings
WORDS = 6
SMALL = StudySettings(
    temperatures=(0.0, 0.8),
    draft_temperatures=(1.0, 2.0),
    paths=(1, 2),
    depth=2,
    sizes=(1, 2, 4),
    places=4,
    judgements=40,
)


def a_tally(nodes: float, tokens: tuple[float, ...]) -> Cell:
    return Cell(
        setting=Setting(plan=Plan()), tokens=tokens, steps=(2, 2), nodes=(2 * nodes, 2 * nodes)
    )


LADDER = [a_tally(1, (2.5, 3.0)), a_tally(3, (3.5, 5.0))]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(0.0, [2.0, 2.0]), (0.5, [2.25, 2.5]), (1.0, [2.5, 3.0]), (2.5, [3.25, 4.5])],
)
def test_a_mixture_of_fixed_trees_has_the_nodes_asked_for(nodes, expected) -> None:
    """Text by text: a share of the larger tree such that the mean number of nodes is right."""
    assert of_size(LADDER, nodes) == pytest.approx(expected)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="nodes"):
        of_size(LADDER, 3.5)
    with pytest.raises(InvalidArgument, match="draft_temperatures"):
        StudySettings(draft_temperatures=(2.0,))
    for sizes in ((4, 2, 16), (2, 4), (0, 16)):
        with pytest.raises(InvalidArgument, match="sizes"):
            StudySettings(sizes=sizes)


def test_cells_of_a_pair_of_tables() -> None:
    """Fixed trees nest, so more nodes commit more; target_only and otbv commit as much of them."""
    pair, texts = table_pair(WORDS), random_texts(WORDS, count=12, length=9)
    sampled, fixed = study_cells("table", pair, texts, 0.8, SMALL)
    assert {(c.paths, c.draft_temperature) for c in sampled} == {
        (k, hotter) for k in (1, 2) for hotter in (1.0, 2.0)
    }
    for cell in sampled:
        assert cell.nodes == 2 if cell.paths == 1 else 2 < cell.nodes <= 4
        assert cell.over_fixed.value == pytest.approx(cell.tokens.value / cell.fixed)
        if cell.draft_temperature == 1.0:
            assert cell.over_equal.value == 1.0
    *ladder, otbv = fixed
    assert [cell.nodes for cell in ladder] == [1.0, 2.0, 4.0]
    for less, more in pairwise(ladder):
        assert less.tokens.value < more.tokens.value
    # 12 texts, 4 places, 40 judgements each: a standard deviation is below 0.02.
    assert otbv.verifier == "otbv"
    assert otbv.tokens.value == pytest.approx(ladder[-1].tokens.value, abs=0.1)

    [path], cold = study_cells("table", pair, texts, 0.0, SMALL)
    assert (path.paths, path.nodes, path.over_equal.value) == (1, 2.0, 1.0)
    assert len(cold) == 3


def test_shapes_are_compared_with_as_many_nodes() -> None:
    pair, texts = table_pair(WORDS), random_texts(WORDS, count=12, length=9)
    settings = StudySettings(
        shapes=("4x1", "2x2", "1x3", "2x1 greedy", "eagle1"),
        temperatures=(0.8,),
        paths=(1, 2, 4),
        depth=2,
        sizes=(1, 2, 4, 8, 16, 25),
        places=4,
        judgements=40,
    )
    cells = {cell.tree: cell for cell in shape_cells("table", pair, texts, 0.8, settings)}
    assert list(cells) == list(settings.shapes)
    four, two, one, greedy, eagle1 = cells.values()
    assert four.over_paths == Estimate.exactly(1.0)  # it is among them
    assert 2 < one.nodes <= two.nodes <= 6
    assert greedy.nodes == 4  # its drafts of a node all differ
    assert one.over_paths is not None
    assert one.over_paths.value < 1  # of one draft at the root there is only one chance
    assert (eagle1.nodes, eagle1.verifier, eagle1.over_paths) == (25, "target_only", None)
    study = studies.Study(
        model="target",
        drafters=("table",),
        questions=("1",),
        suite="builtin",
        settings=settings,
        environment=ENVIRONMENT,
        sampled=(),
        fixed=(),
        shapes=tuple(cells.values()),
    )
    rows = studies.shapes_table(study)
    assert [row[2] for row in rows[1:]] == list(settings.shapes)
    assert rows[-1][5] == "none as large"
    found = studies.shape_findings(study)
    assert "table, 4x1: against paths, as many nodes: not told apart at T = 0.8" in found
    assert not any("eagle1: against paths" in finding for finding in found)


def test_shapes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"temperatures.*above 0"):
        StudySettings(shapes=("2x2",))
    for name in ("eagle9", "2x", "2x2,", "2x2 gredy"):
        with pytest.raises(InvalidArgument, match="shapes"):
            StudySettings(shapes=(name,), temperatures=(1.0,))
    with pytest.raises(InvalidArgument, match="sizes"):  # 20 nodes
        StudySettings(shapes=("4x4",), sizes=(1, 16), temperatures=(1.0,))


def a_cell(temperature: float, hotter: float, tokens: float, **ratios: Estimate) -> SampledCell:
    one = Estimate.exactly(1.0)
    return SampledCell(
        drafter="head",
        temperature=temperature,
        paths=2,
        draft_temperature=hotter,
        nodes=6.0,
        tokens=Estimate.exactly(tokens),
        fixed=2.0,
        **{"over_fixed": one, "over_equal": one, **ratios},
    )


def test_findings_follow_the_intervals() -> None:
    above, below, open_ = Estimate(1.1, 1.05, 1.2), Estimate(0.9, 0.8, 0.95), Estimate(1, 0.9, 1.1)
    cells = (
        a_cell(0.2, 1.0, 2.0, over_fixed=below),
        a_cell(0.2, 2.0, 2.4, over_equal=above),
        a_cell(1.0, 1.0, 2.5, over_fixed=above),
        a_cell(1.0, 2.0, 2.3, over_equal=open_),
    )
    study = studies.Study(
        model="target",
        drafters=("head",),
        questions=("1",),
        suite="builtin",
        settings=StudySettings(),
        environment=ENVIRONMENT,
        sampled=cells,
        fixed=(),
    )
    [trees], (hotter, multiples) = studies.tree_findings(study), studies.temperature_findings(study)
    assert trees.endswith("as many nodes: more tokens at T = 1; fewer tokens at T = 0.2")
    assert "sampled hotter" in hotter
    assert hotter.endswith("own temperature: more tokens at T = 0.2; not told apart at T = 1")
    assert multiples.endswith("best of all multiples 2 at T = 0.2, 1 at T = 1")
    colder = [msgspec.structs.replace(c, draft_temperature=1 / c.draft_temperature) for c in cells]
    turned = msgspec.structs.replace(study, sampled=tuple(colder))
    assert studies.tree_findings(turned) == [trees]
    assert studies.temperature_findings(turned)[0].replace("colder", "hotter") == hotter
    rows = studies.study_table(study)
    assert [row[:3] for row in rows[1:]] == [["head", "0.2", "2"], ["head", "1", "2"]]
    assert rows[1][7] == "2x"

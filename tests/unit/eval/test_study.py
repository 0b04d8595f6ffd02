"""Sampled and fixed trees at equal nodes: the comparison, its findings, the command."""

from itertools import pairwise

import msgspec
import pytest
import torch
from support.tabular_target import TabularTarget

from eaglegbv.config import Plan
from eaglegbv.drafters.tabular import Table, TabularDrafter
from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.paired_comparison import Tally, Text
from eaglegbv.eval.records import Setting, describe_environment
from eaglegbv.eval.statistics import Estimate
from eaglegbv.eval.study import (
    SampledCell,
    Study,
    StudySettings,
    findings,
    of_size,
    study_cells,
    study_table,
)
from eaglegbv.loading import Pair

VOCAB = 6
SMALL = StudySettings(
    temperatures=(0.0, 0.8),
    draft_temperatures=(1.0, 2.0),
    paths=(1, 2),
    depth=2,
    sizes=(1, 2, 4),
    places=4,
    judgements=40,
)


def a_tally(nodes: float, tokens: tuple[float, ...]) -> Tally:
    return Tally(
        setting=Setting(plan=Plan()),
        tokens=tokens,
        places=(2, 2),
        nodes=(2 * nodes, 2 * nodes),
    )


LADDER = [a_tally(1, (2.5, 3.0)), a_tally(3, (3.5, 5.0))]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(0.0, [2.0, 2.0]), (0.5, [2.25, 2.5]), (1.0, [2.5, 3.0]), (2.5, [3.25, 4.5])],
)
def test_a_mixture_of_fixed_trees_has_the_nodes_asked_for(
    nodes: float, expected: list[float]
) -> None:
    """Text by text: a share of the larger tree such that the mean number of nodes is right."""
    assert of_size(LADDER, nodes) == pytest.approx(expected)


def test_no_fixed_tree_so_large() -> None:
    with pytest.raises(InvalidArgument, match="nodes"):
        of_size(LADDER, 3.5)


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="draft_temperatures"):
        StudySettings(draft_temperatures=(2.0,))
    for sizes in ((4, 2, 16), (2, 4), (0, 16)):
        with pytest.raises(InvalidArgument, match="sizes"):
            StudySettings(sizes=sizes)


def pair_and_texts() -> tuple[Pair, list[Text]]:
    target = TabularTarget(vocab_size=VOCAB, order=1, seed=3, scale=2.0)
    noise = torch.randn((VOCAB + 1, VOCAB), generator=torch.Generator().manual_seed(4))
    logits = torch.stack([target.logits_after([state % VOCAB]) for state in range(VOCAB + 1)])
    drafter = TabularDrafter(Table.of_logits(logits + noise))
    numbers = torch.Generator().manual_seed(5)
    texts = [
        Text(
            name=str(n),
            seed=n,
            prompt_ids=(0, 1),
            token_ids=tuple(torch.randint(VOCAB, (9,), generator=numbers).tolist()),
        )
        for n in range(12)
    ]
    return Pair(target, drafter), texts


def test_cells_of_a_pair_of_tables() -> None:
    """Fixed trees nest, so more nodes commit more; target_only and otbv commit as much of them."""
    pair, texts = pair_and_texts()
    warm = study_cells("table", pair, texts, 0.8, SMALL)
    assert {(c.paths, c.draft_temperature) for c in warm.sampled} == {
        (k, hotter) for k in (1, 2) for hotter in (1.0, 2.0)
    }
    for cell in warm.sampled:
        assert cell.nodes == 2 if cell.paths == 1 else 2 < cell.nodes <= 4
        assert cell.over_fixed.value == pytest.approx(cell.tokens.value / cell.fixed)
        if cell.draft_temperature == 1.0:
            assert cell.over_equal.value == 1.0
    *ladder, otbv = warm.fixed
    assert [cell.nodes for cell in ladder] == [1.0, 2.0, 4.0]
    for less, more in pairwise(ladder):
        assert less.tokens.value < more.tokens.value
    # 12 texts, 4 places, 40 judgements each: a standard deviation is below 0.02.
    assert otbv.verifier == "otbv"
    assert otbv.tokens.value == pytest.approx(ladder[-1].tokens.value, abs=0.1)

    cold = study_cells("table", pair, texts, 0.0, SMALL)
    [path] = cold.sampled
    assert (path.paths, path.nodes, path.over_equal.value) == (1, 2.0, 1.0)
    assert len(cold.fixed) == 3


def a_cell(temperature: float, hotter: float, tokens: float, **ratios: Estimate) -> SampledCell:
    one = Estimate(1.0, 1.0, 1.0)
    return SampledCell(
        drafter="head",
        temperature=temperature,
        paths=2,
        draft_temperature=hotter,
        nodes=6.0,
        tokens=Estimate(tokens, tokens, tokens),
        fixed=2.0,
        over_fixed=ratios.get("over_fixed", one),
        over_equal=ratios.get("over_equal", one),
    )


def test_findings_follow_the_intervals() -> None:
    above, below, open_ = Estimate(1.1, 1.05, 1.2), Estimate(0.9, 0.8, 0.95), Estimate(1, 0.9, 1.1)
    cells = (
        a_cell(0.2, 1.0, 2.0, over_fixed=below),
        a_cell(0.2, 2.0, 2.4, over_equal=above),
        a_cell(1.0, 1.0, 2.5, over_fixed=above),
        a_cell(1.0, 2.0, 2.3, over_equal=open_),
    )
    study = Study(
        model="target",
        drafters=("head",),
        questions=("1",),
        suite="builtin",
        settings=StudySettings(),
        environment=describe_environment("cpu"),
        sampled=cells,
        fixed=(),
    )
    trees, hotter, multiples = findings(study)
    assert trees.endswith("as many nodes: more tokens at T = 1; fewer tokens at T = 0.2")
    assert "sampled hotter" in hotter
    assert hotter.endswith("own temperature: more tokens at T = 0.2; not told apart at T = 1")
    assert multiples.endswith("best of all multiples 2 at T = 0.2, 1 at T = 1")
    colder = [msgspec.structs.replace(c, draft_temperature=1 / c.draft_temperature) for c in cells]
    turned = findings(msgspec.structs.replace(study, sampled=tuple(colder)))
    assert [line.replace("colder", "hotter") for line in turned[:2]] == [trees, hotter]
    rows = study_table(study)
    assert [row[:3] for row in rows[1:]] == [["head", "0.2", "2"], ["head", "1", "2"]]
    assert rows[1][7] == "2x"

"""Sampled and fixed trees at equal nodes: the comparison and its findings."""

import pytest
from support.table_pairs import random_texts, table_pair

from eaglegbv.errors import InvalidArgument
from eaglegbv.eval.figures import ACCEPTANCE, NODES, Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.study import StudySettings, study
from eaglegbv.eval.tables import Table
from eaglegbv.eval.ways.places import Sampling, same_drafts

WORDS = 6
SMALL = StudySettings(
    temperatures=(0.0, 0.8),
    draft_temperatures=(1.0, 2.0),
    paths=(1, 2),
    depth=2,
    sizes=(1, 2, 4),
)
SAMPLING = Sampling(places=4, judgements=40)


def judged(settings: StudySettings) -> tuple[Sums, list[Table]]:
    """What the study finds on texts of a pair of tables."""
    pair, texts = table_pair(WORDS), random_texts(WORDS, count=12, length=9)
    trees = settings.settings(["table"])
    observed: list[Observation] = []
    for temperature in settings.temperatures:
        own = [tree for tree in trees if tree.temperature == temperature]
        observed += same_drafts(pair, texts, own, SAMPLING)
    return Sums(observed), study(trees).tables(Sums(observed), trees)


def test_sampled_trees_stand_beside_fixed_ones_of_as_many_nodes() -> None:
    """Fixed trees nest, so more nodes commit more."""
    sums, (table, seen) = judged(SMALL)
    ladder = [f"table target_only 2x2 fixed B8 N{nodes} T0.8" for nodes in SMALL.sizes]
    assert [sums.value(NODES, name) for name in ladder] == [1.0, 2.0, 4.0]
    tokens = [sums.value(ACCEPTANCE, name) for name in ladder]
    assert tokens == sorted(tokens)
    headings, cold, one, two = (dict(zip(table.texts[0], row, strict=True)) for row in table.texts)
    assert (cold["T"], cold["K"], cold["nodes"]) == ("0", "any", "2.0")
    assert [one["K"], two["K"]] == ["1", "2"]
    assert one["nodes"] == "2.0"
    assert 2 < float(two["nodes"]) <= 4
    for row in (one, two):
        ratio = float(row["ratio"].split()[0])
        assert ratio == pytest.approx(
            float(row["sampled"]) / float(row["fixed, as many nodes"]), abs=2e-3
        )
        if row["best draft T"] == "1x":
            assert row["over 1x"] == "1.000"
    assert headings["T"] == "T"
    assert any("best of all multiples" in row[0] for row in seen.rows)


def test_shapes_are_compared_with_as_many_nodes() -> None:
    settings = StudySettings(
        shapes=("4x1", "2x2", "1x3", "2x1 greedy", "eagle1"),
        temperatures=(0.8,),
        paths=(1, 2, 4),
        depth=2,
        sizes=(1, 2, 4, 8, 16, 25),
    )
    _, (table, seen) = judged(settings)
    rows = {row[2]: row for row in table.texts[1:]}
    # A shape that is paths is among those that it is compared with.
    assert list(rows) == ["2x2", "1x3", "eagle1"]
    assert float(rows["2x2"][3]) <= 6
    assert float(rows["1x3"][5].split()[0]) < 1  # of one draft at the root there is one chance
    assert rows["eagle1"][3] == "25.0"
    assert rows["eagle1"][5] == "none as large"
    assert not any("eagle1: against paths" in row[0] for row in seen.rows)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="draft_temperatures"):
        StudySettings(draft_temperatures=(2.0,))
    for sizes in ((4, 2, 16), (2, 4), (0, 16)):
        with pytest.raises(InvalidArgument, match="sizes"):
            StudySettings(sizes=sizes)
    with pytest.raises(InvalidArgument, match=r"temperatures.*above 0"):
        StudySettings(shapes=("2x2",))
    for name in ("eagle9", "2x", "2x2,", "2x2 gredy"):
        with pytest.raises(InvalidArgument, match="shapes"):
            StudySettings(shapes=(name,), temperatures=(1.0,))
    with pytest.raises(InvalidArgument, match="sizes"):  # 20 nodes
        StudySettings(shapes=("4x4",), sizes=(1, 16), temperatures=(1.0,))

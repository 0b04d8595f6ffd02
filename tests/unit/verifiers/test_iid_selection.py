"""Transport runs at the forks of trees alone, and how much room there is for them is no matter."""

from dataclasses import replace

import numpy as np
import pytest
from support.batched_trees import Batch, build_batch, forks, outcomes, random_requests

from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.verifiers import selection as iid_selection
from eaglegbv.verifiers.registry import make_verifier
from eaglegbv.verifiers.selection import bounded_forks

SHAPES = [(1, 3), (2, 4), (3, 3)]


def batch_of(paths: int, length: int, vocab: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    requests = random_requests(DraftSampling.IID, rng, 30, paths=paths, length=length, vocab=vocab)
    return build_batch(DraftSampling.IID, requests, vocab, rng, paths=paths, length=length)


@pytest.mark.parametrize(("paths", "length"), SHAPES)
def test_no_tree_has_more_forks_than_the_bound_and_some_have_as_many(
    paths: int, length: int
) -> None:
    # Of two tokens paths often agree, and of three they split up too.
    trees = [batch_of(paths, length, vocab, seed=3).tree for vocab in (2, 3)]
    expected = max(map(bounded_forks, trees)) if paths > 1 else 0
    assert max(n for tree in trees for n in forks(tree)) == expected


@pytest.mark.parametrize("name", ["otbv", "global_resolution"])
@pytest.mark.parametrize(("paths", "length"), SHAPES)
def test_decisions_do_not_depend_on_the_room_for_forks(
    name: str, paths: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is not asked how many there are: it ranks as many nodes as there may be."""
    batches = [batch_of(paths, length, 4, seed) for seed in range(3)]

    def decided() -> list[object]:
        verdicts = [make_verifier(name).verify(b.tree, b.target, b.uniforms) for b in batches]
        return [outcomes(b.tree, v) for b, v in zip(batches, verdicts, strict=True)]

    expected = decided()
    rooms: list[int] = []

    def bound(tree: DraftTree, _: object) -> int:
        rooms.append(bounded_forks(tree))
        return rooms[-1]

    monkeypatch.setattr(iid_selection, "_room_for_forks", bound)
    assert decided() == expected
    selects = paths > 1 or name != "otbv"  # which does not among one
    assert len(rooms) == (len(batches) if selects else 0)


def test_a_fork_that_is_not_counted_is_decided_otherwise() -> None:
    # So a drafter that counts wrongly shows: a fork left out passes for a node of one draft.
    differ = 0
    for seed in range(6):
        batch = batch_of(3, 3, 4, seed)
        most = max(forks(batch.tree))
        right, wrong = (replace(batch.tree, forks=number) for number in (most, 1))
        decided = [
            outcomes(tree, make_verifier("otbv").verify(tree, batch.target, batch.uniforms))
            for tree in (batch.tree, right, wrong)
        ]
        assert decided[0] == decided[1]
        differ += decided[1] != decided[2]
    assert differ > 0

"""A compiled verification decides as the plain one does, for trees of all sizes.

As with targets the compiler's front end is what can go wrong, so its graphs are run as they are.
But what it generates must not decide otherwise either: one test looks at that.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batched_trees import forks, outcomes, random_batch
from support.compilers import needs_compiler
from torch._dynamo.config import patch

from eaglegbv.rng import RequestRng
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers import registry
from eaglegbv.verifiers.base import Fault, VerifyUniforms
from eaglegbv.verifiers.proof.enumeration import Shape
from eaglegbv.verifiers.registry import VERIFIERS, CheckedVerifier, checked_verifier, make_verifier

SHAPES = [(1, 3), (2, 3), (3, 4)]
VOCAB = 4
ONE_GRAPH = sorted(name for name, cls in VERIFIERS.items() if cls.one_graph)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations

Case = tuple[DraftTree, TargetProbs, VerifyUniforms]


def case(seed, *, paths, length, requests=1, draft_sampling=DraftSampling.IID) -> Case:
    """Return what an engine would hand over for trees that a host drafted."""
    rng = np.random.default_rng(seed)
    batch = random_batch(draft_sampling, rng, requests, Shape(VOCAB, length, paths))
    tree = replace(batch.tree, forks=max(forks(batch.tree)))
    target = TargetProbs.of_logits(batch.target.logits.float(), batch.target.rows)
    streams = [RequestRng(seed + b) for b in range(requests)]
    room = {"drafts": tree.drafts, "length": tree.length}
    numbers = VerifyUniforms.draw(streams, [seed] * requests, **room)
    return tree, target, numbers


def cases(name: str, count: int) -> Iterator[Case]:
    one = VERIFIERS[name].max_paths == 1
    for paths, length in SHAPES:
        for seed in range(count):
            requests = (1, 1, 2, 5)[seed % 4]
            tree, *others = case(seed, paths=1 if one else paths, length=length, requests=requests)
            yield tree, *others
            yield replace(tree, forks=None), *others  # as drawn on a device


def compiled(name: str, backend: str = "eager") -> CheckedVerifier:
    return checked_verifier(name, backend, VOCAB)  # made once for all tests


def assert_same(ours: registry.Checked, theirs: registry.Checked, tree: DraftTree) -> None:
    (mine, my_faults), (its, its_faults) = ours, theirs
    assert outcomes(tree, mine) == outcomes(tree, its)
    assert torch.equal(my_faults, its_faults)


def test_the_default_verifier_is_one_graph() -> None:
    assert ONE_GRAPH == ["block", "otbv", "token"]


@pytest.mark.parametrize(
    ("name", "backend", "count"),
    [
        *((name, "eager", 8) for name in ONE_GRAPH),
        pytest.param("otbv", "inductor", 40, marks=needs_compiler),
    ],
)
@torch.inference_mode()
def test_graphs_decide_as_the_verifier_itself(name: str, backend: str, count: int) -> None:
    ours, plain = compiled(name, backend), CheckedVerifier(make_verifier(name))
    with patch(error_on_recompile=True):
        for tree, target, numbers in cases(name, count):
            checked = ours.verify(tree, target, numbers)
            assert_same(checked, plain.verify(tree, target, numbers), tree)


@torch.inference_mode()
def test_what_the_graph_does_not_take_is_verified_as_it_is() -> None:
    roots = DraftTree.roots([1])
    target = TargetProbs.of_logits(torch.zeros((1, VOCAB)), torch.zeros((1, 1), dtype=torch.int64))
    uniforms = VerifyUniforms.draw([RequestRng(3)], [5], drafts=0, length=0)
    for name, (tree, *others) in (
        ("otbv", case(0, paths=2, length=3, draft_sampling=DraftSampling.GREEDY)),
        ("otbv", (roots, target, uniforms)),
        ("global_resolution_convex", case(2, paths=2, length=2)),  # reads values on the host
    ):
        ours, plain = compiled(name), CheckedVerifier(make_verifier(name))
        assert_same(ours.verify(tree, *others), plain.verify(tree, *others), tree)


@torch.inference_mode()
def test_faults_are_found_by_the_graph_too() -> None:
    ours = compiled("otbv")
    tree, target, numbers = case(1, paths=2, length=3)

    def faults(tree: DraftTree, target: TargetProbs) -> int:
        return int(ours.verify(tree, target, numbers)[1])

    assert faults(tree, target) == 0
    broken = TargetProbs.of_logits(target.logits * torch.nan, target.rows)
    assert faults(tree, broken) & Fault.TARGET_NOT_FINITE
    doubled = replace(tree, draft_probs=2 * tree.draft_probs)
    assert faults(doubled, target) == Fault.DRAFT_NOT_NORMALISED
    elsewhere = replace(tree, token_ids=tree.token_ids + VOCAB)
    assert faults(elsewhere, target) == Fault.IMPOSSIBLE_DRAFT


def test_engines_share_a_graph() -> None:
    shared = checked_verifier("token", "eager", VOCAB)
    assert checked_verifier("token", "eager", VOCAB) is shared
    assert checked_verifier("token", "eager", VOCAB + 1) is not shared
    assert checked_verifier("token") is not shared

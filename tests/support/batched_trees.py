"""Random batches of draft trees over tiny vocabularies, for the batched verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, VerifyUniforms, find_faults
from eaglegbv.verifiers.paths import draft_counts
from eaglegbv.verifiers.proof.chooser import Prefix, Probs, ProbsAt, UniformChooser
from eaglegbv.verifiers.proof.tree import Outcome, from_draft_tree
from eaglegbv.verifiers.registry import REFERENCES
from eaglegbv.verifiers.stateful import ModifiedTarget
from support.tables import KINDS, GeneratorChooser, Model, Shape, draft
from support.tree_check import check_tree


@dataclass(frozen=True)
class Request:
    """The paths drafted for one request and the distributions at every prefix."""

    paths: tuple[Prefix, ...]
    p: ProbsAt
    q: ProbsAt


@dataclass(frozen=True)
class Batch:
    tree: DraftTree
    target: TargetProbs
    uniforms: VerifyUniforms


def random_requests(
    draft_sampling: DraftSampling,
    rng: np.random.Generator,
    count: int,
    *,
    paths: int,
    length: int,
    vocab: int,
) -> list[Request]:
    """Requests of all kinds of distributions; a third end their paths at a token of their own."""
    requests = []
    for _ in range(count):
        kind = KINDS[rng.integers(len(KINDS))]
        tilt = float(rng.choice([0.0, 0.5, 0.9]))
        model = Model(vocab, kind, int(rng.integers(2**31)), tilt)
        end = int(rng.integers(vocab)) if rng.random() < 1 / 3 else -1

        def stop(prefix: Prefix, end: int = end) -> bool:
            return prefix[-1:] == (end,)

        shape = Shape(vocab, length, paths)
        drawn = draft(draft_sampling, model.q, shape, GeneratorChooser(rng), stop)
        requests.append(Request(drawn, model.p, model.q))
    return requests


def build_batch(
    draft_sampling: DraftSampling,
    requests: Sequence[Request],
    vocab: int,
    rng: np.random.Generator,
    *,
    paths: int | None = None,
    length: int | None = None,
) -> Batch:
    """Pad the requests' trees into one batch, with uniforms drawn from ``rng``.

    Supports are listed in random order and padded with token 0. Rows of the target are packed;
    requests with fewer paths than the batch repeat nothing: their surplus paths are empty.
    """
    trees = [Numbered(r) for r in requests]
    paths = paths or max(len(r.paths) for r in requests)
    length = length or max(len(p) for r in requests for p in r.paths)
    nodes = max(len(t.prefixes) for t in trees)
    size = len(requests)
    token_ids = np.zeros((size, nodes), np.int64)
    parents, depth, rows = token_ids.copy(), token_ids.copy(), token_ids.copy()
    path_nodes = np.zeros((size, paths, length), np.int64)
    path_lengths = np.zeros((size, paths), np.int64)
    draft_ids = np.zeros((size, nodes, vocab + 1), np.int64)
    draft_probs = np.zeros((size, nodes, vocab + 1))
    packed: list[Probs] = []
    for b, tree in enumerate(trees):
        first_row = len(packed)
        inner = {prefix[:-1] for prefix in tree.prefixes if prefix}
        rows[b] = first_row
        for node, prefix in enumerate(tree.prefixes):
            rows[b, node] = first_row + node
            packed.append(tree.request.p(prefix))
            depth[b, node] = len(prefix)
            if prefix:
                token_ids[b, node] = prefix[-1]
                parents[b, node] = tree.numbers[prefix[:-1]]
            if prefix not in inner and b % 2:  # leaves need no distribution, and may have none
                continue
            q = tree.request.q(prefix)
            support = rng.permutation([x for x in range(vocab) if q[x] > 0])
            draft_ids[b, node, : len(support)] = support
            draft_probs[b, node, : len(support)] = [q[x] for x in support]
        for k, path in enumerate(tree.request.paths):
            chain = [tree.numbers[path[:i]] for i in range(1, len(path) + 1)]
            path_nodes[b, k] = chain + [chain[-1] if chain else 0] * (length - len(chain))
            path_lengths[b, k] = len(path)
    as_tensor = torch.from_numpy
    tree = DraftTree(
        draft_sampling=draft_sampling,
        token_ids=as_tensor(token_ids),
        parents=as_tensor(parents),
        depth=as_tensor(depth),
        num_nodes=torch.tensor([len(t.prefixes) for t in trees]),
        path_nodes=as_tensor(path_nodes),
        path_lengths=as_tensor(path_lengths),
        draft_ids=as_tensor(draft_ids),
        draft_probs=as_tensor(draft_probs),
    )
    check_tree(tree)
    probs = torch.tensor(packed, dtype=torch.float64)
    target = TargetProbs(probs.log(), probs.new_zeros(len(packed)), as_tensor(rows))
    uniforms = VerifyUniforms(
        selection=as_tensor(rng.random((size, length, paths, 2))),
        acceptance=as_tensor(rng.random((size, max(1, paths * length)))),
        correction=as_tensor(rng.random(size)),
    )
    return Batch(tree, target, uniforms)


class Numbered:
    """The nodes of a request's tree: the prefixes of its paths, level by level."""

    def __init__(self, request: Request) -> None:
        self.request = request
        longest = max(map(len, request.paths))
        below = [p[:d] for d in range(1, longest + 1) for p in request.paths if len(p) >= d]
        self.prefixes: list[Prefix] = list(dict.fromkeys([(), *below]))
        self.numbers = {prefix: n for n, prefix in enumerate(self.prefixes)}


def assert_sound(tree: DraftTree, target: TargetProbs) -> None:
    """Trees are well formed, drafts can be drawn, and all distributions sum to one."""
    check_tree(tree)
    assert not find_faults(tree, target).any()
    sums = torch.logsumexp(target.logits.double(), dim=1) - target.log_normaliser
    assert sums.abs().max() < 1e-6


def forks(tree: DraftTree) -> list[int]:
    """Return how many nodes of each tree several paths leave."""
    counts: list[int] = (draft_counts(tree) > 1).sum(dim=1).tolist()
    return counts


def outcomes(tree: DraftTree, verdict: Verdict) -> list[Outcome]:
    result = []
    for b in range(tree.batch):
        nodes = verdict.path_nodes[b, : int(verdict.accepted[b])].tolist()
        tokens = tuple(tree.token_ids[b, nodes].tolist())
        result.append(Outcome(tokens, int(verdict.token_ids[b])))
    return result


def reference_outcomes(name: str, batch: Batch) -> list[Outcome]:
    """What the reference of that name decides on the batch's uniforms."""
    result = []
    for b in range(batch.tree.batch):
        tree = from_draft_tree(batch.tree, batch.target, b)
        chooser = UniformChooser(batch.uniforms, b)
        result.append(REFERENCES[name](tree, ModifiedTarget(), chooser).outcome)
    return result

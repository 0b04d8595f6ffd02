"""The cost of a batched verification, compared with one pass over the same logits."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import VerifyUniforms
from eaglegbv.verifiers.registry import make_verifier


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a batch of iid draft trees over random laws.

    Attributes:
        requests: Trees verified together.
        paths: K.
        length: L.
        width: Candidates of a draft law.
        vocab: Size of the vocabulary.
    """

    requests: int = 16
    paths: int = 4
    length: int = 6
    width: int = 64
    vocab: int = 128_256

    @property
    def nodes(self) -> int:
        """Most nodes of a tree, the root included."""
        return 1 + self.paths * self.length


@dataclass(frozen=True, slots=True)
class Throughput:
    """Medians of repeated runs in one process.

    Attributes:
        verify_seconds: One whole verification.
        logsumexp_seconds: One ``logsumexp`` over the same logits.
        accepted: Mean number of accepted tokens, to show that the work was real.
    """

    verify_seconds: float
    logsumexp_seconds: float
    accepted: float

    @property
    def ratio(self) -> float:
        """The verification's cost in passes over the logits."""
        return self.verify_seconds / self.logsumexp_seconds


@torch.inference_mode()
def measure(
    verifier: str,
    workload: Workload,
    *,
    seed: int = 0,
    repeats: int = 5,
    device: torch.device | str = "cpu",
) -> Throughput:
    """Time a verifier of iid trees, alternating with the ``logsumexp`` it is compared with.

    Args:
        verifier: Name of a stateless verifier. For one that takes a single path,
            ``workload.paths`` must be 1.
        workload: Sizes of the batch.
        seed: Seed of laws, drafts and uniforms.
        repeats: Runs of each, after one that is not counted.
        device: Where to run.
    """
    rule = make_verifier(verifier)
    tree, logits = random_batch(workload, seed)
    tree = tree.to(torch.device(device))
    logits = logits.to(device)
    rows = torch.arange(workload.requests * tree.nodes, device=device).view(-1, tree.nodes)
    target = TargetLaw.of_logits(logits, rows)
    uniforms = _uniforms(workload, seed, device)
    verify, normalise = [], []
    for _ in range(repeats + 1):
        normalise.append(_seconds(lambda: torch.logsumexp(logits, dim=-1)))
        verify.append(_seconds(lambda: rule.verify(tree, target, uniforms)))
    verdict = rule.verify(tree, target, uniforms)
    return Throughput(
        verify_seconds=median(verify[1:]),
        logsumexp_seconds=median(normalise[1:]),
        accepted=float(verdict.accepted.double().mean()),
    )


def random_batch(workload: Workload, seed: int) -> tuple[DraftTree, Tensor]:
    """Return iid trees, padded to ``workload.nodes``, and logits ``[requests * nodes, vocab]``.

    The target's most likely tokens are the draft's candidates, reweighted at random.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (workload.requests, workload.nodes, workload.width)
    scores = torch.rand(workload.requests, workload.nodes, workload.vocab, generator=generator)
    ids = scores.topk(workload.width, dim=2).indices
    del scores
    preference = torch.randn(shape, generator=generator, dtype=torch.float64)
    probs = (2 * preference).softmax(dim=2)
    logits = torch.randn(
        workload.requests, workload.nodes, workload.vocab, generator=generator
    ).sub_(6)
    noise = torch.randn(shape, generator=generator)
    logits.scatter_(2, ids, (2 * preference).float() + noise + 4)
    tree = _draw_paths(workload, ids, probs, generator)
    return tree, logits.flatten(0, 1)


def _draw_paths(
    workload: Workload, ids: Tensor, probs: Tensor, generator: torch.Generator
) -> DraftTree:
    """Draw paths node by node and share nodes of equal prefixes."""
    size, nodes = workload.requests, workload.nodes
    token_ids = torch.zeros((size, nodes), dtype=torch.int64)
    parents, depth = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    path_nodes = torch.zeros((size, workload.paths, workload.length), dtype=torch.int64)
    counts = []
    for b in range(size):
        children: dict[tuple[int, int], int] = {}
        for k in range(workload.paths):
            node = 0
            for step in range(workload.length):
                place = int(torch.multinomial(probs[b, node], 1, generator=generator))
                token = int(ids[b, node, place])
                child = children.setdefault((node, token), len(children) + 1)
                token_ids[b, child], parents[b, child], depth[b, child] = token, node, step + 1
                path_nodes[b, k, step] = node = child
        counts.append(len(children) + 1)
    return DraftTree(
        law=Law.IID,
        token_ids=token_ids,
        parents=parents,
        depth=depth,
        num_nodes=torch.tensor(counts),
        path_nodes=path_nodes,
        path_lengths=torch.full((size, workload.paths), workload.length),
        draft_ids=ids,
        draft_probs=probs,
    )


def _uniforms(workload: Workload, seed: int, device: torch.device | str) -> VerifyUniforms:
    generator = torch.Generator().manual_seed(seed + 1)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(device)

    return VerifyUniforms(
        selection=numbers(workload.requests, workload.length, workload.paths, 2),
        acceptance=numbers(workload.requests, workload.paths * workload.length),
        correction=numbers(workload.requests),
    )


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start

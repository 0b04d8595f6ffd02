"""Texts whose first step is taken by a stateless batched verifier, and the rest by the target.

Such a verifier keeps nothing between steps, so one step shows its law. Every draft tree of a tiny
problem is listed once, and the verifier judges trees sampled from their exact law.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from eaglegbv.eval.audit_writing import Written
from eaglegbv.eval.iid_trees import random_uniforms
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verifier
from eaglegbv.verifiers.reference.enumeration import Problem, drafted_paths
from eaglegbv.verifiers.reference.probs import Prefix

CHUNK = 4096
"""Number of trees judged in one call."""


@dataclass(frozen=True, slots=True)
class StepWriter:
    """Writes texts with one step of a verifier."""

    verifier: Verifier

    def __call__(
        self, problems: Sequence[Problem], samples: int, generator: torch.Generator
    ) -> Written:
        """Let the verifier take one step of the first problem; p completes the texts."""
        trees, target, masses = batch_of(problems[0])
        laws = _laws_by_code(problems[0])
        cells, committed = [], 0
        for size in _chunks(samples):
            index = torch.multinomial(masses, size, replacement=True, generator=generator)
            tree = trees.mapped(itemgetter(index))
            law = replace(target, rows=target.rows[index])
            verdict = self.verifier.verify(tree, law, random_uniforms(tree, generator))
            drafted = tree.token_ids.gather(1, verdict.path_nodes)
            tokens = torch.cat((drafted, verdict.token_ids.unsqueeze(1)), dim=1)
            tokens.scatter_(1, verdict.accepted.unsqueeze(1), verdict.token_ids.unsqueeze(1))
            texts = Texts(tokens, verdict.accepted + 1)
            committed += int(texts.lengths.sum())
            cells.append(_complete(texts, laws, generator))
        return Written(torch.cat(cells), committed)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in progress: the first ``lengths`` tokens of a row; the rest is undecided."""

    tokens: Tensor
    lengths: Tensor


def _chunks(samples: int) -> list[int]:
    full, rest = divmod(samples, CHUNK)
    return [CHUNK] * full + ([rest] if rest else [])


def _laws_by_code(problem: Problem) -> list[Tensor]:
    """Return the target's laws after all prefixes of lengths 0 ... L.

    Entry d is ``[vocab ** d, vocab]``; its rows are in the order of prefixes as numbers in base
    ``vocab``.
    """
    vocab, p = problem.shape.vocab, problem.target_law
    return [
        torch.tensor([p(prefix) for prefix in product(range(vocab), repeat=d)], dtype=torch.float64)
        for d in range(problem.shape.length + 1)
    ]


def _complete(texts: Texts, laws: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Complete texts with the target; return each whole text as a number in base ``vocab``."""
    vocab = laws[0].shape[1]
    code = torch.zeros_like(texts.lengths)
    for d, law in enumerate(laws):
        own = torch.multinomial(law[code], 1, generator=generator).squeeze(1)
        code = code * vocab + torch.where(texts.lengths > d, texts.tokens[:, d], own)
    return code


def batch_of(problem: Problem) -> tuple[DraftTree, TargetLaw, Tensor]:
    """Return all draft trees of a problem, their target laws and their probabilities ``[batch]``.

    The rows of the target laws belong to prefixes, and all trees share them.
    """
    drafted = drafted_paths(problem)
    trees = [_Nodes.of(paths) for paths in drafted]
    vocab, length = problem.shape.vocab, problem.shape.length
    prefixes = [c for d in range(length + 1) for c in product(range(vocab), repeat=d)]
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    size, nodes = len(trees), max(len(tree.prefixes) for tree in trees)
    most = max(len(tree.paths) for tree in trees)
    token_ids = np.zeros((size, nodes), dtype=np.int64)
    parents, depth, rows = token_ids.copy(), token_ids.copy(), token_ids.copy()
    path_nodes = np.zeros((size, most, length), dtype=np.int64)
    path_lengths = np.zeros((size, most), dtype=np.int64)
    for b, tree in enumerate(trees):
        for node, prefix in enumerate(tree.prefixes):
            rows[b, node] = row_of[prefix]
            if prefix:
                token_ids[b, node] = prefix[-1]
                parents[b, node] = tree.numbers[prefix[:-1]]
                depth[b, node] = len(prefix)
        for k, path in enumerate(tree.paths):
            path_nodes[b, k] = [tree.numbers[path[:d]] for d in range(1, length + 1)]
            path_lengths[b, k] = length
    draft = torch.tensor([problem.draft_law(c) for c in prefixes], dtype=torch.float64)
    shared = torch.from_numpy(rows)
    batch = DraftTree(
        law=problem.law,
        token_ids=torch.from_numpy(token_ids),
        parents=torch.from_numpy(parents),
        depth=torch.from_numpy(depth),
        num_nodes=torch.tensor([len(tree.prefixes) for tree in trees]),
        path_nodes=torch.from_numpy(path_nodes),
        path_lengths=torch.from_numpy(path_lengths),
        draft_ids=torch.arange(vocab).expand(size, nodes, vocab),
        draft_probs=draft[shared],
    )
    probs = torch.tensor([problem.target_law(c) for c in prefixes], dtype=torch.float64)
    target = TargetLaw(probs.log(), probs.new_zeros(len(prefixes)), shared)
    masses = torch.tensor([float(mass) for mass in drafted.values()], dtype=torch.float64)
    return batch, target, masses


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of one tree, numbered by depth, then by first path."""

    paths: tuple[Prefix, ...]
    prefixes: list[Prefix]
    numbers: dict[Prefix, int]

    @classmethod
    def of(cls, paths: tuple[Prefix, ...]) -> "_Nodes":
        longest = max(map(len, paths))
        below = [path[:d] for d in range(1, longest + 1) for path in paths]
        prefixes: list[Prefix] = list(dict.fromkeys([(), *below]))
        return cls(paths, prefixes, {prefix: n for n, prefix in enumerate(prefixes)})

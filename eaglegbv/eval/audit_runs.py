"""Texts written by a batched stateful verifier, step after step, on tiny problems.

A debt of an earlier step changes what later ones commit, so only whole runs can be judged. Many
requests run side by side. Each has its own debts, and every debt keeps the draft law of its step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.eval.audit_writing import Written
from eaglegbv.eval.iid_trees import PathTrees, draw_trees, random_uniforms
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.debts import Debts, Layers, SparseLaws
from eaglegbv.verifiers.reference.enumeration import Problem
from eaglegbv.verifiers.reference.probs import LawAt, Prefix
from eaglegbv.verifiers.stateful import StatefulUniforms, StatefulVerifier


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in progress, one for each request.

    Attributes:
        codes: ``[batch]`` int64, the texts as numbers (see :func:`prefix_of`).
        lengths: ``[batch]`` int64, number of tokens of each text.
        layers: Debts of the texts; column k is that of step k.
        draft_laws: The draft law of each step.
    """

    codes: Tensor
    lengths: Tensor
    layers: Layers
    draft_laws: tuple[LawAt, ...]

    @classmethod
    def start(cls, size: int) -> "Texts":
        """Return requests whose texts are empty."""
        codes = torch.ones(size, dtype=torch.int64)
        return cls(codes, torch.zeros_like(codes), Layers.none(size), ())

    def only(self, chosen: Tensor) -> "Texts":
        """Return the requests where ``chosen`` ``[batch]`` bool is set."""
        layers = Layers(
            self.layers.rho[chosen],
            self.layers.drafts[chosen],
            self.layers.remaining[chosen],
            self.layers.most_drafts,
        )
        return Texts(self.codes[chosen], self.lengths[chosen], layers, self.draft_laws)


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes texts with a stateful verifier, one step after the other."""

    verifier: StatefulVerifier

    def __call__(
        self, problems: Sequence[Problem], samples: int, generator: torch.Generator
    ) -> Written:
        """Take one step for each of ``problems``, then steps without drafts.

        Texts end after L + 1 tokens, within which every debt of a first step falls due. A step
        without drafts commits a token of the modified target.
        """
        vocab, total = problems[0].shape.vocab, problems[0].shape.length + 1
        texts, cells, committed = Texts.start(samples), [], 0
        for number in range(len(problems) + total):
            drafting = number < len(problems)
            problem = problems[number if drafting else -1]
            texts = _step(self.verifier, texts, problem, generator, drafting=drafting)
            if number == 0:
                committed = int(texts.lengths.sum())
            done = texts.lengths >= total
            surplus = vocab ** (texts.lengths[done] - total)
            cells.append(texts.codes[done] // surplus - vocab**total)
            texts = texts.only(~done)
            if len(texts.codes) == 0:
                break
        return Written(torch.cat(cells), committed)


def prefix_of(code: int, vocab: int) -> Prefix:
    """Return the tokens of a code, whose digits are a 1 and then the tokens."""
    tokens: list[int] = []
    while code > 1:
        code, token = divmod(code, vocab)
        tokens.append(token)
    return tuple(reversed(tokens))


def _step(
    verifier: StatefulVerifier,
    texts: Texts,
    problem: Problem,
    generator: torch.Generator,
    *,
    drafting: bool,
) -> Texts:
    vocab, size = problem.shape.vocab, len(texts.codes)
    if drafting:
        trees = _draw(problem, texts.codes, generator)
        codes = _node_codes(trees, texts.codes, vocab)
        tree = trees.with_laws(_laws(problem.draft_law, codes, vocab))
    else:
        tree, codes = DraftTree.roots([0] * size), texts.codes.unsqueeze(1)
    p = _laws(problem.target_law, codes, vocab).flatten(0, 1)
    rows = torch.arange(codes.numel()).view_as(codes)
    target = TargetLaw(p.log(), p.new_zeros(len(p)), rows)
    debts = Debts(texts.layers, _OwnLaws(texts, vocab))
    uniforms = _uniforms(tree, texts.layers.count, generator)
    result = verifier.verify(tree, target, uniforms, debts)
    return Texts(
        codes=_extended(texts.codes, tree, result.verdict, vocab),
        lengths=texts.lengths + result.verdict.accepted + 1,
        layers=result.layers,
        draft_laws=(*texts.draft_laws, problem.draft_law),
    )


def _draw(problem: Problem, codes: Tensor, generator: torch.Generator) -> PathTrees:
    shape = problem.shape
    reached = codes.unsqueeze(1).repeat(1, shape.paths)

    def draw(places: Tensor) -> Tensor:
        del places
        laws = _laws(problem.draft_law, reached, shape.vocab).flatten(0, 1)
        drawn = torch.multinomial(laws, 1, generator=generator).view_as(reached)
        reached.mul_(shape.vocab).add_(drawn)
        return drawn

    return draw_trees(len(codes), shape.paths, shape.length, draw)


def _node_codes(trees: PathTrees, codes: Tensor, vocab: int) -> Tensor:
    """Return the code of each node's text, ``[batch, nodes]``; padding repeats the root's."""
    found = codes.unsqueeze(1).expand_as(trees.parents).clone()
    for depth in range(1, trees.path_nodes.shape[2] + 1):
        longer = found.gather(1, trees.parents) * vocab + trees.token_ids
        found = torch.where(trees.depth == depth, longer, found)
    return found


def _extended(codes: Tensor, tree: DraftTree, verdict: Verdict, vocab: int) -> Tensor:
    drafted = tree.token_ids.gather(1, verdict.path_nodes)
    for i in range(tree.length):
        codes = torch.where(i < verdict.accepted, codes * vocab + drafted[:, i], codes)
    return codes * vocab + verdict.token_ids


def _laws(law: LawAt, codes: Tensor, vocab: int) -> Tensor:
    """Return the laws after texts with codes of any shape ``[...]``: ``[..., vocab]`` float64."""
    each, rows = codes.unique(return_inverse=True)
    table = [law(prefix_of(code, vocab)) for code in each.tolist()]
    return torch.tensor(table, dtype=torch.float64)[rows]


@dataclass(frozen=True, slots=True)
class _OwnLaws:
    """The draft laws of all steps so far, which the debts need."""

    texts: Texts
    vocab: int

    def after(self, tokens: Tensor) -> SparseLaws:
        """Return the laws of all steps after ``tokens`` more, ``[batch, depth]``."""
        codes = self.texts.codes
        for column in tokens.T:
            codes = codes * self.vocab + column
        laws = [_laws(law, codes, self.vocab) for law in self.texts.draft_laws]
        empty = torch.zeros((len(codes), 0, self.vocab), dtype=torch.float64)
        probs = torch.stack(laws, dim=1) if laws else empty
        return SparseLaws(torch.arange(self.vocab).expand(probs.shape), probs)


def _uniforms(tree: DraftTree, layers: int, generator: torch.Generator) -> StatefulUniforms:
    entering, leaving = (tree.batch, tree.length, layers), (tree.batch, layers + 1)
    return StatefulUniforms(
        plain=random_uniforms(tree, generator),
        entering=torch.rand(entering, generator=generator, dtype=torch.float64),
        leaving=torch.rand(leaving, generator=generator, dtype=torch.float64),
    )

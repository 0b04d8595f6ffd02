"""What every verification rule states, takes and returns, and the walks that rules share.

A verifier is a pure function of draft trees, the target's probabilities, and uniform numbers. It
reads nothing on the host, and a whole batch is judged by one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from eaglegbv.config import DraftSampling
from eaglegbv.devices import entry_at, first_true, send
from eaglegbv.errors import InvalidProbabilities, SamplingMismatch, one_of
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftTree, TargetProbs
from eaglegbv.verifiers.paths import (
    Residual,
    correction_token,
    drafted_nodes,
    draw,
    rows_at,
)

NodeStats: TypeAlias = Mapping[str, Tensor]
"""Numbers by which a rule decides, to show them: ``[batch, nodes]`` float64 by their letter in the
documentation; NaN at nodes for which the rule had none. No verdict depends on them."""

_PURPOSES = (Purpose.SELECTION, Purpose.ACCEPTANCE, Purpose.CORRECTION)


@dataclass(frozen=True, slots=True)
class VerifyUniforms:
    """The random numbers one verification may use, float64 in [0, 1)."""

    selection: Tensor  # [batch, length, drafts, 2]: two for each draw of each level
    acceptance: Tensor  # [batch, length * drafts]: one for each draw, level by level
    correction: Tensor  # [batch]: the correction or bonus token

    @classmethod
    def draw(
        cls,
        rngs: Sequence[RequestRng],
        steps: Sequence[int],
        *,
        drafts: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own rng at its own step counter."""
        counts = 2 * drafts * length, drafts * length, 1
        wanted = [(p, n) for p, n in zip(_PURPOSES, counts, strict=True) if n > 0]
        drawn = [
            np.concatenate([s.draw(t, purpose, n) for purpose, n in wanted])
            for s, t in zip(rngs, steps, strict=True)
        ]
        # One copy to the device for all of them.
        numbers = send(torch.from_numpy(np.array(drawn)), device)
        selection, acceptance, correction = numbers.split_with_sizes(counts, dim=1)
        selection = selection.view(len(numbers), length, drafts, 2)
        return cls(selection, acceptance, correction.squeeze(1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification commits, per request."""

    # [batch, length] int64, nodes of the selected path at depths 1 ... length; meaningful up to
    # ``accepted``
    path_nodes: Tensor
    accepted: Tensor  # [batch] int64, number of accepted nodes, 0 ... length
    # [batch] int64, the correction token, or the bonus token where the whole path was accepted
    token_ids: Tensor


class Rule(ABC):
    """The facts that every verification rule states about itself.

    A rule is lossless for the draft samplings it names: the committed text has the target's
    distribution exactly, whatever the drafter proposed.
    """

    name: ClassVar[str]
    draft_samplings: ClassVar[frozenset[DraftSampling]]  # draft samplings the rule is lossless for
    default_sampling: ClassVar[DraftSampling] = DraftSampling.IID
    """How to draft when the user does not say."""
    any_widths: ClassVar[frozenset[DraftSampling] | None] = None
    """Of these, those of which it takes trees of any widths (:attr:`Plan.widths`), where others are
    K paths that fork at the root alone. None says nothing: an audit finds out. Trees of ``hub`` and
    ``fixed`` have shapes of their own, which every rule for them takes."""
    max_paths: ClassVar[int | None] = None  # most paths the rule can use; `None` for any number

    def fitting_paths(self, paths: int) -> int:
        """Return as many of ``paths`` as the rule can use."""
        return paths if self.max_paths is None else min(paths, self.max_paths)

    def check_sampling(
        self, draft_sampling: DraftSampling, paths: int, *, columns: bool = True
    ) -> None:
        """Raise :class:`SamplingMismatch` unless the rule is lossless for such trees.

        ``columns`` says whether they are K paths that fork at the root alone.
        """
        if draft_sampling not in self.draft_samplings:
            expected = f"{one_of(sorted(self.draft_samplings))} for verifier {self.name!r}"
            raise SamplingMismatch("draft_sampling", str(draft_sampling), expected)
        shaped = draft_sampling in (DraftSampling.FIXED, DraftSampling.HUB)
        taken = self.any_widths
        if not columns and not shaped and taken is not None and draft_sampling not in taken:
            expected = f"one that takes widths drawn {str(draft_sampling)!r}, not K paths alone"
            raise SamplingMismatch("verifier", self.name, expected)
        if self.max_paths is not None and paths > self.max_paths:
            raise SamplingMismatch("paths", paths, f"at most {self.max_paths} for {self.name!r}")


class Verifier(Rule):
    """A rule each of whose steps is lossless by itself.

    A subclass implements :meth:`judge`; callers use :meth:`verify`.
    """

    def verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge the drafts of a batch; a tree of a root alone yields a sample of the target.

        Faulty probabilities are found by :func:`find_faults`, whose result the caller reads
        together with the verdict, before committing.

        Raises:
            SamplingMismatch: The tree's draft sampling is not among :attr:`draft_samplings`.
        """
        if tree.length > 0:
            self.check_sampling(tree.draft_sampling, tree.drafts, columns=tree.columns)
            return self.judge(tree, target, uniforms)
        roots = torch.zeros_like(tree.num_nodes)
        token_ids = draw(target.probs_of(roots), uniforms.correction)
        return Verdict(tree.token_ids.new_zeros((tree.batch, 0)), roots, token_ids)

    @abstractmethod
    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of an accepted draft sampling and of at least one step."""

    def stats(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> NodeStats:  # noqa: ARG002
        """Return the numbers, beside p and q, by which :meth:`judge` decides; most have none."""
        return {}


# Faulty probabilities: found on the device, reported before anything is committed. An engine reads
# the answer together with the verdict it belongs to, and fails only the requests that are faulty.


TOLERANCE = 1e-6  # how far the sum of a distribution may be from one


class Fault(IntFlag):
    """What may be wrong with the probabilities of a request; flags combine."""

    TARGET_NOT_FINITE = 1
    DRAFT_NOT_NORMALISED = 2
    IMPOSSIBLE_DRAFT = 4


_MESSAGES = {
    Fault.TARGET_NOT_FINITE: (
        "target logits",
        "NaN or infinite",
        "logits with a finite logsumexp, and settings that do not forbid every token",
    ),
    Fault.DRAFT_NOT_NORMALISED: (
        "draft_probs",
        "not a distribution",
        f"non-negative numbers that sum to 1 within {TOLERANCE:g}",
    ),
    Fault.IMPOSSIBLE_DRAFT: (
        "token_ids",
        "a token of draft probability 0",
        "tokens its draft distribution can draw",
    ),
}


def find_faults(tree: DraftTree, target: TargetProbs) -> Tensor:
    """Return ``[batch]`` int64: the :class:`Fault` flags of each request, 0 where all is well.

    Draft probabilities are checked at nodes with children only, and not at all in ``fixed`` trees,
    whose children follow no distribution.
    """
    faults = target.broken * int(Fault.TARGET_NOT_FINITE)
    if tree.draft_sampling is DraftSampling.FIXED:
        return faults
    probs = tree.draft_probs
    # Written so that NaN is a fault too.
    sound = ((probs.sum(dim=2) - 1).abs() <= TOLERANCE) & (probs.amin(dim=2) >= 0)
    possible_ids = rows_at(torch.where(probs > 0, tree.draft_ids, -1), tree.parents)
    possible = (possible_ids == tree.token_ids.unsqueeze(2)).any(dim=2)
    drafted = drafted_nodes(tree)
    broken = (drafted & ~sound.gather(1, tree.parents)).any(dim=1)
    impossible = (drafted & ~possible).any(dim=1)
    faults = torch.add(faults, broken, alpha=int(Fault.DRAFT_NOT_NORMALISED))
    return torch.add(faults, impossible, alpha=int(Fault.IMPOSSIBLE_DRAFT))


def fault_error(faults: int, request: int) -> InvalidProbabilities:
    """Return the error that describes the first of a request's ``faults``, which are not 0."""
    argument, value, expected = _MESSAGES[next(fault for fault in Fault if fault & faults)]
    return InvalidProbabilities(f"{argument} of request {request}", value, expected)


# Walks down a draft tree.
def walk(tree: DraftTree, next_token: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Follow ``next_token`` from the root for as long as it names a child.

    It takes the nodes ``[batch]`` reached and their depth, and returns a token for each.
    """
    drafted = drafted_nodes(tree)
    node = torch.zeros_like(tree.num_nodes)
    going = torch.ones_like(node, dtype=torch.bool)
    accepted = node
    token = node
    visited = []
    for depth in range(tree.length + 1):
        token = torch.where(going, next_token(node, depth), token)
        if depth == tree.length:
            break
        child = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == token.unsqueeze(1))
        matching = child & drafted
        going = going & matching.any(dim=1)
        node = torch.where(going, first_true(matching), node)
        accepted = accepted + going
        visited.append(node)
    return Verdict(path_nodes=torch.stack(visited, dim=1), accepted=accepted, token_ids=token)


def descend(
    tree: DraftTree,
    target: TargetProbs,
    uniforms: VerifyUniforms,
    children: Tensor,
    weight: Tensor,
    ids: Tensor,
    draft: Tensor,
) -> Verdict:
    """Follow decisions, made at all nodes at once, and draw the correction token at their end.

    ``children`` ``[batch, nodes]`` int64 is the child accepted at each node, 0 where the walk ends.
    The residual there is ``max(weight * p - draft, 0)``, ``weight`` ``[batch, nodes]`` float64 and
    ``draft`` ``[batch, nodes, width]`` float64 over ``ids``.
    """
    node = torch.zeros_like(tree.num_nodes)
    accepted = node
    visited = []
    for _ in range(tree.length):
        child = entry_at(children, node)
        accepted = accepted + (child > 0)
        node = torch.where(child > 0, child, node)
        visited.append(node)
    residual = Residual.at(node, weight, ids, draft)
    token_ids = correction_token(residual, target, uniforms.correction)
    return Verdict(torch.stack(visited, dim=1), accepted, token_ids)


def drafts_in_order(tree: DraftTree, uniforms: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the draws of each number, one of every level, ``[batch, length]`` each.

    That is the nodes each was drawn at, those they led to, whether there is such a draw, and its
    acceptance number, depth * drafts + number in ``uniforms``. The draws at a node come in order.
    Where there is no draw, it counts as drawn at the last node, which has no children.
    """
    real = tree.draws > 0
    parents = tree.parents.gather(1, tree.draws.flatten(1)).view_as(tree.draws)
    parents = torch.where(real, parents, (tree.num_nodes - 1).view(-1, 1, 1))
    numbers = uniforms[:, : tree.drafts * tree.length].view_as(tree.draws)
    columns = (parents, tree.draws, real, numbers)
    return zip(*(column.unbind(2) for column in columns), strict=True)


def numbers_of_children(tree: DraftTree, first: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch, nodes]``: the acceptance number of each node as its parent's child.

    It is that of its first draw, ``first`` ``[batch, nodes]`` int64 of its level.
    """
    at = (tree.depth - 1).clamp(min=0) * tree.drafts + first.clamp(max=tree.drafts - 1)
    return uniforms.gather(1, at)

"""The numbers by which rules decide, node by node, to show them; no verdict depends on them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from eaglegbv.devices import first_place, send
from eaglegbv.errors import InvalidProbabilities, SamplingMismatch, one_of
from eaglegbv.rng import Purpose, RequestRng
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.paths import (
    DraftedPath,
    Residual,
    correction_token,
    drafted_nodes,
    draw,
    places_of_tokens,
    rooted,
    rows_at,
    steps_of,
)

NodeFigures: TypeAlias = Mapping[str, Tensor]
"""Numbers by their letter in the documentation, ``[batch, nodes]`` float64 each; NaN at nodes for
which the rule had none."""


def along_path(tree: DraftTree, path: DraftedPath, values: Tensor) -> Tensor:
    """Return the numbers along a path at the places of its nodes in the tree.

    Args:
        tree: The draft trees.
        path: A path of each.
        values: ``[batch, length]`` float64, at depths 1 ... length; those past a path's end are
            ignored.

    Returns:
        ``[batch, nodes]`` float64, NaN at all other nodes.
    """
    placed = torch.full_like(tree.depth, torch.nan, dtype=torch.float64)
    for step, real in enumerate(_steps(path)):
        here = path.nodes[:, step + 1].unsqueeze(1)
        value = torch.where(real, values[:, step : step + 1], placed.gather(1, here))
        placed = placed.scatter(1, here, value)
    return placed


def at_children(tree: DraftTree, path: DraftedPath, dists: Tensor) -> Tensor:
    """Return the probability of every child of a path's nodes, by the distribution at that node.

    Args:
        tree: The draft trees.
        path: A path of each.
        dists: ``[batch, length, width]`` float64, over the path's support.

    Returns:
        ``[batch, nodes]`` float64, NaN at all other nodes.
    """
    placed = torch.full_like(tree.depth, torch.nan, dtype=torch.float64)
    for step, real in enumerate(_steps(path)):
        child = (tree.parents == path.nodes[:, step : step + 1]) & (tree.depth == step + 1) & real
        same = path.ids[:, step].unsqueeze(1) == tree.token_ids.unsqueeze(2)
        probs = torch.where(same, dists[:, step].unsqueeze(1), 0.0).sum(dim=2)
        placed = torch.where(child, probs, placed)
    return placed


def _steps(path: DraftedPath) -> list[Tensor]:
    """Return for each step ``[batch, 1]`` bool: whether the path takes it."""
    return [(path.lengths > step).unsqueeze(1) for step in range(path.draft.shape[1])]


# The interface of verifiers: pure functions of (draft tree, target distribution, uniforms).


_PURPOSES = (Purpose.SELECTION, Purpose.ACCEPTANCE, Purpose.CORRECTION)


@dataclass(frozen=True, slots=True)
class VerifyUniforms:
    """The random numbers one verification may use, float64 in [0, 1).

    Attributes:
        selection: ``[batch, length, paths, 2]``: two for each path at each depth.
        acceptance: ``[batch, paths * length]``: one for each acceptance test.
        correction: ``[batch]``: the correction or bonus token.
    """

    selection: Tensor
    acceptance: Tensor
    correction: Tensor

    @classmethod
    def draw(
        cls,
        streams: Sequence[RequestRng],
        steps: Sequence[int],
        *,
        paths: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own stream at its own step counter."""
        counts = _counts(paths, length)
        wanted = [(p, n) for p, n in zip(_PURPOSES, counts, strict=True) if n > 0]
        drawn = [
            np.concatenate([s.draw(t, purpose, n) for purpose, n in wanted])
            for s, t in zip(streams, steps, strict=True)
        ]
        # One copy to the device for all of them.
        numbers = send(torch.from_numpy(np.array(drawn)), device)
        return cls.of_numbers(numbers, paths=paths, length=length)

    @classmethod
    def of_numbers(cls, numbers: Tensor, *, paths: int, length: int) -> Self:
        """Split ``numbers`` ``[batch, 3 * paths * length + 1]`` in the order of the fields."""
        selection, acceptance, correction = numbers.split_with_sizes(_counts(paths, length), dim=1)
        return cls(
            selection=selection.view(len(numbers), length, paths, 2),
            acceptance=acceptance,
            correction=correction.squeeze(1),
        )


def _counts(paths: int, length: int) -> tuple[int, int, int]:
    """Return how many numbers each purpose needs."""
    return 2 * paths * length, paths * length, 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification commits, per request.

    Attributes:
        path_nodes: ``[batch, length]`` int64, nodes of the selected path at depths 1 ... length;
            meaningful up to ``accepted``.
        accepted: ``[batch]`` int64, number of accepted nodes, 0 ... length.
        token_ids: ``[batch]`` int64, the correction token, or the bonus token where the whole path
            was accepted.
    """

    path_nodes: Tensor
    accepted: Tensor
    token_ids: Tensor


class Rule(ABC):
    """The facts that every verification rule states about itself.

    A rule is lossless for the draft samplings it names: the committed text follows the target's distribution
    exactly, whatever the drafter proposed.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section, equation."""
    cost: ClassVar[str]
    """Work of one verification: K paths, length L, N nodes, draft distributions of width W."""
    draft_samplings: ClassVar[frozenset[DraftSampling]]
    """Draft samplings the rule is lossless for."""
    default_sampling: ClassVar[DraftSampling] = DraftSampling.IID
    """The distribution to draft with when the user names none."""
    max_paths: ClassVar[int | None] = None
    """Most paths the rule can use; ``None`` for any number."""

    def fitting_paths(self, paths: int) -> int:
        """Return as many of ``paths`` as the rule can use."""
        return paths if self.max_paths is None else min(paths, self.max_paths)

    def check_sampling(self, draft_sampling: DraftSampling, paths: int) -> None:
        """Raise :class:`SamplingMismatch` unless the verifier is lossless for ``paths`` of ``draft_sampling``."""
        if draft_sampling not in self.draft_samplings:
            expected = f"{one_of(sorted(self.draft_samplings))} for verifier {self.name!r}"
            raise SamplingMismatch("draft_sampling", str(draft_sampling), expected)
        if self.max_paths is not None and paths > self.max_paths:
            raise SamplingMismatch("paths", paths, f"at most {self.max_paths} for {self.name!r}")


class Verifier(Rule):
    """A rule that turns a draft tree and the target's distributions into committed tokens.

    Each step is lossless by itself. A subclass implements :meth:`judge`; callers use
    :meth:`verify`.
    """

    one_graph: ClassVar[bool] = False
    """Whether :meth:`judge` runs one graph of tensor operations on independent paths of any size:
    neither values nor sizes decide which operations run, or how often."""

    def verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge the drafts of a batch; a tree of a root alone yields a sample of its target distribution.

        Nothing is read on the host. Faulty probabilities are found by
        :func:`eaglegbv.verifiers.base.find_faults`, whose result the caller reads together with
        the verdict, before committing.

        Raises:
            SamplingMismatch: The tree's draft sampling is not among :attr:`draft_samplings`.
        """
        if tree.length == 0:
            return self._sample_roots(tree, target, uniforms)
        self.check_sampling(tree.draft_sampling, tree.paths)
        return self.judge(tree, target, uniforms)

    @abstractmethod
    def judge(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of an accepted distribution and of at least one step."""

    def figures(
        self,
        tree: DraftTree,  # noqa: ARG002
        target: TargetProbs,  # noqa: ARG002
        uniforms: VerifyUniforms,  # noqa: ARG002
    ) -> NodeFigures:
        """Return the numbers, beside p and q, by which :meth:`judge` decides.

        Most rules have none; a rule that weighs prefixes returns its weights.
        """
        return {}

    def _sample_roots(
        self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms
    ) -> Verdict:
        roots = torch.zeros_like(tree.num_nodes)
        return Verdict(
            path_nodes=tree.token_ids.new_zeros((tree.batch, 0)),
            accepted=roots,
            token_ids=draw(target.probs_of(roots), uniforms.correction),
        )


# Faulty probabilities: found on the device, reported before anything is committed.
#
# :func:`find_faults` reads nothing on the host, so an engine reads its answer together with the
# verdict it belongs to, and fails only the requests that are faulty.


TOLERANCE = 1e-6
"""How far the sum of a distribution may be from one."""


class Fault(IntFlag):
    """What may be wrong with the probabilities of a request; flags combine."""

    TARGET_NOT_FINITE = 1
    DRAFT_NOT_NORMALISED = 2
    IMPOSSIBLE_DRAFT = 4


_MESSAGES = {
    Fault.TARGET_NOT_FINITE: ("target logits", "NaN or infinite", "logits with a finite logsumexp"),
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

    Draft samplings are checked only at nodes with children, and not at all in ``fixed`` trees, whose
    children follow no distribution.
    """
    normalisers = target.log_normaliser.take(target.rows)
    # A number minus itself is 0, or NaN where it is not finite.
    faults = ((normalisers - normalisers).sum(dim=1) != 0) * int(Fault.TARGET_NOT_FINITE)
    if tree.draft_sampling is DraftSampling.FIXED:
        return faults
    dists = tree.draft_probs
    # Written so that NaN is a fault too.
    sound = ((dists.sum(dim=2) - 1).abs() <= TOLERANCE) & (dists.amin(dim=2) >= 0)
    needed = torch.stack((sound.gather(1, tree.parents), _possible(tree)), dim=1)
    # Greater than, of truth values: drafted but not sound, drafted but not possible.
    broken, impossible = (drafted_nodes(tree).unsqueeze(1) > needed).any(dim=2).unbind(1)
    faults = torch.add(faults, broken, alpha=int(Fault.DRAFT_NOT_NORMALISED))
    return torch.add(faults, impossible, alpha=int(Fault.IMPOSSIBLE_DRAFT))


def _possible(tree: DraftTree) -> Tensor:
    """Return ``[batch, nodes]`` bool: whether the distribution of a node's parent can draw its token."""
    tokens = rows_at(torch.where(tree.draft_probs > 0, tree.draft_ids, -1), tree.parents)
    return (tokens == tree.token_ids.unsqueeze(2)).any(dim=2)


def fault_error(faults: int, request: int) -> InvalidProbabilities:
    """Return the error that describes the first of a request's ``faults``.

    Args:
        faults: Its flags from :func:`find_faults`, not 0.
        request: The request's number, for the message.
    """
    first = next(fault for fault in Fault if fault & faults)
    argument, value, expected = _MESSAGES[first]
    return InvalidProbabilities(f"{argument} of request {request}", value, expected)


def check_inputs(tree: DraftTree, target: TargetProbs) -> None:
    """Check a batch on the host, the sums of the target's distributions included: one pass over the logits.

    Raises:
        InvalidProbabilities: A distribution does not sum to one or holds NaN, or a drafted token has draft
            probability zero.
    """
    for request, faults in enumerate(find_faults(tree, target).tolist()):
        if faults:
            raise fault_error(faults, request)
    sums = torch.logsumexp(target.logits.to(torch.float64), dim=1) - target.log_normaliser
    for row, total in enumerate(sums.exp().tolist()):
        if not abs(total - 1) <= TOLERANCE:
            raise InvalidProbabilities(
                f"target distribution of row {row}",
                f"sum {total}",
                f"a sum of 1 within {TOLERANCE:g}",
            )


# Walks down a draft tree along tokens that do not depend on the drafts.


def walk(tree: DraftTree, next_token: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Follow ``next_token`` from the root for as long as it names a child.

    Args:
        tree: The draft trees.
        next_token: Takes the nodes ``[batch]`` reached and their depth; returns a token for each.
    """
    drafted = drafted_nodes(tree)
    node = torch.zeros_like(tree.num_nodes)
    going = torch.ones_like(node, dtype=torch.bool)
    accepted, token, visited = node, node, []
    for depth in range(tree.length + 1):
        token = torch.where(going, next_token(node, depth), token)
        if depth == tree.length:
            break
        child = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == token.unsqueeze(1))
        found = child & drafted
        going = going & found.any(dim=1)
        node = torch.where(going, first_place(found), node)
        accepted = accepted + going
        visited.append(node)
    return Verdict(path_nodes=torch.stack(visited, dim=1), accepted=accepted, token_ids=token)


# Target and draft distributions that rejections change, at all nodes of a batch of trees.


@dataclass(slots=True)
class RemainingProbs:
    """What is left of p at each node, on the support of its draft distribution and off it, and of q.

    Attributes:
        ids: ``[batch, nodes, width]`` int64.
        probs: ``[batch, nodes, width]`` float64, p at ``ids`` as it was.
        left: ``[batch, nodes, width]`` float64, what is left of p at ``ids``, normalised.
        beside: ``[batch, nodes]`` float64, the mass left off the support.
        scale: ``[batch, nodes]`` float64, what is left of a token off the support, over its p.
        draft: ``[batch, nodes, width]`` float64, q given the tokens lost.
        places: ``[batch, nodes]`` int64, the place of each node's token in its parent's ids.
    """

    ids: Tensor
    probs: Tensor
    left: Tensor
    beside: Tensor
    scale: Tensor
    draft: Tensor
    places: Tensor

    @classmethod
    def of(cls, tree: DraftTree, target: TargetProbs) -> Self:
        """Start with p and q themselves."""
        probs = target.probs_at(tree.draft_ids) * (tree.draft_probs > 0)
        beside = (1 - probs.sum(dim=2)).clamp(min=0)
        return cls(
            ids=tree.draft_ids,
            probs=probs,
            left=probs,
            beside=beside,
            scale=torch.ones_like(beside),
            draft=tree.draft_probs,
            places=places_of_tokens(tree, tree.draft_ids, tree.draft_probs),
        )

    @property
    def taken(self) -> Tensor:
        """``[batch, nodes, width]``: what is left of p is ``scale * p`` minus this."""
        return self.scale.unsqueeze(2) * self.probs - self.left

    def ratios(self, parents: Tensor, children: Tensor) -> Tensor:
        """Return (what is left of p) / q of the tokens of ``children``, ``[batch, steps]``."""
        at = parents * self.left.shape[2] + self.places.gather(1, children)
        return self.left.flatten(1).gather(1, at) / self.draft.flatten(1).gather(1, at)

    def subtract(self, nodes: Tensor, weights: Tensor, where: Tensor) -> Tensor:
        """Replace what is left of p by ``(w left - q)+``, normalised, at some nodes.

        Args:
            nodes: ``[batch, steps]`` int64, different where ``where`` holds.
            weights: ``[batch, steps]`` float64, w.
            where: ``[batch, steps]`` bool: which to change. Nodes at which nothing would be left
                stay as they are.

        Returns:
            ``[batch, steps]`` float64, the mass before normalising.
        """
        left, draft = rows_at(self.left, nodes), rows_at(self.draft, nodes)
        beside, scale = self.beside.gather(1, nodes), self.scale.gather(1, nodes)
        rest = (weights.unsqueeze(2) * left - draft).clamp(min=0)
        mass = rest.sum(dim=2) + weights * beside
        changed = where & (mass > 0)
        rows = torch.where(changed.unsqueeze(2), rest / mass.unsqueeze(2), left)
        self.left = _replaced(self.left, nodes, rows)
        beside = torch.where(changed, weights * beside / mass, beside)
        self.beside = self.beside.scatter(1, nodes, beside)
        scale = torch.where(changed, weights * scale / mass, scale)
        self.scale = self.scale.scatter(1, nodes, scale)
        return mass

    def lose(self, parents: Tensor, children: Tensor, where: Tensor) -> None:
        """Restrict q to the tokens other than those of ``children``, at some ``parents``."""
        draft = rows_at(self.draft, parents)
        rest = draft.scatter(2, self.places.gather(1, children).unsqueeze(2), 0.0)
        total = rest.sum(dim=2, keepdim=True)
        rest = torch.where(total > 0, rest / total, rest)
        rows = torch.where(where.unsqueeze(2), rest, draft)
        self.draft = _replaced(self.draft, parents, rows)


def _replaced(table: Tensor, nodes: Tensor, rows: Tensor) -> Tensor:
    return table.scatter(1, nodes.unsqueeze(2).expand_as(rows), rows)


# Rules that walk down a tree and stop at the node where they leave it.
#
# What happens at a node does not depend on the nodes above it, so such a rule decides at all nodes at
# once, and the walk then follows its decisions.


@dataclass(frozen=True, slots=True)
class Decisions:
    """Where the walk goes from each node, and what follows if it stops there.

    Attributes:
        children: ``[batch, nodes]`` int64, the child accepted at each node, 0 where it stops.
        weight: ``[batch, nodes]`` float64; the residual is ``max(weight * p - draft, 0)``.
        draft: ``[batch, nodes, width]`` float64, over ``ids``.
        ids: ``[batch, nodes, width]`` int64.
    """

    children: Tensor
    weight: Tensor
    draft: Tensor
    ids: Tensor


def descend(
    tree: DraftTree, decisions: Decisions, target: TargetProbs, uniforms: VerifyUniforms
) -> Verdict:
    """Follow ``decisions`` from the root and draw the correction token where they stop."""
    node = torch.zeros_like(tree.num_nodes)
    accepted, visited = node, []
    for _ in range(tree.length):
        child = decisions.children.gather(1, node.unsqueeze(1)).squeeze(1)
        accepted = accepted + (child > 0)
        node = torch.where(child > 0, child, node)
        visited.append(node)
    at = node.unsqueeze(1)
    residual = Residual(
        nodes=node,
        weight=decisions.weight.gather(1, at).squeeze(1),
        ids=rows_at(decisions.ids, at).squeeze(1),
        draft=rows_at(decisions.draft, at).squeeze(1),
    )
    return Verdict(
        path_nodes=torch.stack(visited, dim=1),
        accepted=accepted,
        token_ids=correction_token(residual, target, uniforms.correction),
    )


@dataclass(frozen=True, slots=True)
class DraftCopies:
    """The drafts that one path carries, one below each of its nodes, ``[batch, length]`` each.

    Attributes:
        parents: int64, the nodes it was drawn at.
        children: int64, the nodes it leads to.
        real: bool, False past the path's end.
        uniforms: float64, the numbers of their acceptance tests: depth * paths + path.
    """

    parents: Tensor
    children: Tensor
    real: Tensor
    uniforms: Tensor


def draft_copies(tree: DraftTree, uniforms: Tensor) -> list[DraftCopies]:
    """Return the drafts of every path, in the order drawn.

    Args:
        tree: The draft trees.
        uniforms: ``[batch, paths * length]``.
    """
    numbers = uniforms[:, : tree.paths * tree.length].view(tree.batch, tree.length, tree.paths)
    real = steps_of(tree)
    return [
        DraftCopies(
            parents=rooted(tree.path_nodes[:, k])[:, :-1],
            children=tree.path_nodes[:, k],
            real=real[:, k],
            uniforms=numbers[:, :, k],
        )
        for k in range(tree.paths)
    ]


def numbers_of_children(tree: DraftTree, first: Tensor, uniforms: Tensor) -> Tensor:
    """Return ``[batch, nodes]``: the acceptance number of each node as its parent's child.

    Args:
        tree: The draft trees.
        first: ``[batch, nodes]`` int64, the path whose number each node uses.
        uniforms: ``[batch, at least paths * length]``.
    """
    at = (tree.depth - 1).clamp(min=0) * tree.paths + first.clamp(max=tree.paths - 1)
    return uniforms.gather(1, at)

"""From SGLang's numbers of nodes to a :class:`DraftTree`, and from a verdict on it back to them.

SGLang's trees have a constant number of nodes, ``K L + 1``; see
:mod:`eaglegbv.backends.sglang.tree_layout`. Verifiers see those that represent a path.

On a GPU one kernel does each of both ways; elsewhere the tensor code does, which is the reference.
Nothing is read on the host, so both may run inside a CUDA graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.backends.sglang.tree_layout import ShortProbs
from eaglegbv.devices import runs_kernels
from eaglegbv.drafters.tree_growth import Frontier, first_equal
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.utils import power_of_two
from eaglegbv.verifiers.base import Verdict
from eaglegbv.verifiers.paths import rows_at


@dataclass(frozen=True, slots=True)
class NumberedTree:
    """A draft tree, and SGLang's numbers of its nodes."""

    tree: DraftTree  # the tree; nodes that represent no path come last, as padding
    # [batch, nodes] int64, SGLang's number of each node, counted through the batch; padding has the
    # root's. It is also the row of the target's distribution there.
    rows: Tensor


def draft_tree(tokens: Tensor, packed: Tensor, paths: int) -> NumberedTree:
    """Build the trie of the paths; of a greedy request, whose tree is another, a trie all the same.

    Args:
        tokens: ``[batch, nodes]`` int64 in SGLang's order: the last committed token, then those
            drawn at each depth.
        packed: ``[batch, 1 + (length - 1) * paths, 2, width]`` float64, the distributions at the
            root and after each path's tokens but the last, packed.
        paths: K.
    """
    if runs_kernels(tokens.device):
        return _launch_numbering(tokens, packed, paths)
    K, L = paths, (tokens.shape[1] - 1) // paths
    drawn = tokens[:, 1:].view(-1, L, K)
    levels = [first_equal(Frontier(drawn[:, 0]))]
    for depth in range(1, L):
        levels.append(first_equal(Frontier(drawn[:, depth]), levels[-1]))
    nodes = torch.arange(K * L + 1, device=tokens.device).expand(len(tokens), -1)
    standing = torch.stack(levels, dim=1)  # [batch, L, K]
    # SGLang's number of the node that represents each path at each depth, and of the one above.
    represents = nodes[:, 1::K].unsqueeze(2) + standing
    above = pad(represents[:, :-1], (0, 0, 1, 0)).flatten(1)
    stands = pad((represents.flatten(1) == nodes[:, 1:]).long(), (1, 0), value=1)
    numbers = (1 - stands).argsort(dim=1, stable=True)
    places = torch.empty_like(numbers).scatter_(1, numbers, nodes)
    kept = stands.gather(1, numbers)

    def arranged(table: Tensor) -> Tensor:
        return table.gather(1, numbers) * kept

    # The last nodes are leaves, so they have no distribution.
    table = pad(packed.flatten(2), (0, 0, 0, K))
    table = rows_at(table, numbers) * kept.unsqueeze(2)
    probs = ShortProbs.unpack(table.unflatten(2, (2, -1)))
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=arranged(tokens),
        parents=arranged(places.gather(1, pad(above, (1, 0)))),
        depth=arranged((nodes + K - 1) // K),
        num_nodes=stands.sum(dim=1),
        draws=places.gather(1, represents.flatten(1)).view(-1, L, K),
        draft_ids=probs.ids,
        draft_probs=probs.probs,
        columns=True,
    )
    requests = torch.arange(len(tokens), device=tokens.device)
    roots = requests.unsqueeze(1) * tokens.shape[1]
    return NumberedTree(tree, roots + arranged(nodes))


def _launch_numbering(tokens: Tensor, packed: Tensor, paths: int) -> NumberedTree:
    from eaglegbv.backends.sglang import kernels

    batch, nodes = tokens.shape
    length, width = (nodes - 1) // paths, packed.shape[3]
    token_ids, parents, depth, rows = tokens.new_empty((4, batch, nodes))
    num_nodes = tokens.new_empty(batch)
    draws = tokens.new_empty((batch, length, paths))
    draft_ids = tokens.new_empty((batch, nodes, width))
    draft_probs = packed.new_empty((batch, nodes, width))
    kernels.number_nodes[(batch, nodes)](
        tokens.contiguous(),
        packed.contiguous(),
        token_ids,
        parents,
        depth,
        rows,
        num_nodes,
        draws,
        draft_ids,
        draft_probs,
        paths,
        length,
        width,
        PATHS=power_of_two(max(2, paths)),
        BLOCK=power_of_two(max(2, width)),
    )
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=token_ids,
        parents=parents,
        depth=depth,
        num_nodes=num_nodes,
        draws=draws,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        columns=True,
    )
    return NumberedTree(tree, rows)


class Acceptance(NamedTuple):
    """A verdict as SGLang's kernels report it; nodes are numbered through the batch."""

    tokens: Tensor  # [batch, nodes] int64, at the root and each accepted node, the token after it
    nodes: Tensor  # [batch, length + 1] int64, the root and the accepted nodes, then -1
    accepted: Tensor  # [batch] int64, number of accepted nodes without the root


def acceptance(verdict: Verdict, numbered: NumberedTree) -> Acceptance:
    """Convert a verdict to SGLang's numbering."""
    tree = numbered.tree
    if runs_kernels(tree.token_ids.device):
        return _launch_report(verdict, numbered)
    accepted = verdict.accepted.unsqueeze(1)
    steps = torch.arange(tree.length + 1, device=tree.token_ids.device)
    # Steps beyond the last accepted node repeat it, so that they write the same values.
    path = pad(verdict.path_nodes, (1, 0)).gather(1, torch.minimum(steps, accepted))
    following = pad(tree.token_ids.gather(1, path)[:, 1:], (0, 1))
    following = torch.where(steps < accepted, following, verdict.token_ids.unsqueeze(1))
    at = numbered.rows.gather(1, path)
    tokens = torch.zeros_like(tree.token_ids)
    tokens.view(-1).scatter_(0, at.flatten(), following.flatten())
    return Acceptance(tokens, torch.where(steps <= accepted, at, -1), verdict.accepted)


def _launch_report(verdict: Verdict, numbered: NumberedTree) -> Acceptance:
    from eaglegbv.backends.sglang import kernels

    tree = numbered.tree
    tokens = torch.empty_like(tree.token_ids)
    nodes = tokens.new_empty((tree.batch, tree.length + 1))
    kernels.report_paths[(tree.batch,)](
        verdict.path_nodes.contiguous(),
        verdict.accepted.contiguous(),
        verdict.token_ids.contiguous(),
        tree.token_ids,
        numbered.rows,
        tokens,
        nodes,
        tree.length,
        tree.nodes,
        STEPS=power_of_two(tree.length + 1),
        NODES=power_of_two(tree.nodes),
    )
    return Acceptance(tokens, nodes, verdict.accepted)

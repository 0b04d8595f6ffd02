"""K paths of length L as one tree: in SGLang's numbering, and as a :class:`DraftTree`.

SGLang's trees have a constant number of nodes, ``K L + 1``: node ``1 + i K + k`` is the token that
path k drew at depth ``i + 1``. Paths with equal prefixes share the node of the first of them, which
represents all. The nodes of the others remain as leaves without children, which no verifier sees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglegbv.backends.sglang.short_probs import ShortProbs
from eaglegbv.tree import DraftSampling, DraftTree


class GrowingPaths:
    """The tokens of the paths so far, and which path represents each."""

    def __init__(self, roots: Tensor) -> None:
        """Start with the tokens of depth 1, ``[batch, paths]`` int64."""
        self.tokens = [roots]
        self.standing = [_first_equal(roots.unsqueeze(2) == roots.unsqueeze(1))]

    def grow(self, tokens: Tensor) -> None:
        """Add the tokens of the next depth, ``[batch, paths]``."""
        standing = self.standing[-1]
        same = (standing.unsqueeze(2) == standing.unsqueeze(1)) & (
            tokens.unsqueeze(2) == tokens.unsqueeze(1)
        )
        self.tokens.append(tokens)
        self.standing.append(_first_equal(same))


def _first_equal(same: Tensor) -> Tensor:
    """Return, for each row of ``[batch, paths, paths]`` bool, the first column that is true."""
    return same.to(torch.uint8).argmax(dim=2)


@dataclass(frozen=True, slots=True)
class SGLangTree:
    """Inputs from which SGLang builds its tree; see its ``build_tree_kernel_efficient``.

    SGLang numbers candidates by the place at which they are found: those below path r at depth
    ``i + 1`` are ``K + K^2 (i - 1) + r K + k``. It finds a node's parent by
    ``parents[number // K]``.

    Attributes:
        parents: ``[batch, 1 + K (L - 1)]`` int64, or ``[batch, 0]`` where L is 1.
        numbers: ``[batch, K L]`` int64.
        tokens: ``[batch, K L]`` int64.
    """

    parents: Tensor
    numbers: Tensor
    tokens: Tensor


def sglang_tree(paths: GrowingPaths) -> SGLangTree:
    """Number the nodes as SGLang does."""
    batch, K = paths.tokens[0].shape
    own = torch.arange(K, device=paths.tokens[0].device).expand(batch, -1)
    levels = [own]
    for i, standing in enumerate(paths.standing[:-1]):
        levels.append(K + K * K * i + K * standing + own)
    roots = torch.arange(-1, K, device=own.device).expand(batch, -1)
    parents = torch.cat((roots, *levels[1:-1]), dim=1) if len(levels) > 1 else own[:, :0]
    return SGLangTree(
        parents=parents.contiguous(),
        numbers=torch.cat(levels, dim=1).contiguous(),
        tokens=torch.cat(paths.tokens, dim=1).contiguous(),
    )


@dataclass(frozen=True, slots=True)
class NumberedTree:
    """A draft tree, and SGLang's numbers of its nodes.

    Attributes:
        tree: The tree; nodes that represent no path come last, as padding.
        numbers: ``[batch, nodes]`` int64, SGLang's number of each node within its request.
    """

    tree: DraftTree
    numbers: Tensor


def draft_tree(
    last: Tensor, tokens: Tensor, root_probs: ShortProbs, inner_probs: ShortProbs
) -> NumberedTree:
    """Build the trie of the paths.

    Args:
        last: ``[batch]`` int64, the last committed token.
        tokens: ``[batch, length, paths]`` int64, as drawn.
        root_probs: ``[batch, width]``, the distributions at the roots.
        inner_probs: ``[batch, length - 1, paths, width]``, the distributions after each path's tokens.
    """
    batch, L, K = tokens.shape
    paths = GrowingPaths(tokens[:, 0])
    for depth in range(1, L):
        paths.grow(tokens[:, depth])
    standing = torch.stack(paths.standing, dim=1)
    own = torch.arange(K, device=tokens.device)
    offsets = 1 + K * torch.arange(L, device=tokens.device).unsqueeze(1)
    stands = torch.cat((torch.ones_like(last).bool().unsqueeze(1), (standing == own).flatten(1)), 1)
    numbers = (~stands).to(torch.uint8).argsort(dim=1, stable=True)
    places = torch.empty_like(numbers).scatter_(
        1, numbers, torch.arange(K * L + 1, device=tokens.device).expand(batch, -1)
    )
    above = torch.cat((torch.zeros_like(standing[:, :1]), (offsets + standing)[:, :-1]), dim=1)
    above = torch.cat((torch.zeros_like(above[:, :1, :1]).flatten(1), above.flatten(1)), dim=1)
    depths = (torch.arange(K * L + 1, device=tokens.device) + K - 1) // K
    ids, probs = _node_probs(root_probs, inner_probs, K)
    kept = stands.gather(1, numbers)

    def arranged(table: Tensor) -> Tensor:
        return torch.where(kept, table.gather(1, numbers), 0)

    wide = numbers.unsqueeze(2).expand(-1, -1, ids.shape[2])
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=arranged(torch.cat((last.unsqueeze(1), tokens.flatten(1)), dim=1)),
        parents=arranged(places.gather(1, above)),
        depth=arranged(depths.expand(batch, -1)),
        num_nodes=stands.sum(dim=1),
        path_nodes=places.gather(1, (offsets + standing).flatten(1)).view(batch, L, K).mT,
        path_lengths=torch.full((batch, K), L, dtype=torch.int64, device=tokens.device),
        draft_ids=ids.gather(1, wide),
        draft_probs=probs.gather(1, wide) * kept.unsqueeze(2),
    )
    return NumberedTree(tree, numbers)


def _node_probs(root: ShortProbs, inner: ShortProbs, paths: int) -> tuple[Tensor, Tensor]:
    """Return ids and probabilities ``[batch, nodes, width]`` in SGLang's order, 0 at leaves."""
    ids = torch.cat((root.ids.unsqueeze(1), inner.ids.flatten(1, 2)), dim=1)
    probs = torch.cat((root.probs.unsqueeze(1), inner.probs.flatten(1, 2)), dim=1)
    pad = (0, 0, 0, paths)
    return torch.nn.functional.pad(ids, pad), torch.nn.functional.pad(probs, pad)

"""K paths of length L as one tree: in SGLang's numbering, and as a :class:`DraftTree`.

SGLang's trees have a constant number of nodes, ``K L + 1``: node ``1 + i K + k`` is the token that
path k drew at depth ``i + 1``. Paths with equal prefixes share the node of the first of them, which
represents all. The nodes of the others remain as leaves without children, which no verifier sees.

Everything here may run inside a CUDA graph: nothing is read on the host.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.tree import DraftSampling, DraftTree


@dataclass(frozen=True, slots=True)
class ShortProbs:
    """Distributions of the next drafted token, as short lists.

    Attributes:
        ids: ``[..., width]`` int64 target token ids, most likely first.
        probs: ``[..., width]`` float64, normalised once; the same numbers are sampled from and
            passed to the verifier.
    """

    ids: Tensor
    probs: Tensor

    @classmethod
    def of_logits(
        cls, logits: Tensor, temperatures: Tensor, *, width: int, target_ids: Tensor | None
    ) -> Self:
        """Keep the ``width`` most likely tokens, apply the temperature, and normalise.

        Any distribution is lossless as long as it is the one that is sampled from. So a head whose
        logits are NaN drafts the first of its tokens with certainty, and decoding continues as if
        without speculation.

        Args:
            logits: ``[rows, draft_vocab]``.
            temperatures: ``[rows, 1]``, above 0.
            width: Number of candidates to keep; fewer if the vocabulary is smaller.
            target_ids: ``[draft_vocab]`` int64, the target's id of each draft token; None if both
                have the same vocabulary.
        """
        values, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
        values = values.double()
        probs = ((values - values[:, :1]) / temperatures).softmax(dim=-1)
        certain = torch.zeros_like(probs)
        certain[:, 0] = 1
        probs = torch.where(probs.isfinite().all(dim=-1, keepdim=True), probs, certain)
        return cls(ids if target_ids is None else target_ids[ids], probs)

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """Undo :meth:`pack`."""
        return cls(packed[..., 0, :].to(torch.int64), packed[..., 1, :])

    def pack(self) -> Tensor:
        """Return ``[..., 2, width]`` float64: ids, which are exact there, and probabilities."""
        return torch.stack((self.ids.to(torch.float64), self.probs), dim=-2)

    def pick(self, uniforms: Tensor) -> Tensor:
        """Draw tokens ``[...]`` by inverse CDF, never one of probability 0.

        Args:
            uniforms: ``[...]`` float64 in [0, 1).
        """
        cumulative = self.probs.cumsum(dim=-1)
        total = cumulative[..., -1:]
        # Entries of probability 0 are at the end, as the distributions are sorted; the sum stays
        # constant there.
        limit = torch.nextafter(total, torch.zeros_like(total))
        threshold = torch.minimum(uniforms.unsqueeze(-1) * total, limit)
        place = (cumulative <= threshold).sum(dim=-1, keepdim=True)
        return self.ids.gather(-1, place).squeeze(-1)

    def of_branches(self, branches: Tensor) -> Self:
        """Return ``[batch, paths, width]``: for each path, the distribution of the given branch.

        Args:
            branches: ``[batch, paths]`` int64; there are ``batch * paths`` rows.
        """
        ids, probs = (t.view(*branches.shape, -1) for t in (self.ids, self.probs))
        at = branches.unsqueeze(-1).expand_as(ids)
        return type(self)(ids.gather(1, at), probs.gather(1, at))


class GrowingPaths:
    """The tokens of the paths so far, and which path represents each."""

    def __init__(self, first: Tensor) -> None:
        """Start with the tokens of depth 1, ``[batch, paths]`` int64."""
        self.tokens: list[Tensor] = []
        self.standing: list[Tensor] = []
        self._add(first, first.unsqueeze(2) == first.unsqueeze(1))

    def grow(self, tokens: Tensor) -> None:
        """Add the tokens of the next depth, ``[batch, paths]``."""
        standing = self.standing[-1]
        same = standing.unsqueeze(2) == standing.unsqueeze(1)
        self._add(tokens, same & (tokens.unsqueeze(2) == tokens.unsqueeze(1)))

    def _add(self, tokens: Tensor, same: Tensor) -> None:
        self.tokens.append(tokens)
        self.standing.append(same.to(torch.uint8).argmax(dim=2))  # the first that is the same


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
        numbers=torch.cat(levels, dim=1),
        tokens=torch.cat(paths.tokens, dim=1),
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


def draft_tree(last: Tensor, tokens: Tensor, root: ShortProbs, packed: Tensor) -> NumberedTree:
    """Build the trie of the paths.

    Args:
        last: ``[batch]`` int64, the last committed token.
        tokens: ``[batch, length, paths]`` int64, as drawn.
        root: ``[batch, width]``, the distributions at the roots.
        packed: ``[batch, length - 1, paths, 2, width]``, those after each path's tokens, packed.
    """
    batch, L, K = tokens.shape
    paths = GrowingPaths(tokens[:, 0])
    for depth in range(1, L):
        paths.grow(tokens[:, depth])
    nodes = torch.arange(K * L + 1, device=tokens.device).expand(batch, -1)
    standing = torch.stack(paths.standing, dim=1)  # [batch, L, K]
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
    table = pad(torch.cat((root.pack().unsqueeze(1), packed.flatten(1, 2)), 1), (0, 0, 0, 0, 0, K))
    at = numbers[:, :, None, None].expand_as(table)
    probs = ShortProbs.unpack(table.gather(1, at))
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=arranged(torch.cat((last.unsqueeze(1), tokens.flatten(1)), dim=1)),
        parents=arranged(places.gather(1, pad(above, (1, 0)))),
        depth=arranged((nodes + K - 1) // K),
        num_nodes=stands.sum(dim=1),
        path_nodes=places.gather(1, represents.flatten(1)).view(batch, L, K).mT,
        path_lengths=torch.full((batch, K), L, dtype=torch.int64, device=tokens.device),
        draft_ids=probs.ids,
        draft_probs=probs.probs * kept.unsqueeze(2),
    )
    return NumberedTree(tree, numbers)

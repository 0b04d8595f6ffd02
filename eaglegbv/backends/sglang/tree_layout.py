"""The trees of a round as they grow, in SGLang's numbering.

SGLang's trees have a constant number of nodes, ``K L + 1``. In a sampled tree, node ``1 + i K + k``
is the token that path k drew at depth ``i + 1``. Paths with equal prefixes share the node of the
first of them, which represents all. The nodes of the others remain as leaves without children,
which no verifier sees. A greedy request has SGLang's own EAGLE-2 tree in the same batch.

Everything here may run inside a CUDA graph: nothing is read on the host.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from eaglegbv.devices import first_true, send
from eaglegbv.drafters.draft_probs import DraftProbs, pick_places
from eaglegbv.verifiers.paths import rows_at


class ShortProbs(DraftProbs):
    """Distributions ``[..., width]`` of the head's most likely tokens alone, most likely first.

    Before they are :meth:`tempered`, logits stand in the place of probabilities.
    """

    def tempered(self, temperatures: Tensor) -> Self:
        """Make probabilities of logits ``[rows, width]`` at ``temperatures`` ``[rows, 1]`` above 0.

        A head whose logits are NaN drafts the first of its tokens with certainty, which is
        lossless, so decoding continues as if without speculation.
        """
        probs = ((self.probs - self.probs[:, :1]) / temperatures).softmax(dim=-1)
        certain = torch.zeros_like(probs)
        certain[:, 0] = 1
        sound = probs.isfinite().all(dim=-1, keepdim=True)
        return type(self)(self.ids, torch.where(sound, probs, certain))

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """Undo :meth:`pack`."""
        return cls(packed[..., 0, :].to(torch.int64), packed[..., 1, :])

    def pack(self) -> Tensor:
        """Return ``[..., 2, width]`` float64: ids, which are exact there, and probabilities."""
        return torch.stack((self.ids.to(torch.float64), self.probs), dim=-2)

    def pick(self, uniforms: Tensor) -> Tensor:
        """Draw tokens by ``uniforms`` ``[...]`` float64 in [0, 1), never one of probability 0."""
        return self.ids.gather(-1, pick_places(self.probs, uniforms).unsqueeze(-1)).squeeze(-1)

    def of_branches(self, branches: Tensor) -> Self:
        """Return ``[batch, paths, width]``: of ``batch * paths`` rows, those of ``branches``."""
        every = (table.view(*branches.shape, -1) for table in (self.ids, self.probs))
        return type(self)(*(rows_at(table, branches) for table in every))


def representatives(tokens: Tensor, above: Tensor | None = None) -> Tensor:
    """Return which path represents each at a depth, the first with equal tokens up to there.

    ``tokens`` are ``[batch, paths]`` int64, and ``above`` the representatives of the depth before.
    """
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    return first_true(same if above is None else same & (above.unsqueeze(2) == above.unsqueeze(1)))


_LEAST_LIKELY, _MOST_LIKELY = -1e4, -1e-9
"""Limits of a token's log-probability in a greedy tree. A node always scores below its parent, and
so is never in a tree without it."""


class TreeGrowth:
    """The trees of a batch, growing by a row of the head for each of K branches and each depth.

    The branches of a sampled request are its paths. Those of a greedy request go on from the K most
    likely nodes of a depth, by the product of the head's probabilities along the way, and its tree
    are the K L most likely of all nodes, as in SGLang's EAGLE.

    Attributes:
        tokens: ``[batch, paths]`` int64, the branches' last tokens.
        origins: ``[batch, paths]`` int64, the branch of the depth before that each continues.
    """

    def __init__(self, roots: ShortProbs, uniforms: Tensor, greedy: Tensor) -> None:
        """Choose the tokens of depth 1.

        Args:
            roots: ``[batch, width]``, the distributions at the roots; a width of at least K.
            uniforms: ``[batch, paths, length]`` float64 in [0, 1).
            greedy: ``[batch, 1]`` bool.
        """
        batch, K, _ = uniforms.shape
        self._uniforms, self._greedy = uniforms, greedy
        self._branches = self.origins = torch.arange(K, device=uniforms.device).expand(batch, -1)
        self._numbers = [self._branches]
        likely = roots.ids[:, :K]
        self._best = roots.probs[:, :K].log().clamp(_LEAST_LIKELY, _MOST_LIKELY)
        self._scores, self._ids = [self._best], [likely]
        each = (table.unsqueeze(1).expand(-1, K, -1) for table in (roots.ids, roots.probs))
        self.tokens = torch.where(greedy, likely, ShortProbs(*each).pick(uniforms[:, :, 0]))
        self._levels = [self.tokens]
        self._standing = representatives(self.tokens)

    def grow(self, probs: ShortProbs, peaks: Tensor) -> ShortProbs:
        """Add a depth; return the distributions ``[batch, paths, width]`` it was drawn from.

        Args:
            probs: ``[batch * paths, width]``, the distributions after the branches' tokens.
            peaks: ``[batch * paths, 1]``, the log-probability of each one's most likely token among
                all tokens.
        """
        depth, K = len(self._numbers), self.tokens.shape[1]
        own = probs.of_branches(self._standing)
        likely = (probs.probs[:, :K] / probs.probs[:, :1]).log() + peaks
        likely = likely.nan_to_num(_LEAST_LIKELY).clamp(_LEAST_LIKELY, _MOST_LIKELY)
        scores = (self._best.unsqueeze(2) + likely.view(-1, K, K)).flatten(1)
        ids = probs.ids[:, :K].reshape(-1, K * K)
        self._scores.append(scores)
        self._ids.append(ids)
        self._best, best = scores.topk(K, dim=1)
        drawn = own.pick(self._uniforms[:, :, depth])
        places = torch.where(self._greedy, best, K * self._standing + self._branches)
        self._numbers.append(K + K * K * (depth - 1) + places)
        self.origins = torch.where(self._greedy, best // K, self._branches)
        self.tokens = torch.where(self._greedy, ids.gather(1, best), drawn)
        self._levels.append(self.tokens)
        self._standing = representatives(self.tokens, self._standing)
        return own

    def tree(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what SGLang builds its tree from; see its ``build_tree_kernel_efficient``.

        SGLang numbers candidates by the place at which they are found: those below branch r at
        depth ``i + 1`` are ``K + K^2 (i - 1) + r K + k``. It finds a node's parent by
        ``parents[number // K]``.

        Returns:
            Parents ``[batch, 1 + K (L - 1)]``, or ``[batch, 0]`` where L is 1, and the numbers and
            tokens ``[batch, K L]`` of the nodes; int64.
        """
        tokens = torch.cat(self._levels, dim=1)
        best = torch.cat(self._scores, dim=1).topk(tokens.shape[1], dim=1).indices
        best = best.sort(dim=1).values
        likely = torch.cat(self._ids, dim=1).gather(1, best)
        before = torch.arange(-1, self.tokens.shape[1], device=best.device).expand(len(best), -1)
        above = torch.cat((before, *self._numbers[1:-1]), dim=1)
        return (
            above if len(self._numbers) > 1 else above[:, :0],
            torch.where(self._greedy, best, torch.cat(self._numbers, dim=1)),
            torch.where(self._greedy, likely, tokens),
        )


def greedy_rows(sampling: Any) -> Tensor | None:
    """Return ``[batch]`` bool: who is greedy in a SamplingBatchInfo of SGLang's; None if nobody."""
    return sampling.top_ks == 1 if sampling.is_any_greedy else None


class RoundBuffers:
    """What changes from round to round, at fixed addresses: CUDA graphs read it there.

    A round needs from the round before only the head's most likely tokens at its root. They are
    kept by the request's slot in SGLang's pool, as is what SGLang carries from round to round.

    Attributes:
        width: Number of candidates of a draft distribution.
        uniforms: ``[rows, numbers]`` float64, a request's random numbers: paths by length for the
            paths, then the verifier's.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        numbers: int,
        width: int,
        *,
        draft_temperature: float = 1.0,
        target_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate for up to ``rows`` requests, padding included, with values that suit captures.

        There are ``slots`` in SGLang's pool. ``target_ids`` ``[draft_vocab]`` int64 are the
        target's ids of the head's tokens; None if they are the same.
        """
        self.width, self._target_ids = width, target_ids
        self._draft_temperature = draft_temperature
        self.uniforms = torch.zeros((rows, numbers), dtype=torch.float64, device=device)
        self._temperatures = torch.ones((rows, 1), device=device)
        self._greedy = torch.zeros((rows, 1), dtype=torch.bool, device=device)
        self._roots = torch.zeros((slots, 2, width), dtype=torch.float64, device=device)

    def load(self, uniforms: Tensor, sampling: Any) -> None:
        """Write a round's numbers ``[batch, numbers]`` float64, and SGLang's SamplingBatchInfo."""
        batch, greedy = len(uniforms), greedy_rows(sampling)
        self.uniforms[:batch].copy_(send(uniforms, self.uniforms.device))
        torch.mul(sampling.temperatures, self._draft_temperature, out=self._temperatures[:batch])
        self._greedy[:batch] = False if greedy is None else greedy.unsqueeze(1)

    def temperatures(self, batch: int) -> Tensor:
        """Return ``[batch, 1]``: a greedy request's tree goes by the head's own probabilities."""
        return self._temperatures[:batch].masked_fill(self._greedy[:batch], 1.0)

    def short_probs(self, logits: Tensor, temperatures: Tensor) -> ShortProbs:
        """Turn the head's logits ``[rows, draft_vocab]`` into the distributions of the drafts."""
        return self._top(logits).tempered(temperatures)

    def _top(self, logits: Tensor) -> ShortProbs:
        values, ids = logits.topk(self.width, dim=1)
        ids = ids if self._target_ids is None else self._target_ids[ids]
        return ShortProbs(ids, values.double())

    def keep_roots(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the most likely tokens at the next round's roots, from ``[batch, draft_vocab]``."""
        self._roots[slots] = self._top(logits).pack()

    def grow(
        self, slots: Tensor, paths: int, length: int, head: Callable[[TreeGrowth], Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Grow the trees of a round from the roots kept for ``slots`` ``[batch]``.

        ``head`` returns the logits ``[batch * paths, draft_vocab]`` after the branches' tokens.

        Returns:
            What :meth:`TreeGrowth.tree` does, and the distributions at the root and after each
            branch's tokens but the last, packed: ``[batch, 1 + (length - 1) * paths, 2, width]``.
        """
        batch, temperatures = len(slots), self.temperatures(len(slots))
        roots = ShortProbs.unpack(self._roots[slots]).tempered(temperatures)
        drawn = self.uniforms[:batch, : paths * length].view(batch, paths, length)
        growth = TreeGrowth(roots, drawn, self._greedy[:batch])
        temperatures = temperatures.repeat_interleave(paths, dim=0)
        packed = [roots.pack().unsqueeze(1)]
        for _ in range(length - 1):
            logits = head(growth)
            peaks = (logits.amax(dim=1) - logits.logsumexp(dim=1)).double().unsqueeze(1)
            packed.append(growth.grow(self.short_probs(logits, temperatures), peaks).pack())
        return growth.tree(), torch.cat(packed, dim=1)

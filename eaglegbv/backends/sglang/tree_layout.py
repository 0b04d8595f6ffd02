"""The trees of a round as they grow, in SGLang's numbering.

SGLang's trees have a constant number of nodes, ``K L + 1``. In a sampled tree, node ``1 + i K + k``
is the token that path k drew at depth ``i + 1``. Paths with equal prefixes share the node of the
first of them, which represents all. The nodes of the others remain as leaves without children,
which no verifier sees. A greedy request has SGLang's own EAGLE-2 tree in the same batch.

Everything here may run inside a CUDA graph: nothing is read on the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.devices import send
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.drafters.tree_growth import LevelTable, TreeGrowth, level_table
from eaglegbv.tree import DraftSampling


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


class RoundTables(NamedTuple):
    """The levels of the two kinds of trees of a round."""

    sampled: LevelTable  # K paths
    greedy: LevelTable  # the K L most likely nodes that a beam of K finds, as in SGLang's EAGLE

    @classmethod
    def of(cls, paths: int, length: int, device: torch.device) -> Self:
        """Return those of K ``paths`` of a ``length``."""
        plan = Plan(paths=paths, depth=length)
        fixed = level_table(plan, DraftSampling.FIXED, device, width=paths)
        return cls(level_table(plan, DraftSampling.IID, device), fixed)


class RoundGrowth:
    """The trees of a batch, growing by a row of the head for each of K branches and each depth.

    The branches of a sampled request are its paths. Those of a greedy request go on from the K most
    likely nodes of a depth, by the product of the head's probabilities along the way. Trees of both
    kinds grow for every request, and each takes its own.

    Attributes:
        tokens: ``[batch, paths]`` int64, the branches' last tokens.
        origins: ``[batch, paths]`` int64, the branch of the depth before that each continues.
    """

    def __init__(
        self, tables: RoundTables, roots: ShortProbs, uniforms: Tensor, greedy: Tensor
    ) -> None:
        """Choose the tokens of depth 1.

        Args:
            tables: The levels of the trees.
            roots: ``[batch, width]``, the distributions at the roots; a width of at least K.
            uniforms: ``[batch, paths, length]`` float64 in [0, 1).
            greedy: ``[batch, 1]`` bool.
        """
        batch, paths, _ = uniforms.shape
        unknown = torch.zeros_like(roots.ids[:, 0])  # the roots' tokens are SGLang's to know
        self._sampled = TreeGrowth(tables.sampled, unknown, uniforms)
        self._likely = TreeGrowth(tables.greedy, unknown, None)
        self._tables = tables
        self._is_greedy = greedy
        self._branches = torch.arange(paths, device=greedy.device).expand(batch, -1)
        self._leaders = self._branches
        self._numbers: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._advance(roots, roots.probs[:, :paths].log(), self._branches)

    def grow(self, probs: ShortProbs, peaks: Tensor) -> None:
        """Add a depth.

        Args:
            probs: ``[batch * paths, width]``, the distributions after the branches' tokens.
            peaks: ``[batch * paths, 1]``, the log-probability of each one's most likely token among
                all tokens.
        """
        paths = self.tokens.shape[1]
        likely = (probs.probs[:, :paths] / probs.probs[:, :1]).log() + peaks
        first = paths + paths * paths * (len(self._numbers) - 1)
        self._advance(probs, likely, first + paths * self._leaders + self._branches)

    def _advance(self, probs: ShortProbs, likely: Tensor, numbers: Tensor) -> None:
        """Take the next tokens; ``numbers`` are SGLang's of the paths'."""
        paths = self._branches.shape[1]
        drawn = self._sampled.grow(probs)
        best = self._likely.grow(DraftProbs(probs.ids[:, :paths].contiguous(), likely))
        if drawn.leaders is not None:
            self._leaders = drawn.leaders
        first = sum(level.children for level in self._tables.greedy.levels[: len(self._numbers)])
        self._numbers.append(torch.where(self._is_greedy, first + best.places(), numbers))
        self.tokens = torch.where(self._is_greedy, best.token_ids, drawn.token_ids)
        self.origins = self._branches
        if best.parents is not None and len(self._numbers) > 1:
            self.origins = torch.where(self._is_greedy, best.parents, self._branches)
        self._tokens.append(self.tokens)

    def tree(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what SGLang builds its tree from; see its ``build_tree_kernel_efficient``.

        SGLang numbers candidates by the place at which they are found: those below branch r at
        depth ``i + 1`` are ``K + K^2 (i - 1) + r K + k``, which is the number of a draw less the
        root's. It finds a node's parent by ``parents[number // K]``.

        Returns:
            Parents ``[batch, 1 + K (L - 1)]``, or ``[batch, 0]`` where L is 1, and the numbers and
            tokens ``[batch, K L]`` of the nodes; int64.
        """
        numbers, token_ids = self._likely.most_likely()
        before = torch.arange(-1, self._branches.shape[1], device=numbers.device)
        above = torch.cat((before.expand(len(numbers), -1), *self._numbers[1:-1]), dim=1)
        return (
            above if len(self._numbers) > 1 else above[:, :0],
            torch.where(self._is_greedy, numbers - 1, torch.cat(self._numbers, dim=1)),
            torch.where(self._is_greedy, token_ids, torch.cat(self._tokens, dim=1)),
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
        self, slots: Tensor, paths: int, length: int, head: Callable[[RoundGrowth], Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Grow the trees of a round from the roots kept for ``slots`` ``[batch]``.

        ``head`` returns the logits ``[batch * paths, draft_vocab]`` after the branches' tokens.

        Returns:
            What :meth:`RoundGrowth.tree` does, and the distributions at the root and after each
            branch's tokens but the last, packed: ``[batch, 1 + (length - 1) * paths, 2, width]``.
        """
        batch, temperatures = len(slots), self.temperatures(len(slots))
        roots = ShortProbs.unpack(self._roots[slots]).tempered(temperatures)
        drawn = self.uniforms[:batch, : paths * length].view(batch, paths, length)
        tables = RoundTables.of(paths, length, drawn.device)
        self._tables = tables  # recorded graphs read them, as long as these buffers
        growth = RoundGrowth(tables, roots, drawn, self._greedy[:batch])
        temperatures = temperatures.repeat_interleave(paths, dim=0)
        packed = [roots.pack().unsqueeze(1)]
        for _ in range(length - 1):
            logits = head(growth)
            peaks = (logits.amax(dim=1) - logits.logsumexp(dim=1)).double().unsqueeze(1)
            probs = self.short_probs(logits, temperatures)
            growth.grow(probs, peaks)
            packed.append(probs.pack().unflatten(0, (batch, paths)))
        return growth.tree(), torch.cat(packed, dim=1)

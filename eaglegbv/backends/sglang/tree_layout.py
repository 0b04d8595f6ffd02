"""The trees of a round as they grow, in SGLang's numbering.

SGLang's trees have a constant number of nodes, ``K L + 1``. In a sampled tree, node ``1 + i K + k``
is the token that path k drew at depth ``i + 1``. Paths with equal prefixes share the node of the
first of them, which represents all. The nodes of the others remain as leaves without children,
which no verifier sees. A greedy request has SGLang's own EAGLE-2 tree in the same batch.

On a GPU two kernels a level grow the trees; elsewhere the tensor code does, which is the reference.
Everything here may run inside a CUDA graph: nothing is read on the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.devices import PIECE, PIECE_WARPS, WIDEST, runs_kernels, staged
from eaglegbv.drafters.draft_probs import DraftProbs
from eaglegbv.drafters.tree_growth import LevelTable, TreeGrowth, level_table
from eaglegbv.tree import DraftSampling
from eaglegbv.utils import power_of_two


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


class Branches(Protocol):
    """K branches of each tree of a batch, for each of which the head runs a row.

    Those of a sampled request are its paths. Those of a greedy request go on from the K most likely
    nodes of a depth, by the product of the head's probabilities along the way.
    """

    tokens: Tensor  # [batch, paths] int64, their last tokens
    origins: Tensor  # [batch, paths] int64, the branch of the depth before that each continues


class RoundGrowth(Branches):
    """The trees of a batch, growing by tensor operations.

    Trees of both kinds grow for every request, and each takes its own.
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


class LaunchedGrowth(Branches):
    """The same trees, by two kernels a level and one at the end, but for the rounding of sums.

    A path that shares its node with earlier ones has the distribution of the first.
    """

    def __init__(self, buffers: "RoundBuffers", slots: Tensor) -> None:
        """Choose the tokens of depth 1, from the roots kept for ``slots`` ``[batch]``."""
        batch, paths, length = len(slots), buffers.paths, buffers.length
        most = paths + (length - 1) * paths**2  # nodes that the beam of a greedy request finds
        above = 1 + (length - 1) * paths
        ids, numbers = buffers.root_places.new_empty, buffers.uniforms.new_empty
        self._buffers, self._slots = buffers, slots
        self._level = 0
        # Of each level's branches: tokens, origins, and the first branch at the same node.
        self._branches = ids((3, length, batch, paths))
        self._branch_scores = numbers((length, batch, paths))
        self._candidates = ids((batch, most))
        self._scores = numbers((batch, most))
        self._parents = ids((batch, above if length > 1 else 0))
        self._nodes = ids((2, batch, paths * length))  # numbers and tokens
        self._advance(buffers.root_values, buffers.root_places, buffers.root_values)

    def grow(self, logits: Tensor) -> None:
        """Add a depth, from the head's logits ``[batch * paths, draft_vocab]``."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self._advance(*logits.topk(self._buffers.width, dim=1), logits)

    def _advance(self, values: Tensor, places: Tensor, logits: Tensor) -> None:
        from eaglegbv.backends.sglang import kernels  # where Triton is, and only when it is needed

        buffers, paths, width = self._buffers, self._buffers.paths, self._buffers.width
        batch, level = len(self._slots), self._level
        tokens, origins, leaders = self._branches.unbind(0)
        greedy = buffers.greedy.view(torch.int8)
        block = power_of_two(max(2, width))
        mapped = buffers.target_ids is not None
        kernels.draw_branches[(batch, paths)](
            values,
            places,
            self._slots,
            logits,
            buffers.target_ids if mapped else places,
            buffers.all_temperatures,
            greedy,
            buffers.uniforms,
            leaders,
            self._branch_scores,
            buffers.packed,
            tokens,
            self._candidates,
            self._scores,
            paths,
            buffers.length,
            level,
            width,
            logits.shape[1],
            logits.stride(0),
            buffers.uniforms.stride(0),
            MAPPED=mapped,
            BLOCK=block,
            PIECE=PIECE,
            num_warps=max(PIECE_WARPS, min(16, block // 64)),
        )
        kernels.join_branches[(batch,)](
            greedy,
            self._candidates,
            self._scores,
            tokens,
            origins,
            leaders,
            self._branch_scores,
            self._parents,
            *self._nodes.unbind(0),
            paths,
            buffers.length,
            level,
            PATHS=power_of_two(max(2, paths)),
        )
        self.tokens, self.origins = tokens[level], origins[level]
        self._level += 1

    def tree(self) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`RoundGrowth.tree`."""
        from eaglegbv.backends.sglang import kernels

        numbers, tokens = self._nodes.unbind(0)
        kernels.choose_nodes[(len(numbers),)](
            self._buffers.greedy.view(torch.int8),
            self._candidates,
            self._scores,
            numbers,
            tokens,
            self._buffers.paths,
            self._buffers.length,
        )
        return self._parents, numbers, tokens


def numbers_of(paths: int, length: int) -> int:
    """Return how many random numbers a round takes: of a token one to draft, three to verify."""
    return 4 * paths * length + 1


class RoundBuffers:
    """What changes from round to round, at fixed addresses: CUDA graphs read it there.

    A round needs from the round before only the head's most likely tokens at its root. They are
    kept by the request's slot in SGLang's pool, as is what SGLang carries from round to round.

    Attributes:
        paths: K.
        length: L.
        width: Number of candidates of a draft distribution.
        target_ids: ``[draft_vocab]`` int64, the target's ids of the head's tokens, or None.
        uniforms: ``[rows, numbers]`` float64, a request's random numbers: paths by length for the
            paths, then the verifier's.
        all_temperatures: ``[rows, 1]`` float32, of the drafts of sampled requests.
        greedy: ``[rows, 1]`` bool.
        root_values: ``[slots, width]`` float32, the largest logits at the roots.
        root_places: ``[slots, width]`` int64, the head's tokens that have them.
        packed: ``[rows, 1 + (length - 1) * paths, 2, width]`` float64, the distributions at the
            root and after each branch's tokens but the last, packed.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        paths: int,
        length: int,
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
        self.paths, self.length, self.width = paths, length, width
        self.target_ids = target_ids
        self._draft_temperature = draft_temperature
        numbers = rows, numbers_of(paths, length)
        lists = rows, 1 + (length - 1) * paths, 2, width
        self.uniforms = torch.zeros(numbers, dtype=torch.float64, device=device)
        self.packed = torch.zeros(lists, dtype=torch.float64, device=device)
        self.all_temperatures = torch.ones((rows, 1), device=device)
        self.greedy = torch.zeros((rows, 1), dtype=torch.bool, device=device)
        self.root_values = torch.zeros((slots, width), device=device)
        self.root_places = torch.zeros((slots, width), dtype=torch.int64, device=device)

    def load(self, uniforms: Tensor, sampling: Any) -> None:
        """Write a round's numbers ``[batch, numbers]`` float64, and SGLang's SamplingBatchInfo."""
        batch = len(uniforms)
        numbers = staged(uniforms, self.uniforms.device)
        self.uniforms[:batch].copy_(numbers, non_blocking=True)
        temperatures = self.all_temperatures[:batch]
        torch.mul(sampling.temperatures, self._draft_temperature, out=temperatures)
        torch.eq(sampling.top_ks, 1, out=self.greedy[:batch, 0])

    def temperatures(self, batch: int) -> Tensor:
        """Return ``[batch, 1]``: a greedy request's tree goes by the head's own probabilities."""
        return self.all_temperatures[:batch].masked_fill(self.greedy[:batch], 1.0)

    def short_probs(self, logits: Tensor, temperatures: Tensor) -> ShortProbs:
        """Turn the head's logits ``[rows, draft_vocab]`` into the distributions of the drafts."""
        return self._tempered(*logits.topk(self.width, dim=1), temperatures)

    def _tempered(self, values: Tensor, places: Tensor, temperatures: Tensor) -> ShortProbs:
        ids = places if self.target_ids is None else self.target_ids[places]
        return ShortProbs(ids, values.double()).tempered(temperatures)

    def keep_roots(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the most likely tokens at the next round's roots, from ``[batch, draft_vocab]``."""
        values, places = logits.topk(self.width, dim=1)
        self.root_values[slots] = values.to(self.root_values.dtype)
        self.root_places[slots] = places

    def grow(
        self, slots: Tensor, head: Callable[[Branches], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Grow the trees of a round from the roots kept for ``slots`` ``[batch]``.

        ``head`` returns the logits ``[batch * paths, draft_vocab]`` after the branches' tokens.
        The distributions are written to :attr:`packed`, the trees returned as by
        :meth:`RoundGrowth.tree`.
        """
        if runs_kernels(self.uniforms.device) and self.width <= WIDEST:
            launched = LaunchedGrowth(self, slots)
            for _ in range(self.length - 1):
                launched.grow(head(launched))
            return launched.tree()
        paths, length = self.paths, self.length
        batch, temperatures = len(slots), self.temperatures(len(slots))
        roots = self._tempered(self.root_values[slots], self.root_places[slots], temperatures)
        drawn = self.uniforms[:batch, : paths * length].view(batch, paths, length)
        tables = RoundTables.of(paths, length, drawn.device)
        self._tables = tables  # recorded graphs read them, as long as these buffers
        growth = RoundGrowth(tables, roots, drawn, self.greedy[:batch])
        temperatures = temperatures.repeat_interleave(paths, dim=0)
        packed = [roots.pack().unsqueeze(1)]
        for _ in range(length - 1):
            logits = head(growth)
            peaks = (logits.amax(dim=1) - logits.logsumexp(dim=1)).double().unsqueeze(1)
            probs = self.short_probs(logits, temperatures)
            growth.grow(probs, peaks)
            packed.append(probs.pack().unflatten(0, (batch, paths)))
        torch.cat(packed, dim=1, out=self.packed[:batch])
        return growth.tree()

"""Independent paths drawn by two kernels a level, on a GPU.

:class:`eaglegbv.drafters.tree_growth.TreeGrowth` is the reference: the trees are the same, but for
the rounding of sums. :func:`growing_paths` takes the one that the device runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eaglegbv.config import DraftSampling, Plan
from eaglegbv.devices import WIDEST, runs_kernels
from eaglegbv.drafters.draft_probs import draft_probs
from eaglegbv.drafters.tree_growth import TreeGrowth, in_columns, level_table
from eaglegbv.sampling import WarpSettings, warped_rows
from eaglegbv.tree import DraftTree
from eaglegbv.utils import power_of_two


def takes(plan: Plan, draft_sampling: DraftSampling, width: int, device: torch.device) -> bool:
    """Return whether kernels draw such trees, of lists of ``width`` tokens, on a device."""
    independent = draft_sampling is DraftSampling.IID and in_columns(plan, draft_sampling)
    return independent and width <= WIDEST and runs_kernels(device)


def growing_paths(
    plan: Plan, roots: Tensor, uniforms: Tensor, *, width: int, draft_to_target: Tensor
) -> "TensorPaths | DrawnPaths":
    """Start trees of independent paths; see :class:`DrawnPaths` for the arguments."""
    growth = DrawnPaths if takes(plan, DraftSampling.IID, width, roots.device) else TensorPaths
    return growth(plan, roots, uniforms, width=width, draft_to_target=draft_to_target)


class TensorPaths:
    """The trees of a batch in the making, by tensor operations."""

    def __init__(
        self, plan: Plan, roots: Tensor, uniforms: Tensor, *, width: int, draft_to_target: Tensor
    ) -> None:
        """Start trees; see :class:`DrawnPaths`."""
        table = level_table(plan, DraftSampling.IID, roots.device)
        self._growth = TreeGrowth(table, roots, uniforms)
        self._width = width
        self._draft_to_target = draft_to_target

    def grow(self, logits: Tensor, settings: WarpSettings) -> Tensor:
        """Draw a level; see :meth:`DrawnPaths.grow`."""
        ids = self._draft_to_target
        probs = draft_probs(logits, settings, width=self._width, draft_to_target=ids)
        return self._growth.grow(probs).token_ids

    def finish(self) -> DraftTree:
        """Return the trees, padded to the most nodes they can have."""
        return self._growth.finish()


class DrawnPaths:
    """The trees of a batch in the making."""

    def __init__(
        self, plan: Plan, roots: Tensor, uniforms: Tensor, *, width: int, draft_to_target: Tensor
    ) -> None:
        """Start trees at ``roots`` ``[batch]`` int64, token ids.

        Args:
            plan: Paths, depth and the least product of draft probabilities that goes on.
            roots: Their last tokens.
            uniforms: ``[batch, paths, depth]`` float64, each request's numbers.
            width: Tokens of a distribution, the most likely ones.
            draft_to_target: ``[draft_vocab]`` int64, the target's id of each draft token.
        """
        batch = len(roots)
        most = 1 + plan.paths * plan.depth
        self._plan = plan
        self._roots = roots
        self._uniforms = uniforms.contiguous()
        self._draft_to_target = draft_to_target
        self._width = min(width, len(draft_to_target))
        # Token ids, parents and depths of all nodes.
        self._nodes = roots.new_zeros((3, batch, most))
        self._draft_ids = roots.new_zeros((batch, most, self._width))
        self._draft_probs = uniforms.new_zeros((batch, most, self._width))
        self._draws = roots.new_empty((batch, plan.depth, plan.paths))
        self._level = 0
        self._rows = self._room()

    def _room(self) -> "_PathRows":
        shape = (len(self._roots), self._plan.paths)
        ids = self._roots.new_empty((2, *shape))
        alive = self._roots.new_empty(shape, dtype=torch.int8)
        scores = self._uniforms.new_empty(shape)
        return _PathRows(ids[0], ids[1], alive, scores, self._roots.new_empty(shape[:1]))

    def grow(self, logits: Tensor, settings: WarpSettings) -> Tensor:
        """Draw a level from ``logits`` ``[rows, draft_vocab]`` with settings of every row.

        Returns the tokens ``[batch, paths]`` int64 of the next level's rows; those of paths that
        have ended mean nothing.
        """
        from eaglegbv import draft_kernels  # where Triton is, and only when it is needed

        plan = self._plan
        batch = len(self._roots)
        listed = self._width < len(self._draft_to_target)
        candidates = self._draft_to_target
        if listed:
            logits, candidates = logits.topk(self._width, dim=1)
        warped, normalisers = warped_rows(logits, settings)
        rows = self._rows
        after = self._room()
        tokens = self._roots.new_empty((batch, plan.paths))
        values = self._uniforms.new_empty((batch, plan.paths))
        most = self._nodes.shape[2]
        block = power_of_two(max(2, self._width))
        draft_kernels.draw_children[(batch, plan.paths)](
            warped,
            normalisers,
            candidates,
            self._draft_to_target,
            self._uniforms,
            rows.node,
            rows.leader,
            rows.alive,
            self._draft_ids,
            self._draft_probs,
            tokens,
            values,
            plan.paths,
            plan.depth,
            self._level,
            self._width,
            most,
            LISTED=listed,
            BLOCK=block,
            num_warps=max(1, min(16, block // 64)),
        )
        draft_kernels.number_children[(batch,)](
            self._roots,
            tokens,
            values,
            rows.node,
            rows.alive,
            rows.scores,
            rows.nodes,
            after.node,
            after.leader,
            after.alive,
            after.scores,
            after.nodes,
            *self._nodes.unbind(0),
            self._draws,
            plan.min_confidence,
            plan.paths,
            plan.depth,
            self._level,
            most,
            PATHS=power_of_two(max(2, plan.paths)),
            num_warps=1,
        )
        self._rows = after
        self._level += 1
        return tokens

    def finish(self) -> DraftTree:
        """Return the trees, padded to the most nodes they can have."""
        token_ids, parents, depth = self._nodes.unbind(0)
        return DraftTree(
            DraftSampling.IID,
            token_ids,
            parents,
            depth,
            self._rows.nodes,
            self._draws,
            draft_ids=self._draft_ids,
            draft_probs=self._draft_probs,
            columns=True,
        )


class _PathRows(NamedTuple):
    """The rows of a level: one for each path."""

    node: Tensor  # [batch, paths] int64, the node of each
    leader: Tensor  # [batch, paths] int64, the first row at the same node
    alive: Tensor  # [batch, paths] int8, whether the path goes on
    scores: Tensor  # [batch, paths] float64, the product of its draft probabilities
    nodes: Tensor  # [batch] int64, nodes of each tree

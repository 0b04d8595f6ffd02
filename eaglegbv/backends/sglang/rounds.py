"""A round's trees, from drafting to the verdict: one :class:`DraftTree`; SGLang's is read off it.

Trees are grown as by the package's own engine. SGLang asks for a constant number of nodes,
``K L + 1``, so its tree has the nodes of ours in our order, with padding as further leaves at the
root, which no verifier sees. A greedy request has SGLang's own EAGLE-2 tree in the same batch.

What rounds read stands in buffers at fixed addresses, where CUDA graphs find it. Everything here
may run inside a graph: nothing is read on the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from eaglegbv.config import Plan
from eaglegbv.devices import runs_kernels, staged
from eaglegbv.drafters.draft_probs import certain_where_broken, log_probs
from eaglegbv.drafters.drawn_paths import growing_paths
from eaglegbv.drafters.tree_growth import Frontier, LevelTable, TreeGrowth, level_table
from eaglegbv.sampling import WarpSettings
from eaglegbv.tree import DraftSampling, DraftTree
from eaglegbv.utils import power_of_two
from eaglegbv.verifiers.base import Verdict

Head = Callable[[Tensor, Tensor], Tensor]
"""Runs the head a level on: given tokens ``[batch, K]`` and the row of the level before that each
continues, both int64, it returns logits ``[batch * K, draft_vocab]``.
"""


def shape_of(plan: Plan) -> tuple[int, int]:
    """Return paths and length of a plan's trees; plain decoding has trees of a root alone."""
    return (plan.paths, plan.depth) if plan.speculative else (1, 0)


def numbers_of(plan: Plan) -> int:
    """Return how many random numbers a round takes: of a token one to draft, three to verify."""
    paths, length = shape_of(plan)
    return 4 * paths * length + 1


class RoundBuffers:
    """What changes from round to round, of one plan.

    A round needs from the round before only the head's logits at its root. They are kept by the
    request's slot in SGLang's pool, as is what SGLang carries from round to round.

    Attributes:
        plan: The plan of all requests.
        draft_to_target: ``[draft_vocab]`` int64, the target's ids of the head's tokens.
        root_logits: ``[slots, draft_vocab]`` float32, shared by the buffers of all plans.
        uniforms: ``[rows, numbers]`` float64, a request's random numbers: paths by depth for the
            paths, then the verifier's.
        temperatures: ``[rows]`` float32, of the drafts of sampled requests.
        greedy: ``[rows, 1]`` bool.
        tree: The sampled trees of the last round, also where greedy requests have another one.
    """

    def __init__(self, plan: Plan, rows: int, root_logits: Tensor, draft_to_target: Tensor) -> None:
        """Allocate for up to ``rows`` requests and padding, with values that suit captures."""
        self.plan, self.root_logits, self.draft_to_target = plan, root_logits, draft_to_target
        device = draft_to_target.device
        self.width = min(max(plan.draft_width, plan.paths), len(draft_to_target))
        paths, length = shape_of(plan)
        nodes = 1 + paths * length
        ids = torch.zeros((3, rows, nodes), dtype=torch.int64, device=device)
        lists = torch.zeros((rows, nodes, self.width), dtype=torch.float64, device=device)
        self.uniforms = torch.zeros((rows, numbers_of(plan)), dtype=torch.float64, device=device)
        self.temperatures = torch.ones(rows, device=device)
        self.greedy = torch.zeros((rows, 1), dtype=torch.bool, device=device)
        self.tree = DraftTree(
            DraftSampling.IID,
            token_ids=ids[0],
            parents=ids[1],
            depth=ids[2],
            num_nodes=torch.ones_like(ids[0, :, 0]),
            draws=ids.new_zeros((rows, length, paths)),
            draft_ids=lists.to(torch.int64),
            draft_probs=lists,
            columns=True,
        )
        # Recorded graphs read them.
        self._likely = level_table(plan, DraftSampling.FIXED, device, width=plan.paths)
        self._places = torch.arange(nodes, device=device) % paths
        self._every = torch.arange(paths, device=device)

    def of_plan(self, plan: Plan) -> Self:
        """Return buffers for rounds of another plan, which start where these do."""
        return type(self)(plan, len(self.uniforms), self.root_logits, self.draft_to_target)

    def load(self, uniforms: Tensor, sampling: Any) -> None:
        """Write a round's numbers ``[batch, numbers]`` float64, and SGLang's SamplingBatchInfo."""
        batch = len(uniforms)
        numbers = staged(uniforms, self.uniforms.device)
        self.uniforms[:batch].copy_(numbers, non_blocking=True)
        own, factor = self.temperatures[:batch].unsqueeze(1), self.plan.draft_temperature
        torch.mul(sampling.temperatures, factor, out=own)
        torch.eq(sampling.top_ks, 1, out=self.greedy[:batch, 0])

    def keep_roots(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the head's logits ``[batch, draft_vocab]`` at the next round's roots."""
        self.root_logits[slots] = logits.to(self.root_logits.dtype)

    def settings(self, rows: int, repeats: int = 1) -> WarpSettings:
        """Return what turns logits of ``rows`` requests, of so many rows each, into drafts."""
        return WarpSettings(temperature=self.temperatures[:rows].repeat_interleave(repeats))

    def grow(self, slots: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """Grow the trees of a round from the roots kept for ``slots`` ``[batch]``.

        Returns what SGLang builds its trees from; see its ``build_tree_kernel_efficient``. There a
        node has a *number*; its parent is the root if ``number // K`` is 0, and else the node whose
        number is ``parents[number // K]``.

        Returns:
            Parents ``[batch, 1 + K (L - 1)]``; numbers, and tokens, ``[batch, K L]`` of the nodes
            but the root; int64.
        """
        batch, plan = len(slots), self.plan
        roots = torch.zeros_like(slots, dtype=torch.int64)  # the tokens are SGLang's to know
        drawn = self.uniforms[:batch, : plan.paths * plan.depth]
        paths = growing_paths(
            plan,
            roots,
            drawn.view(batch, plan.paths, plan.depth),
            width=self.width,
            draft_to_target=self.draft_to_target,
        )
        beam = _Beam(plan, self._likely, roots)
        greedy, logits = self.greedy[:batch], self.root_logits[slots]
        settings = self.settings(batch)
        for level in range(plan.depth):
            tokens = paths.grow(logits, settings)
            best = beam.grow(logits, self.draft_to_target)
            if level == plan.depth - 1:
                break
            if level == 0:
                settings = self.settings(batch, plan.paths)
            origins = self._every if best.parents is None else best.parents
            logits = head(
                torch.where(greedy, best.token_ids, tokens),
                torch.where(greedy, origins, self._every),
            )
        for kept, made in zip(
            self.tree.tensors.values(), paths.finish().tensors.values(), strict=True
        ):
            kept[:batch].copy_(made)
        # A broken head drafts one token with certainty: decoding goes on as without it.
        certain_where_broken(self.tree.draft_probs[:batch])
        # As nodes' numbers, K times their parents' places and more: siblings follow each other, at
        # most K, so places modulo K tell them apart. Padding repeats numbers of the first level:
        # SGLang takes the first of a number. Only leaves stand beyond the list of parents.
        numbers = plan.paths * self.tree.parents[:batch] + self._places
        sampled = numbers[:, : 1 + plan.paths * (plan.depth - 1)], numbers[:, 1:]
        told = zip(beam.for_sglang(), (*sampled, self.tree.token_ids[:batch, 1:]), strict=True)
        parents, numbers, tokens = (torch.where(greedy, *pair) for pair in told)
        return parents, numbers, tokens


class _Beam:
    """The trees of greedy requests, as SGLang's EAGLE has them, with its numbers."""

    def __init__(self, plan: Plan, table: LevelTable, roots: Tensor) -> None:
        """Start at ``roots`` ``[batch]`` int64."""
        self._growth, self._table, self._paths = TreeGrowth(table, roots, None), table, plan.paths
        before = torch.arange(-1, plan.paths, device=roots.device)
        self._parents = [before.expand(len(roots), -1)]  # the root's, and the first level's numbers
        self._first = 0  # the first number of the level to grow

    def grow(self, logits: Tensor, draft_to_target: Tensor) -> Frontier:
        """Add a level; see :meth:`TreeGrowth.grow`."""
        likely = log_probs(logits, width=self._paths, draft_to_target=draft_to_target)
        frontier = self._growth.grow(likely)
        if self._first:
            self._parents.append(self._first + frontier.places())
        self._first += self._table.levels[1 if self._first else 0].children
        return frontier

    def for_sglang(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return parents, numbers and tokens; see :meth:`RoundBuffers.grow`."""
        numbers, token_ids = self._growth.most_likely()
        levels = self._parents[:-1] if len(self._parents) > 1 else [self._parents[0][:, :1]]
        return torch.cat(levels, dim=1), numbers - 1, token_ids


class Acceptance(NamedTuple):
    """A verdict as SGLang's kernels report it; nodes are numbered through the batch."""

    tokens: Tensor  # [batch, nodes] int32, at the root and each accepted node, the token after it
    nodes: Tensor  # [batch, length + 1] int32, the root and the accepted nodes, then -1
    lengths: Tensor  # [batch] int32, number of committed tokens


def acceptance(verdict: Verdict, tree: DraftTree) -> Acceptance:
    """Return a verdict on trees in SGLang's terms, by one kernel on a GPU."""
    tokens = torch.zeros_like(tree.token_ids, dtype=torch.int32)
    if runs_kernels(tokens.device):
        return _launch_report(verdict, tree, tokens)
    accepted = verdict.accepted.unsqueeze(1)
    steps = torch.arange(tree.length + 1, device=tokens.device)
    # Steps beyond the last accepted node repeat it, so that they write the same values.
    path = torch.cat((torch.zeros_like(accepted), verdict.path_nodes), dim=1)
    path = path.gather(1, torch.minimum(steps, accepted))
    following = tree.token_ids.gather(1, path).roll(-1, dims=1)
    following = torch.where(steps < accepted, following, verdict.token_ids.unsqueeze(1))
    tokens.scatter_(1, path, following.int())
    first = tree.nodes * torch.arange(tree.batch, device=tokens.device).unsqueeze(1)
    nodes = torch.where(steps <= accepted, first + path, -1)
    return Acceptance(tokens, nodes.int(), (verdict.accepted + 1).int())


def _launch_report(verdict: Verdict, tree: DraftTree, tokens: Tensor) -> Acceptance:
    from eaglegbv.backends.sglang import kernels  # where Triton is, and only when it is needed

    nodes, lengths = tokens.new_empty((tree.batch, tree.length + 1)), tokens.new_empty(tree.batch)
    kernels.report_paths[(tree.batch,)](
        verdict.path_nodes.contiguous(),
        verdict.accepted.contiguous(),
        verdict.token_ids.contiguous(),
        tree.token_ids,
        tokens,
        nodes,
        lengths,
        tree.length,
        tree.nodes,
        STEPS=power_of_two(tree.length + 1),
    )
    return Acceptance(tokens, nodes, lengths)

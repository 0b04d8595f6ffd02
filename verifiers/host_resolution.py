"""Global Resolution by solvers that run on the host, to compare with the exact transport.

Each solver's tolerance costs acceptance and never losslessness; see
:mod:`eaglegbv.verifiers.reference.global_resolution`.
"""

from typing import ClassVar

import torch

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.reference.chooser import UniformChooser
from eaglegbv.verifiers.reference.global_resolution import GlobalResolution, Solver
from eaglegbv.verifiers.reference.tree import from_draft_tree


class HostSolver(Verifier):
    """Global resolution by a solver that runs on the host, for comparison.

    Attributes:
        resolution: The rule; ``resolution.fallbacks`` counts nodes at which the solver failed and
            K-SEQ took its place.
    """

    source: ClassVar[str] = "Thomas & Pal, Global Resolution (2511.15898)"
    cost: ClassVar[str] = "O(W^n) on the host, for comparison only"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})
    solver: ClassVar[Solver]

    def __init__(self) -> None:
        self.resolution = GlobalResolution(self.solver)

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge the requests one by one."""
        path_nodes = torch.zeros_like(tree.path_nodes[:, 0])
        accepted, token_ids = torch.zeros_like(tree.num_nodes), torch.zeros_like(tree.num_nodes)
        for b in range(tree.batch):
            request = from_draft_tree(tree, target, b)
            outcome = self.resolution(request, UniformChooser(uniforms, b))
            for depth in range(1, len(outcome.accepted) + 1):
                node = request.node_numbers[outcome.accepted[:depth]]
                path_nodes[b, depth - 1] = node
            accepted[b], token_ids[b] = len(outcome.accepted), outcome.token
        return Verdict(path_nodes, accepted, token_ids)


class ConvexResolutionVerifier(HostSolver):
    """The convex programme, with an error bound and a counted fall-back to K-SEQ."""

    name: ClassVar[str] = "global_resolution_convex"
    solver: ClassVar[Solver] = Solver.CONVEX


class RaceResolutionVerifier(HostSolver):
    """The convex programme for weights of drafts, which needs no list of draft sets."""

    name: ClassVar[str] = "global_resolution_race"
    source: ClassVar[str] = "eaglegbv: a variant of Global Resolution (2511.15898)"
    cost: ClassVar[str] = "O(W) an evaluation on the host, some hundred a node, for comparison only"
    solver: ClassVar[Solver] = Solver.RACE


class MaxFlowResolutionVerifier(HostSolver):
    """The linear programme as an integer flow."""

    name: ClassVar[str] = "global_resolution_max_flow"
    solver: ClassVar[Solver] = Solver.MAX_FLOW


class LinearResolutionVerifier(HostSolver):
    """The linear programme, by HiGHS."""

    name: ClassVar[str] = "global_resolution_lp"
    solver: ClassVar[Solver] = Solver.LP

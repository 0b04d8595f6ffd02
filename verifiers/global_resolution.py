"""Optimal transport at every node of a tree of independent paths, by five solvers.

At a node with n drafts one of them is selected and accepted with min(1, p/b), b the law of the
selection; the residual is (p - b)+. The exact solver is the transport of
:mod:`eaglegbv.verifiers.transport`: it has no tolerance and cannot fail. The others are solved on
the host, for comparison only.
"""

from typing import ClassVar

import torch

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.iid_selection import select_iid
from eaglegbv.verifiers.reference.chooser import UniformChooser
from eaglegbv.verifiers.reference.global_resolution import GlobalResolution, Solver
from eaglegbv.verifiers.reference.tree import from_draft_tree
from eaglegbv.verifiers.siblings import first_paths
from eaglegbv.verifiers.token_rule import verify_tokens
from eaglegbv.verifiers.top_down import numbers_of_children


class GlobalResolutionVerifier(Verifier):
    """Select by exact optimal transport at every node, accept token by token."""

    name: ClassVar[str] = "global_resolution"
    source: ClassVar[str] = "Thomas & Pal, Global Resolution (2511.15898), solved exactly"
    cost: ClassVar[str] = "O(N W + F W log W), F forks, and one row of the vocabulary"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID})

    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge independent paths; a child is tested by the number of its first path."""
        path = select_iid(tree, target, uniforms.selection)
        numbers = numbers_of_children(tree, first_paths(tree), uniforms.acceptance)
        tests = numbers.gather(1, path.nodes[:, 1:])
        return verify_tokens(path, target, tests, uniforms.correction)


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
        """Judge one request after the other."""
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

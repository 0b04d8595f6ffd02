"""A verifier with the check of its inputs: one piece of work, which may be compiled.

The operations on a few trees take longer to launch than to compute. One graph serves every plan and
batch, as its sizes are symbols. But PyTorch treats sizes 0 and 1 as constants, so a single tree and
single paths get separate graphs. Shorter paths and one-token distributions are padded to the smallest size a
graph takes:

    of length 1         root -- a        root -- a -- a -- a    as past any path's end
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.compiling import EXAMPLE_WIDTH, check_backend, compile_graph, making_graphs
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.rng import RequestRng
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, find_faults
from eaglegbv.verifiers.block import BlockVerifier, block
from eaglegbv.verifiers.gbv import GbvVerifier, gbv
from eaglegbv.verifiers.global_resolution import (
    ConvexResolutionVerifier,
    GlobalResolution,
    GlobalResolutionVerifier,
    LinearResolutionVerifier,
    MaxFlowResolutionVerifier,
    RaceResolutionVerifier,
    Solver,
)
from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier, greedy_block
from eaglegbv.verifiers.greedy_draft import GreedyDraftVerifier, greedy_draft
from eaglegbv.verifiers.otbv import OtbvVerifier, otbv
from eaglegbv.verifiers.proof.chooser import Chooser
from eaglegbv.verifiers.proof.enumeration import Verify, VerifyWithState, stateless
from eaglegbv.verifiers.proof.tree import Outcome, ReferenceTree
from eaglegbv.verifiers.selection import bounded_forks
from eaglegbv.verifiers.spechub import SpecHubVerifier, spechub
from eaglegbv.verifiers.specinfer import SpecInferVerifier, specinfer
from eaglegbv.verifiers.spectr import SpecTrVerifier, spectr
from eaglegbv.verifiers.spectr_gbv import SpecTrGbvVerifier, spectr_gbv
from eaglegbv.verifiers.stateful import StatefulVerifier
from eaglegbv.verifiers.target_only import GreedyWalkVerifier, TargetOnlyVerifier, target_only
from eaglegbv.verifiers.token import TokenVerifier, token
from eaglegbv.verifiers.traversal import TraversalVerifier, traversal

_LENGTH, _FORKS, _LEAST_WIDTH = 3, 2, 2
"""Smallest sizes that a graph takes; smaller ones are padded to these."""


class Checked(NamedTuple):
    """A verdict, and whether the verifier's inputs are sound.

    Attributes:
        verdict: Meaningless where there are faults.
        faults: ``[batch]`` int64, see :class:`eaglegbv.verifiers.base.Fault`.
    """

    verdict: Verdict
    faults: Tensor


class CheckedVerifier:
    """Verifies batches of trees, those of independent paths by compiled graphs if wanted.

    Attributes:
        verifier: The verifier that judges.
    """

    def __init__(
        self,
        verifier: Verifier,
        *,
        compile_backend: str | None = None,
        vocab: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take a verifier.

        Args:
            verifier: The verifier that judges.
            compile_backend: A backend of ``torch.compile``, which compiles this work now if the
                verifier is ``one_graph``; None runs it uncompiled.
            vocab: Vocabulary size of the targets to compile for.
            device: Device of the trees to compile for.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self.verifier = verifier
        self._compiled: Callable[..., Checked] | None = None
        if compile_backend is not None and verifier.one_graph:
            check_backend(compile_backend)
            self._compiled = compile_graph(self._verify, compile_backend)
            with making_graphs():
                self._warm_up(vocab, device)

    def verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Checked:
        """Judge the drafts of a batch and look for faults; see :meth:`Verifier.verify`."""
        compiled = self._compiled
        if compiled is None or tree.draft_sampling is not DraftSampling.IID:
            return self._verify(tree, target, uniforms)
        # The forks of trees that were drawn on a device are not counted.
        forks = bounded_forks(tree) if tree.forks is None else tree.forks
        steps = max(0, _LENGTH - tree.length)
        if steps:
            tree, uniforms = _longer_tree(tree, steps), _longer(uniforms, steps)
        return compiled(_for_graphs(tree, max(_FORKS, forks)), target, uniforms)

    @torch.inference_mode()
    def _warm_up(self, vocab: int, device: torch.device | str) -> None:
        """Make the graphs, for tensors of inference mode, in which an engine runs."""
        for batch in (1, 7):
            for paths in (1,) if self.verifier.max_paths == 1 else (1, 4):
                self.verify(*_example(batch, paths, _LENGTH + 2, vocab, device=device))

    def _verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Checked:
        return Checked(self.verifier.verify(tree, target, uniforms), find_faults(tree, target))


@lru_cache(maxsize=64)
def checked_verifier(
    name: str,
    compile_backend: str | None = None,
    vocab: int = 0,
    device: torch.device | str = "cpu",
) -> CheckedVerifier:
    """Return the stateless verifier of that name with its check, compiled once for all engines.

    See :class:`CheckedVerifier` for the other arguments.

    Raises:
        InvalidArgument: There is no such verifier, or no such backend of ``torch.compile``.
    """
    verifier = make_verifier(name)
    return CheckedVerifier(verifier, compile_backend=compile_backend, vocab=vocab, device=device)


def _for_graphs(tree: DraftTree, forks: int) -> DraftTree:
    """Return ``tree`` as graphs take it: draft_samplings padded, and room for ``forks``."""
    ids, probs = tree.draft_ids, tree.draft_probs
    missing = _LEAST_WIDTH - ids.shape[2]
    if missing > 0:
        ids, probs = pad(ids, (0, missing)), pad(probs, (0, missing))
    return replace(tree, draft_ids=ids, draft_probs=probs, forks=forks)


def _longer_tree(tree: DraftTree, steps: int) -> DraftTree:
    """Return ``tree`` padded for paths that are longer by ``steps``; its own stay as they are."""
    nodes = tree.path_nodes
    nodes = torch.cat((nodes, nodes[:, :, -1:].expand(-1, -1, steps)), dim=2)
    return replace(tree, path_nodes=nodes)


def _longer(uniforms: VerifyUniforms, steps: int) -> VerifyUniforms:
    """Return ``uniforms`` with numbers for the padding of a tree, which decide nothing."""
    selection = pad(uniforms.selection, (0, 0, 0, 0, 0, steps))
    _, length, paths, _ = selection.shape
    acceptance = pad(uniforms.acceptance, (0, paths * length - uniforms.acceptance.shape[1]))
    parts = selection.flatten(1), acceptance, uniforms.correction.unsqueeze(1)
    # Cut from one tensor, like drawn ones: a graph is made for strides too.
    return VerifyUniforms.of_numbers(torch.cat(parts, dim=1), paths=paths, length=length)


def _example(
    batch: int, paths: int, length: int, vocab: int, *, device: torch.device | str
) -> tuple[DraftTree, TargetProbs, VerifyUniforms]:
    """Return inputs to make a graph from. All sizes differ: equal ones would have to stay equal."""
    nodes = 1 + paths * length
    vocab = max(vocab, EXAMPLE_WIDTH + 1)
    path_nodes = torch.arange(1, nodes).view(1, paths, length).repeat(batch, 1, 1)
    parents = path_nodes - 1
    parents[:, :, 0] = 0
    depth = torch.arange(1, length + 1).expand(batch, paths, length)
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=torch.zeros((batch, nodes), dtype=torch.int64),
        parents=pad(parents.flatten(1), (1, 0)),
        depth=pad(depth.flatten(1), (1, 0)),
        num_nodes=torch.full((batch,), nodes),
        path_nodes=path_nodes,
        path_lengths=torch.full((batch, paths), length),
        draft_ids=torch.arange(EXAMPLE_WIDTH).repeat(batch, nodes, 1),
        draft_probs=torch.full(
            (batch, nodes, EXAMPLE_WIDTH), 1 / EXAMPLE_WIDTH, dtype=torch.float64
        ),
        forks=_FORKS + 1,
    ).to(torch.device(device))
    rows = torch.arange(batch * nodes, device=device).view(batch, nodes)
    target = TargetProbs.of_logits(torch.zeros((batch * nodes, vocab), device=device), rows)
    streams, steps = [RequestRng(0)] * batch, [0] * batch
    uniforms = VerifyUniforms.draw(streams, steps, paths=paths, length=length, device=device)
    return tree, target, uniforms


# Verifiers by name.


_CLASSES: tuple[type[Verifier], ...] = (
    TokenVerifier,
    BlockVerifier,
    GbvVerifier,
    OtbvVerifier,
    SpecTrVerifier,
    SpecInferVerifier,
    SpecHubVerifier,
    GreedyDraftVerifier,
    TraversalVerifier,
    GlobalResolutionVerifier,
    ConvexResolutionVerifier,
    RaceResolutionVerifier,
    MaxFlowResolutionVerifier,
    LinearResolutionVerifier,
    TargetOnlyVerifier,
)

_STATEFUL_CLASSES: tuple[type[StatefulVerifier], ...] = (GreedyBlockVerifier, SpecTrGbvVerifier)

VERIFIERS: Mapping[str, type[Verifier]] = MappingProxyType({cls.name: cls for cls in _CLASSES})
"""Every verifier whose steps are lossless by themselves, keyed by its name."""

STATEFUL_VERIFIERS: Mapping[str, type[StatefulVerifier]] = MappingProxyType(
    {cls.name: cls for cls in _STATEFUL_CLASSES}
)
"""Every verifier that leaves a modified target to the next step, keyed by its name."""


def make_verifier(name: str) -> Verifier:
    """Return the stateless verifier of that name, or the greedy walk.

    A plan cannot choose the walk: it is lossless at temperature 0 only, where the engine uses it
    whatever the plan's verifier is.

    Raises:
        InvalidArgument: No stateless verifier has that name.
    """
    if name == GreedyWalkVerifier.name:
        return GreedyWalkVerifier()
    if name not in VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(VERIFIERS), name))
    return VERIFIERS[name]()


def make_stateful_verifier(name: str) -> StatefulVerifier:
    """Return the verifier of that name, which keeps state from step to step.

    Raises:
        InvalidArgument: No verifier with state has that name.
    """
    if name not in STATEFUL_VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(STATEFUL_VERIFIERS), name))
    return STATEFUL_VERIFIERS[name]()


def make_any_verifier(name: str) -> Verifier | StatefulVerifier:
    """Return the verifier of that name, with state or without.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    if name in VERIFIERS:
        return make_verifier(name)
    if name in STATEFUL_VERIFIERS:
        return make_stateful_verifier(name)
    raise InvalidArgument("verifier", name, one_of(sorted({*VERIFIERS, *STATEFUL_VERIFIERS}), name))


# Every reference verifier by name.


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference verifier.

    Attributes:
        verify: The rule.
        draft_samplings: Draft samplings it is lossless for.
        max_paths: Most paths it can use, ``None`` for any number.
        keeps_state: Whether it leaves a modified target behind.
    """

    verify: VerifyWithState
    draft_samplings: frozenset[DraftSampling]
    max_paths: int | None = None
    keeps_state: bool = False


def _plain(
    verify: Verify, *draft_samplings: DraftSampling, max_paths: int | None = None
) -> Reference:
    return Reference(stateless(verify), frozenset(draft_samplings), max_paths)


def _stateful(
    verify: VerifyWithState, *draft_samplings: DraftSampling, max_paths: int | None = None
) -> Reference:
    return Reference(verify, frozenset(draft_samplings), max_paths, keeps_state=True)


def _solved_by(solver: Solver) -> Verify:
    """Return global resolution with a solver; its counter starts anew at every call."""

    def verify(tree: ReferenceTree, chooser: Chooser) -> Outcome:
        return GlobalResolution(solver)(tree, chooser)

    return verify


REFERENCES: Mapping[str, Reference] = MappingProxyType(
    {
        "token": _plain(token, DraftSampling.IID, max_paths=1),
        "block": _plain(block, DraftSampling.IID, max_paths=1),
        "greedy_block": _stateful(greedy_block, DraftSampling.IID, max_paths=1),
        "gbv": _plain(gbv, DraftSampling.IID),
        "otbv": _plain(otbv, DraftSampling.IID, DraftSampling.GREEDY, DraftSampling.FIXED),
        "spectr": _plain(spectr, DraftSampling.IID),
        "specinfer": _plain(specinfer, DraftSampling.IID, DraftSampling.WOR),
        "spechub": _plain(spechub, DraftSampling.HUB),
        "greedy_draft": _plain(greedy_draft, DraftSampling.GREEDY),
        "target_only": _plain(target_only, *DraftSampling),
        "traversal": _plain(traversal, DraftSampling.IID, DraftSampling.WOR),
        "global_resolution": _plain(_solved_by(Solver.EXACT), DraftSampling.IID),
        "global_resolution_convex": _plain(_solved_by(Solver.CONVEX), DraftSampling.IID),
        "global_resolution_race": _plain(_solved_by(Solver.RACE), DraftSampling.IID),
        "global_resolution_max_flow": _plain(_solved_by(Solver.MAX_FLOW), DraftSampling.IID),
        "global_resolution_lp": _plain(_solved_by(Solver.LP), DraftSampling.IID),
        "spectr_gbv": _stateful(spectr_gbv, DraftSampling.IID),
    }
)
"""Verifiers by name; ``global_resolution`` once for each solver."""

"""Every rule by name; and verification with the check of its inputs, which may be compiled.

The operations on a few trees take longer to launch than to compute. One graph serves every plan and
batch, as its sizes are symbols. But PyTorch treats sizes 0 and 1 as constants, so a single tree and
single paths get graphs of their own, and paths of one or two tokens and lists of one are verified
uncompiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.compiling import EXAMPLE_WIDTH, compile_graph, making_graphs
from eaglegbv.config import PLAIN, Plan, PlanChoices
from eaglegbv.devices import runs_kernels
from eaglegbv.errors import InvalidArgument, one_of
from eaglegbv.rng import RequestRng
from eaglegbv.tree import DraftSampling, DraftTree, TargetProbs
from eaglegbv.verifiers import fused
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms, find_faults
from eaglegbv.verifiers.block import BlockVerifier, block
from eaglegbv.verifiers.gbv import GbvVerifier, gbv
from eaglegbv.verifiers.global_resolution import (
    GlobalResolution,
    GlobalResolutionVerifier,
    Solver,
    host_solver,
)
from eaglegbv.verifiers.greedy_block import GreedyBlockVerifier, greedy_block
from eaglegbv.verifiers.greedy_draft import GreedyDraftVerifier, greedy_draft
from eaglegbv.verifiers.otbv import OtbvVerifier, otbv
from eaglegbv.verifiers.proof.enumeration import stateless
from eaglegbv.verifiers.proof.tree import Verify
from eaglegbv.verifiers.selection import bounded_forks
from eaglegbv.verifiers.spechub import SpecHubVerifier, spechub
from eaglegbv.verifiers.specinfer import SpecInferVerifier, specinfer
from eaglegbv.verifiers.spectr import SpecTrVerifier, spectr
from eaglegbv.verifiers.spectr_gbv import SpecTrGbvVerifier
from eaglegbv.verifiers.stateful import StatefulVerifier, VerifyWithState
from eaglegbv.verifiers.target_only import GreedyWalkVerifier, TargetOnlyVerifier, target_only
from eaglegbv.verifiers.token import TokenVerifier, token
from eaglegbv.verifiers.traversal import TraversalVerifier, traversal

OwnVerifier = TypeVar("OwnVerifier", bound=type[Verifier] | type[StatefulVerifier])

_RULES: tuple[tuple[type[Verifier], Verify], ...] = (
    (TokenVerifier, token),
    (BlockVerifier, block),
    (GbvVerifier, gbv),
    (OtbvVerifier, otbv),
    (SpecTrVerifier, spectr),
    (SpecInferVerifier, specinfer),
    (SpecHubVerifier, spechub),
    (GreedyDraftVerifier, greedy_draft),
    (TraversalVerifier, traversal),
    (GlobalResolutionVerifier, GlobalResolution()),
    *((host_solver(own), GlobalResolution(own)) for own in Solver if own is not Solver.EXACT),
    (TargetOnlyVerifier, target_only),
)
"""The batched class and the reference of each rule whose steps are lossless by themselves."""

_STATEFUL_RULES: tuple[tuple[type[StatefulVerifier], VerifyWithState], ...] = (
    (GreedyBlockVerifier, greedy_block),
    (SpecTrGbvVerifier, greedy_block),
)

VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls, _ in _RULES}
"""Every verifier whose steps are lossless by themselves, keyed by its name."""

STATEFUL_VERIFIERS: dict[str, type[StatefulVerifier]] = {
    cls.name: cls for cls, _ in _STATEFUL_RULES
}
"""Every verifier that leaves a modified target to the next step, keyed by its name."""

ALL_VERIFIERS: dict[str, type[Verifier] | type[StatefulVerifier]] = {
    **VERIFIERS,
    **STATEFUL_VERIFIERS,
}

REFERENCES: Mapping[str, VerifyWithState] = MappingProxyType(
    {cls.name: stateless(verify) for cls, verify in _RULES}
    | {cls.name: verify for cls, verify in _STATEFUL_RULES}
)
"""The reference of every verifier, keyed by its name."""


def register_verifier(rule: OwnVerifier) -> OwnVerifier:
    """Let plans name a class of yours, a decorator; see docs/add_a_verifier.md.

    That it is lossless for the draft samplings it names is its own claim: ``eaglegbv audit
    --module`` checks it.

    Raises:
        InvalidArgument: The class has no name, or one that is taken.
    """
    name = getattr(rule, "name", None)
    if not isinstance(name, str) or name in (*ALL_VERIFIERS, GreedyWalkVerifier.name, "none"):
        raise InvalidArgument("name", name, f"a new one, not {one_of(sorted(ALL_VERIFIERS))}")
    ALL_VERIFIERS[name] = rule
    if issubclass(rule, StatefulVerifier):
        STATEFUL_VERIFIERS[name] = rule
    else:
        VERIFIERS[name] = rule
    return rule


def with_fitting_paths(choices: PlanChoices) -> PlanChoices:
    """Return choices that name a verifier alone with as many paths as it takes.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    name = choices.verifier
    if name is None or name == PLAIN.verifier or choices.paths is not None:
        return choices
    if choices.widths is not None:
        return choices
    return replace(choices, paths=make_any_verifier(name).fitting_paths(Plan().paths))


def make_verifier(name: str) -> Verifier:
    """Return the stateless verifier of that name, or the greedy walk.

    A plan cannot choose the walk, which is lossless at temperature 0 only.

    Raises:
        InvalidArgument: No stateless verifier has that name.
    """
    if name == GreedyWalkVerifier.name:
        return GreedyWalkVerifier()
    if name not in VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(VERIFIERS), name))
    return VERIFIERS[name]()


def make_any_verifier(name: str) -> Verifier | StatefulVerifier:
    """Return the verifier of that name, with state or without.

    Raises:
        InvalidArgument: No verifier has that name.
    """
    if name not in ALL_VERIFIERS:
        raise InvalidArgument("verifier", name, one_of(sorted(ALL_VERIFIERS), name))
    return ALL_VERIFIERS[name]()


_LEAST_LENGTH, _LEAST_FORKS, _LEAST_WIDTH = 3, 2, 2  # smallest sizes that a graph takes

Checked: TypeAlias = tuple[Verdict, Tensor]
"""A verdict, and ``[batch]`` int64: the faults of its inputs, where it is meaningless; else 0."""


class CheckedVerifier:
    """Verifies batches of trees, those of independent paths by compiled graphs if wanted."""

    def __init__(
        self,
        verifier: Verifier,
        *,
        compile_backend: str | None = None,
        vocab: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compile the work for ``vocab`` and ``device`` now if the verifier is ``one_graph``.

        ``compile_backend`` is a backend of ``torch.compile``; None runs all uncompiled.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self.verifier = verifier
        self._compiled: Callable[..., Checked] | None = None
        kernels = runs_kernels(torch.device(device))  # which are faster than any compiled graph
        if compile_backend is not None and verifier.one_graph and not kernels:
            self._compiled = compile_graph(self._verify, compile_backend)
            # Graphs are made for tensors of inference mode, in which an engine runs.
            with making_graphs(), torch.inference_mode():
                for batch in (1, 7):
                    for paths in (1,) if verifier.max_paths == 1 else (1, 4):
                        self.verify(*_example(batch, paths, vocab, device))

    def verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Checked:
        """Judge the drafts of a batch and look for faults; see :meth:`Verifier.verify`."""
        fits = tree.length >= _LEAST_LENGTH and tree.width >= _LEAST_WIDTH
        independent = tree.draft_sampling is DraftSampling.IID and tree.columns
        if self._compiled is None or not independent or not fits:
            return self._verify(tree, target, uniforms)
        # The forks of trees that were drawn on a device are not counted.
        forks = bounded_forks(tree) if tree.forks is None else tree.forks
        # A graph is made for one layout in memory, also of dimensions of size 1.
        draws = tree.draws.clone(memory_format=torch.contiguous_format)
        tree = replace(tree, draws=draws, forks=max(_LEAST_FORKS, forks))
        return self._compiled(tree, target, uniforms)

    def _verify(self, tree: DraftTree, target: TargetProbs, uniforms: VerifyUniforms) -> Checked:
        if fused.takes(self.verifier, tree):
            return fused.judge(self.verifier, tree, target, uniforms)
        return self.verifier.verify(tree, target, uniforms), find_faults(tree, target)


@lru_cache(maxsize=64)
def checked_verifier(
    name: str,
    compile_backend: str | None = None,
    vocab: int = 0,
    device: torch.device | str = "cpu",
) -> CheckedVerifier:
    """Return the stateless verifier of that name with its check, compiled once for all engines.

    Raises:
        InvalidArgument: There is no such verifier, or no such backend of ``torch.compile``.
    """
    verifier = make_verifier(name)
    return CheckedVerifier(verifier, compile_backend=compile_backend, vocab=vocab, device=device)


def _example(
    batch: int, paths: int, vocab: int, device: torch.device | str
) -> tuple[DraftTree, TargetProbs, VerifyUniforms]:
    """Return inputs to make a graph from. All sizes differ: equal ones would have to stay equal."""
    length, width = _LEAST_LENGTH + 2, EXAMPLE_WIDTH
    nodes = 1 + paths * length
    draws = torch.arange(1, nodes).view(1, paths, length).repeat(batch, 1, 1)
    parents = draws - 1
    parents[:, :, 0] = 0
    depth = torch.arange(1, length + 1).expand(batch, paths, length)
    tree = DraftTree(
        draft_sampling=DraftSampling.IID,
        token_ids=torch.zeros((batch, nodes), dtype=torch.int64),
        parents=pad(parents.flatten(1), (1, 0)),
        depth=pad(depth.flatten(1), (1, 0)),
        num_nodes=torch.full((batch,), nodes),
        draws=draws.mT.contiguous(),
        draft_ids=torch.arange(width).repeat(batch, nodes, 1),
        draft_probs=torch.full((batch, nodes, width), 1 / width, dtype=torch.float64),
        columns=True,
        forks=_LEAST_FORKS + 1,
    ).to(torch.device(device))
    rows = torch.arange(batch * nodes, device=device).view(batch, nodes)
    logits = torch.zeros((batch * nodes, max(vocab, width + 1)), device=device)
    rngs, steps = [RequestRng(0)] * batch, [0] * batch
    uniforms = VerifyUniforms.draw(rngs, steps, drafts=paths, length=length, device=device)
    return tree, TargetProbs.of_logits(logits, rows), uniforms

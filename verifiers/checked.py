"""A verifier with the check of its inputs: one piece of work, which may be compiled.

The operations on a few trees take longer to launch than to compute. One graph serves every plan and
batch, as its sizes are symbols. But PyTorch treats sizes 0 and 1 as constants, so a single tree and
single paths get separate graphs. Shorter paths and one-token laws are padded to the smallest size a
graph takes:

    of length 1         root -- a        root -- a -- a -- a    as past any path's end
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.compiling import EXAMPLE_WIDTH, check_backend, compile_graph, making_graphs
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.uniforms import Stream
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.iid_selection import bounded_forks
from eaglegbv.verifiers.inputs import find_faults
from eaglegbv.verifiers.registry import make_verifier

_LENGTH, _FORKS, _LEAST_WIDTH = 3, 2, 2
"""Smallest sizes that a graph takes; smaller ones are padded to these."""


class Checked(NamedTuple):
    """A verdict, and whether the verifier's inputs are sound.

    Attributes:
        verdict: Meaningless where there are faults.
        faults: ``[batch]`` int64, see :class:`eaglegbv.verifiers.inputs.Fault`.
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

    def verify(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Checked:
        """Judge the drafts of a batch and look for faults; see :meth:`Verifier.verify`."""
        compiled = self._compiled
        if compiled is None or tree.law is not Law.IID:
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

    def _verify(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Checked:
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
    """Return ``tree`` as graphs take it: laws padded, and room for ``forks``."""
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
) -> tuple[DraftTree, TargetLaw, VerifyUniforms]:
    """Return inputs to make a graph from. All sizes differ: equal ones would have to stay equal."""
    nodes = 1 + paths * length
    vocab = max(vocab, EXAMPLE_WIDTH + 1)
    path_nodes = torch.arange(1, nodes).view(1, paths, length).repeat(batch, 1, 1)
    parents = path_nodes - 1
    parents[:, :, 0] = 0
    depth = torch.arange(1, length + 1).expand(batch, paths, length)
    tree = DraftTree(
        law=Law.IID,
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
    target = TargetLaw.of_logits(torch.zeros((batch * nodes, vocab), device=device), rows)
    streams, steps = [Stream(0)] * batch, [0] * batch
    uniforms = VerifyUniforms.draw(streams, steps, paths=paths, length=length, device=device)
    return tree, target, uniforms

"""A verifier with the check of what it is given: one piece of work, which may be compiled.

The operations on a few trees take longer to launch than to compute. One graph serves every plan and
batch, and another a single tree: their sizes are symbols. Only, PyTorch takes sizes of 0 and 1 for
fixed, among them those of the laws between a path's ends, so smaller trees are padded:

    of 1 path, of length 1         root -- a        root -- a -- a -- a    as past any path's end
                                                    root                   a path of length 0
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eaglegbv.compiling import check_backend, compiled_alone, making_graphs
from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree, Law
from eaglegbv.uniforms import Stream
from eaglegbv.verifiers.base import Verdict, Verifier, VerifyUniforms
from eaglegbv.verifiers.inputs import find_faults
from eaglegbv.verifiers.registry import make_verifier

_PATHS, _LENGTH, _FORKS = 2, 3, 2
"""Least sizes that a graph takes; smaller ones are padded to these."""


class Checked(NamedTuple):
    """What a verifier says, and whether what it was given is sound.

    Attributes:
        verdict: Means nothing where there are faults.
        faults: ``[batch]`` int64, see :class:`eaglegbv.verifiers.inputs.Fault`.
    """

    verdict: Verdict
    faults: Tensor


class CheckedVerifier:
    """Verifies batches of trees; those of independent paths by a compiled graph, if wanted.

    Attributes:
        verifier: Who judges.
    """

    def __init__(self, verifier: Verifier, *, compile_backend: str | None = None) -> None:
        """Take a verifier.

        Args:
            verifier: Who judges.
            compile_backend: Compile this work by this backend of ``torch.compile`` now, if the
                verifier is ``one_graph``; None runs it as it is.

        Raises:
            InvalidArgument: There is no such backend.
        """
        self.verifier = verifier
        self._compiled: Callable[..., Checked] | None = None
        if compile_backend is not None and verifier.one_graph:
            check_backend(compile_backend)
            self._compiled = compiled_alone(self._verify, compile_backend)
            with making_graphs():
                self._warm_up()

    def verify(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Checked:
        """Judge the drafts of a batch and look for faults; see :meth:`Verifier.verify`."""
        compiled, forks = self._compiled, tree.forks
        if compiled is None or forks is None or tree.law is not Law.IID:
            return self._verify(tree, target, uniforms)
        paths = 0 if self.verifier.max_paths == 1 else max(0, _PATHS - tree.paths)
        steps = max(0, _LENGTH - tree.length)
        if paths or steps:
            tree, uniforms = _padded_tree(tree, paths, steps), _padded(uniforms, paths, steps)
        if forks < _FORKS:
            tree = replace(tree, forks=_FORKS)
        return compiled(tree, target, uniforms)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Make the graphs: for the tensors of inference mode, in which an engine runs."""
        paths = self.verifier.max_paths or _PATHS + 2
        for batch in (1, 6):
            self.verify(*_example(batch, paths, _LENGTH + 2))

    def _verify(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Checked:
        return Checked(self.verifier.verify(tree, target, uniforms), find_faults(tree, target))


@lru_cache(maxsize=64)
def checked_verifier(name: str, compile_backend: str | None = None) -> CheckedVerifier:
    """Return the stateless verifier of that name with its check, compiled once for all engines.

    Raises:
        InvalidArgument: There is no such verifier, or no such backend of ``torch.compile``.
    """
    return CheckedVerifier(make_verifier(name), compile_backend=compile_backend)


def _padded_tree(tree: DraftTree, paths: int, steps: int) -> DraftTree:
    """Return ``tree`` with room for more paths and longer ones, and neither."""
    nodes = tree.path_nodes
    nodes = torch.cat((nodes, nodes[:, :, -1:].expand(-1, -1, steps)), dim=2)
    return replace(
        tree,
        path_nodes=pad(nodes, (0, 0, 0, paths)),
        path_lengths=pad(tree.path_lengths, (0, paths)),
    )


def _padded(uniforms: VerifyUniforms, paths: int, steps: int) -> VerifyUniforms:
    """Return ``uniforms`` with numbers for what a tree was padded by, which decide nothing."""
    selection = pad(uniforms.selection, (0, 0, 0, paths, 0, steps))
    _, length, paths, _ = selection.shape
    acceptance = pad(uniforms.acceptance, (0, paths * length - uniforms.acceptance.shape[1]))
    parts = selection.flatten(1), acceptance, uniforms.correction.unsqueeze(1)
    # Out of one tensor like those drawn: a graph is made for strides too.
    return VerifyUniforms.of_numbers(torch.cat(parts, dim=1), paths=paths, length=length)


def _example(batch: int, paths: int, length: int) -> tuple[DraftTree, TargetLaw, VerifyUniforms]:
    """Return what to make a graph from. Equal sizes would have to be equal for good: none are."""
    width, vocab, nodes = 7, 23, 1 + paths * length
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
        draft_ids=torch.arange(width).repeat(batch, nodes, 1),
        draft_probs=torch.full((batch, nodes, width), 1 / width, dtype=torch.float64),
        forks=3,
    )
    rows = torch.arange(batch * nodes).view(batch, nodes)
    target = TargetLaw.of_logits(torch.zeros((batch * nodes, vocab)), rows)
    streams, steps = [Stream(0)] * batch, [0] * batch
    return tree, target, VerifyUniforms.draw(streams, steps, paths=paths, length=length)

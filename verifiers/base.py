"""The interface of verifiers: pure functions of (draft tree, target law, uniforms)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.errors import LawMismatch, one_of
from eaglegbv.target_law import TargetLaw
from eaglegbv.transfer import send
from eaglegbv.tree import DraftTree, Law
from eaglegbv.uniforms import Purpose, Stream
from eaglegbv.verifiers.categorical import draw
from eaglegbv.verifiers.figures import NodeFigures

_PURPOSES = (Purpose.SELECTION, Purpose.ACCEPTANCE, Purpose.CORRECTION)


@dataclass(frozen=True, slots=True)
class VerifyUniforms:
    """The random numbers one verification may use, float64 in [0, 1).

    Attributes:
        selection: ``[batch, length, paths, 2]``: two for each path at each depth.
        acceptance: ``[batch, paths * length]``: one for each acceptance test.
        correction: ``[batch]``: the correction or bonus token.
    """

    selection: Tensor
    acceptance: Tensor
    correction: Tensor

    @classmethod
    def draw(
        cls,
        streams: Sequence[Stream],
        steps: Sequence[int],
        *,
        paths: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own stream at its own step counter."""
        counts = _counts(paths, length)
        wanted = [(p, n) for p, n in zip(_PURPOSES, counts, strict=True) if n > 0]
        drawn = [
            np.concatenate([s.draw(t, purpose, n) for purpose, n in wanted])
            for s, t in zip(streams, steps, strict=True)
        ]
        # One copy to the device for all of them.
        numbers = send(torch.from_numpy(np.array(drawn)), device)
        return cls.of_numbers(numbers, paths=paths, length=length)

    @classmethod
    def of_numbers(cls, numbers: Tensor, *, paths: int, length: int) -> Self:
        """Split ``numbers`` ``[batch, 3 * paths * length + 1]`` in the order of the fields."""
        selection, acceptance, correction = numbers.split_with_sizes(_counts(paths, length), dim=1)
        return cls(
            selection=selection.view(len(numbers), length, paths, 2),
            acceptance=acceptance,
            correction=correction.squeeze(1),
        )


def _counts(paths: int, length: int) -> tuple[int, int, int]:
    """Return how many numbers each purpose needs."""
    return 2 * paths * length, paths * length, 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification commits, per request.

    Attributes:
        path_nodes: ``[batch, length]`` int64, nodes of the selected path at depths 1 ... length;
            meaningful up to ``accepted``.
        accepted: ``[batch]`` int64, number of accepted nodes, 0 ... length.
        token_ids: ``[batch]`` int64, the correction token, or the bonus token where the whole path
            was accepted.
    """

    path_nodes: Tensor
    accepted: Tensor
    token_ids: Tensor


class Rule(ABC):
    """The facts that every verification rule states about itself.

    A rule is lossless for the draft laws it names: the committed text follows the target's law
    exactly, whatever the drafter proposed.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section, equation."""
    cost: ClassVar[str]
    """Work of one verification: K paths, length L, N nodes, draft laws of width W."""
    laws: ClassVar[frozenset[Law]]
    """Draft laws the rule is lossless for."""
    default_law: ClassVar[Law] = Law.IID
    """The law to draft with when the user names none."""
    max_paths: ClassVar[int | None] = None
    """Most paths the rule can use; ``None`` for any number."""

    def fitting_paths(self, paths: int) -> int:
        """Return as many of ``paths`` as the rule can use."""
        return paths if self.max_paths is None else min(paths, self.max_paths)

    def check_law(self, law: Law, paths: int) -> None:
        """Raise :class:`LawMismatch` unless the verifier is lossless for ``paths`` of ``law``."""
        if law not in self.laws:
            expected = f"{one_of(sorted(self.laws))} for verifier {self.name!r}"
            raise LawMismatch("law", str(law), expected)
        if self.max_paths is not None and paths > self.max_paths:
            raise LawMismatch("paths", paths, f"at most {self.max_paths} for {self.name!r}")


class Verifier(Rule):
    """A rule that turns a draft tree and the target's laws into committed tokens.

    Each step is lossless by itself. A subclass implements :meth:`judge`; callers use
    :meth:`verify`.
    """

    one_graph: ClassVar[bool] = False
    """Whether :meth:`judge` runs one graph of tensor operations on independent paths of any size:
    neither values nor sizes decide which operations run, or how often."""

    def verify(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge the drafts of a batch; a tree of a root alone yields a sample of its target law.

        Nothing is read on the host. Faulty probabilities are found by
        :func:`eaglegbv.verifiers.inputs.find_faults`, whose result the caller reads together with
        the verdict, before committing.

        Raises:
            LawMismatch: The tree's law is not among :attr:`laws`.
        """
        if tree.length == 0:
            return self._sample_roots(tree, target, uniforms)
        self.check_law(tree.law, tree.paths)
        return self.judge(tree, target, uniforms)

    @abstractmethod
    def judge(self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms) -> Verdict:
        """Judge trees of an accepted law and of at least one step."""

    def figures(
        self,
        tree: DraftTree,  # noqa: ARG002
        target: TargetLaw,  # noqa: ARG002
        uniforms: VerifyUniforms,  # noqa: ARG002
    ) -> NodeFigures:
        """Return the numbers, beside p and q, by which :meth:`judge` decides.

        Most rules have none; a rule that weighs prefixes returns its weights.
        """
        return {}

    def _sample_roots(
        self, tree: DraftTree, target: TargetLaw, uniforms: VerifyUniforms
    ) -> Verdict:
        roots = torch.zeros_like(tree.num_nodes)
        return Verdict(
            path_nodes=tree.token_ids.new_zeros((tree.batch, 0)),
            accepted=roots,
            token_ids=draw(target.probs_of(roots), uniforms.correction),
        )

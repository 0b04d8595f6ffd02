"""Verifiers with state: each step pays the debts of earlier ones and may leave one of its own.

What an engine keeps for a request, from step to step:

* The numbers of its layers, a column of :class:`eaglegbv.verifiers.debts.Layers`, oldest first. A
  new request has none. After each verification take :attr:`StatefulVerdict.layers` and drop the
  columns whose ``remaining`` is 0. The last column, if it remains, is the layer of the step just
  done.
* For each layer a *snapshot* of what its draft law needs: the drafter's settings and state at the
  root of the step that pushed the layer, and the tokens committed since that root. The law of a
  layer is that of its own step, not of the current one, so a drafter must be able to recall what
  that step would have drawn from (:class:`eaglegbv.drafters.base.RecallingDrafter`).
* Nothing else. Steps without drafts (a root alone) go through the same verifier, so that debts are
  paid there too; layers survive pre-emption with the request.

At verification the engine passes ``Debts(layers, laws)``, where ``laws.after(tokens)`` recalls the
law of every layer of every request, after the given tokens of the path being selected. Requests
with fewer layers are padded by columns whose ``remaining`` is 0.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eaglegbv.target_law import TargetLaw
from eaglegbv.tree import DraftTree
from eaglegbv.uniforms import Purpose, Stream
from eaglegbv.verifiers.base import Rule, Verdict, VerifyUniforms
from eaglegbv.verifiers.debts import Debts, Layers
from eaglegbv.verifiers.figures import NodeFigures


@dataclass(frozen=True, slots=True)
class StatefulUniforms:
    """The random numbers of a verification with state.

    Attributes:
        plain: Those every verification uses.
        entering: ``[batch, length, layers]`` float64: at a node of depth d, number (d, j) moves the
            j-th of the layers in force to the child entered.
        leaving: ``[batch, layers + 1]`` float64: likewise after the step's last token; the number
            after those of the layers in force belongs to the new layer.
    """

    plain: VerifyUniforms
    entering: Tensor
    leaving: Tensor

    @classmethod
    def draw(
        cls,
        streams: Sequence[Stream],
        steps: Sequence[int],
        layers: Sequence[int],
        *,
        paths: int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Draw every request's numbers from its own stream at its own step counter.

        They continue the selection and correction numbers of the plain draw, so they do not depend
        on how many layers other requests have.

        Args:
            streams: The requests' streams.
            steps: Their step counters.
            layers: The number of layers of each request.
            paths: Paths of the tree.
            length: Length of the tree.
            device: Where the numbers are wanted.
        """
        plain = VerifyUniforms.draw(streams, steps, paths=paths, length=length, device=device)
        most = max(layers, default=0)
        entering = np.zeros((len(streams), length, most))
        leaving = np.zeros((len(streams), most + 1))
        start = 2 * paths * length
        for b, (stream, step, count) in enumerate(zip(streams, steps, layers, strict=True)):
            numbers = stream.draw(step, Purpose.SELECTION, start + length * count)[start:]
            entering[b, :, :count] = numbers.reshape(length, count)
            leaving[b, : count + 1] = stream.draw(step, Purpose.CORRECTION, count + 2)[1:]
        return cls(
            plain, torch.from_numpy(entering).to(device), torch.from_numpy(leaving).to(device)
        )


@dataclass(frozen=True, slots=True)
class StatefulVerdict:
    """What a verification commits, and what it leaves to the next.

    Attributes:
        verdict: The tokens.
        layers: The debts after the last of them: those passed in, and in the last column the one
            of this step; ``remaining`` is 0 where there is none.
        figures: Computes the numbers, beside p and q, by which the verification decided.
    """

    verdict: Verdict
    layers: Layers
    figures: Callable[[], NodeFigures]


class StatefulVerifier(Rule):
    """A rule whose steps are lossless only in sequence: each needs the debts of those before."""

    @abstractmethod
    def verify(
        self, tree: DraftTree, target: TargetLaw, uniforms: StatefulUniforms, debts: Debts
    ) -> StatefulVerdict:
        """Judge the drafts of a batch, given the debts of earlier steps.

        ``tree.length`` must be the length the paths were drawn to, even if all ended earlier: it
        determines how long a debt lasts. A tree of a root alone yields a token of the modified
        target.

        Raises:
            LawMismatch: The tree's law is not among :attr:`laws`.
        """

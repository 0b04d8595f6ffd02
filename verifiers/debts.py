"""What the steps of greedy rules owe: layers, and the draft laws of the steps they come from.

See :mod:`eaglegbv.verifiers.modified_target` for what a layer does to the target.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

MOST_RHO = 1e100
"""Largest rho that is kept.

A debt may follow a text whose tokens its own step would hardly have drafted: b can be 1e-130 or
less at each of them, and the product of the M / b soon exceeds what float64 holds. At this limit
M_k is M_{k-1} already: where M_{k-1}(x) >= 1e-80, b is less than 1e-20 of rho M_{k-1}, and all
other tokens together have less than 1e-80 times the size of the vocabulary.
"""


@dataclass(frozen=True, slots=True)
class Layers:
    """The debts of earlier steps, ``[batch, layers]`` each, oldest first.

    Attributes:
        rho: float64.
        drafts: int64, n, the drafts that would still be in play.
        remaining: int64, tokens the debt still covers; 0 where there is no layer.
        most_drafts: A bound on ``drafts``: the most paths any of the steps had.
    """

    rho: Tensor
    drafts: Tensor
    remaining: Tensor
    most_drafts: int

    @classmethod
    def none(cls, batch: int, *, device: torch.device | str = "cpu") -> Self:
        """Return no layers: the state of new requests."""
        counts = torch.zeros((batch, 0), dtype=torch.int64, device=device)
        return cls(counts.to(torch.float64), counts, counts, 1)

    @property
    def count(self) -> int:
        """Padded number of layers."""
        return self.rho.shape[1]


def rho_after(rho: Tensor, target_prob: Tensor, plan_prob: Tensor) -> Tensor:
    """Return ``rho M(x) / b(x)`` once a token x is entered, at most :data:`MOST_RHO`.

    Args:
        rho: float64, of any shape, as are the others.
        target_prob: M(x), the law that the debt modifies.
        plan_prob: b(x) > 0, by which the debt's own step would have selected x.
    """
    factor = (target_prob / plan_prob).clamp(max=MOST_RHO)
    return (rho * factor).clamp(max=MOST_RHO)


@dataclass(frozen=True, slots=True)
class SparseLaws:
    """Draft laws as short lists.

    Attributes:
        ids: ``[batch, layers, width]`` int64.
        probs: ``[batch, layers, width]`` float64; padding entries are 0. All are 0 where there is
            no layer, or where the paths of the layer's own step would have ended.
    """

    ids: Tensor
    probs: Tensor


class LayerLaws(Protocol):
    """The draft laws of layers, recalled along a path."""

    def after(self, tokens: Tensor) -> SparseLaws:
        """Return the law of every layer's own step after ``tokens``.

        Called once per depth, from the root down, each time with one token more.

        Args:
            tokens: ``[batch, depth]`` int64, the tokens entered below the root so far; depth is 0
                at the root. They are meaningless for requests whose path has already ended.
        """


@dataclass(frozen=True, slots=True)
class Debts:
    """What a verification needs to know about earlier steps."""

    layers: Layers
    laws: LayerLaws

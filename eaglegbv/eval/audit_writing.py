"""Interface between a sampled audit and a verifier: the verifier writes texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eaglegbv.verifiers.reference.enumeration import Problem


@dataclass(frozen=True, slots=True)
class Written:
    """Texts that a verifier wrote.

    Attributes:
        cells: ``[samples]`` int64, each whole text as a number in base ``vocab``.
        committed: Tokens committed by all first steps together.
    """

    cells: Tensor
    committed: int


class Writer(Protocol):
    """Writes texts of L + 1 tokens with the batched implementation of a verifier."""

    def __call__(
        self, problems: Sequence[Problem], samples: int, generator: torch.Generator
    ) -> Written:
        """Write texts whose steps follow ``problems``."""

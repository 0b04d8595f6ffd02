"""Counter-based random numbers: every number is a pure function of (seed, step, purpose).

A request's numbers never depend on what else runs, and a number is never used twice: numbers are
keyed by the request's *step counter*, not by token positions. If they were keyed by position, the
next step would reuse the numbers drawn for rejected positions, which biases the output.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a uniform number decides. Different purposes never share numbers."""

    DRAFT = 0
    SELECTION = 1
    ACCEPTANCE = 2
    CORRECTION = 3


_EMPTY = np.zeros(4, dtype=np.uint64)
"""Philox makes four numbers at a time; draws never leave any for the next one."""


@dataclass(frozen=True, slots=True)
class RequestRng:
    """The random numbers of one request."""

    seed: int  # key of the request, 64 bits
    # The generator is made once, as that takes longer than a draw; every draw sets all its state.
    _generator: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_generator", np.random.Generator(np.random.Philox(key=0)))

    def draw(self, step: int, purpose: Purpose, count: int) -> NDArray[np.float64]:
        """Return ``count`` uniforms in [0, 1), float64, as a pure function of their key.

        Args:
            step: The request's step counter (0 for the first token after the prompt).
            purpose: What the numbers decide.
            count: Number of uniforms; a longer draw starts with the numbers of a shorter one.
        """
        # Philox is keyed by (seed, purpose); the step is above the 64-bit block counter.
        # The key is an array because numpy would round large seeds in a list to float64.
        self._generator.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([0, step, 0, 0], dtype=np.uint64),
                "key": np.array([self.seed, purpose], dtype=np.uint64),
            },
            "buffer": _EMPTY,
            "buffer_pos": len(_EMPTY),
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator.random(count)


def request_seed(engine_seed: int, request_number: int) -> int:
    """Return the 64-bit seed of a request without a seed, derived from the engine's seed."""
    # With a spawn key: in one list of both, the words of a large seed run into those of the number.
    sequence = np.random.SeedSequence(engine_seed, spawn_key=(request_number,))
    return int(sequence.generate_state(1, np.uint64)[0])

"""A kernel, ready to run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gpu.ptx.instructions import meaning
from gpu.ptx.lanes import ENDED, Lanes, Launch, Ranges
from gpu.ptx.text import JUMPS, Guard, Instruction, Kernel, Name
from gpu.ptx.values import Operands, Step

_BLOCKS_AT_ONCE = 16
"""More cost more memory than they save time: most of a recorded launch's end at once."""


@dataclass(frozen=True, slots=True)
class _Jump:
    """The end of a basic block: where active lanes go, those that its guard lets."""

    target: int
    guard: Guard | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Steps, and where they lead: to the next block, or where a jump says."""

    steps: tuple[Step, ...]
    jump: _Jump | None


class Program:
    """Runs a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        """Find out what every instruction means.

        Raises:
            NotImplementedError: One is not known here.
        """
        self.kernel = kernel
        self._blocks = [self._block(block) for block in kernel.blocks]

    def run(self, launch: Launch, allowed: Ranges | None = None) -> None:
        """Run all blocks of a launch, some at a time.

        Args:
            launch: What it is launched with.
            allowed: Global memory that may be touched; None for any.

        Raises:
            MemoryFault: The kernel reads or writes elsewhere.
        """
        blocks = range(int(np.prod(launch.grid)))
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            some = blocks[first : first + _BLOCKS_AT_ONCE]
            with np.errstate(all="ignore"):  # also of lanes whose turn it is not
                self._run(Lanes(self.kernel, launch, some, allowed))

    def _run(self, lanes: Lanes) -> None:
        counters = lanes.counters
        while (present := int(counters.min())) < ENDED:
            active = counters == present
            lanes.all_active = bool(active.all())
            lanes.active = lanes.everyone if lanes.all_active else active
            block = self._blocks[present]
            for step in block.steps:
                step(lanes)
            counters[active] = present + 1
            if block.jump is not None:
                counters[active & _taken(block.jump, lanes)] = block.jump.target

    def _block(self, instructions: Sequence[Instruction]) -> _Block:
        operands = Operands(self.kernel)
        jump = None
        if instructions and instructions[-1].name[0] in JUMPS:
            *instructions, last = instructions
            jump = _Jump(self._target(last), last.guard)
        return _Block(tuple(meaning(own, operands) for own in instructions), jump)

    def _target(self, jump: Instruction) -> int:
        if jump.name[0] != "bra":
            return ENDED
        [label] = jump.operands
        assert isinstance(label, Name), jump.text
        return self.kernel.labels[label.text]


def _taken(jump: _Jump, lanes: Lanes) -> np.ndarray:
    if jump.guard is None:
        return lanes.everyone
    return lanes.passing(jump.guard)

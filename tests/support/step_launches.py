"""Counts what a step of the engine runs outside of its recordings, by phase: BATCH...

All that FlashInfer and the recordings run is left out. It runs on a CPU, so that operations over
tensors that belong to the host are counted too. Kernels are interpreted: a minute for one request.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from eaglegbv import kernels, layer_kernels
from eaglegbv.config import Plan
from eaglegbv.cuda_graphs import Recorder, Work
from eaglegbv.metrics import Stopwatch
from eaglegbv.sampling import SamplingParams
from support.flashinfer_stand import Stand, StandAttention
from support.launches import launches
from support.tiny_engine import tiny_engine

PLAN = Plan(verifier="otbv", paths=4, depth=6, draft_width=8)
BY_KERNELS = (
    *("eaglegbv.sampling", "eaglegbv.verifiers.fused", "eaglegbv.verifiers.registry"),
    "eaglegbv.attention.flashinfer",
)


class Silent(Recorder):
    """Replays without being seen."""

    def record(self, work: Work) -> Work:
        with _disable_current_modes():
            work()

        def replay() -> tuple[Tensor, ...]:
            with _disable_current_modes():
                return work()

        return replay


def silently(method: Any) -> Any:
    def quiet(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return method(*arguments, **named)

    return quiet


def counts(batch: int) -> dict[str, int]:
    """Return the launches of a step's phases."""
    found: dict[str, int] = {}
    tiny = tiny_engine(slots=2048, graphs=Silent(), attention=StandAttention, layers=4)
    for number in range(batch):
        params = SamplingParams(seed=number, temperature=0.8, ignore_eos=True)
        tiny.engine.add([3, 1, 4, number], params, PLAN)
    for _ in range(4):
        tiny.engine.step()
    modules = {
        kernels: ("warp_rows", "judge_nodes", "judge_paths", "draw_corrections"),
        layer_kernels: ("pack_masks",),
    }
    with launches(modules) as names, pytest.MonkeyPatch.context() as patch:
        phase = Stopwatch.phase

        @contextmanager
        def counted(self: Stopwatch, name: Any) -> Iterator[None]:
            before = len(names)
            with phase(self, name):
                yield
            found[str(name)] = len(names) - before

        patch.setattr(Stopwatch, "phase", counted)
        tiny.engine.step()
    return found


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr("eaglegbv.attention.flashinfer.check_pool", lambda pool: None)
        patch.setattr(Stand, "plan", silently(Stand.plan))
        patch.setattr(Stand, "run", silently(Stand.run))
        patch.setattr("eaglegbv.sampling.PIECE", 16)
        for name in BY_KERNELS:
            if hasattr(import_module(name), "runs_kernels"):
                patch.setattr(f"{name}.runs_kernels", lambda _: True)
        for batch in map(int, sys.argv[1:]):
            sys.stdout.write(f"batch {batch}: {counts(batch)}\n")


if __name__ == "__main__":
    main()

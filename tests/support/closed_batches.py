"""Batches that are served to their ends, in worlds without models: what a planner gains or loses.

A world is a machine's distribution of step times, with an error of its own for every plan and batch size,
minutes in which it is slow, and noise; and a drafter to which texts are more or less hard. The
planner sees noisy times, as an engine does; what it gains is told by the true ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from eaglegbv.config import AUTO, PLAIN, Plan
from eaglegbv.request import Request
from eaglegbv.scheduler.planner import Array, Cell, KnownCosts, Measured, Planner, StepShape
from support.simulated_engine import make_request, verify

SECONDS = np.array((9.0, 0.32, 1.6, 2.4, 0.6, 0.38, 0.25, 0.24)) / 1000
"""Seconds by feature: about those of the tiny pair on two slow CPU cores."""

READING = 40e-6
"""Seconds in which a drafter reads a position."""

USUAL_ROWS = 9
"""Rows that it reads within a step of its own."""


@dataclass
class Machine:
    """How long steps take.

    Attributes:
        generator: Of everything that is drawn.
        misfit: Standard deviation of the distribution's error (natural logarithm) for a plan and size.
    """

    generator: np.random.Generator
    misfit: float = 0.06
    _errors: dict[Cell, float] = field(default_factory=dict)
    _slow: float = 1.0
    _left: int = 0

    def seconds(self, shape: StepShape) -> float:
        """Return what a step takes in a usual minute."""
        if shape.cell not in self._errors:
            self._errors[shape.cell] = float(np.exp(self.misfit * self.generator.normal()))
        return float(shape.features @ SECONDS) * self._errors[shape.cell]

    def noise(self) -> float:
        """Return what multiplies the time of the next step."""
        if self._left == 0:
            self._left = int(self.generator.geometric(1 / 60))
            slow = self.generator.random() < 0.5
            self._slow = float(np.exp(0.15 * abs(self.generator.normal()))) if slow else 1.0
        self._left -= 1
        hiccup = 1.5 if self.generator.random() < 0.02 else 1.0
        return self._slow * hiccup * float(np.exp(0.05 * self.generator.normal()))

    def calibrated(self) -> tuple[Measured, ...]:
        """Return what is measured before the first request."""
        lone = [plan for plan in AUTO.candidates if plan.paths == 1 or plan.depth == 3]
        small = [plan for plan in lone if plan.paths == 1 and plan.depth < 3]
        largest = max(lone, key=lambda plan: plan.tree_nodes)
        kinds = [
            *((1, plan, 64) for plan in (PLAIN, *lone)),
            *((size, PLAIN, 64) for size in (4, 8, 16)),
            *((4, plan, 512) for plan in (PLAIN, largest)),
            *((size, plan, 64) for size in (4, 8) for plan in small),
        ]
        shapes = [StepShape.of(plan, size, size * prompt) for size, plan, prompt in kinds]
        return tuple(
            Measured(shape, min(self.seconds(shape) * self.noise() for _ in range(6)))
            for shape in shapes
        )


@dataclass
class Shop:
    """Serves batches under automatic plans on a machine.

    Attributes:
        machine: It.
        chance: Of a single draft at depth 1 of a usual text.
        tokens: Tokens of every answer.
        stall: Seconds by which the first timed step is held up that ``stalls`` says; once.
        stalls: Says which.
    """

    machine: Machine
    chance: float = 0.63
    tokens: int = 64
    stall: float = 0.0
    stalls: Callable[[list[Request]], bool] = lambda requests: False
    _added: int = 0

    def __post_init__(self) -> None:
        """Calibrate."""
        known = self.machine.calibrated()
        self.planner = Planner(KnownCosts(greedy=known, sampled=known))

    def gain(self, batch: int, generator: np.random.Generator) -> float:
        """Serve a batch of new texts; return how many times as fast as by plain decoding."""
        prompts = np.clip(generator.lognormal(4.1, 0.6, batch), 20, 400).astype(int)
        ease = 0.6 * generator.normal(size=batch)
        plainly = [
            StepShape(batch, int(prompts.sum()) + batch * n, 0, 0, 0)
            for n in range(self.tokens - 1)
        ]
        return sum(map(self.machine.seconds, plainly)) / self._serve(prompts, ease, generator)

    def _serve(self, prompts: Array, ease: Array, generator: np.random.Generator) -> float:
        requests = [self._request(int(prompt)) for prompt in prompts]
        chances = {r.number: self._chances(e) for r, e in zip(requests, ease, strict=True)}
        behind = {r.number: r.context for r in requests}
        time = 0.0
        for r in requests:
            if self.planner.worth_reading(r, rows=r.context, batch=len(requests)):
                time += READING * behind[r.number]
                behind[r.number] = 0
        self.planner.observe_reading(100, 100 * READING)
        while requests:
            self.planner.assign(requests, behind=lambda r: behind[r.number])
            drafting = [r for r in requests if r.plan.speculative]
            late = [behind[r.number] for r in drafting if behind[r.number] > USUAL_ROWS]
            shape = StepShape.of(
                drafting[0].plan if drafting else PLAIN,
                requests=len(requests),
                context=sum(r.context for r in requests),
                drafting=len(drafting),
            )
            seconds = self.machine.seconds(shape) + READING * sum(
                64 if rows > 128 else rows for rows in late
            )
            time += seconds
            for r in requests:
                self._commit(r, chances[r.number], generator)
                behind[r.number] = 0 if r.plan.speculative else behind[r.number] + 1
            held_up = 0.0
            if self.stall and self.planner._timed and self.stalls(requests):
                held_up, self.stall = self.stall, 0.0
            self.planner.observe_step(seconds * self.machine.noise() + held_up)
            requests = [r for r in requests if len(r.token_ids) < self.tokens]
        return time

    def _commit(
        self, r: Request, chance: Callable[[Plan, int], float], generator: np.random.Generator
    ) -> None:
        accepted = verify(r, self.planner, partial(chance, r.plan), generator)
        new = min(1 + accepted, self.tokens - len(r.token_ids))
        r.token_ids += [1] * new
        r.slots = torch.arange(len(r.slots) + new)

    def _chances(self, ease: float) -> Callable[[Plan, int], float]:
        """Return the chances at a depth, from 0; further paths bring less, deeper ones least."""

        def chance(plan: Plan, depth: int) -> float:
            odds = self.chance / (1 - self.chance) * np.exp(ease + 0.15 * depth)
            drafts = 1 + (plan.paths**0.35 - 1) * 0.45**depth
            return float(1 - (1 / (1 + odds)) ** drafts)

        return chance

    def _request(self, prompt: int) -> Request:
        self._added += 1
        return make_request(self._added, AUTO, 1.0, max_tokens=self.tokens, context=prompt)

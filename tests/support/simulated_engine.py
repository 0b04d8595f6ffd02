"""An engine without models: steps take the time and drafts get as far as a stated world says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from eaglegbv.config import AUTO, PLAIN, AutoPlan, Plan, Source
from eaglegbv.request import PlanReason, Request
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.costs import KnownCosts, Measured, StepShape
from eaglegbv.scheduler.planner import Planner
from support.requests import make_request


def constant(value: float) -> Callable[[int, int], float]:
    return lambda place, depth: value


@dataclass(slots=True)
class World:
    """What is true.

    Attributes:
        step: Milliseconds of a step of one request, and of every further one.
        draft: Milliseconds that drafting adds: once, a request, a level, a node.
        chance: Chance of a single draft, by place in the batch and depth from 0.
        noise: Standard deviation of the logarithm of a step's time.
        reading: Milliseconds that a drafter takes for a position that it missed.
        looks: Milliseconds of a node's look at 1024 tokens of its request's context.
        matched: How much of a text's end a lookup finds, by place in the batch and step.
        looked_up: Chance of a token looked up.
    """

    step: tuple[float, float] = (4.0, 0.5)
    draft: tuple[float, float, float, float] = (1.0, 0.2, 0.5, 0.05)
    chance: Callable[[int, int], float] = field(default_factory=lambda: constant(0.6))
    noise: float = 0.05
    reading: float = 0.0
    looks: float = 0.0
    matched: Callable[[int, int], int] = field(default_factory=lambda: lambda place, step: 0)
    looked_up: float = 0.0

    def seconds(self, requests: list[Request], behind: Mapping[int, int] | None = None) -> float:
        """Return the time of a step; ``behind`` has the positions that drafters missed."""
        time = self.step[0] + self.step[1] * (len(requests) - 1)
        once, request, level, node = self.draft
        time += node * sum(r.plan.depth for r in requests if r.plan.source is Source.LOOKUP)
        drafting = [r for r in requests if r.plan.asks_drafter]
        if drafting:
            plan = drafting[0].plan
            time += once + request * len(drafting) + level * plan.depth
            for r in drafting:
                looks = self.looks * r.context / 1024
                time += plan.paths * plan.depth * (node + looks)
                time += self.reading * (behind or {}).get(r.number, 0)
        return time / 1000

    def next(self, place: int, plan: Plan, depth: int) -> float:
        """Return the chance that a path goes on at a depth, from 0."""
        if plan.source is Source.LOOKUP:
            return self.looked_up
        return 1 - (1 - self.chance(place, depth)) ** (1 + (plan.paths - 1) * 0.5**depth)

    def expected(self, place: int, plan: Plan) -> float:
        depths = range(plan.depth if plan.speculative else 0)
        return 1 + float(np.cumprod([self.next(place, plan, d) for d in depths]).sum())

    def rate(self, batch: int, plan: Plan, *, context: int = 100) -> float:
        """Return the tokens per second of a fixed plan."""
        seconds = self.seconds(planned(plan, batch, context=context))
        return sum(self.expected(n, plan) for n in range(batch)) / seconds

    def best(self, batch: int, *, context: int = 100) -> float:
        """Return the tokens per second of the best fixed plan."""
        return max(self.rate(batch, plan, context=context) for plan in (PLAIN, *AUTO.candidates))

    def recorded(self, *, drafts: float = 1.0, plain: float = 1.0) -> KnownCosts:
        """Return costs as an earlier run kept them, times these factors."""
        steps = []
        for batch in (1, 4, 16):
            for plan in (PLAIN, *AUTO.candidates[::3]):
                seconds = self.seconds(planned(plan, batch))
                seconds *= drafts if plan.speculative else plain
                steps.append(Measured(StepShape.of([plan], batch, 100 * batch), seconds))
        return KnownCosts(greedy=tuple(steps), sampled=tuple(steps))


@dataclass(slots=True)
class Simulation:
    """Runs a planner in a world.

    Attributes:
        world: What is true; may be replaced between runs.
        planner: Who chooses.
        log: Plans and reasons of all requests of all steps.
    """

    world: World
    planner: Planner = field(default_factory=Planner)
    log: list[list[tuple[Plan, PlanReason]]] = field(default_factory=list)
    added: int = 0
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def run(
        self,
        batch: int,
        steps: int,
        *,
        auto: AutoPlan = AUTO,
        temperature: float = 1.0,
        missed: int = 0,
        context: int = 100,
    ) -> float:
        """Run a batch for some steps, and return its tokens per second, as expected in the world.

        Drafters have missed ``missed`` positions at first, and then what is decoded plainly.
        """
        requests = [
            decoding(self.added + n, auto, temperature, context=context) for n in range(batch)
        ]
        behind = {request.number: missed for request in requests}
        for _ in range(2):  # of other prompts
            self.planner.observe_reading(100, 100 * self.world.reading / 1000)
        self.added += batch
        tokens = time = 0.0
        for step in range(steps):
            found = {r.number: self.world.matched(n, step) for n, r in enumerate(requests)}
            self.planner.assign(
                requests,
                behind=lambda request: behind[request.number],
                matched=lambda request, found=found: found[request.number],
            )
            self.log.append([(r.plan, r.plan_reason) for r in requests])
            for place, request in enumerate(requests):
                tokens += self.world.expected(place, request.plan)
                self._verify(place, request)
            noise = np.exp(self.world.noise * self.generator.normal())
            seconds = self.world.seconds(requests, behind)
            time += seconds
            self.planner.observe_step(float(seconds * noise))
            for request in requests:
                drafts = request.plan.asks_drafter
                behind[request.number] = 0 if drafts else behind[request.number] + 1
        return tokens / time

    def _verify(self, place: int, request: Request) -> None:
        """Draw how many drafts of a request are accepted, and tell the planner."""
        accepted, depth = 0, request.plan.depth if request.plan.speculative else 0
        draws = self.generator.random(depth)
        while accepted < depth and draws[accepted] < self.world.next(place, request.plan, accepted):
            accepted += 1
        request.step += 1
        self.planner.observe_request(request, offered=depth, accepted=accepted)

    def share(self, of: Plan | Source | PlanReason, last: int) -> float:
        """Return the share of a plan, a source or a reason in the last steps."""
        steps = self.log[-last:]
        chosen = [of in (plan, plan.source, why) for step in steps for plan, why in step]
        return sum(chosen) / len(chosen)


def planned(plan: Plan, batch: int, *, context: int = 100) -> list[Request]:
    """Return requests that decode by a plan."""
    return [decoding(n, None, 1.0, context=context, plan=plan) for n in range(batch)]


def decoding(
    number: int, auto: AutoPlan | None, temperature: float, *, context: int = 100, **more: Any
) -> Request:
    """Return a request that decodes."""
    params, slots = SamplingParams(temperature=temperature), torch.arange(context)
    more = {"max_tokens": 100_000} | more
    return make_request(
        number, (1, 2), params=params, auto=auto, token_ids=[1], slots=slots, **more
    )

"""An engine without models: steps take the time and drafts get as far as stated distributions say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from eaglegbv.config import AUTO, PLAIN, AutoPlan, Plan, Source
from eaglegbv.request import PlanReason, Request
from eaglegbv.rng import RequestRng
from eaglegbv.sampling import SamplingParams
from eaglegbv.scheduler.planner import Planner


@dataclass(slots=True)
class World:
    """What is true.

    Attributes:
        step: Milliseconds of a step of one request, and of every further one.
        draft: Milliseconds that drafting adds: once, a request, a level, a node.
        chance: Chance of a single draft, by place in the batch and depth from 0.
        noise: Standard deviation of the logarithm of a step's time.
        reading: Milliseconds that a drafter takes for a position that it missed.
        matched: How much of a text's end a lookup finds, by place in the batch and step.
        looked_up: Chance of a token looked up.
    """

    step: tuple[float, float] = (4.0, 0.5)
    draft: tuple[float, float, float, float] = (1.0, 0.2, 0.5, 0.05)
    chance: Callable[[int, int], float] = field(default=lambda place, depth: 0.6)
    noise: float = 0.05
    reading: float = 0.0
    matched: Callable[[int, int], int] = field(default=lambda place, step: 0)
    looked_up: float = 0.0

    def seconds(self, requests: list[Request], behind: Mapping[int, int] | None = None) -> float:
        """Return the time of a step; ``behind`` has the positions that drafters missed."""
        base, each = self.step
        time = base + each * (len(requests) - 1)
        drafting = [r for r in requests if r.plan.asks_drafter]
        once, request, level, node = self.draft
        time += node * sum(r.plan.depth for r in requests if r.plan.source is Source.LOOKUP)
        if drafting:
            plan = drafting[0].plan
            nodes = plan.paths * plan.depth * len(drafting)
            time += once + request * len(drafting) + level * plan.depth + node * nodes
            time += self.reading * sum((behind or {}).get(r.number, 0) for r in drafting)
        return time / 1000

    def hazard(self, place: int, paths: int, depth: int) -> float:
        drafts = 1 + (paths - 1) * 0.5**depth
        return 1 - (1 - self.chance(place, depth)) ** drafts

    def next(self, place: int, plan: Plan, depth: int) -> float:
        """Return the chance that a path goes on at a depth, from 0."""
        drafted = plan.source is Source.DRAFTER
        return self.hazard(place, plan.paths, depth) if drafted else self.looked_up

    def expected(self, place: int, plan: Plan) -> float:
        if not plan.speculative:
            return 1.0
        hazards = [self.hazard(place, plan.paths, d) for d in range(plan.depth)]
        return 1 + float(np.cumprod(hazards).sum())


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
        prompt: int = 0,
    ) -> float:
        """Run a batch for some steps, and return its tokens per second.

        Drafters have missed ``prompt`` positions at first, and then what is decoded plainly.
        """
        requests = [make_request(self.added + n, auto, temperature) for n in range(batch)]
        behind = {request.number: prompt for request in requests}
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
                chance = partial(self.world.next, place, request.plan)
                tokens += 1 + verify(request, self.planner, chance, self.generator)
            noise = np.exp(self.world.noise * self.generator.normal())
            seconds = self.world.seconds(requests, behind)
            time += seconds
            self.planner.observe_step(float(seconds * noise))
            for request in requests:
                drafts = request.plan.asks_drafter
                behind[request.number] = 0 if drafts else behind[request.number] + 1
        return tokens / time

    def best(self, batch: int, *, auto: AutoPlan = AUTO) -> float:
        """Return the tokens per second of the best fixed plan."""
        return max(self.rate(batch, plan) for plan in (PLAIN, *auto.candidates))

    def rate(self, batch: int, plan: Plan) -> float:
        """Return the tokens per second of a fixed plan."""
        requests = [make_request(n, AUTO, 1.0) for n in range(batch)]
        for request in requests:
            request.plan = plan
        tokens = sum(self.world.expected(n, plan) for n in range(batch))
        return tokens / self.world.seconds(requests)

    def share(self, of: Callable[[Plan, PlanReason], bool], last: int) -> float:
        """Return the share of plans, of the last steps, of which ``of`` is true."""
        chosen = [of(*entry) for step in self.log[-last:] for entry in step]
        return sum(chosen) / len(chosen)


def verify(
    request: Request,
    planner: Planner,
    chance: Callable[[int], float],
    generator: np.random.Generator,
) -> int:
    """Return how many drafts of a request are accepted, and tell the planner.

    Args:
        request: Its plan says how many there are.
        planner: Learns from it.
        chance: That a path goes on at a depth, from 0.
        generator: Decides.
    """
    accepted, depth = 0, request.plan.depth if request.plan.speculative else 0
    while accepted < depth and generator.random() < chance(accepted):
        accepted += 1
    planner.observe_request(request, offered=depth, accepted=accepted)
    return accepted


def make_request(
    number: int,
    auto: AutoPlan | None,
    temperature: float,
    *,
    max_tokens: int = 100_000,
    context: int = 100,
) -> Request:
    """Return a request that decodes."""
    return Request(
        number=number,
        prompt_ids=(1, 2),
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens),
        plan=PLAIN,
        stream=RequestRng(number),
        max_tokens=max_tokens,
        auto=auto,
        token_ids=[1],
        slots=torch.arange(context),
    )

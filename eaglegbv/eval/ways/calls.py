"""Whole calls of several ways to generate, which take turns, by batch and context."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TypeAlias

import msgspec

from eaglegbv.config import Plan, Planning
from eaglegbv.engine import Engine
from eaglegbv.errors import EagleGBVError, InvalidArgument
from eaglegbv.eval.baselines import Generation
from eaglegbv.eval.experiment import Part
from eaglegbv.eval.figures import WALL_SPEED, Estimate, Sums
from eaglegbv.eval.observations import Observation
from eaglegbv.eval.settings import Setting
from eaglegbv.eval.tables import Beside, Cell, Table, over_plain, pivot
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS
from eaglegbv.request import Request
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion
from eaglegbv.utils import grouped, require_integers

Prompts: TypeAlias = list[list[int]]
"""Token ids of each prompt."""

Generates: TypeAlias = Callable[[Prompts, int, float, int], dict[str, float]]
"""Answers prompts with so many tokens each, at a temperature, with a seed; returns what it came to:
"answer_tokens", and decoding forwards, once for each request, by plan and reason."""

AUTOMATIC = "auto"  # who plans where the engine chooses
WARM_UP_TOKENS = 24
FEW = 0.02  # plans with a smaller share than this are shown together
EXPLAINED = (
    "shares of all steps of all answers; best: the most tokens a second by what is known; "
    "learning: too little is known of such steps; probe: to see whether what is known still holds"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A way to generate."""

    setting: Setting  # its plan, or who it is
    generates: Generates
    max_batch: int | None = None  # most prompts at once; None for any number


def run_engine(
    llm: LLM | Engine,
    plan: Planning,
    prompts: Prompts,
    tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Answer by the engine, which plans all requests so; see :data:`Generates`."""
    usual = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    seeds = (request_seed(seed, n) for n in range(len(prompts)))
    params = [msgspec.structs.replace(usual, seed=seed_of_prompt) for seed_of_prompt in seeds]
    before = _counters(llm)  # ways share an engine and its counters
    answers: Sequence[Completion | Request]
    if isinstance(llm, Engine):
        answers = llm.run(prompts, params, plan)
    else:
        answers = llm.generate(prompts, params, plan=plan)
    for answer in answers:
        if answer.error is not None:  # for example, a prompt longer than the model's context
            raise EagleGBVError(str(answer.error))
    sums = {"answer_tokens": float(sum(len(answer.token_ids) for answer in answers))}
    return sums | dict(_counters(llm) - before)


def _counters(llm: LLM | Engine) -> Counter[str]:
    values = llm.metrics.values
    named = {"plans": values.get(FORWARDS, {}), "reasons": values.get(REASONS, {})}
    return Counter(
        {f"{kind}.{name}": n for kind, counts in named.items() for name, n in counts.items()}
    )


def run_library(
    generation: Generation, prompts: Prompts, tokens: int, temperature: float, seed: int
) -> dict[str, float]:
    """Answer by transformers, past ends of sequence; see :data:`Generates`."""
    answers = generation(prompts, tokens, temperature=temperature, seed=seed)
    return {"answer_tokens": float(answers.numel())}


@dataclass(frozen=True, slots=True)
class Grid:
    """Settings of a measurement.

    Attributes:
        batches: Numbers of prompts at once.
        contexts: Tokens of a prompt; 0 for the questions as they are.
        temperature: Sampling temperatures.
        tokens: Tokens of an answer.
        repeats: How many times to run everything.
        prompts: Least number of prompts that a repeat answers, batch after batch.
        seed: Seed of all random numbers.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16)
    contexts: Sequence[int] = (0,)
    temperature: Sequence[float] = (1.0,)
    tokens: int = 64
    repeats: int = 3
    prompts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("batches", 1), ("contexts", 0)):
            values = getattr(self, name)
            if not values or min(values) < low:
                raise InvalidArgument(name, list(values), f"integers of at least {low}")
        require_integers(self, tokens=(1, None), repeats=(1, None), prompts=(1, None))

    def calls(self, batch: int) -> int:
        """Return how many batches of this size are answered in a repeat."""
        return -(-self.prompts // batch)

    def settings(self, callers: Sequence[Caller]) -> tuple[Setting, ...]:
        """Return every way at every load that it takes."""
        axes = product(self.temperature, self.contexts, self.batches)
        loads = [Setting(temperature=t, context=length, batch=size) for t, length, size in axes]
        return tuple(
            msgspec.structs.replace(load, plan=caller.setting.plan, who=caller.setting.who)
            for load in loads
            for caller in callers
            if caller.max_batch is None or load.batch <= caller.max_batch
        )


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of every way at every load, timed with their prompts.

    Ways take turns, as the settings of conversations do. A small batch is measured on several
    prompts, batch after batch, because drafts of a single text may be good or bad by chance.
    """

    callers: Sequence[Caller]
    prompts: Callable[[int, int], Prompts]  # so many prompts of a length (0: as they are)
    grid: Grid
    _warm: set[Setting] = field(default_factory=set)

    def __call__(self, settings: Sequence[Setting]) -> Iterator[Part]:
        """Yield a part for each call."""
        for load, fit in grouped(settings, lambda one: one.plainly).items():
            calls = self.grid.calls(load.batch)
            asked = self.prompts(load.batch * calls, load.context)
            for repeat, call, place in product(
                range(self.grid.repeats), range(calls), range(len(fit))
            ):
                setting = fit[(place + repeat + call) % len(fit)]
                prompts = asked[call * load.batch : (call + 1) * load.batch]
                measure = partial(self._measure, setting, prompts, repeat, call)
                yield Part(f"{setting.name} {repeat} {call}", 1, measure)

    def _measure(
        self, setting: Setting, prompts: Prompts, repeat: int, call: int
    ) -> list[Observation]:
        grid = self.grid
        temperature = setting.temperature
        callers = {(one.setting.who, one.setting.plan): one.generates for one in self.callers}
        generates = callers[setting.who, setting.plan]
        if setting not in self._warm:
            self._warm.add(setting)
            generates(prompts, min(grid.tokens, WARM_UP_TOKENS), temperature, grid.seed)
        seed = request_seed(grid.seed, repeat * grid.calls(setting.batch) + call)
        start = time.perf_counter()
        sums = generates(prompts, grid.tokens, temperature, seed)
        sums["wall_seconds"] = time.perf_counter() - start
        unit = str(call * setting.batch)
        return [Observation(setting=setting.name, unit=unit, repeat=repeat, sums=sums)]


# Tables of tokens a second and of the plans chosen.


def batch_tables(sums: Sums, settings: Sequence[Setting]) -> list[Table]:
    """Return rates, and what auto chose with how much it gained."""
    measured = [setting for setting in settings if sums.has(setting.name)]
    rates: dict[tuple[str, str], Cell] = {}
    chosen: list[Sequence[Cell]] = []
    for setting in measured:
        rates[_label(setting), f"batch {setting.batch}"] = _rate(sums, setting)
        if setting.who == AUTOMATIC:
            chosen.append(_choice(sums, setting, measured))
    tables = [pivot("tokens/s (of none)", rates)]
    if chosen:
        headings = ["auto", "batch", "plans", "reasons", "over plain", "over the best other", "it"]
        rows = [headings, *chosen]
        tables.append(Table(title="What auto chose", rows=rows, notes=(EXPLAINED,)))
    return tables


def _rate(sums: Sums, setting: Setting) -> Cell:
    rate = Estimate.exactly(sums.value(WALL_SPEED, setting.name), digits=0)
    ratio = over_plain(sums, WALL_SPEED, setting)
    return Beside(rate, Estimate.exactly(ratio.value)) if ratio else rate


def _label(setting: Setting) -> str:
    """Return the heading of a row."""
    length = f" {setting.context} tokens," if setting.context else ""
    return f"T={setting.temperature:g},{length} {_way(setting)}"


def _way(setting: Setting) -> str:
    return msgspec.structs.replace(setting, temperature=1.0, batch=0, context=0).name


def _choice(sums: Sums, auto: Setting, settings: Sequence[Setting]) -> list[Cell]:
    """Return the shares of plans and reasons, and how many times as fast as other ways auto is."""
    others = [o for o in settings if o.plainly == auto.plainly and o != auto]
    best = max(others, key=lambda other: sums.value(WALL_SPEED, other.name), default=None)
    return [
        _label(auto),
        auto.batch,
        _shares(sums, auto, "plans."),
        _shares(sums, auto, "reasons."),
        faster(sums, auto.name, auto.plainly.name),
        faster(sums, auto.name, best.name) if best else None,
        _way(best) if best else None,
    ]


def faster(sums: Sums, setting: str, other: str) -> Estimate | None:
    """Return how many times as fast a setting is on the same prompts; None for a single call."""
    ratio = sums.over(WALL_SPEED, setting, other)
    return ratio if ratio.units > 1 else None


def _shares(sums: Sums, setting: Setting, prefix: str) -> str:
    names = sums.names(prefix, setting.name)
    counted = Counter({name: sums.total(setting.name, prefix + name) for name in names})
    total = max(1.0, counted.total())
    large = [(name, n) for name, n in counted.most_common() if n >= FEW * total]
    rest = counted.total() - sum(n for _, n in large)
    shown = [*large, ("others", rest)] if rest else large
    return ", ".join(f"{name} {n / total:.0%}" for name, n in shown)


def engine_caller(llm: LLM | Engine, plan: Planning) -> Caller:
    """Return a way of the engine's: by a fixed plan, or by its own choice."""
    setting = Setting(plan=plan) if isinstance(plan, Plan) else Setting(who=AUTOMATIC)
    return Caller(setting, partial(run_engine, llm, plan))

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
from eaglegbv.eval.tables import grid, plain_of
from eaglegbv.llm import LLM
from eaglegbv.metrics import FORWARDS, REASONS, Metric
from eaglegbv.request import Request
from eaglegbv.rng import request_seed
from eaglegbv.sampling import SamplingParams
from eaglegbv.text import Completion
from eaglegbv.utils import grouped

Prompts: TypeAlias = list[list[int]]
"""Token ids of each prompt."""

Generates: TypeAlias = Callable[[Prompts, int, float, int], dict[str, float]]
"""Answers prompts with so many tokens each, at a temperature, with a seed; returns what it came to:
"answer_tokens", and decoding forwards, once for each request, by plan and reason."""

AUTOMATIC = "auto"  # who plans where the engine chooses
WARM_UP_TOKENS = 24
FEW = 0.02  # plans with a smaller share than this are shown together


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

    def counted(metric: Metric) -> Counter[str]:
        values = llm.metrics.values.get(metric, {})
        return Counter({name: int(count) for name, count in values.items()})

    usual = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    seeds = (request_seed(seed, n) for n in range(len(prompts)))
    params = [msgspec.structs.replace(usual, seed=seed_of_prompt) for seed_of_prompt in seeds]
    plans, reasons = counted(FORWARDS), counted(REASONS)  # ways share an engine and its counters
    answers: Sequence[Completion | Request]
    if isinstance(llm, Engine):
        answers = llm.run(prompts, params, plan)
    else:
        answers = llm.generate(prompts, params, plan=plan)
    for answer in answers:
        if answer.error is not None:  # for example, a prompt longer than the model's context
            raise EagleGBVError(str(answer.error))
    sums = {"answer_tokens": sum(len(answer.token_ids) for answer in answers)}
    sums |= {f"plans.{name}": n for name, n in (counted(FORWARDS) - plans).items()}
    sums |= {f"reasons.{name}": n for name, n in (counted(REASONS) - reasons).items()}
    return {name: float(count) for name, count in sums.items()}


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
        for name, values, low in (
            ("batches", self.batches, 1),
            ("contexts", self.contexts, 0),
            ("tokens", (self.tokens,), 1),
            ("repeats", (self.repeats,), 1),
            ("prompts", (self.prompts,), 1),
        ):
            if not values or min(values) < low:
                raise InvalidArgument(name, list(values), f"integers of at least {low}")

    def calls(self, batch: int) -> int:
        """Return how many batches of this size are answered in a repeat."""
        return -(-self.prompts // batch)

    def settings(self, callers: Sequence[Caller]) -> tuple[Setting, ...]:
        """Return every way at every load that it takes."""
        loads = product(self.temperature, self.contexts, self.batches)
        return tuple(
            msgspec.structs.replace(
                caller.setting, temperature=temperature, context=context, batch=batch
            )
            for temperature, context, batch in loads
            for caller in callers
            if caller.max_batch is None or batch <= caller.max_batch
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
        loads = grouped(settings, lambda one: (one.temperature, one.context, one.batch))
        for (_, context, batch), fit in loads.items():
            calls = self.grid.calls(batch)
            asked = self.prompts(batch * calls, context)
            for repeat, call, place in product(
                range(self.grid.repeats), range(calls), range(len(fit))
            ):
                setting = fit[(place + repeat + call) % len(fit)]
                prompts = asked[call * batch : (call + 1) * batch]
                measure = partial(self._measure, setting, prompts, repeat, call)
                yield Part(f"{setting.name} {repeat} {call}", 1, measure)

    def _measure(
        self, setting: Setting, prompts: Prompts, repeat: int, call: int
    ) -> list[Observation]:
        grid, temperature = self.grid, setting.temperature
        generates = self._generates(setting)
        if setting not in self._warm:
            self._warm.add(setting)
            generates(prompts, min(grid.tokens, WARM_UP_TOKENS), temperature, grid.seed)
        seed = request_seed(grid.seed, repeat * grid.calls(setting.batch) + call)
        start = time.perf_counter()
        sums = generates(prompts, grid.tokens, temperature, seed)
        sums["wall_seconds"] = time.perf_counter() - start
        unit = str(call * setting.batch)
        return [Observation(setting=setting.name, unit=unit, repeat=repeat, sums=sums)]

    def _generates(self, setting: Setting) -> Generates:
        of = ((one.setting.who, one.setting.plan, one.generates) for one in self.callers)
        return next(run for who, plan, run in of if (who, plan) == (setting.who, setting.plan))


# Tables of tokens a second and of the plans chosen.


def rate_table(sums: Sums, settings: Sequence[Setting]) -> list[list[str]]:
    """Return a row for each way, a column for each batch: tokens a second, and over plain's."""
    measured = [setting for setting in settings if sums.has(setting.name)]

    def cell(setting: Setting) -> str:
        rate = f"{sums.value(WALL_SPEED, setting.name):.0f}"
        plain = plain_of(measured, setting)
        if plain is None:
            return rate
        return f"{rate} ({sums.ratio(WALL_SPEED, [setting.name], [plain.name]).value:.2f})"

    lengths = any(setting.context for setting in measured)
    return grid(
        "tokens/s (of none)",
        measured,
        cell,
        lambda setting: _label(setting, lengths=lengths),
        lambda setting: f"batch {setting.batch}",
    )


def _label(setting: Setting, *, lengths: bool) -> str:
    """Return the heading of a row; a context of 0 means questions at their original lengths."""
    length = f" {setting.context or 'own'} tokens," if lengths else ""
    way = msgspec.structs.replace(setting, temperature=1.0, batch=0, context=0)
    return f"T={setting.temperature:g},{length} {way.name}"


def choice_lines(sums: Sums, settings: Sequence[Setting]) -> list[str]:
    """Return one line for each load: the shares of the plans auto chose, and of the reasons."""
    automatic = (own for own in settings if own.who == AUTOMATIC)
    chosen = [own for own in automatic if sums.names("plans.", [own.name])]
    lengths = any(setting.context for setting in chosen)
    return [
        f"{_label(setting, lengths=lengths)}, batch {setting.batch}: "
        f"{_shares(sums, setting, 'plans.')}; {_shares(sums, setting, 'reasons.')}"
        for setting in chosen
    ]


def paired_lines(sums: Sums, settings: Sequence[Setting]) -> list[str]:
    """Return lines for each load: how many times as fast as the best other way auto is.

    The best is the one with the most tokens a second; plain decoding follows.
    """
    lines = []
    for auto in (one for one in settings if one.who == AUTOMATIC and sums.has(one.name)):
        others = [one for one in settings if _same_load(one, auto) and one != auto]
        others = [one for one in others if sums.has(one.name)]
        if not others:
            continue
        best = max(others, key=lambda one: sums.value(WALL_SPEED, one.name))
        plain = plain_of(others, auto)
        for other in dict.fromkeys((best, *([plain] if plain else []))):
            ratio = faster(sums, auto.name, other.name)
            if ratio is not None:
                label = _label(auto, lengths=bool(auto.context))
                way = msgspec.structs.replace(other, temperature=1.0, batch=0, context=0)
                lines.append(f"{label} / {way.name}, batch {auto.batch}: {ratio.text(3)}")
    return lines


def faster(sums: Sums, setting: str, other: str) -> Estimate | None:
    """Return how many times as fast a setting is on the same prompts; None for a single call."""
    ratio = sums.ratio(WALL_SPEED, [setting], [other])
    return ratio if ratio.units > 1 else None


def _same_load(one: Setting, other: Setting) -> bool:
    return (one.temperature, one.context, one.batch) == (
        other.temperature,
        other.context,
        other.batch,
    )


def _shares(sums: Sums, setting: Setting, prefix: str) -> str:
    counted = Counter(
        {
            name: sums.total(setting.name, prefix + name)
            for name in sums.names(prefix, [setting.name])
        }
    )
    total = max(1.0, counted.total())
    large = [(name, n) for name, n in counted.most_common() if n >= FEW * total]
    rest = counted.total() - sum(n for _, n in large)
    shown = [*large, ("others", rest)] if rest else large
    return ", ".join(f"{name} {n / total:.0%}" for name, n in shown)


def engine_caller(llm: LLM | Engine, plan: Planning) -> Caller:
    """Return a way of the engine's: by a fixed plan, or by its own choice."""
    setting = Setting(plan=plan) if isinstance(plan, Plan) else Setting(who=AUTOMATIC)
    return Caller(setting, partial(run_engine, llm, plan))
